"""What two programs of different versions say to each other: messages, topics, chunks, parts, packed parts."""

from __future__ import annotations

from typing import get_args

import msgspec
import numpy as np
import pytest

from edgefl.protocol import messages, topics
from edgefl.protocol.chunks import HEADER_BYTES, Chunk, bundled, decode_chunks, encode_chunk
from edgefl.protocol.messages import decode_down, decode_up, encode
from edgefl.protocol.packing import compress, decompress
from edgefl.protocol.tensors import ENCODINGS, decode_part, encode_part, object_id
from edgefl.records import PACKINGS
from pins.filled import filled
from pins.golden import WRITING, check, check_keys, pinned

MESSAGES = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == messages.__name__
}
SPOKEN = {name: kind for name, kind in MESSAGES.items() if kind.__struct_config__.tag is not None and name[0] != "_"}
UP = messages.UpMessage.__args__


def test_the_messages_are_these():
    assert set(MESSAGES) - set(SPOKEN) == {"_Message", "PackedPart"}  # the base, and what an offer holds
    check_keys("messages.json", set(SPOKEN))


@pytest.mark.parametrize("name", SPOKEN)
def test_messages(name: str):
    kind = SPOKEN[name]
    default, full = kind(), filled(kind)
    check("messages.json", name, {"default": encode(default).hex(), "filled": encode(full).hex()})
    if not WRITING:
        golden = pinned("messages.json")[name]
        decode = decode_up if kind in UP else decode_down
        assert decode(bytes.fromhex(golden["default"])) == default
        assert decode(bytes.fromhex(golden["filled"])) == full


def test_topics():
    levels = {"probe": "name", "enroll-up": "client", "enroll-down": "client"}  # each is called what it names
    made: dict[str, str | list[str]] = {
        channel.replace("-", "_"): topics.build(channel, "fleet", levels.get(channel, "device"), "transfer")
        for channel in get_args(topics.Channel)
    }
    made |= {"call": topics.call("fleet"), "device_subscriptions": topics.device_subscriptions("fleet", "device")}
    made["coordinator_subscriptions"] = topics.coordinator_subscriptions("fleet")
    single = [topic for topic in made.values() if isinstance(topic, str)]
    check("topics.json", "built", made)
    check("topics.json", "parsed", {topic: topics.parse(topic) for topic in single})


def test_chunks():
    first, second = b"0123456789" * 3, b"abc"
    chunks = [Chunk(object_id(first), 0, first[:20]), Chunk(object_id(first), 1, first[20:])]
    chunks.append(Chunk(object_id(second), 0, second))
    messages_of = [payload.hex() for payload in bundled(chunks, 20 + 2 * HEADER_BYTES)]
    check("chunks.json", "one", encode_chunk(chunks[0]).hex())
    check("chunks.json", "bundled", messages_of)
    if not WRITING:
        golden = [decode_chunks(bytes.fromhex(text)) for text in pinned("chunks.json")["bundled"]]
        assert [chunk for some in golden for chunk in some] == chunks
        assert decode_chunks(bytes.fromhex(pinned("chunks.json")["one"])) == chunks[:1]


def tensors() -> dict[str, np.ndarray]:
    """Of every dtype that a part can hold, with no, one and more axes, and an empty one."""
    floats = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 7, "wide": np.array([1.5, -2e-3])}
    whole = {str(np.dtype(d)): np.array([1, 0, 1], d) for d in (np.int64, np.int32, np.int16, np.int8, np.uint8, bool)}
    return {
        **floats,
        **whole,
        "count": np.array(7),
        "half": np.array([0.5], np.float16),
        "none": np.zeros((0, 3), "f4"),
    }


@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
def test_parts(encoding: str):
    data = encode_part(tensors(), encoding)
    check("parts.json", encoding, data.hex())
    if not WRITING:
        found = decode_part(bytes.fromhex(pinned("parts.json")[encoding]))
        assert list(found) == sorted(tensors())
        for name, value in tensors().items():
            assert found[name].shape == value.shape
            np.testing.assert_allclose(found[name], value, rtol=1e-3 if encoding == "f16" else 1e-7)


def test_no_encoding_is_left_out():
    check_keys("parts.json", set(ENCODINGS))


def part(seed: int) -> dict[str, np.ndarray]:
    """Values of no random generator, so that only this file has to stay as it is."""
    steps = (np.arange(7 * 151, dtype=np.int64) * (seed + 37)) % 1009
    weight = (steps.astype(np.float32) / np.float32(504.5) - 1).reshape(7, 151)
    return {"weight": weight, "bias": weight[0, :5].copy(), "steps": np.array(seed), "few": weight[:2, :3].copy()}


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_parts(packing: str):
    """Packed, held at the other side, and what is lost and comes with the next round: all to the bit."""
    target, base = part(5), part(2)
    sent = compress(target, base, packing, 0.05)
    check(
        "packed.json",
        packing,
        {"data": sent.data.hex(), "held": id_of(sent.reconstructed), "lost": id_of(sent.residual)},
    )
    if not WRITING:
        golden = pinned("packed.json")[packing]
        assert id_of(decompress(bytes.fromhex(golden["data"]), base, packing)) == golden["held"]


def test_no_packing_is_left_out():
    check_keys("packed.json", set(PACKINGS))


def id_of(held: dict[str, np.ndarray]) -> str:
    return object_id(encode_part(held))
