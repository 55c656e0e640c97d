"""A device whose name another machine takes over: nothing of the old one is believed of the new."""

from __future__ import annotations

import msgspec
import pytest
from test_coordinator_machine import NAMES, Play, of
from test_revoked import deliver, of_three

from coordinator.core import moves as do
from coordinator.core import moves as e
from coordinator.core import state as v
from edgefl.protocol.messages import Hello, Update
from edgefl.records import Attempt, Budget
from edgefl.run_records import AssignmentRow, EventRow


def replace(play: Play, name: str, generation: int = 2) -> list[do.Instruction]:
    return play.send(e.Replaced(play.now, name, generation))


def comes(play: Play, name: str, generation: int = 2, samples: int = 8, **changes: object) -> list[do.Instruction]:
    hello = msgspec.structs.replace(Hello(device=name, session="new", samples={"": samples}), **changes)
    return play.send(e.Joined(play.now, hello, generation))


@pytest.mark.parametrize("when", ["before the others", "after the others"])
def test_the_open_round_closes_without_the_old_machine_and_the_next_has_the_new(when: str) -> None:
    play = of_three()
    if when == "after the others":
        deliver(play, "a", "b")
    out = replace(play, "c")
    (row,) = of(AssignmentRow, out)
    assert (row.device, row.status, row.refusal.reason) == ("c", "left_out", "replaced")
    assert [(one.kind, one.device, one.data) for one in of(EventRow, out) if one.device] == [
        ("device_left", "c", {"reason": "replaced", "generation": 2})
    ]
    comes(play, "c")
    if play.plans:
        play.finish_plan()
    if when == "before the others":
        deliver(play, "a", "b")
    assert play.aggregate is not None, "nothing is waited for"
    assert [update.device for update in play.aggregate.updates] == ["a", "b"]
    play.finish_aggregate()
    out = play.finish_evaluate()
    out += play.finish_plan() if play.plans else []
    assert sorted(one.device for one in of(do.SendOffer, out)) == ["a", "b", "c"]


def test_what_the_old_machine_sent_arrives_late_and_counts_for_nothing() -> None:
    """Its messages wait at the broker while no coordinator is there."""
    play = of_three()
    play.announce("c")
    replace(play, "c")
    update = Update("c", play.opened[-1], {"task": play.fetches["a"].manifest["task"]} if play.fetches else {})
    for late in (
        e.Accepted(play.now, "c", play.opened[-1]),
        e.Announced(play.now, update),
        e.UpdateStored(play.now, "c", play.opened[-1]),
        e.Spent(play.now, "c", play.opened[-1]),
    ):
        out = play.send(late)
        assert not of(do.Fetch, out)
        assert not of(do.Spending, out)
    assert play.status("c") == "left_out"
    (asked,) = of(do.SendWelcome, play.send(e.HeartbeatSeen(play.now, "c", play.opened[-1])))
    assert asked.device == "c", "a heartbeat does not introduce the new machine: it is asked who it is"
    assert not play.state.devices["c"].online
    deliver(play, "a", "b")
    assert play.aggregate is not None
    assert [one.device for one in play.aggregate.updates] == ["a", "b"]


def test_profile_claim_and_record_of_the_old_machine_are_forgotten_but_not_the_operators_word() -> None:
    play = of_three()
    old = play.state.devices["c"]
    play.state = msgspec.structs.replace(
        play.state,
        devices={
            **play.state.devices,
            "c": msgspec.structs.replace(
                old, bad=2, barred=-1, holds=1, aggregated=Attempt("r1", 1, 1, 1), factors={"flops": 3.0}, late_in=1
            ),
        },
    )
    play.leave_out("c")
    replace(play, "c")
    blank = v.Device(Hello("c"), online=False, connections=1, left_out="terminal", generation=2, awaited=True)
    blank = msgspec.structs.replace(blank, previous_session=old.hello.session)
    assert play.state.devices["c"] == blank
    play.take_in("c")
    out = comes(play, "c", samples=90, budget=Budget(memory_bytes=5))
    device = play.state.devices["c"]
    assert (device.claim.samples, device.hello.budget.memory_bytes, device.awaited) == ({"": 90}, 5, False)
    assert not [one for one in of(EventRow, out) if one.kind == "warning"], "more samples than the old one's"
    (candidate,) = play.plans[-1].candidates
    assert (candidate.budget.memory_bytes, candidate.factors, candidate.arrival) == (5, {}, "joining")


@pytest.mark.parametrize("times", [1, 2])
def test_the_old_machine_is_not_taken_for_the_new_one_while_the_broker_lets_it_in(times: int) -> None:
    """A broker elsewhere may read its files later than its reload command returns; a hello may wait in its queue."""
    play = of_three()
    comes(play, "c", 1, session="old")
    for generation in range(2, 2 + times):
        replace(play, "c", generation)
    out = comes(play, "c", 1 + times, session="old")
    assert not out
    assert play.state.devices["c"].awaited
    assert not play.state.devices["c"].online
    comes(play, "c", 1 + times, samples=900)
    device = play.state.devices["c"]
    assert (device.awaited, device.claim.samples, device.warned) == (False, {"": 900}, ())


def test_a_replacement_is_told_once_and_outlives_a_restart() -> None:
    play = of_three()
    replace(play, "c")
    assert not of(EventRow, replace(play, "c"))
    play.restart()
    assert (play.state.devices["c"].generation, play.state.devices["c"].awaited) == (2, True)
    assert not of(EventRow, replace(play, "c"))
    comes(play, "c")
    play.restart()
    assert (play.state.devices["c"].generation, play.state.devices["c"].awaited) == (2, False)


def test_a_revoked_device_is_in_again_once_another_machine_has_its_name() -> None:
    play = of_three()
    play.send(e.Revoked(play.now, "c"))
    replace(play, "c")
    assert not play.state.devices["c"].out
    deliver(play, "a", "b")
    comes(play, "c")
    assert play.state.devices["c"].online
    play.send(e.Revoked(play.now, "c"))
    assert play.state.devices["c"].revoked, "the new one may be revoked, too"


def test_a_device_that_the_run_meets_later_is_known_by_its_generation() -> None:
    play = of_three()
    comes(play, "d", generation=3)
    assert play.state.devices["d"].generation == 3
    assert not of(EventRow, replace(play, "d", 3))
    assert set(NAMES) < set(play.state.devices)
