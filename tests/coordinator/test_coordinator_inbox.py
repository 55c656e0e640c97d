"""What the coordinator believes of what reaches it."""

from __future__ import annotations

import math

from coordinator.core.moves import (
    Announced,
    DeviceOffline,
    FromDevice,
    HeartbeatSeen,
    Joined,
    Progressed,
)
from coordinator.core.timeouts import Timeouts, slowed
from coordinator.runtime import inbound as inbound_module
from coordinator.runtime.inbound import MAX_ENTRIES, MAX_INTRODUCTIONS, Inbound, cleaned
from edgefl.console import safe_text
from edgefl.protocol import messages as m
from edgefl.protocol.messages import Need
from edgefl.protocol.topics import Topic
from edgefl.records import Attempt, Figure, Refusal

NOW = 5.0


def read(inbound: Inbound, message: m.UpMessage, channel: str = "up", device: str = "a", now: float = NOW) -> object:
    event: FromDevice | Need | None = inbound.read(Topic(channel, device, ""), m.encode(message), now)  # type: ignore[arg-type]
    return event


def test_a_device_speaks_for_itself_only() -> None:
    inbound = Inbound(10.0, 1.0)
    assert read(inbound, m.Hello(device="b")) is None
    assert read(inbound, m.Hello(device="a"), channel="presence") is None
    assert read(inbound, m.Presence(device="a", online=True)) is None
    assert inbound.dropped == {"forged": 1, "wrong topic": 2}


def test_what_can_not_be_read_is_counted_by_reason() -> None:
    inbound = Inbound(10.0, 1.0)
    for payload in (b"", b"\xc1", b"\x80", b"x" * (m.MAX_MESSAGE_BYTES + 1)):
        assert inbound.read(Topic("up", "a", ""), payload, NOW) is None
    assert inbound.read(Topic("up", "a", ""), b"\x81\xa1t\xa3new", NOW) is None
    assert inbound.dropped == {"malformed": 4, "unknown kind": 1}


def test_the_last_will_of_an_earlier_session_says_nothing() -> None:
    inbound = Inbound(10.0, 1.0)
    assert isinstance(read(inbound, m.Hello(device="a", session="old")), Joined)
    assert isinstance(read(inbound, m.Hello(device="a", session="new")), Joined)
    assert read(inbound, m.Presence("a", "old", online=False), "presence") is None
    assert isinstance(read(inbound, m.Presence("a", "new", online=False), "presence"), DeviceOffline)
    assert read(inbound, m.Presence("a", "new", online=False), "presence") is None


def test_devices_of_a_large_fleet_may_be_silent_for_as_long_as_they_beat_less() -> None:
    """Of 10,000, each beats every 100 s in place of 10, and is lost after as many silent beats."""
    asked = Timeouts()
    for known in (4, 1000, 10_000):
        inbound, beat_s = Inbound(asked.silence_s, 1.0), asked.heartbeat_s * slowed(known)
        inbound.heard("a", 0.0)
        assert inbound.silent(3.4 * beat_s, fleet_size=known) == []
        (lost,) = inbound.silent(3.6 * beat_s, fleet_size=known)
        assert lost.reason == f"silent for {3.5 * beat_s:g} s"
        assert known / beat_s <= 100, "messages a second"


def test_silence_is_told_once_and_not_held_against_anyone_after_an_outage() -> None:
    inbound = Inbound(10.0, 1.0)
    inbound.heard("a", 0.0)
    inbound.heard("b", 6.0)
    assert [left.device for left in inbound.silent(11.0)] == ["a"]
    assert inbound.silent(12.0) == []
    inbound.reset(100.0)
    assert inbound.silent(105.0) == []


def test_each_of_many_devices_is_lost_after_its_own_silence() -> None:
    inbound, lost = Inbound(10.0, 1.0), list[tuple[float, str]]()
    for now in range(60):  # device n is heard of last after n seconds
        for device in range(now, 30):
            inbound.heard(str(device), float(now))
        lost += [(float(now), left.device) for left in inbound.silent(float(now))]
    assert lost == [(device + 11.0, str(device)) for device in range(30)]


def test_the_silence_of_a_device_that_is_asked_for_nothing_is_no_absence() -> None:
    inbound = Inbound(10.0, 1.0)
    inbound.heard("a", 0.0)
    inbound.heard("b", 0.0)
    assert [left.device for left in inbound.silent(11.0, excused="a".__eq__)] == ["b"]
    assert inbound.signs[0]["a"] == (0.0, "message", True)
    inbound.heard("a", 20.0)
    assert [left.device for left in inbound.silent(31.0)] == ["a"]


def test_the_last_will_of_a_device_that_is_asked_for_nothing_is_told() -> None:
    """It is drained, so it does not beat; taken in again, it must not be waited for until the deadline."""
    inbound = Inbound(10.0, 1.0)
    read(inbound, m.Hello(device="a", session="s"), now=0.0)
    assert inbound.silent(11.0, excused="a".__eq__) == []
    assert isinstance(read(inbound, m.Presence("a", "s", online=False), "presence", now=50.0), DeviceOffline)


def test_the_silence_of_a_device_that_is_asked_again_counts_from_then() -> None:
    inbound = Inbound(10.0, 1.0)
    inbound.heard("a", 0.0)
    assert inbound.silent(11.0, excused="a".__eq__) == []
    assert inbound.silent(20.0) == []
    assert [left.device for left in inbound.silent(22.0)] == ["a"]


def test_who_is_online_without_a_hello_is_asked_a_few_times() -> None:
    inbound = Inbound(10.0, 1.0)
    assert read(inbound, m.Presence("a", "s", online=True), "presence") is None
    assert inbound.strangers(NOW + 0.5) == []
    asked = [beat for second in range(1, 30) for beat in inbound.strangers(NOW + second)]
    assert asked == [HeartbeatSeen(NOW + second, "a", reports_work=False) for second in range(1, MAX_INTRODUCTIONS + 1)]


def test_numbers_that_are_none_are_left_out_and_entries_limited() -> None:
    inbound = Inbound(10.0, 1.0)
    figures = {f"f{number}": Figure(1.0) for number in range(MAX_ENTRIES + 9)}
    update = m.Update("a", Attempt("r"), metrics={"loss": math.nan, "ok": 1.0}, figures=figures)
    event = read(inbound, update)
    assert isinstance(event, Announced)
    assert event.update.metrics == {"ok": 1.0}
    assert len(event.update.figures) == MAX_ENTRIES
    progress = read(inbound, m.Progress("a", Attempt("r"), loss=math.inf))
    assert isinstance(progress, Progressed)
    assert progress.data["loss"] is None


def test_a_device_that_says_hello_twice_in_a_moment_is_answered_once() -> None:
    """It came just when the coordinator called. After it has left, or with other words, it is a hello like any."""
    inbound, hello = Inbound(10.0, 1.0), m.Hello(device="a", session="s")
    assert isinstance(read(inbound, hello), Joined)
    assert read(inbound, hello, now=NOW + 0.5) is None
    assert isinstance(read(inbound, m.Hello(device="a", session="s", profile="p"), now=NOW + 0.6), Joined)
    assert isinstance(read(inbound, m.Presence("a", "s", online=False), "presence", now=NOW + 0.7), DeviceOffline)
    assert isinstance(read(inbound, m.Hello(device="a", session="s", profile="p"), now=NOW + 0.8), Joined)
    assert isinstance(read(inbound, m.Hello(device="a", session="s", profile="p"), now=NOW + 2.0), Joined)


def test_a_plain_message_is_itself_and_an_odd_one_is_not() -> None:
    figures = {"flops": Figure(1.0, source="counted by the trainer"), "wall_s": Figure(reason="no clock")}
    plain = m.Update(device="a", attempt=Attempt("run", 1, 2, 3), figures=figures, samples={"head/x": 3})
    assert cleaned(plain) is plain
    assert cleaned(m.Hello(device="a", modalities={"x": ()})).modalities == {"x": ()}
    for odd in ("\x1b[2J", "a" * 65, "\u202e"):
        for source in ("trainer", odd):
            changed = cleaned(m.Update(device="a", figures={odd: Figure(1.0, source=source)}, samples={odd: 3}))
            assert list(changed.samples) == list(changed.figures) == [safe_text(odd[:64])]
    assert cleaned(Figure(1.0, source="\x1b")).source == "\ufffd"
    assert cleaned(Figure(1.0, reason="x" * 600)).reason == "x" * 500
    assert cleaned(Refusal("r" * 65, unit="u" * 65)) == Refusal("r" * 65, unit="u" * 64)


def test_one_look_at_all_texts_of_a_message_decides_as_a_look_at_each() -> None:
    for text in (
        "x" * 64,
        "x" * 65,
        "x" * 500,
        "x" * 501,
        'a"b',
        "a\\b",
        "a\x7fb",
        "a\nb",
        "é",
        "\u202e",
        "",
        ":",
        "source",
    ):
        figures = {"wall_s": Figure(1.0, source=text), "flops": Figure(reason=text)}
        for message in (
            m.Update(device="a", figures=figures),
            m.Update(device="a", metrics={text: 1.0}, layer=text),
            m.Update(device="a", metrics={":": 1.0, "source": 2.0, text: 3.0}),
            m.Decline(device="a", refusal=Refusal(text, unit="u", detail=text)),
            m.Hello(device="a", session=text, profile=text, modalities={text: (1,)}, signature=text.encode()),
        ):
            assert cleaned(message) == inbound_module._cleaned(message)
