"""Releases one minor apart work together: golden bytes of each protocol, fields more and less, both refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from coordinator_fixture import a_plan
from pins.filled import filled
from test_agent_machine import DEVICE, offer, play, sent

from coordinator.core import machine
from coordinator.core.moves import Begin, Joined, Position, SendDrain, SendWelcome
from coordinator.core.state import State
from device_agent.core import state as v
from device_agent.core.machine import initial
from edgefl import PROTOCOL_VERSION, __version__
from edgefl.protocol import messages as m
from edgefl.protocol.releases import mismatch, shown, works_with
from edgefl.run_records import EventRow

#: Protocol -> the minor release that carries it. A new minor release adds its line, and its golden bytes.
RELEASES = {0: "0.0", 1: "0.1"}
GOLDEN = Path(__file__).parent / "golden"
FACTS = v.DataFacts({"acc": (50, 3)}, {"": 32, "acc": 32}, (20, 12), ("rest", "run"), base_bytes=1000)


def golden() -> list[Any]:
    """Each message of each protocol that this release works with, bytes and what they say."""
    return [
        pytest.param(name, case["bytes"], case["says"], id=f"v{protocol}-{name}")
        for protocol in range(max(0, PROTOCOL_VERSION - 1), PROTOCOL_VERSION + 1)
        for name, case in json.loads((GOLDEN / f"v{protocol}.json").read_text()).items()
    ]


def decoded(name: str, payload: bytes) -> Any:
    up = getattr(m, name) in m.UpMessage.__args__
    return m.decode_up(payload) if up else m.decode_down(payload)


def within(said: Any, found: Any) -> bool:
    """Whether all that was said is found, where there may be more."""
    if isinstance(said, dict) and isinstance(found, dict):
        return all(key in found and within(value, found[key]) for key, value in said.items())
    return bool(said == found)


def test_the_protocol_counts_minor_releases() -> None:
    assert ".".join(__version__.split(".")[:2]) == RELEASES[PROTOCOL_VERSION]
    assert sorted(RELEASES) == list(range(PROTOCOL_VERSION + 1))
    assert (GOLDEN / f"v{PROTOCOL_VERSION}.json").is_file()


@pytest.mark.parametrize(("name", "payload", "says"), golden())
def test_golden_bytes_are_understood(name: str, payload: str, says: Any) -> None:
    found = decoded(name, bytes.fromhex(payload))
    assert type(found).__name__ == name
    assert within(says, msgspec.json.decode(msgspec.json.encode(found)))


@pytest.mark.parametrize("kind", [*m.UpMessage.__args__, *m.DownMessage.__args__], ids=lambda kind: kind.__name__)
def test_a_field_less_is_its_default_and_a_field_more_is_passed_over(kind: Any) -> None:
    full = filled(kind)
    plain = msgspec.msgpack.decode(m.encode(full))
    for field in msgspec.structs.fields(kind):
        less = {key: value for key, value in plain.items() if key != field.encode_name}
        found = decoded(kind.__name__, msgspec.msgpack.encode(less))
        assert getattr(found, field.name) == getattr(kind(), field.name)
        assert msgspec.structs.replace(found, **{field.name: getattr(full, field.name)}) == full
    more = {**plain, "of_the_next_release": {"a": [1, None]}}
    assert decoded(kind.__name__, msgspec.msgpack.encode(more)) == full


@pytest.mark.parametrize(("apart", "works"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)])
def test_one_apart_works_and_two_do_not(apart: int, works: bool) -> None:
    assert works_with(PROTOCOL_VERSION + apart) is works


def test_the_reason_names_both_releases_and_what_to_upgrade() -> None:
    old = mismatch("this coordinator", "its agent", "0.0.7", PROTOCOL_VERSION - 2)
    new = mismatch("this coordinator", "its agent", "0.3.2", PROTOCOL_VERSION + 2)
    for text, release in ((old, "0.0.7"), (new, "0.3.2")):
        assert f"its agent is release {release}" in text
        assert f"this coordinator is release {__version__}" in text
    assert old.endswith(f"upgrade its agent to {__version__}")
    assert new.endswith("upgrade this coordinator to 0.3.2")
    assert shown("0.1\x1b[31m") == shown("1" * 33) == shown("") == "of an unknown number"


# What each side does


def coordinators_answer(protocol: int) -> list[Any]:
    begun, _ = machine.step(State(a_plan()), Begin(0.0, Position(0, 0, 0, {}, None, 1)))
    hello = m.Hello("cam", "s", agent_version="0.9.1", protocol=protocol, samples={"": 8}, modalities={"acc": (8, 3)})
    return machine.step(begun, Joined(1.0, hello))[1]


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_coordinator_welcomes_an_agent_one_minor_release_apart(protocol: int) -> None:
    assert SendWelcome("cam") in coordinators_answer(protocol)


def test_a_coordinator_refuses_an_agent_two_minor_releases_apart() -> None:
    reason = mismatch("this coordinator", "its agent", "0.9.1", PROTOCOL_VERSION + 2)
    out = coordinators_answer(PROTOCOL_VERSION + 2)
    assert [one for one in out if isinstance(one, SendDrain)] == [SendDrain("cam", reason)]
    assert [one.data["text"] for one in out if isinstance(one, EventRow)] == [f"cam is refused: {reason}"]


@pytest.mark.parametrize("apart", [-2, -1, 1, 2])
def test_an_agent_takes_the_offers_of_a_coordinator_one_minor_release_apart(apart: int) -> None:
    protocol = PROTOCOL_VERSION + apart
    welcome = m.Welcome("c1", protocol=protocol, run="r1", release="0.9.1")
    _, out = play(initial(DEVICE, v.Saved(), None), v.Connected(), v.TrainerReady(FACTS), welcome, offer())
    declines = [decline.refusal for decline in sent(out, m.Decline)]
    assert len(sent(out, m.Accept)) == (abs(apart) == 1)
    if abs(apart) == 2:
        (refusal,) = declines
        detail = mismatch("this agent", "the coordinator", "0.9.1", protocol)
        assert (refusal.reason, refusal.needed, refusal.detail) == ("protocol", protocol, detail)
