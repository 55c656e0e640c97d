"""An outage of every device: the next round waits for those who were there, from when the first of them is back."""

from __future__ import annotations

import msgspec
import pytest
from test_coordinator_machine import NAMES, POLICY, Play, of

from coordinator.core import moves as do
from coordinator.core import moves as e
from coordinator.core import state as v
from coordinator.core.timeouts import Timeouts
from edgefl.run_records import EventRow

THREE = msgspec.structs.replace(POLICY, devices=3, join_s=60.0)


def train(play: Play, names: tuple[str, ...] = NAMES) -> None:
    for name in names:
        play.announce(name)
        play.receive(name)


def without_any(away_s: float, policy: object = THREE) -> Play:
    """Three devices vanish between the rounds of stage 2, for so long."""
    play = Play(policy)  # type: ignore[arg-type]
    play.state = msgspec.structs.replace(play.state, timeouts=Timeouts())
    play.started(*NAMES)
    train(play)
    play.finish_aggregate()
    play.finish_evaluate()
    play.finish_plan()
    train(play)
    for name in NAMES:
        play.send(e.DeviceOffline(play.now, name))
    play.finish_aggregate()
    play.finish_evaluate()
    passed = 0.0
    while passed < away_s:
        play.wait(0.5)
        passed += 0.5
    return play


def opened_with(play: Play, comings: dict[str, float], until: float = 90.0) -> tuple[float, list[str], list[str]]:
    """When the next round opens after the first is back, who is in it, and what is warned of."""
    passed, warnings = 0.0, []
    began = len(play.opened)
    while passed <= until:
        out = [one for name, at in comings.items() if at == passed for one in play.hello(name)]
        while play.plans:
            out += play.finish_plan()
        out += play.wait(0.5)
        warnings += [str(one.data["text"]) for one in of(EventRow, out) if one.kind == "warning"]
        if len(play.opened) > began:
            assert play.state.open is not None
            return passed, sorted(play.state.open.assignments), warnings
        passed += 0.5
    raise AssertionError("no round opened")


@pytest.mark.parametrize("away_s", [10.0, 19.0, 40.0], ids=["in grace", "at its end", "waiting"])
def test_after_an_outage_the_next_round_waits_until_all_are_back(away_s: float) -> None:
    play = without_any(away_s)
    assert play.state.phase is (v.Phase.WAITING if away_s > 20 else v.Phase.JOINING)
    at, names, warnings = opened_with(play, {"c": 0.0, "b": 4.0, "a": 15.0})
    assert names == ["a", "b", "c"]
    assert at == 15.0, "and no longer"
    text = "c is the first device online after all were offline; no round waits longer than 20 s for a, b"
    assert text in warnings


@pytest.mark.parametrize("away_s", [10.0, 40.0])
def test_who_stays_away_after_an_outage_is_waited_for_until_grace_is_over(away_s: float) -> None:
    at, names, _ = opened_with(without_any(away_s), {"c": 0.0, "b": 4.0})
    assert names == ["b", "c"]
    assert 19.0 <= at <= 20.5


def test_two_that_come_at_once_with_facts_that_have_changed_wait_for_the_third() -> None:
    play = without_any(40.0)
    play.now += 1.0
    for name in ("a", "b"):
        play.hello(name, agent_version="9", class_counts=(4, 4))
    while play.plans:
        play.finish_plan()
    assert play.state.phase is v.Phase.JOINING
    assert opened_with(play, {"c": 4.0})[1] == ["a", "b", "c"]


def test_a_device_that_comes_and_goes_does_not_put_the_round_off_for_ever() -> None:
    play = without_any(40.0)
    passed, began = 0.0, len(play.opened)
    while len(play.opened) == began and passed < 60.0:
        play.hello("a")
        for _ in range(8):
            play.wait(0.5)
        if len(play.opened) == began:
            play.send(e.DeviceOffline(play.now, "a"))
            play.wait(0.5)
        passed += 4.5
    assert passed <= 45.0
    assert play.state.open is not None
    assert sorted(play.state.open.assignments) == ["a"]


def test_who_was_left_out_or_refused_is_not_expected_after_an_outage() -> None:
    play = without_any(40.0)
    play.leave_out("a")
    at, names, _ = opened_with(play, {"c": 0.0, "b": 4.0})
    assert (at, names) == (4.0, ["b", "c"])


def test_an_outage_during_an_evaluation_counts_from_the_first_that_is_back() -> None:
    play = Play(THREE)
    play.state = msgspec.structs.replace(play.state, timeouts=Timeouts())
    play.started(*NAMES)
    train(play)
    play.finish_aggregate()
    for name in NAMES:
        play.send(e.DeviceOffline(play.now, name))
    play.wait(19.5)
    play.hello("a")
    play.wait(2.0)
    play.finish_evaluate()
    assert play.state.phase is v.Phase.JOINING
    assert opened_with(play, {"b": 4.0, "c": 14.0})[1] == ["a", "b", "c"]


def test_a_coordinator_that_restarts_in_an_outage_still_expects_who_was_there() -> None:
    play = without_any(40.0)
    play.restart()
    assert opened_with(play, {"c": 0.0, "b": 4.0, "a": 15.0})[1] == ["a", "b", "c"]


def test_one_device_alone_is_not_delayed_by_its_own_outage() -> None:
    play = Play(msgspec.structs.replace(POLICY, devices=1))
    play.started("a")
    train(play, ("a",))
    play.send(e.DeviceOffline(play.now, "a"))
    play.finish_aggregate()
    play.finish_evaluate()
    for _ in range(20):
        play.wait(0.5)
    assert not of(do.Fail, play.hello("a"))
    play.finish_plan()
    assert play.state.phase is v.Phase.ROUND
