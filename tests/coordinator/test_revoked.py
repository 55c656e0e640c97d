"""A device that its fleet revokes: no round waits for it, and the run's record says so."""

from __future__ import annotations

import msgspec
import pytest
from test_coordinator_machine import NAMES, POLICY, Play, of

from coordinator.core import moves as do
from coordinator.core import moves as e
from coordinator.core import state as v
from coordinator.core.timeouts import Timeouts
from edgefl.run_records import AssignmentRow, EventRow

ALL = msgspec.structs.replace(POLICY, devices=3, quorum=1.0)


def of_three(quorum: float = 1.0) -> Play:
    play = Play(msgspec.structs.replace(ALL, quorum=quorum))
    play.state = msgspec.structs.replace(play.state, timeouts=Timeouts())
    return play.started(*NAMES)


def deliver(play: Play, *names: str) -> None:
    for name in names:
        play.announce(name)
        play.receive(name)


def revoke(play: Play, name: str) -> list[do.Instruction]:
    return play.send(e.Revoked(play.now, name))


def test_the_next_round_does_not_wait_for_a_revoked_device() -> None:
    play = of_three()
    deliver(play, *NAMES)
    out = revoke(play, "c")
    assert [(row.kind, row.device, row.data) for row in of(EventRow, out)] == [
        ("device_left", "c", {"reason": "revoked"})
    ]
    play.finish_aggregate()
    play.finish_evaluate()
    assert sorted(one.device for one in of(do.SendOffer, play.finish_plan())) == ["a", "b"]
    assert play.state.phase is v.Phase.ROUND, "at once"


def test_a_round_that_waits_for_a_device_which_is_revoked_then_begins() -> None:
    play = of_three()
    deliver(play, *NAMES)
    play.send(e.DeviceOffline(play.now, "c"))
    play.finish_aggregate()
    play.finish_evaluate()
    assert play.state.phase is v.Phase.JOINING
    revoke(play, "c")
    assert sorted(one.device for one in of(do.SendOffer, play.finish_plan())) == ["a", "b"]


@pytest.mark.parametrize("when", ["before the others", "after the others"])
def test_the_open_round_closes_without_a_revoked_device(when: str) -> None:
    play = of_three()
    if when == "before the others":
        out = revoke(play, "c")
        deliver(play, "a", "b")
    else:
        deliver(play, "a", "b")
        out = revoke(play, "c")
    (row,) = of(AssignmentRow, out)
    assert (row.device, row.status, row.refusal.reason) == ("c", "left_out", "revoked")
    assert play.aggregate is not None, "the quorum is of the others, and nothing is waited for"
    assert [update.device for update in play.aggregate.updates] == ["a", "b"]


def test_a_revocation_is_told_once_and_outlives_a_restart() -> None:
    play = of_three(quorum=0.5)
    revoke(play, "c")
    assert not of(EventRow, revoke(play, "c"))
    play.restart()
    assert not of(EventRow, revoke(play, "c"))
    play.hello("a", play.opened[-1])
    play.hello("b", play.opened[-1])
    deliver(play, "a", "b")
    play.finish_aggregate()
    play.finish_evaluate()
    assert sorted(one.device for one in of(do.SendOffer, play.finish_plan())) == ["a", "b"]


def test_a_device_revoked_while_no_coordinator_was_there_is_not_waited_for() -> None:
    play = of_three()
    deliver(play, *NAMES)
    play.finish_aggregate()
    play.restart()
    play.finish_evaluate()
    play.hello("a")
    play.hello("b")
    assert play.state.phase is v.Phase.JOINING
    revoke(play, "c")
    assert sorted(one.device for one in of(do.SendOffer, play.finish_plan())) == ["a", "b"]


def test_a_revoked_device_that_comes_back_is_sent_away() -> None:
    """As in a run that goes on with a copy of the fleet's directory from before the revocation."""
    play = of_three()
    revoke(play, "c")
    play.restart()
    for name in ("a", "b"):
        play.hello(name, play.opened[-1])
    assert [one.device for one in of(do.SendDrain, play.hello("c"))] == ["c"]
    deliver(play, "a", "b")
    play.finish_aggregate()
    play.finish_evaluate()
    assert sorted(one.device for one in of(do.SendOffer, play.finish_plan())) == ["a", "b"]


def test_a_revoked_device_is_not_restored_and_a_run_left_by_all_names_it() -> None:
    play = of_three()
    revoke(play, "c")
    play.take_in("c")
    assert play.state.devices["c"].revoked
    for name in ("a", "b"):
        play.send(e.DeviceOffline(play.now, name))
    deliver_nothing = play.wait(ALL.deadline_s)
    deliver_nothing += [one for _ in range(60) for one in play.wait(0.5)]
    warnings = [str(one.data["text"]) for one in of(EventRow, deliver_nothing) if one.kind == "warning"]
    assert "no device that can train stage 1 is connected (revoked: c); waiting 10 s for one" in warnings
