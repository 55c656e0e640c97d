"""Pause, resume, stop, leave out and take in: what the machine does with each of them in each phase."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_coordinator_machine import KEEPING, NAMES, POLICY, TIMEOUTS, Play, behave, left_alone, of, rounds_of

from coordinator.core import moves as do
from coordinator.core import moves as e
from coordinator.core.state import Phase
from edgefl.run_records import AssignmentRow, EventRow


def joining() -> Play:
    play = Play()
    play.hello("a")
    return play


def planning() -> Play:
    play = Play()
    for name in ("a", "b"):
        play.hello(name)
    return play


def in_round() -> Play:
    return Play().started("a", "b")


def retrying() -> Play:
    play = in_round()
    play.wait(POLICY.deadline_s)
    return play


def aggregating() -> Play:
    play = in_round()
    for name in ("a", "b"):
        play.announce(name)
        play.receive(name)
    return play


def evaluating() -> Play:
    play = aggregating()
    play.finish_aggregate()
    return play


def paused() -> Play:
    play = planning()
    play.pause()
    return play


REACHED: dict[Phase, Callable[[], Play]] = {
    Phase.JOINING: joining,
    Phase.PLANNING: planning,
    Phase.WAITING: left_alone,
    Phase.ROUND: in_round,
    Phase.RETRYING: retrying,
    Phase.AGGREGATING: aggregating,
    Phase.EVALUATING: evaluating,
    Phase.PAUSED: paused,
}
RUNNING = pytest.mark.parametrize("phase", REACHED)


def reached(phase: Phase) -> Play:
    play = REACHED[phase]()
    assert play.state.phase is phase
    return play


def events(out: list[do.Instruction], *kinds: str) -> list[tuple[str, str, str]]:
    found = [(one.kind, one.device, one.data.get("by", "")) for one in out if isinstance(one, EventRow)]
    return [one for one in found if not kinds or one[0] in kinds]


def test_every_phase_of_a_run_that_goes_on_is_tried() -> None:
    assert set(REACHED) == set(Phase) - {Phase.STARTING, Phase.FINISHED, Phase.FAILED, Phase.STOPPED}


@RUNNING
def test_a_pause_opens_no_round_however_long_it_lasts_and_the_run_goes_on_after_it(phase: Phase) -> None:
    play = reached(phase)
    already = play.state.phase is Phase.PAUSED
    opened = len(play.opened)
    out = play.pause()
    begun = phase in {Phase.ROUND, Phase.AGGREGATING, Phase.EVALUATING}
    told = [] if already else [("pausing" if begun else "paused", "", "terminal")]
    assert events(out, "pausing", "paused") == told
    assert not of(do.SendAbort, out), "nothing that is being trained is lost"
    if phase is Phase.ROUND:
        for name in ("a", "b"):
            play.announce(name)
            play.receive(name)
    if play.aggregate is not None:
        play.finish_aggregate()
    if play.evaluate is not None:
        assert events(play.finish_evaluate(), "paused") == [("paused", "", "terminal")]
    assert play.state.phase is Phase.PAUSED
    for _ in range(5):  # far longer than any deadline
        assert not of(do.Fail, play.wait(POLICY.deadline_s))
    assert len(play.opened) == opened
    assert events(play.resume())[:1] == [("resumed", "", "web")]
    assert not of(do.Fail, play.wait(POLICY.join_s / 2)), "waits begin again with their whole time"
    for name in NAMES:
        play.hello(name)
    behave(play)
    assert play.state.phase is Phase.FINISHED


def test_a_pause_lets_an_attempt_be_tried_again_only_afterwards() -> None:
    play = in_round()
    play.pause()
    play.wait(POLICY.deadline_s)
    assert play.state.phase is Phase.RETRYING
    assert events(play.wait(TIMEOUTS.retry_pause_s)) == [("paused", "", "terminal")]
    out = play.resume()
    assert [one.device for one in of(do.SendOffer, out)] == ["a", "b"]
    assert play.state.open is not None
    assert play.state.open.tries == 2, "what was tried before the pause counts"


def test_a_pause_that_is_called_off_before_it_begins_changes_nothing() -> None:
    play = in_round()
    play.pause()
    assert events(play.resume()) == [("resumed", "", "web")]
    behave(play)
    assert "paused" not in play.state.story[-1]
    assert play.state.phase is Phase.FINISHED


def test_a_pause_outlives_the_process_and_so_does_the_round_before_it() -> None:
    play = in_round()
    play.announce("a")
    play.receive("a")
    play.pause()
    play.restart()
    assert play.state.phase is Phase.ROUND
    play.hello("a", working_on=play.opened[-1])
    play.hello("b", working_on=play.opened[-1])
    play.announce("b")
    play.receive("b")
    play.finish_aggregate()
    play.finish_evaluate()
    assert play.state.phase is Phase.PAUSED
    assert events(play.restart()) == [("paused", "", "terminal")]
    assert not of(do.Fail, play.wait(10 * POLICY.join_s)), "no device need be there"
    for name in ("a", "b"):
        assert not of(do.SendOffer, play.hello(name))
    play.resume()
    behave(play)
    assert play.state.phase is Phase.FINISHED


def test_a_pause_outlasts_an_evaluation_that_an_earlier_process_left_over() -> None:
    play = evaluating()
    play.pause()
    play.restart()
    assert play.state.phase is Phase.EVALUATING
    play.now += 2 * POLICY.join_s  # as long as it takes: no device is waited for meanwhile
    out = play.finish_evaluate()
    assert not of(do.Fail, out)
    assert events(out) == [("evaluated", "", ""), ("paused", "", "terminal")]
    assert play.state.phase is Phase.PAUSED


def test_a_paused_run_still_takes_what_stragglers_bring() -> None:
    play = Play(KEEPING, stages=rounds_of("keep")).started("a", "b")
    first = play.opened[-1]
    play.announce("a")
    play.receive("a")
    play.pause()
    play.wait(POLICY.deadline_s)
    play.finish_aggregate()
    play.finish_evaluate()
    assert play.state.phase is Phase.PAUSED
    play.announce("b", first)
    assert of(do.SendAck, play.receive("b"))[0].accepted
    assert len(play.state.buffered) == 1


def test_without_lockstep_a_pause_lets_the_round_end_and_offers_nothing_more() -> None:
    policy = POLICY.__class__(devices=2, join_s=10.0, mode="async", buffer=2, max_staleness=1)
    play = Play(policy, stages=rounds_of("async")).started("a", "b")
    play.pause()
    play.hello("c")
    assert not of(do.SendOffer, play.finish_plan())
    for name in ("a", "b"):
        play.announce(name)
        assert not of(do.SendOffer, play.receive(name))
    play.finish_aggregate()
    play.finish_evaluate()
    assert play.state.phase is Phase.PAUSED


@RUNNING
def test_a_stop_ends_the_run_at_once_and_its_resumption_ends_it_in_full(phase: Phase) -> None:
    play = reached(phase)
    out = play.stop()
    assert play.state.phase is Phase.STOPPED
    assert events(out) == [("run_stopped", "", "terminal")]
    assert [one.status for one in of(do.SaveEnd, out)] == ["stopped"]
    assert [one.reason for one in of(do.DrainAll, out)] == ["the run was stopped (terminal)"]
    assert not of(do.Fail, out)
    play.restart()
    assert not play.state.paused, "a stop ends a pause"
    for name in NAMES:
        play.hello(name)
    behave(play)
    assert play.state.phase is Phase.FINISHED


def test_updates_that_were_there_at_a_stop_are_not_made_again() -> None:
    play = in_round()
    play.announce("a")
    play.receive("a")
    play.stop()
    play.restart()
    assert play.status("a") == "done"
    assert not of(do.SendOffer, play.hello("a"))
    assert [one.device for one in of(do.SendOffer, play.hello("b"))] == ["b"], "which was drained"


@RUNNING
def test_a_device_that_is_left_out_is_drained_and_asked_for_nothing_until_it_is_taken_in(phase: Phase) -> None:
    play = reached(phase)
    online = play.state.devices["a"].online
    out = play.leave_out("a")
    assert events(out, "left_out") == [("left_out", "a", "terminal")]
    assert [one.device for one in of(do.SendDrain, out)] == ["a"]
    assert not play.leave_out("a"), "once"
    if play.state.paused:
        play.resume()
    for name in ("b", "c"):
        play.hello(name)
    drained = of(do.SendDrain, play.hello("a"))
    assert [one.device for one in drained] == ["a"], "also when it comes back"
    for _ in range(6):
        while play.plans:
            play.finish_plan()
        if play.aggregate is not None:
            play.finish_aggregate()
        if play.evaluate is not None:
            play.finish_evaluate()
        play.wait(3.0)
    play.restart()
    assert play.state.devices["a"].left_out == "terminal"
    assert [one.device for one in of(do.SendDrain, play.hello("a"))] == ["a"]
    out = play.take_in("a")
    assert events(out) == [("taken_in", "a", "web")]
    assert [one.device for one in of(do.SendWelcome, out)] == ["a"]
    assert not play.take_in("a"), "once"
    assert online or phase is Phase.WAITING


def test_the_plan_says_who_was_left_out_while_it_was_made_and_no_offer_follows() -> None:
    play = planning()
    play.leave_out("a")
    out = play.finish_plan()
    (planned,) = [one for one in of(EventRow, out) if one.kind == "stage_planned"]
    assert {one["device"]: one.get("left_out") for one in planned.data["placements"]} == {"a": "terminal", "b": None}
    assert [one.device for one in of(do.SendOffer, out)] == ["b"]


def test_the_open_round_goes_on_without_a_device_that_is_left_out() -> None:
    play = in_round()
    play.announce("a")
    play.receive("a")
    opened = play.opened[-1]
    out = play.leave_out("b")
    assert [(one.device, one.attempt) for one in of(do.SendAbort, out)] == [("b", opened)]
    (row,) = [one for one in of(AssignmentRow, out) if one.device == "b"]
    assert (row.status, row.refusal.reason) == ("left_out", "left_out")
    assert [u.device for u in of(do.Aggregate, out)[0].updates] == ["a"], "nobody else is waited for"


def test_what_a_device_has_delivered_counts_though_it_is_left_out_then() -> None:
    play = in_round()
    play.announce("a")
    play.receive("a")
    out = play.leave_out("a")
    assert not of(do.SendAbort, out)
    play.announce("b")
    out = play.receive("b")
    assert [u.device for u in of(do.Aggregate, out)[0].updates] == ["a", "b"]


def test_the_quorum_is_of_those_who_are_not_left_out() -> None:
    every = POLICY.__class__(devices=3, join_s=10.0, quorum=1.0, deadline_s=100.0)
    play = Play(every)
    for name in NAMES:
        play.hello(name)
    play.finish_plan()
    for name in ("a", "b"):
        play.announce(name)
        play.receive(name)
    assert play.state.phase is Phase.ROUND
    out = play.leave_out("c")
    assert [u.device for u in of(do.Aggregate, out)[0].updates] == ["a", "b"]
    play.finish_aggregate()
    play.finish_evaluate()
    assert not play.state.returning, "two devices of three are enough from now on"
    play.send(e.DeviceOffline(play.now, "c"))
    assert not play.state.returning, "it is not waited for"


def test_without_its_last_device_an_attempt_is_over_but_the_run_is_not() -> None:
    play = in_round()
    for _ in range(POLICY.max_attempts):
        play.leave_out("a")
        out = play.leave_out("b")
        assert play.state.phase is Phase.RETRYING
        assert [one.status for one in of(do.SavedRound, out)] == ["failed"]
        out = play.wait(TIMEOUTS.retry_pause_s * POLICY.max_attempts)
        assert play.state.phase is Phase.WAITING
        (text,) = [one.data["text"] for one in of(EventRow, out) if one.kind == "warning"]
        assert "left out of the run: a, b" in text
        play.take_in("a")
        play.take_in("b")
        assert [one.device for one in of(do.SendOffer, play.hello("a"))] == ["a", "b"]


def test_a_straggler_that_is_left_out_is_not_waited_for_and_its_update_does_not_count() -> None:
    play = Play(KEEPING, stages=rounds_of("keep")).started("a", "b")
    first = play.opened[-1]
    play.announce("a")
    play.receive("a")
    play.wait(POLICY.deadline_s)
    out = play.leave_out("b")
    assert [(one.device, one.attempt) for one in of(do.SendAbort, out)] == [("b", first)]
    assert not play.state.stragglers
    play.finish_aggregate()
    assert not of(do.SendAck, play.announce("b", first))[0].accepted


def test_a_run_that_waits_for_a_device_begins_once_that_is_left_out() -> None:
    play = planning()
    play.restart()
    play.hello("a")
    assert play.state.phase is Phase.JOINING, "b was there before the restart"
    play.leave_out("b")
    play.finish_plan()
    assert list(play.state.assignments) == ["a"]


@pytest.mark.parametrize("request_of", [e.PauseAsked, e.ResumeAsked, e.StopAsked])
def test_a_run_that_has_ended_takes_no_request(request_of: type) -> None:
    play = in_round()
    play.stop()
    before = play.state
    assert play.send(request_of(play.now, "terminal")) == []
    assert play.state.phase is before.phase
