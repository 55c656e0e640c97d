"""Messages and topics: round trips, other versions, hostile bytes, limits."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgefl.errors import ProtocolError
from edgefl.protocol import topics
from edgefl.protocol.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Accept,
    Ack,
    Decline,
    DownMessage,
    Drain,
    Grant,
    Heartbeat,
    Hello,
    Need,
    Offer,
    Presence,
    Progress,
    UnknownMessageError,
    Update,
    UpMessage,
    Welcome,
    decode_down,
    decode_up,
    encode,
)
from edgefl.records import Attempt, Figure, ObjectRef, Refusal

UP = [Hello, Accept, Decline, Progress, Update, Need, Heartbeat, Presence]
DOWN = [Welcome, Offer, Grant, Ack, Abort, Drain]

counts = st.integers(0, 2**63 - 1)
texts = st.text(max_size=20)
attempts = st.builds(Attempt, run=texts, stage=counts, round=counts, attempt=counts)
figures = st.dictionaries(texts, st.builds(Figure, value=st.none() | st.floats(allow_nan=False)), max_size=3)
refusals = st.builds(Refusal, reason=texts, needed=st.none() | st.floats(allow_nan=False), unit=texts)
manifests = st.dictionaries(texts, st.builds(ObjectRef, id=texts, size=counts), max_size=3)
needs = {
    "device": texts,
    "transfer": texts,
    "epoch": counts,
    "credit": counts,
    "received": counts,
    "missing": st.dictionaries(texts, st.binary(max_size=20), max_size=3),
    "done": st.booleans(),
}
ups = st.one_of(
    st.builds(
        Hello,
        device=texts,
        modalities=st.dictionaries(texts, st.lists(counts, max_size=3).map(tuple), max_size=2),
        class_counts=st.lists(counts, max_size=4).map(tuple),
        working_on=st.none() | attempts,
    ),
    st.builds(Accept, device=texts, attempt=attempts),
    st.builds(Decline, device=texts, attempt=attempts, refusal=refusals, figures=figures),
    st.builds(Progress, device=texts, attempt=attempts, loss=st.floats(allow_nan=False)),
    st.builds(Update, device=texts, attempt=attempts, manifest=manifests, figures=figures),
    st.builds(Need, **needs),
    st.builds(Heartbeat, device=texts, sequence=counts, working_on=st.none() | attempts),
    st.builds(Presence, device=texts, online=st.booleans()),
)
downs = st.one_of(
    st.builds(Welcome, coordinator=texts, run=texts),
    st.builds(Offer, attempt=attempts, manifest=manifests, transfer=texts),
    st.builds(Grant, **needs),
    st.builds(Ack, attempt=attempts, accepted=st.booleans(), refusal=refusals),
    st.builds(Abort, attempt=attempts, reason=texts),
    st.builds(Drain, run=texts),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ups, downs)
def test_round_trip(up: UpMessage, down: DownMessage):
    assert decode_up(encode(up)) == up
    assert decode_down(encode(down)) == down


@pytest.mark.parametrize("kind", [*UP, *DOWN])
def test_every_message_has_defaults_for_everything(kind):
    decode = decode_up if kind in UP else decode_down
    assert decode(encode(kind())) == kind()
    assert type(decode(msgspec.msgpack.encode({"t": kind.__struct_config__.tag}))) is kind


@pytest.mark.parametrize("kind", [*UP, *DOWN])
def test_a_newer_peer_may_add_fields(kind):
    decode = decode_up if kind in UP else decode_down
    fields = msgspec.msgpack.decode(encode(kind()))
    assert decode(msgspec.msgpack.encode({**fields, "added_later": {"deep": [1, b"2"]}})) == kind()


def test_a_newer_peer_may_add_kinds():
    for decode in (decode_up, decode_down):
        with pytest.raises(UnknownMessageError, match="gossip"):
            decode(msgspec.msgpack.encode({"t": "gossip", "text": "…"}))


def test_directions_are_kept_apart():
    with pytest.raises(UnknownMessageError):
        decode_up(encode(Offer()))
    with pytest.raises(UnknownMessageError):
        decode_down(encode(Hello()))


HOSTILE = {
    "nothing": b"",
    "no map": b"\x93\x01\x02\x03",
    "no tag": b"\x80",
    "tag is a number": b"\x81\xa1t\x05",
    "bytes after the end": b"\x81\xa1t\xa5hello\xc1",
    "text that is not UTF-8": b"\x82\xa1t\xa5hello\xa6device\xa1\xff",
    "nested without end": b"\x82\xa1t\xa5hello\xa1x" + b"\x91" * 60_000 + b"\xc0",
    "a list that says it has 2^32 items": b"\x82\xa1t\xa5hello\xacclass_counts\xdd\xff\xff\xff\xff",
    "wrong type": msgspec.msgpack.encode({"t": "hello", "device": 5}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_bytes_are_a_protocol_error(case):
    with pytest.raises(ProtocolError) as error:
        decode_up(HOSTILE[case])
    assert not isinstance(error.value, UnknownMessageError)


@given(st.binary(max_size=60), st.sampled_from([b"", b"\x82\xa1t\xa4need", b"\x82\xa1t\xa6update"]))
def test_no_bytes_raise_anything_but_a_protocol_error(payload, start):
    for decode in (decode_up, decode_down):
        try:
            decode(start + payload)
        except ProtocolError as error:
            assert error.message  # noqa: PT017  either outcome is right


def test_the_largest_message_passes_and_one_byte_more_does_not():
    empty = len(encode(Drain(reason="x" * 70_000))) - 70_000
    largest = Drain(reason="x" * (MAX_MESSAGE_BYTES - empty))
    assert len(encode(largest)) == MAX_MESSAGE_BYTES
    assert decode_down(encode(largest)) == largest
    with pytest.raises(ProtocolError, match=f"Drain of {MAX_MESSAGE_BYTES + 1} bytes exceeds"):
        encode(Drain(reason=largest.reason + "x"))
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        decode_down(bytes(MAX_MESSAGE_BYTES + 1))


def test_500_parts_of_28_mib_fit_an_offer_and_the_need_that_answers_it():
    refs = {f"encoder{number}/stage": ObjectRef(f"{number:064x}", 28 * 2**20) for number in range(500)}
    assert encode(Offer(manifest=refs))
    assert encode(Need(missing={ref.id: b"\xff" * 38 for ref in refs.values()}))


names = st.from_regex(topics.NAME, fullmatch=True)


@given(names, names, names)
def test_topics_are_parsed_as_they_are_built(fleet, device, transfer):
    assert topics.parse(topics.build("up", fleet, device)) == ("up", device, "")
    assert topics.parse(topics.build("down", fleet, device)) == ("down", device, "")
    assert topics.parse(topics.build("presence", fleet, device)) == ("presence", device, "")
    assert topics.parse(topics.build("up-object", fleet, device, transfer)) == ("up-object", device, transfer)
    assert topics.parse(topics.build("down-object", fleet, device, transfer)) == ("down-object", device, transfer)
    assert topics.parse(topics.build("shared-object", fleet, transfer=transfer)) == ("shared-object", "", transfer)


def matches(pattern: str, topic: str) -> bool:
    """MQTT's rule for ``+``."""
    want, have = pattern.split("/"), topic.split("/")
    return len(want) == len(have) and all(w in ("+", h) for w, h in zip(want, have, strict=True))


def test_each_side_listens_to_what_the_other_says_and_a_device_to_no_other_device():
    own = topics.device_subscriptions("f", "a")
    server = topics.coordinator_subscriptions("f")
    to_device = [*(topics.build(channel, "f", "a", "t") for channel in ("down", "down-object")), topics.call("f")]
    to_server = [topics.build(channel, "f", "a", "t") for channel in ("up", "presence", "up-object")]
    for patterns, heard, others in ((own, to_device, to_server), (server, to_server, to_device)):
        assert all(any(matches(pattern, topic) for pattern in patterns) for topic in heard)
        assert not any(matches(pattern, topic) for pattern in patterns for topic in others)
    assert not any(matches(pattern, topics.build("down", "f", "b")) for pattern in own)


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "edgefl/1/f",
        "edgefl/2/f/d/a/up",
        "edgefl/1/f/d/a/sideways",
        "edgefl/1/f/d/a/up/o/",
        "edgefl/1/f/d//up",
        "edgefl/1/f/d/../up",
        "edgefl/1/f/d/a/presence/o/t",
        "edgefl/1/f/o/t/more",
        "edgefl/1/f/o/t\n",
        "edgefl/1/f/d/a b/up",
        "$SYS/broker/version",
    ],
)
def test_other_topics_are_a_protocol_error(topic):
    with pytest.raises(ProtocolError, match="unknown topic"):
        topics.parse(topic)


@pytest.mark.parametrize("name", ["", "a/b", "+", "#", ".hidden", "-x", "a b", "x" * 65, "é", "a\n"])
def test_names_that_can_not_be_a_topic_level(name):
    with pytest.raises(ProtocolError, match="device"):
        topics.check_name("device", name)
    assert topics.check_name("device", "jetson-1.lab_a") == "jetson-1.lab_a"
