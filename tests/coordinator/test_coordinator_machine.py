"""The coordinator's machine: random events with invariants after every step, and rounds worked through by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from coordinator_fixture import STEP_BYTES, a_plan, place
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core import moves as do
from coordinator.core import moves as e
from coordinator.core import state as v
from coordinator.core.machine import TRANSITIONS, ignore, step
from coordinator.core.state import changes, decode, resumed
from coordinator.core.timeouts import Timeouts
from edgefl.aggregation.history import Memory
from edgefl.aggregation.pace import StageTrack
from edgefl.plan.job import Decline, Placement, RoundPolicy
from edgefl.protocol.messages import Hello, Update
from edgefl.records import Attempt, Budget, EvaluationRow, ObjectRef, Refusal
from edgefl.report.events import KINDS
from edgefl.run_records import OPEN, AssignmentRow, EventRow

NAMES = ("a", "b", "c")
MADE_MS = 7
NOT_BEGUN = e.Position(0, 0, 0, {}, None, MADE_MS)
FIRST = Attempt("r1", 1, 1, 1, MADE_MS)
REF = ObjectRef("0" * 64, 10)
POLICY = RoundPolicy(devices=2, join_s=10.0, quorum=0.5, deadline_s=100.0, max_attempts=2)
TIMEOUTS = Timeouts(grace_s=5.0, retry_pause_s=1.0)


def attempt_of(row: do.SavedRound | AssignmentRow) -> Attempt:
    return Attempt("r1", row.stage, row.round, row.attempt, MADE_MS)


class Play:
    """A machine with its history, and what a runner would have in hand; ``send`` checks the invariants."""

    def __init__(self, policy: RoundPolicy = POLICY, **changes: Any) -> None:
        self.plan = a_plan(policy=policy, **changes)
        self.state = v.State(self.plan, TIMEOUTS)
        self.kept: dict[tuple[str, str], Any] = {}
        self.now = 0.0
        self.plans: list[do.Plan] = []
        self.fetches: dict[str, Update] = {}
        self.aggregate: do.Aggregate | None = None
        self.evaluate: do.Evaluate | None = None
        self.opened: list[Attempt] = []
        self.closed: list[Attempt] = []
        self.counted: set[tuple[str, Attempt]] = set()
        self.acked: set[tuple[str, Attempt]] = set()
        self.outdated: set[tuple[str, Attempt]] = set()
        self.log: list[e.Event] = []
        self.saved = self.state
        self.send(e.Begin(self.now, NOT_BEGUN))

    def send(self, event: e.Event) -> list[do.Instruction]:
        before = self.state
        self.log.append(event)
        self.state, out = step(before, event)
        changed, self.saved = changes(self.saved, self.state), self.state
        self.kept = {key: row for key, row in self.kept.items() if key not in changed.deleted}
        self.kept |= {key: msgspec.json.decode(msgspec.json.encode(row)) for key, row in changed.rows.items()}
        msgspec.convert(msgspec.to_builtins(self.state), v.State)
        for one in out:
            assert msgspec.convert(msgspec.to_builtins(one), type(one)) == one, "of the types that it says"
            assert not isinstance(one, EventRow) or one.kind in KINDS, "the report and the console know it"
            self._note(one, before)
        self._check()
        return out

    def _note(self, one: do.Instruction, before: v.State) -> None:
        if isinstance(one, do.Plan):
            self.plans.append(one)
        elif isinstance(one, do.Fetch):
            self.fetches[one.update.device] = one.update
        elif isinstance(one, do.SendAbort):
            self.fetches.pop(one.device, None)
        elif isinstance(one, do.SendOffer):
            self.fetches.pop(one.device, None)
            assert not self.state.devices[one.device].out, "who is out of the run is offered nothing"
            offered = before.open is not None and one.device in before.open.assignments
            assert offered or not self.state.paused, "before a pause nothing new is offered"
            assert one.attempt == (self.state.open or before.open).attempt  # type: ignore[union-attr]
        elif isinstance(one, do.EndTransfers):
            self.fetches.clear()
        elif isinstance(one, do.Evaluate):
            assert self.evaluate is None
            self.evaluate = one
        elif isinstance(one, do.Aggregate):
            self._note_aggregate(one)
        else:
            self._note_record(one)

    def _note_record(self, one: do.Instruction) -> None:
        if isinstance(one, do.SavedRound) and one.status == "running":
            assert not self.state.paused, "no round opens in a pause"
            assert not self.opened or attempt_of(one) > self.opened[-1], "attempts go up"
            self.opened.append(attempt_of(one))
        elif isinstance(one, do.SavedRound) and one.status == "done":
            assert (one.stage, one.round) not in [(a.stage, a.round) for a in self.closed]
            self.closed.append(attempt_of(one))
        elif isinstance(one, do.SendAck) and one.accepted:
            self.acked.add((one.device, one.attempt))
        elif isinstance(one, AssignmentRow) and one.status == "late":
            self.outdated.add((one.device, attempt_of(one)))
        elif isinstance(one, do.CollectGarbage):
            states = {update.attempt for update in one.updates} | one.attempts
            held = [*self.state.stragglers.values(), *self.state.buffered.values()]
            assert {a.attempt for a in held} <= states, "what a device may still bring stays readable"

    def _note_aggregate(self, one: do.Aggregate) -> None:
        assert self.aggregate is None
        self.aggregate = one
        opened = self.state.open
        assert opened is not None
        assert opened.attempt == one.attempt == self.opened[-1]
        policy = self.plan.policy
        offered = [a for a in opened.assignments.values() if a.status not in {"refused", "left_out"}]
        assert one.updates
        if policy.mode == "lockstep":
            own = [update for update in one.updates if update.attempt == one.attempt]
            assert not offered or len(own) >= max(1, math.ceil(POLICY.quorum * len(offered) - 1e-9)), "a quorum"
            missed = [name for name, a in opened.assignments.items() if a.status in {"late", "lost"}]
            alone = all(not self.state.devices[name].online for name in missed)
            assert not missed or alone or self.now >= opened.deadline_at, "nobody present is left out before its time"
        last = one.attempt.round == self.state.rounds[one.attempt.stage - 1]
        assert not (last and self.state.stragglers), "a stage leaves nobody behind"
        for update in one.updates:
            late = one.attempt.round - update.attempt.round
            assert update.attempt.stage == one.attempt.stage
            assert 0 <= late <= policy.max_staleness
            assert update.attempt == one.attempt or policy.keeps
            assert (update.device, update.attempt) not in self.counted, "an update counts once"
            self.counted.add((update.device, update.attempt))

    def _check(self) -> None:
        state = self.state
        working = state.open.assignments if state.open is not None else {}
        for kind, there in (("assignment", working), ("behind", state.stragglers), ("taken", state.buffered)):
            assert {name for of, name in self.kept if of == kind} == set(there), (
                "the ledger has what goes on, and no more"
            )
        if state.phase is not v.Phase.STOPPED:  # which leaves an open attempt to the process that resumes the run
            assert (state.open is not None) == (state.phase in {v.Phase.ROUND, v.Phase.AGGREGATING})
        assert state.paused or state.phase is not v.Phase.PAUSED
        if state.open is not None:
            assert state.open.attempt == Attempt(state.plan.run, state.stage, state.number, state.attempt, MADE_MS)
            assert state.open.assignments or state.policy.keeps
            open_ones = [a for a in state.open.assignments.values() if a.status in OPEN]
            assert not (state.phase is v.Phase.AGGREGATING and open_ones)
            parts = {**state.open.assignments, **state.stragglers}
            assert not any(state.devices[name].out and a.status in OPEN for name, a in parts.items())
            assert all(a.update is not None for a in state.open.assignments.values() if a.status in {"updated", "done"})
        assert state.phase is not v.Phase.ROUND or self.aggregate is None
        assert state.policy.keeps or not (state.stragglers or state.buffered)
        assert all(one.status in OPEN and one.attempt is not None for one in state.stragglers.values())
        assert all(one.status == "done" and one.update is not None for one in state.buffered.values())
        assert all(name not in state.stragglers for name in (state.open.assignments if state.open else ()))

    def restart(self) -> list[do.Instruction]:
        """The process is killed and another goes on with what the ledger has."""
        if self.aggregate is not None:  # begun anew by the process that comes
            self.counted -= {(update.device, update.attempt) for update in self.aggregate.updates}
        last = self.closed[-1] if self.closed else None
        unevaluated = last if self.evaluate is not None else None
        self.plans, self.fetches, self.aggregate, self.evaluate = [], {}, None, None
        following = [
            a.attempt for a in self.opened if (a.stage, a.round) > ((last.stage, last.round) if last else (0, 0))
        ]
        anew = v.State(self.plan, TIMEOUTS)
        was = decode(anew, ((kind, name, row) for (kind, name), row in self.kept.items()))
        assert was is not None
        where = (last.stage, last.round) if last else (0, 0)
        stands = e.Position(*where, max(following, default=0), {}, unevaluated, MADE_MS)
        begin = e.Begin(self.now, stands, self.state.memory, resumed(was, self.now))
        self.state, self.saved = anew, was
        return self.send(begin)

    # What devices, the runner's work and the operator may do.

    def pause(self) -> list[do.Instruction]:
        return self.send(e.PauseAsked(self.now, "terminal"))

    def resume(self) -> list[do.Instruction]:
        return self.send(e.ResumeAsked(self.now, "web"))

    def stop(self) -> list[do.Instruction]:
        return self.send(e.StopAsked(self.now, "terminal"))

    def leave_out(self, name: str) -> list[do.Instruction]:
        return self.send(e.LeaveOutAsked(self.now, "terminal", name))

    def take_in(self, name: str) -> list[do.Instruction]:
        return self.send(e.TakeInAsked(self.now, "web", name))

    def hello(self, name: str, working_on: Attempt | None = None, **changes: Any) -> list[do.Instruction]:
        return self.send(e.Joined(self.now, Hello(device=name, samples={"": 8}, working_on=working_on, **changes)))

    def accept(self, name: str, attempt: Attempt | None = None) -> list[do.Instruction]:
        return self.send(e.Accepted(self.now, name, attempt or self.opened[-1]))

    def decline(self, name: str, refusal: Refusal, attempt: Attempt | None = None) -> list[do.Instruction]:
        return self.send(e.Declined(self.now, name, attempt or self.opened[-1], refusal))

    def announce(self, name: str, attempt: Attempt | None = None) -> list[do.Instruction]:
        update = Update(name, attempt or self.opened[-1], {"task": REF}, {"task": 8}, {"loss": 1.0})
        return self.send(e.Announced(self.now, update))

    def receive(self, name: str) -> list[do.Instruction]:
        update = self.fetches.pop(name)
        return self.send(e.UpdateStored(self.now, name, update.attempt))

    def finish_plan(self, index: int = 0) -> list[do.Instruction]:
        plan = self.plans.pop(index)
        stage, hyper = self.plan.stages[plan.stage - 1], self.plan.hypers[plan.stage - 1]
        return self.send(e.Planned(self.now, plan.ticket, tuple(place(stage, hyper, c) for c in plan.candidates)))

    def finish_aggregate(self, memory: Memory = Memory()) -> list[do.Instruction]:  # noqa: B008 - it is frozen
        assert self.aggregate is not None
        attempt, self.aggregate = self.aggregate.attempt, None
        return self.send(e.Aggregated(self.now, attempt, {"task": REF}, memory=memory))

    def finish_evaluate(self) -> list[do.Instruction]:
        assert self.evaluate is not None
        attempt, self.evaluate = self.evaluate.attempt, None
        row = EvaluationRow(stage=attempt.stage, round=attempt.round, available=("acc",), value=0.5, samples=10)
        return self.send(e.Evaluated(self.now, attempt, (row,)))

    def wait(self, seconds: float) -> list[do.Instruction]:
        self.now += seconds
        return self.send(e.Tick(self.now))

    def started(self, *names: str, **changes: Any) -> Play:
        for name in names:
            self.hello(name, **changes)
        self.finish_plan()
        return self

    def status(self, name: str) -> str:
        assert self.state.open is not None
        return self.state.open.assignments[name].status


def of(kind: type, out: list[do.Instruction]) -> list[Any]:
    return [one for one in out if isinstance(one, kind)]


REFUSALS = (Refusal("ceiling", 2.0, 1.0, "B"), Refusal("ceiling"), Refusal("error"), Refusal("data", 4.0, 2.0))


def act(play: Play, draw: Any) -> None:
    """One random event out of what can happen; messages may be of this, an older or a foreign attempt."""
    action = draw(st.sampled_from((*ACTIONS, *LIKELY)))
    known = [*play.opened[-2:], Attempt("other", 1, 1, 1), Attempt("r1", 9, 9, 9)]
    attempt = draw(st.sampled_from([*play.opened[-1:] * 8, *known]))
    ACTIONS[action](play, draw, draw(st.sampled_from(NAMES)), attempt)


def hello(play: Play, draw: Any, name: str, attempt: Attempt) -> None:
    budget = Budget(step_memory_bytes=draw(st.sampled_from([None, None, None, STEP_BYTES // 2, 1])))
    play.hello(name, draw(st.sampled_from([None, attempt])), budget=budget)


def beat(play: Play, draw: Any, name: str, attempt: Attempt) -> None:
    play.send(e.HeartbeatSeen(play.now, name, draw(st.sampled_from([None, attempt])), draw(st.booleans())))


def decline(play: Play, draw: Any, name: str, attempt: Attempt) -> None:
    play.decline(name, draw(st.sampled_from(REFUSALS)), attempt)


def receive(play: Play, draw: Any, name: str, attempt: Attempt) -> None:
    if name in play.fetches:
        play.receive(name)


def spoil(play: Play, draw: Any, name: str, attempt: Attempt) -> None:
    if name in play.fetches:
        play.send(e.UpdateInvalid(play.now, name, play.fetches.pop(name).attempt, Refusal("update")))


def replaced(play: Play, draw: Any, name: str, attempt: Attempt) -> None:
    was = play.state.devices.get(name)
    play.send(e.Replaced(play.now, name, was.generation + 1 if was is not None else 2))


def plan(play: Play, draw: Any, name: str, attempt: Attempt) -> None:
    if play.plans:
        play.finish_plan(draw(st.integers(0, len(play.plans) - 1)))


def stop(play: Play, draw: Any, name: str, attempt: Attempt) -> None:
    play.stop()
    assert play.state.phase in v.ENDED
    play.restart()


ACTIONS: dict[str, Callable[[Play, Any, str, Attempt], object]] = {
    "hello": hello,
    "leave": lambda play, draw, name, attempt: play.send(e.DeviceOffline(play.now, name)),
    "revoke": lambda play, draw, name, attempt: play.send(e.Revoked(play.now, name)),
    "replace": replaced,
    "beat": beat,
    "accept": lambda play, draw, name, attempt: play.accept(name, attempt),
    "decline": decline,
    "progress": lambda play, draw, name, attempt: play.send(e.Progressed(play.now, name, attempt)),
    "announce": lambda play, draw, name, attempt: play.announce(name, attempt),
    "receive": receive,
    "spoil": spoil,
    "plan": plan,
    "work": lambda play, draw, name, attempt: work(play),
    "restart": lambda play, draw, name, attempt: play.restart(),
    "pause": lambda play, draw, name, attempt: play.pause(),
    "resume": lambda play, draw, name, attempt: play.resume(),
    "stop": stop,
    "leave out": lambda play, draw, name, attempt: play.leave_out(name),
    "take in": lambda play, draw, name, attempt: play.take_in(name),
    "wait": lambda play, draw, name, attempt: play.wait(draw(st.sampled_from([0.1, 0.1, 0.1, 3.0, 6.0, 50.0]))),
}


#: Drawn more often, so that rounds get somewhere.
LIKELY = ("announce", "receive", "announce", "receive", "plan", "work", "work")


def work(play: Play) -> None:
    if play.aggregate is not None:
        play.finish_aggregate()
    elif play.evaluate is not None:
        play.finish_evaluate()


def let_go_on(play: Play) -> None:
    """The operator ends the pause and takes in everyone."""
    if play.state.paused:
        play.resume()
    for name in NAMES:
        device = play.state.devices.get(name)
        if device is not None and device.left_out:
            play.take_in(name)
            if device.online:
                play.hello(name)  # which it says when it is welcomed


def behave(play: Play) -> None:
    """From here on everyone is there and does what it should."""
    let_go_on(play)
    for _ in range(200):
        if play.state.phase in v.ENDED:
            return
        while play.plans:
            play.finish_plan()
        work(play)
        opened = play.state.open
        for name in NAMES:
            device, part = play.state.devices.get(name), play.state.stragglers.get(name)
            if part is None and opened is not None and play.state.open == opened:
                part = opened.assignments.get(name)
            attempt = part.attempt if part is not None else None
            if device is None or not device.online:
                play.hello(name)
            elif part is not None and part.status in {"offered", "accepted"}:
                play.announce(name, attempt)
            elif part is not None and part.status == "updated" and name in play.fetches:
                play.receive(name)
            elif part is not None and part.status == "updated":  # fetched by a process that is gone
                play.hello(name, attempt or play.opened[-1])
            opened = play.state.open
        play.wait(1.0)
    raise AssertionError(f"the run goes nowhere: {play.state.phase}\n" + "\n".join(play.state.story))


KEEPING = msgspec.structs.replace(POLICY, late="keep", max_staleness=2)
ASYNC = msgspec.structs.replace(POLICY, mode="async", buffer=2, max_staleness=1)
#: Rounds a stage: enough for updates to grow old.
ROUNDS = {"drop": (1, 2), "keep": (3, 2), "async": (4, 3)}


def rounds_of(name: str) -> tuple[Any, ...]:
    stages = zip(a_plan().stages, ROUNDS[name], strict=True)
    return tuple(msgspec.structs.replace(stage, rounds=rounds) for stage, rounds in stages)


@pytest.mark.parametrize(("name", "policy"), [("drop", POLICY), ("keep", KEEPING), ("async", ASYNC)])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_whatever_happens_the_invariants_hold_and_the_run_comes_to_an_end(
    name: str, policy: RoundPolicy, data: st.DataObject
) -> None:
    after = data.draw(st.sampled_from([0, 2]))
    play = Play(msgspec.structs.replace(policy, quarantine_after=after), stages=rounds_of(name))
    if data.draw(st.booleans()):
        play.started(*NAMES)
        if play.plans:
            play.finish_plan()
    for _ in range(data.draw(st.integers(0, 80))):
        if play.state.phase not in v.ENDED:
            act(play, data.draw)
    behave(play)
    if play.state.phase is v.Phase.FINISHED:
        first, second = ROUNDS[name]
        expected = [*((1, n + 1) for n in range(first)), *((2, n + 1) for n in range(second))]
        assert [(a.stage, a.round) for a in play.closed] == expected
        finished = set(play.closed)
        lost = {one for one in play.acked - play.counted - play.outdated if one[1] in finished}
        assert not lost, "what was taken is in the model"


def test_an_update_made_from_an_earlier_model_counts_in_the_next_round() -> None:
    play = Play(KEEPING, stages=rounds_of("keep")).started("a", "b")
    first = play.opened[-1]
    play.announce("a")
    play.receive("a")
    out = play.wait(POLICY.deadline_s)
    assert not of(do.SendAbort, out), "b goes on"
    assert not of(do.EndTransfers, out), "and so do its transfers"
    play.finish_aggregate()
    out = play.finish_evaluate()
    assert [one.device for one in of(do.SendOffer, out)] == ["a"], "b is not asked for something else"
    assert of(do.CollectGarbage, out)[0].attempts == {first}
    play.announce("b", first)
    (told,) = [one for one in of(EventRow, play.receive("b")) if one.kind == "update"]
    assert told.data["staleness"] == 1
    assert of(do.SendAck, play.announce("b", first))[0].accepted, "said twice, it is taken once"
    play.announce("a")
    out = play.receive("a")
    assert [(u.device, u.attempt.round) for u in of(do.Aggregate, out)[0].updates] == [("a", 2), ("b", 1)]
    saved = of(do.SavedRound, play.finish_aggregate())[0]
    assert saved.participants == ("a", "b")
    assert of(do.SendAck, play.announce("b", first))[0].accepted, "also once it is in the model"
    assert [one.device for one in of(do.SendOffer, play.finish_evaluate())] == ["a", "b"]


def test_a_late_update_is_lost_neither_by_a_failed_attempt_nor_by_restarts() -> None:
    play = Play(KEEPING, stages=rounds_of("keep")).started("a", "b")
    first = play.opened[-1]
    play.announce("a")
    play.receive("a")
    play.wait(POLICY.deadline_s)
    play.finish_aggregate()
    play.finish_evaluate()
    play.announce("b", first)
    play.restart()
    play.hello("b", working_on=first)
    play.hello("a", working_on=play.opened[-1])
    play.receive("b")
    play.restart()
    play.hello("a", working_on=play.opened[-1])
    assert of(do.SendAck, play.hello("b", working_on=first))[0].accepted
    play.wait(POLICY.deadline_s)  # a has not delivered: no quorum of those asked
    assert play.state.phase is v.Phase.RETRYING
    play.wait(TIMEOUTS.retry_pause_s)
    play.announce("a")
    out = play.receive("a")
    play.announce("b")
    out += play.receive("b")
    assert [(u.device, u.attempt.round) for u in of(do.Aggregate, out)[0].updates] == [("a", 2), ("b", 2), ("b", 1)]


def test_without_lockstep_the_server_steps_when_the_buffer_is_full_and_nobody_waits() -> None:
    play = Play(ASYNC, stages=rounds_of("async")).started("a", "b")
    play.hello("c")
    assert [one.device for one in of(do.SendOffer, play.finish_plan())] == ["c"], "a newcomer begins at once"
    first = play.opened[-1]
    play.announce("a")
    assert not of(do.SendOffer, play.receive("a")), "it has made the newest model's update already"
    play.announce("b")
    out = play.receive("b")
    assert [u.device for u in of(do.Aggregate, out)[0].updates] == ["a", "b"]
    play.announce("c", first)
    play.receive("c")  # while the server is at its step: counts in the next one
    play.finish_aggregate()
    out = play.finish_evaluate()
    assert [one.device for one in of(do.SendOffer, out)] == ["a", "b", "c"]
    play.announce("b")
    out = play.receive("b")
    assert [(u.device, u.attempt.round) for u in of(do.Aggregate, out)[0].updates] == [("b", 2), ("c", 1)]


def test_who_delivers_late_is_offered_the_newest_model_at_once() -> None:
    play = Play(ASYNC, stages=rounds_of("async")).started("a", "b")
    play.hello("c")
    play.finish_plan()
    first = play.opened[-1]
    for name in ("a", "b"):
        play.announce(name)
        play.receive(name)
    play.finish_aggregate()
    play.finish_evaluate()
    play.announce("c", first)
    (offer,) = of(do.SendOffer, play.receive("c"))
    assert (offer.device, offer.attempt) == ("c", play.opened[-1])


def test_an_update_older_than_the_policy_admits_is_dropped_and_the_device_asked_anew() -> None:
    play = Play(ASYNC, stages=rounds_of("async")).started("a", "b")
    play.hello("c")
    play.finish_plan()
    first = play.opened[-1]
    for number in (1, 2):
        for name in ("a", "b"):
            play.announce(name)
            play.receive(name)
        play.finish_aggregate()
        out = play.finish_evaluate()
        assert ("c" in play.state.stragglers) == (number == 1)
    assert [(one.device, one.attempt) for one in of(do.SendAbort, out)] == [("c", first)]
    (late,) = [one for one in of(AssignmentRow, out) if one.status == "late"]
    assert (late.refusal.needed, late.refusal.allowed, late.refusal.unit) == (2.0, 1.0, "rounds")
    assert [one.device for one in of(do.SendOffer, out)] == ["a", "b", "c"]
    (ack,) = of(do.SendAck, play.announce("c", first))
    assert (ack.accepted, ack.refusal.reason) == (False, "stale")


def test_a_stages_last_round_leaves_nobody_behind_and_another_stages_update_is_stale() -> None:
    play = Play(ASYNC, stages=rounds_of("drop")).started("a", "b")  # one round in the first stage
    play.hello("c")
    play.finish_plan()
    first = play.opened[-1]
    for name in ("a", "b"):
        play.announce(name)
        out = play.receive(name)
    assert [(one.device, one.attempt) for one in of(do.SendAbort, out)] == [("c", first)]
    assert of(do.EndTransfers, out)
    play.finish_aggregate()
    play.finish_evaluate()
    play.finish_plan()
    assert play.state.stage == 2
    (ack,) = of(do.SendAck, play.announce("c", first))
    assert (ack.accepted, ack.refusal.reason) == (False, "stale")


def test_a_buffer_larger_than_the_fleet_waits_for_everybody_and_no_longer() -> None:
    play = Play(msgspec.structs.replace(ASYNC, buffer=9), stages=rounds_of("async")).started("a", "b")
    play.announce("a")
    play.receive("a")
    play.announce("b")
    assert len(of(do.Aggregate, play.receive("b"))[0].updates) == 2


def test_a_device_that_forgot_what_it_was_behind_with_is_offered_the_newest() -> None:
    play = Play(ASYNC, stages=rounds_of("async")).started("a", "b")
    play.hello("c")
    play.finish_plan()
    for name in ("a", "b"):
        play.announce(name)
        play.receive(name)
    play.finish_aggregate()
    play.finish_evaluate()
    out = play.hello("c")
    assert [one.status for one in of(AssignmentRow, out)] == ["lost", "offered"]
    assert of(do.SendOffer, out)[0].attempt == play.opened[-1]


def broken(play: Play, name: str) -> list[do.Instruction]:
    """An update with a part nobody asked for."""
    return play.send(e.Announced(play.now, Update(name, play.opened[-1], {"strange": REF}, {}, {})))


def test_a_device_is_quarantined_after_bad_updates_in_a_row_and_the_round_goes_on() -> None:
    play = Play(msgspec.structs.replace(POLICY, quarantine_rounds=1), stages=rounds_of("async")).started("a", "b")
    assert not [one for one in of(EventRow, broken(play, "b")) if one.kind == "quarantined"]
    play.announce("a")
    assert of(do.Aggregate, play.receive("a")), "at once: b has had its answer"
    play.finish_aggregate()
    play.finish_evaluate()
    out = broken(play, "b")
    told = [one.kind for one in of(EventRow, out)]
    assert told == ["rejected", "quarantined"]
    assert of(do.SendAck, out)[0].refusal.reason == "parts"
    play.announce("a")
    play.receive("a")
    play.restart()
    play.hello("a")
    play.hello("b", profile="of another name")
    play.finish_aggregate()
    out = play.finish_evaluate()
    while play.plans:
        out += play.finish_plan()
    assert [one.device for one in of(do.SendOffer, out)] == ["a"], "kept over a restart and a new introduction"
    (row,) = [one for one in of(AssignmentRow, out) if one.status == "quarantined"]
    assert row.refusal.reason == "quarantine"
    assert "2 updates in a row could not be used (in all: parts × 2)" in row.refusal.detail
    play.announce("a")
    play.receive("a")
    play.finish_aggregate()
    out = play.finish_evaluate()
    assert [one.device for one in of(do.SendOffer, out)] == ["a", "b"]
    assert [one.kind for one in of(EventRow, out)].count("readmitted") == 1
    assert play.state.devices["b"].bad == 0


def test_a_good_update_between_bad_ones_keeps_a_device_out_of_quarantine() -> None:
    play = Play(stages=rounds_of("async")).started("a", "b")
    for number in range(3):
        broken(play, "b") if number != 1 else play.announce("b")
        if number == 1:
            play.receive("b")
        play.announce("a")
        play.receive("a")
        play.finish_aggregate()
        play.finish_evaluate()
    assert play.state.devices["b"].rejected == {"parts": 2}
    assert not play.state.devices["b"].barred


def test_when_all_are_in_quarantine_the_run_ends_and_names_them() -> None:
    play = Play(msgspec.structs.replace(POLICY, max_attempts=9)).started("a", "b")
    for number in (1, 2):
        assert play.opened[-1].attempt == number
        broken(play, "a")
        broken(play, "b")
        out = play.wait(10.0)
    (failure,) = of(do.Fail, out)
    assert failure.message == "every device that can train stage 1 is in quarantine: a, b"


def test_a_recorded_log_replays_to_the_same_state() -> None:
    play = Play().started("a", "b")
    play.accept("a")
    play.announce("a")
    play.receive("a")
    play.decline("b", Refusal("ceiling", 5.0, 3.0, "B"))
    play.finish_plan()
    play.announce("b")
    play.receive("b")
    play.finish_aggregate()
    raw = [(type(event).__name__, msgspec.json.encode(event)) for event in play.log]
    state = v.State(play.plan, TIMEOUTS)
    for kind, line in raw:
        state, _ = step(state, msgspec.json.decode(line, type=getattr(e, kind)))
    assert state == play.state
    assert state.phase is v.Phase.EVALUATING


def test_the_first_round_waits_for_the_policys_devices_or_the_join_time() -> None:
    play = Play()
    assert not of(do.Plan, play.hello("a"))
    out = play.wait(POLICY.join_s)
    assert "1 of 2 devices" in of(EventRow, out)[0].data["text"]
    assert len(of(do.SendOffer, play.finish_plan())) == 1


def test_nobody_at_all_is_an_error_after_the_join_time() -> None:
    (failure,) = of(do.Fail, Play().wait(POLICY.join_s))
    assert failure.message == "no device connected within 10 s"


def test_a_round_closes_when_the_last_has_delivered() -> None:
    play = Play().started("a", "b")
    play.announce("a")
    assert of(do.SendAck, play.receive("a"))
    play.announce("b")
    out = play.receive("b")
    assert [u.device for u in of(do.Aggregate, out)[0].updates] == ["a", "b"]
    out = play.finish_aggregate()
    assert of(do.SavedRound, out)[0].metrics == {"loss": 1.0}


def test_an_update_is_counted_once_however_often_it_is_announced() -> None:
    play = Play().started("a", "b")
    play.announce("a")
    assert of(do.Fetch, play.announce("a"))
    play.receive("a")
    out = play.announce("a")
    assert not of(do.Fetch, out)
    assert of(do.SendAck, out)[0].accepted
    assert play.state.dropped == {"duplicate": 2}


def test_the_deadline_closes_with_a_quorum_and_tells_the_late_one() -> None:
    play = Play().started("a", "b")
    play.announce("a")
    play.receive("a")
    out = play.wait(POLICY.deadline_s)
    assert of(do.Aggregate, out)
    assert [abort.device for abort in of(do.SendAbort, out)] == ["b"]
    assert play.status("b") == "late"
    ack = of(do.SendAck, play.announce("b"))[0]
    assert (ack.accepted, ack.refusal.reason) == (False, "late")


def test_without_a_quorum_the_round_is_tried_again_and_then_fails_with_its_story() -> None:
    play = Play().started("a", "b")
    play.wait(POLICY.deadline_s)
    assert play.state.phase is v.Phase.RETRYING
    play.wait(TIMEOUTS.retry_pause_s)
    assert play.opened[-1].attempt == 2
    out = play.wait(POLICY.deadline_s)
    (failure,) = of(do.Fail, out)
    assert failure.message.startswith("attempt r1/s1/r1/a2 got 0 of 1 updates it needs (a late; b late)")


def test_a_lost_device_is_waited_for_only_until_the_others_are_done_and_grace_is_over() -> None:
    play = Play().started("a", "b")
    play.send(e.DeviceOffline(play.now, "b"))
    play.announce("a")
    play.receive("a")
    assert play.state.phase is v.Phase.ROUND
    play.wait(TIMEOUTS.grace_s - 1)
    assert play.state.phase is v.Phase.ROUND
    play.wait(1.0)
    assert play.state.phase is v.Phase.AGGREGATING
    assert play.status("b") == "lost"


def test_a_lost_device_that_returns_in_time_goes_on() -> None:
    play = Play().started("a", "b")
    play.accept("b")
    play.send(e.DeviceOffline(play.now, "b"))
    play.announce("a")
    play.receive("a")
    play.wait(1.0)
    assert not of(do.SendOffer, play.hello("b", working_on=play.opened[-1]))
    play.wait(TIMEOUTS.grace_s)
    assert play.state.phase is v.Phase.ROUND
    assert play.status("b") == "accepted"


def test_a_device_that_forgot_its_attempt_is_offered_it_again() -> None:
    play = Play().started("a", "b")
    play.accept("b")
    assert of(do.SendOffer, play.hello("b"))
    assert play.status("b") == "offered"


def test_a_beat_that_passes_an_offer_on_its_way_does_not_have_it_sent_again() -> None:
    play = Play().started("a", "b")
    for earlier in (None, Attempt("r1", 1, 1, 0, MADE_MS)):
        assert not of(do.SendOffer, play.send(e.HeartbeatSeen(play.now + 0.1, "b", earlier)))
    play.now += TIMEOUTS.offer_s
    assert of(do.SendOffer, play.send(e.HeartbeatSeen(play.now, "b", None))), "by now it would have come"
    assert not of(do.SendOffer, play.send(e.HeartbeatSeen(play.now + 0.1, "b", None))), "nor the repeated one"
    play.restart()
    play.hello("a")
    assert of(do.SendOffer, play.hello("b")), "one that comes back does not wait"


def test_a_beat_during_an_upload_does_not_ask_for_it_again() -> None:
    play = Play().started("a", "b")
    play.announce("a")
    (fetch,) = of(do.Fetch, play.send(e.HeartbeatSeen(play.now, "a", play.opened[-1])))
    assert not fetch.again
    (fetch,) = of(do.Fetch, play.hello("a", working_on=play.opened[-1]))
    assert fetch.again, "it may have been started again"


def test_a_device_that_works_on_a_closed_attempt_is_told_so() -> None:
    play = Play().started("a", "b")
    play.wait(POLICY.deadline_s)
    play.wait(TIMEOUTS.retry_pause_s)
    old = play.opened[0]
    out = play.hello("a", working_on=old)
    assert of(do.SendAbort, out)[0].attempt == old
    assert of(do.SendOffer, out)[0].attempt == play.opened[-1]


def test_an_update_to_an_earlier_run_of_the_same_name_is_not_counted() -> None:
    play = Play().started("a", "b")
    earlier = msgspec.structs.replace(play.opened[-1], made_ms=MADE_MS - 1)
    out = play.hello("a", working_on=earlier)
    assert of(do.SendOffer, out)[0].attempt == play.opened[-1]
    assert not of(do.SendAbort, out)  # the welcome tells the device which run it is
    assert not of(do.Fetch, play.announce("a", earlier))
    assert play.status("a") == "offered"


def test_a_decline_with_figures_is_planned_again_smaller_and_at_last_excluded() -> None:
    play = Play().started("a", "b")
    out = play.decline("a", Refusal("ceiling", 9.0, 5.0, "B"))
    assert of(do.Plan, out)[0].candidates[0].declined == (Decline(1, 4, False, Refusal("ceiling", 9.0, 5.0, "B")),)
    (offer,) = of(do.SendOffer, play.finish_plan())
    assert (offer.device, offer.placement.hyper.micro_batch) == ("a", 2)
    play.decline("a", Refusal("ceiling", 7.0, 5.0, "B"))
    assert not of(do.SendOffer, play.finish_plan())
    assert play.status("a") == "refused"
    play.announce("b")
    assert of(do.Aggregate, play.receive("b"))


def test_the_same_decline_again_is_final_for_the_round() -> None:
    play = Play().started("a", "b")
    refusal = Refusal("disk", 9.0, 5.0, "B")
    play.decline("a", refusal)
    play.finish_plan()
    assert not of(do.Plan, play.decline("a", refusal))
    assert play.status("a") == "declined"


def test_nobody_fits_names_the_nearest_device() -> None:
    play = Play()
    play.hello("a", budget=Budget(step_memory_bytes=100))
    play.hello("b", budget=Budget(step_memory_bytes=400))
    (failure,) = of(do.Fail, play.finish_plan())
    assert failure.kind == "BudgetError"
    assert "'b', needs" in failure.message


def test_saves_come_with_what_they_announce() -> None:
    play = Play().started("a", "b")
    play.announce("a")
    out = play.receive("a")
    assert of(AssignmentRow, out)[0].status == "done"
    assert of(do.SendAck, out)


def test_a_run_resumed_without_a_snapshot_begins_a_new_attempt_of_the_next_round() -> None:
    state = v.State(a_plan(policy=POLICY), TIMEOUTS)
    state, out = step(state, e.Begin(0.0, e.Position(2, 1, 3, {}, Attempt("r1", 2, 1, 1), 0)))
    assert of(do.Evaluate, out)
    for name in ("a", "b"):
        state, _ = step(state, e.Joined(0.0, Hello(device=name, samples={"": 8})))
    state, out = step(state, e.Evaluated(1.0, Attempt("r1", 2, 1, 1)))
    (plan,) = of(do.Plan, out)
    placements = tuple(place(a_plan().stages[1], a_plan().hypers[1], c) for c in plan.candidates)
    state, out = step(state, e.Planned(1.0, plan.ticket, placements))
    assert of(do.SendOffer, out)[0].attempt == Attempt("r1", 2, 2, 4)


def test_after_a_restart_the_next_round_waits_for_those_who_were_there() -> None:
    play = Play().started("a", "b")
    play.announce("a")
    play.announce("b")
    play.receive("a")
    play.receive("b")
    play.restart()
    assert of(do.Aggregate, [*play.hello("a"), *play.wait(0.1)]) or play.aggregate is not None
    play.finish_aggregate()
    play.finish_evaluate()
    assert play.state.phase is v.Phase.JOINING, "b was there and is expected back"
    play.hello("b")
    assert sorted(one.device for one in of(do.SendOffer, play.finish_plan())) == ["a", "b"]


def test_after_a_restart_nobody_is_awaited_for_longer_than_the_grace() -> None:
    play = Play().started("a", "b", "c")
    play.finish_plan()
    for name in ("a", "b", "c"):
        play.announce(name)
        play.receive(name)
    play.restart()
    play.hello("a")
    play.hello("b")
    play.finish_aggregate()
    play.finish_evaluate()
    assert play.state.phase is v.Phase.JOINING
    play.restart()
    play.hello("a")
    play.hello("b")
    assert play.state.phase is v.Phase.JOINING, "a second restart has not forgotten c"
    play.wait(TIMEOUTS.grace_s)
    assert sorted(one.device for one in of(do.SendOffer, play.finish_plan())) == ["a", "b"]


@pytest.mark.parametrize("back", [True, False])
def test_the_next_round_waits_a_little_for_a_device_that_has_left_if_without_it_there_are_too_few(back: bool) -> None:
    play = Play().started("a", "b")
    for name in ("a", "b"):
        play.announce(name)
        play.receive(name)
    play.send(e.DeviceOffline(play.now, "b"))
    play.finish_aggregate()
    play.finish_evaluate()
    assert play.state.phase is v.Phase.JOINING
    if back:
        play.hello("b")
    else:
        play.wait(TIMEOUTS.grace_s)
    offered = [one.device for one in of(do.SendOffer, play.finish_plan())]
    assert sorted(offered) == (["a", "b"] if back else ["a"])


def test_a_round_that_waits_for_one_does_not_wait_longer_for_who_leaves_meanwhile() -> None:
    play = Play(policy=msgspec.structs.replace(POLICY, devices=3)).started("a", "b", "c")
    for name in ("a", "b", "c"):
        play.announce(name)
        play.receive(name)
    play.send(e.DeviceOffline(play.now, "c"))
    play.finish_aggregate()
    play.finish_evaluate()
    assert play.state.phase is v.Phase.JOINING
    play.wait(TIMEOUTS.grace_s - 1)
    play.send(e.DeviceOffline(play.now, "b"))
    assert play.state.phase is v.Phase.JOINING
    out = [*play.wait(1), *play.finish_plan()]
    assert [one.device for one in of(do.SendOffer, out)] == ["a"]


def test_stages_without_rounds_are_passed_over_and_a_finished_run_ends_at_once() -> None:
    plan = a_plan(policy=POLICY)
    stages = (msgspec.structs.replace(plan.stages[0], rounds=0), plan.stages[1])
    state, _ = step(v.State(msgspec.structs.replace(plan, stages=stages), TIMEOUTS), e.Begin(0.0, NOT_BEGUN))
    assert (state.stage, state.number) == (2, 1)
    state, out = step(v.State(plan, TIMEOUTS), e.Begin(0.0, e.Position(2, 2, 0, {}, None, 0)))
    assert state.phase is v.Phase.FINISHED
    assert of(do.DrainAll, out)


def test_an_update_announced_again_while_its_arrival_is_told_counts_once() -> None:
    play = Play().started("a", "b")
    play.announce("a")
    update = play.fetches["a"]
    play.announce("a")  # the device repeats itself, so it is fetched, and found complete, twice
    assert of(do.SendAck, play.receive("a"))
    assert not play.send(e.UpdateStored(play.now, "a", update.attempt))
    assert not play.send(e.UpdateInvalid(play.now, "a", update.attempt, Refusal()))
    assert play.state.dropped["duplicate"] == 3
    play.announce("b")
    assert [u.device for u in of(do.Aggregate, play.receive("b"))[0].updates] == ["a", "b"]


@pytest.mark.parametrize("again", ["unfit", "another attempt"])
def test_a_device_that_changes_its_mind_while_its_update_is_fetched_does_not_end_the_run(again: str) -> None:
    play = Play().started("a", "b")
    play.announce("a")
    update = play.fetches["a"]
    if again == "unfit":
        claimed = msgspec.structs.replace(update, samples={"task": 10**6})
        assert not of(do.SendAck, play.send(e.Announced(play.now, claimed)))[0].accepted
    else:
        play.hello("a", Attempt("r1", 1, 1, 0, MADE_MS))
    for late in (e.UpdateStored(play.now, "a", FIRST), e.UpdateInvalid(play.now, "a", FIRST, Refusal())):
        assert not of(AssignmentRow, play.send(late))
    assert play.state.dropped["duplicate"] == 2


@pytest.mark.parametrize("claimed", [9, 10**18, -1])
def test_an_update_with_more_samples_than_the_device_has_is_refused(claimed: int) -> None:
    play = Play().started("a", "b")
    update = Update("a", play.opened[-1], {"task": REF}, {"task": claimed}, {"loss": 1.0})
    (ack,) = of(do.SendAck, play.send(e.Announced(play.now, update)))
    assert not ack.accepted
    assert (ack.refusal.needed, ack.refusal.allowed) == (float(claimed), 8.0)


@pytest.mark.parametrize(
    "event",
    [
        e.Begin(1.0, NOT_BEGUN),
        e.Aggregated(1.0, FIRST),
        e.Evaluated(1.0, FIRST),
    ],
)
def test_illegal_moves_tell_the_story(event: e.Event) -> None:
    play = Play().started("a", "b")
    with pytest.raises(e.IllegalMoveError, match=r"illegal \w+ in phase 'round' of r1/s1/r1/a1(?s:.*)Joined b"):
        step(play.state, event)


def test_random_selection_draws_the_same_devices_again() -> None:
    server = {"select": {"random": {"share": 0.5}}}
    offers = []
    for _ in range(2):
        play = Play(server=server)
        play.hello("a")
        play.hello("b")
        offers.append([one.device for one in of(do.SendOffer, play.finish_plan())])
    assert offers[0] == offers[1]
    assert len(offers[0]) == 1


def test_what_is_announced_after_its_round_is_accepted_if_it_counted_and_else_refused_as_stale() -> None:
    play = Play().started("a", "b")
    first = play.opened[-1]
    play.announce("a")
    play.receive("a")
    play.wait(POLICY.deadline_s)
    play.finish_aggregate()
    play.finish_evaluate()
    (counted,), (late,) = (of(do.SendAck, play.announce(name, first)) for name in ("a", "b"))
    assert (counted.accepted, counted.refusal) == (True, Refusal())
    assert (late.accepted, late.refusal.reason) == (False, "stale")


def test_a_device_with_most_of_a_parts_weight_is_named_once_in_a_run() -> None:
    play = Play(policy=msgspec.structs.replace(POLICY, devices=3)).started(*NAMES)
    shares = {"task": {"devices": {"a": 0.9, "b": 0.06, "c": 0.04}}, "acc/stage1": {"devices": {"a": 0.5, "b": 0.5}}}
    said = []
    for _ in range(2):
        for name in NAMES:
            play.announce(name)
            play.receive(name)
        assert play.aggregate is not None
        attempt, play.aggregate = play.aggregate.attempt, None
        out = play.send(e.Aggregated(play.now, attempt, {"task": REF}, {"parts": shares}))
        said += [(one.device, one.data["text"]) for one in of(EventRow, out) if one.kind == "warning"]
        play.finish_evaluate()
        if play.plans:  # of the second stage
            play.finish_plan()
    assert said == [("a", "a: it has 90 % of the weight of part task; round.largest_share caps it")]


def left_alone() -> Play:
    """Everyone leaves between the rounds of stage 2: nobody is there when its second round is to open."""
    play = Play().started("a", "b")
    for number in (1, 2):
        for name in ("a", "b"):
            play.announce(name)
            out = play.receive(name)
        assert of(do.Aggregate, out), number
        if number == 1:
            play.finish_aggregate()
            play.finish_evaluate()
            play.finish_plan()
    for name in ("a", "b"):
        play.send(e.DeviceOffline(play.now, name))
    play.finish_aggregate()
    play.finish_evaluate()
    out = play.wait(TIMEOUTS.grace_s)
    assert play.state.phase is v.Phase.WAITING
    (warning,) = [one for one in of(EventRow, out) if one.kind == "warning"]
    assert warning.data["text"] == "no device that can train stage 2 is connected; waiting 10 s for one"
    return play


def test_a_run_that_waits_for_a_device_goes_on_with_the_one_that_comes() -> None:
    play = left_alone()
    assert not of(do.Fail, play.wait(POLICY.join_s - 0.5))
    play.hello("a")
    assert play.state.phase is v.Phase.JOINING, "b is given its grace"
    out = play.wait(TIMEOUTS.grace_s)
    assert [one.device for one in of(do.SendOffer, out)] == ["a"]
    assert play.state.phase is v.Phase.ROUND
    assert (play.opened[-1].stage, play.opened[-1].round) == (2, 2)


def test_a_run_that_waits_for_a_device_fails_after_join_s() -> None:
    play = left_alone()
    assert not of(do.Fail, play.wait(POLICY.join_s - 0.5))
    (fail,) = of(do.Fail, play.wait(0.5))
    assert (fail.kind, fail.message) == (
        "RunError",
        "no device that can train was connected for 10 s (stage 2, round 2)",
    )


def test_the_table_says_what_each_event_does_in_each_phase() -> None:
    assert set(TRANSITIONS) == set(get_args(e.Event))
    rules = {(p, event): special.get(p, usual) for event, (usual, special) in TRANSITIONS.items() for p in v.Phase}
    ignored = {(phase.value, event.__name__) for (phase, event), rule in rules.items() if rule is ignore}
    ended = {"finished", "failed", "stopped"}
    resting = {"starting", "planning", "paused", "closing", "evaluating", *ended}
    requests = {kind.__name__ for kind in get_args(e.Request)}
    late = {(phase, request) for phase in {"starting", *ended} for request in {*requests, "Revoked", "Replaced"}}
    assert ignored == {(phase, "Tick") for phase in resting} | late | {("paused", "PauseAsked")}


@pytest.mark.parametrize("phase", v.Phase)
def test_a_report_of_the_runner_is_illegal_in_every_phase_but_its_own(phase: v.Phase) -> None:
    reports = {
        v.Phase.STARTING: e.Begin(0.0, NOT_BEGUN),
        v.Phase.AGGREGATING: e.Aggregated(0.0, FIRST),
        v.Phase.EVALUATING: e.Evaluated(0.0, FIRST),
    }
    for own, report in reports.items():
        if phase is not own:
            with pytest.raises(e.IllegalMoveError, match=type(report).__name__):
                step(v.State(a_plan(), phase=phase), report)


def closed_round(play: Play, memory: Memory) -> list[do.Instruction]:
    for name in ("a", "b"):
        play.accept(name)
        play.announce(name)
        play.receive(name)
    return play.finish_aggregate(memory)


def test_a_stage_that_its_pace_ends_is_evaluated_and_followed_by_the_next() -> None:
    """Three rounds are planned for stage 1. A process that resumes the run knows that the stage is over."""
    stages = tuple(msgspec.structs.replace(stage, rounds=3) for stage in a_plan().stages)
    play = Play(stages=stages, evaluate_every="stage").started("a", "b")
    track = StageTrack(index=1, best=0, state={"task": REF})
    out = closed_round(play, Memory(rounds=1, stage=track))
    assert of(do.CollectGarbage, out)[-1].states == ({"task": REF},), "the state of the best round is kept"
    assert play.state.undo is not None
    out = closed_round(play, Memory(rounds=2, stage=msgspec.structs.replace(track, over=True, state={})))
    assert of(do.Evaluate, out)
    assert play.state.undo is None, "taken back, its stage would be neither over nor under way"
    out = play.finish_evaluate()
    (event,) = [one for one in out if isinstance(one, EventRow) and one.kind == "stage_finished"]
    assert event.data == {"planned": 3, "best": 0}
    assert (play.state.stage, play.state.number) == (2, 1)
    play.restart()
    assert (play.state.stage, play.state.number) == (2, 1)


def test_a_placement_is_written_where_it_changes() -> None:
    """A device's row and its assignment's go without it; another placement leaves the assignment the one it has."""
    first, second = (Placement(device="a", rank=count) for count in (1, 2))
    attempt, device = Attempt("r", 1, 1, 1), v.Device(Hello(device="a"), placement=first)
    opened = v.Round(attempt, 1, 0.0, 0.0, {"a": v.Assignment(first)})
    blank = v.State(a_plan())
    state = msgspec.structs.replace(blank, devices={"a": device}, open=opened, phase=v.Phase.ROUND)
    rows = changes(blank, state).rows
    assert rows["placement", "a"] is first
    assert rows["device", "a"].placement is rows["assignment", "a"].placement is None
    learned = msgspec.structs.replace(state, devices={"a": msgspec.structs.replace(device, factors={"flops": 2.0})})
    assert list(changes(state, learned).rows) == [("device", "a")]
    moved = msgspec.structs.replace(state, devices={"a": msgspec.structs.replace(device, placement=second)})
    rows = changes(state, moved).rows
    assert (rows["placement", "a"], rows["assignment", "a"].placement) == (second, first)
    gone = msgspec.structs.replace(state, devices={"a": msgspec.structs.replace(device, placement=None)})
    found = changes(state, gone)
    assert found.deleted == (("placement", "a"),)
    kept = {**changes(blank, state).rows, **found.rows}
    del kept["placement", "a"]
    plain = [(*key, msgspec.json.decode(msgspec.json.encode(row))) for key, row in kept.items()]
    again = decode(blank, plain)
    assert again is not None
    assert (again.devices["a"].placement, again.assignments["a"].placement) == (None, first)


def test_placements_of_an_earlier_versions_ledger_are_kept_through_two_restarts() -> None:
    """It has them in the devices' rows, which are written without them from the first restart on."""
    placement, blank = Placement(device="a", rank=1), v.State(a_plan())
    device = v.Device(Hello(device="a"), placement=placement)
    attempt = Attempt("r", 1, 1, 1)
    opened = v.Round(attempt, 1, 0.0, 0.0, {"a": v.Assignment(placement)})
    state = msgspec.structs.replace(blank, devices={"a": device}, open=opened, phase=v.Phase.ROUND)
    kept: dict[tuple[str, str], object] = {
        ("outline", ""): v.position_of(state),
        ("device", "a"): device,
        ("assignment", "a"): v.Assignment(placement),
    }
    for _ in range(3):
        was = decode(blank, [(*key, msgspec.json.decode(msgspec.json.encode(row))) for key, row in kept.items()])
        assert was is not None
        assert (was.devices["a"].placement, was.assignments["a"].placement) == (placement, placement)
        found = changes(was, resumed(was, 0.0))
        kept |= found.rows
        for key in found.deleted:
            del kept[key]
