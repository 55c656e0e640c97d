"""The agent's machine: hand-made examples, and random event sequences with invariants after every step."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from device_agent.core import state as v
from device_agent.core.machine import ANNOUNCE_S, MachineError, initial, step
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.plan.job import Hyper, Job, Stage
from edgefl.protocol import messages as m
from edgefl.records import Attempt, Budget, Figure, ObjectRef, Refusal, Traffic

ID = "a" * 64
FACTS = v.DataFacts({"acc": (50, 3)}, {"": 32, "acc": 32}, (20, 12), ("rest", "run"), base_bytes=1000)
DEVICE = v.State(device="d1", session="s1")


def job(**changes) -> Job:
    model = ModelSpec({"acc": EncoderSpec(input_shape=(50, 3))}, classes=2, label_names=("run", "rest"))
    stage = Stage(1, 1, 2, ("acc/embed", "task"), ("task",))
    return Job(model, stage, Hyper(batch_size=changes.pop("batch_size", 16)), **changes)


def offer(number=1, attempt=1, run="r1", made_ms=0, **changes) -> m.Offer:
    manifest = {"acc/embed": ObjectRef(ID, 1000), "task": ObjectRef("b" * 64, 500)}
    return m.Offer(
        Attempt(run, 1, number, attempt, made_ms),
        60.0,
        changes.pop("job", job()),
        manifest,
        f"down-{run}-{number}-{attempt}",
        1024,
        4,
    )


def play(state, *events, now=0.0):
    """Steps through ``events``; the last state and all instructions."""
    out = []
    for event in events:
        if isinstance(event, m.Welcome | m.Offer | m.Grant | m.Ack | m.Abort | m.Drain):
            event = v.Received(event)
        state, more = step(state, event, now)
        out += typed(state, more)
    return state, out


def typed(state, instructions):
    """The instructions, once their fields and those of the state are seen to be of the types that they say."""
    for one in (state, *instructions):
        assert msgspec.convert(msgspec.to_builtins(one), type(one)) == one
    return instructions


def kinds(instructions):
    return [type(i).__name__ for i in instructions if not isinstance(i, v.Log)]


def sent(instructions, kind):
    return [i.message for i in instructions if isinstance(i, v.Send) and isinstance(i.message, kind)]


def ready():
    """A connected device with a warm trainer."""
    state = initial(DEVICE, v.Saved(), None)
    return play(state, v.Connected(), v.TrainerReady(FACTS), m.Welcome("c1", run="r1"))[0]


def trained(attempt=None):
    manifest = {"task": ObjectRef("c" * 64, 500)}
    return v.TrainingEnded(attempt or offer().attempt, v.Result(manifest, {"task": 32}, {"loss": 0.5}))


def test_one_round_from_hello_to_forgotten():
    state, out = play(initial(DEVICE, v.Saved(), None), v.Connected())
    assert kinds(out) == ["Send", "StartTrainer"]
    assert sent(out, m.Presence) == [m.Presence("d1", "s1", online=True)]
    state, out = play(state, v.TrainerReady(FACTS))
    (hello,) = sent(out, m.Hello)
    assert (hello.samples[""], hello.modalities, hello.capabilities.trainer_base_bytes) == (32, {"acc": (50, 3)}, 1000)
    state, out = play(state, offer())
    assert kinds(out) == ["Save", "Send", "CollectGarbage", "Fetch"]  # on disk before it is announced
    assert sent(out, m.Accept) == [m.Accept("d1", offer().attempt)]
    state, out = play(state, v.Fetched(offer().attempt))
    assert kinds(out) == ["Train"]
    state, out = play(state, trained())
    assert kinds(out) == ["Save", "Send"]
    assert out[0].saved.update == sent(out, m.Update)[0]
    state, out = play(state, m.Grant("d1", "up-1", missing={"c" * 64: b"\x01"}))
    assert kinds(out) == ["Serve"]
    state, out = play(state, m.Ack(offer().attempt))
    assert kinds(out) == ["Save", "StopServe"]
    assert out[0].saved == v.Saved(closed=offer().attempt)


def test_a_repeated_offer_gets_the_same_answer_and_is_counted():
    state, _ = play(ready(), offer())
    state, out = play(state, offer())
    assert sent(out, m.Accept) == [m.Accept("d1", offer().attempt)]
    state, _ = play(state, v.Fetched(offer().attempt), trained())
    state, out = play(state, offer())
    assert len(sent(out, m.Update)) == 1
    assert state.dropped == {"duplicate-offer": 2}


def test_a_repeated_offer_is_fetched_again_while_it_is_fetched_and_not_while_it_is_trained():
    state, _ = play(ready(), offer())
    state, out = play(state, offer())
    assert kinds(out) == ["Send", "Save", "Fetch"]
    state, out = play(state, v.Fetched(offer().attempt), offer())
    assert "Fetch" not in kinds(out)


def test_an_older_offer_is_dropped_and_counted():
    state, _ = play(ready(), offer(number=2))
    after, out = play(state, offer(number=1))
    assert after.task == state.task
    assert kinds(out) == []
    assert after.dropped == {"stale-offer": 1}


def test_the_same_attempt_planned_again_replaces_the_declined_one():
    big = offer(job=job(batch_size=64))
    state, out = play(ready(), big)
    assert sent(out, m.Decline)[0].refusal == Refusal(
        "data", 64.0, 32.0, "samples", "the local share does not fill one batch"
    )
    state, out = play(state, big)
    assert len(sent(out, m.Decline)) == 1  # asked again, answered again
    state, out = play(state, offer())
    assert sent(out, m.Accept)


def test_an_abandoned_training_ends_before_the_next_begins():
    state, _ = play(ready(), offer(), v.Fetched(offer().attempt))
    state, out = play(state, offer(number=2))
    assert "Interrupt" in kinds(out)
    assert state.abandoned == offer().attempt
    state, out = play(state, v.Fetched(offer(number=2).attempt))
    assert kinds(out) == []  # the trainer still works on the first
    state, out = play(state, trained())
    assert kinds(out) == ["Send", "Train"]
    assert sent(out, m.Spent) == [m.Spent("d1", offer().attempt)]
    assert state.update is None
    assert state.dropped == {"superseded": 1, "abandoned-result": 1}


def test_an_abort_drops_its_attempt_and_nothing_newer():
    state, _ = play(ready(), offer(number=2))
    state, _ = play(state, m.Abort(offer(number=1).attempt))
    assert state.task is not None
    state, out = play(state, m.Abort(offer(number=2).attempt))
    assert state.task is None
    assert "StopFetch" in kinds(out)
    state, _ = play(state, offer(number=2))
    assert state.task is None  # closed: an old offer of it in the broker's queue changes nothing


def test_what_a_dropped_attempt_cost_is_told_once_it_is_known():
    """Before its first step, in the middle of training, and trained: whatever the round's end finds it at."""
    first = offer().attempt
    welcomed, _ = play(ready(), m.Welcome("c1", run="r1"))
    fetching, _ = play(welcomed, offer())
    _, out = play(fetching, m.Abort(first))
    assert sent(out, m.Spent) == [m.Spent("d1", first, v.NOTHING_TRAINED)]
    training, _ = play(fetching, v.Fetched(first))
    aborted, out = play(training, m.Abort(first))
    assert sent(out, m.Spent) == []
    figures = {"flops": Figure(5.0, "counted")}
    left_off = v.TrainingEnded(first, v.Result(refusal=Refusal("abandoned"), figures=figures))
    _, out = play(aborted, left_off)
    assert sent(out, m.Spent) == [m.Spent("d1", first, figures)]
    superseded, _ = play(training, offer(number=2))
    _, out = play(superseded, left_off)
    assert sent(out, m.Spent) == [m.Spent("d1", first, figures)]
    done, _ = play(training, v.TrainingEnded(first, v.Result({"task": ObjectRef(ID, 1)}, figures=figures)))
    _, out = play(done, m.Abort(first))
    assert sent(out, m.Spent) == [m.Spent("d1", first, figures)]
    left_out, _ = play(aborted, m.Drain("r1", "left out"))
    _, out = play(left_out, left_off)
    assert sent(out, m.Spent) == [m.Spent("d1", first, figures)], "its run goes on without it"
    unfit = offer(number=2, job=job(batch_size=64))
    _, out = play(fetching, unfit)
    assert sent(out, m.Spent) == [m.Spent("d1", first, v.NOTHING_TRAINED)]
    declined, _ = play(training, unfit)
    _, out = play(declined, left_off)
    assert sent(out, m.Spent) == [m.Spent("d1", first, figures)]


def test_an_attempt_that_a_stopped_run_goes_on_with_is_not_told_as_dropped():
    first = offer().attempt
    state, _ = play(ready(), m.Welcome("c1", run="r1"), offer(), v.Fetched(first), m.Drain("r1", "stopped"))
    assert state.abandoned == first
    _, out = play(state, v.TrainingEnded(first, v.Result(refusal=Refusal("abandoned"))))
    assert sent(out, m.Spent) == []


def test_a_killed_trainer_is_a_decline_with_both_numbers_and_starts_again():
    state, _ = play(ready(), offer(), v.Fetched(offer().attempt))
    refusal = Refusal("ceiling", 900.0, 800.0, "B")
    state, out = play(state, v.TrainingEnded(offer().attempt, v.Result(refusal=refusal), alive=False))
    assert sent(out, m.Decline) == [m.Decline("d1", offer().attempt, refusal)]
    assert "StartTrainer" in kinds(out)


def test_an_offer_that_was_declined_is_declined_again_and_not_fetched():
    refusal = Refusal("ceiling", 900.0, 800.0, "B")
    state, _ = play(ready(), offer(), v.Fetched(offer().attempt))
    state, _ = play(state, v.TrainingEnded(offer().attempt, v.Result(refusal=refusal), alive=False))
    state, out = play(state, v.TrainerReady(FACTS), offer())
    assert sent(out, m.Decline) == [m.Decline("d1", offer().attempt, refusal)]
    assert (sent(out, m.Accept), "Fetch" in kinds(out)) == ([], False)


def test_a_hello_says_who_greets_and_the_first_heartbeat_comes_when_it_is_due():
    state, out = play(initial(DEVICE, v.Saved(), FACTS), v.Connected(), now=1000.0)
    (hello,) = sent(out, m.Hello)
    assert (hello.device, hello.session, hello.modalities) == ("d1", "s1", FACTS.modalities)
    state, _ = play(state, m.Welcome("c1", run="r1"), now=1000.0)
    state, out = play(state, v.Tick(), now=1000.0 + state.heartbeat_s - 0.5)
    assert sent(out, m.Heartbeat) == []
    state, out = play(state, v.Tick(), now=1000.0 + state.heartbeat_s)
    assert [(beat.device, beat.session, beat.sequence) for beat in sent(out, m.Heartbeat)] == [("d1", "s1", 1)]


def test_a_device_without_a_run_sends_no_heartbeats():
    def beats(state, *events):
        """The state an hour after these, and what it sent by then."""
        began, said = state.heartbeat_at, []
        state, _ = play(state, *events, now=began)
        for second in range(1, 3601):
            state, out = play(state, v.Tick(), now=began + second)
            said += [one for one in out if isinstance(one, v.Send)]
        return state, said

    state, out = beats(initial(DEVICE, v.Saved(), FACTS), v.Connected())
    assert out == []
    state, out = beats(state, m.Welcome("c1", run="r1"))
    assert len(out) == 360
    for over in (m.Drain("r1", "left out of the run"), m.Drain("r1", "the run is finished", final=True)):
        state, out = beats(state, m.Welcome("c1", run="r1"), over)
        assert out == []


def test_bytes_of_the_link_are_told_with_the_next_hello_and_those_of_waiting_apart():
    def told(state):
        return sent(play(state, v.Connected(), now=200.0)[1], m.Hello)[0].capabilities.traffic

    state = initial(DEVICE, v.Saved(), FACTS)
    state, _ = play(state, v.Tick(link_bytes=None), now=100.0)
    state, _ = play(state, v.Connected(), v.Tick(link_bytes=5000), now=102.0)
    assert told(state) == Traffic(5000, 2.0, 5000, 2.0)
    state, _ = play(state, v.Tick(link_bytes=5100), now=110.0)
    state, _ = play(state, m.Welcome("c1", run="r1"), v.Tick(link_bytes=9100), now=130.0)
    state, _ = play(state, m.Drain("r1", final=True), v.Tick(link_bytes=9200), now=140.0)
    assert told(state) == Traffic(9200, 40.0, 5200, 20.0)
    state, _ = play(state, v.Disconnected(), v.Tick(link_bytes=None), now=160.0)
    state, _ = play(state, v.Connected(), v.Tick(link_bytes=50), now=170.0)
    assert told(state) == Traffic(9250, 50.0, 5250, 30.0), "another transport counts from nothing"


def test_a_device_at_work_sends_heartbeats_before_its_coordinator_is_back():
    state = initial(DEVICE, v.Saved(offer=offer()), FACTS)
    state, _ = play(state, v.Connected(), now=100.0)
    state, out = play(state, v.Tick(), now=110.0)
    assert sent(out, m.Heartbeat) == [m.Heartbeat("d1", "s1", 1, offer().attempt)]


def test_an_offer_that_comes_before_the_data_is_known_is_answered_as_soon_as_it_is():
    state, out = play(initial(DEVICE, v.Saved(), None), v.Connected(), m.Welcome("c1", run="r1"), offer())
    assert (sent(out, m.Accept), sent(out, m.Decline)) == ([], [])
    state, out = play(state, v.TrainerReady(FACTS))
    assert sent(out, m.Accept) == [m.Accept("d1", offer().attempt)]
    assert "Fetch" in kinds(out)


def test_what_was_trained_is_logged_with_its_attempt():
    _, out = play(ready(), offer(), v.Fetched(offer().attempt), trained())
    (line,) = [one for one in out if isinstance(one, v.Log) and one.event == "trained"]
    assert line.fields == {"attempt": str(offer().attempt), "loss": 0.5}


def test_an_unsent_update_survives_a_restart_and_is_announced_again():
    state, out = play(ready(), offer(), v.Fetched(offer().attempt), trained())
    saved = [i.saved for i in out if isinstance(i, v.Save)][-1]
    again, out = play(initial(replace(DEVICE, session="s2"), saved, FACTS), v.Connected())
    assert sent(out, m.Hello)[0].working_on == offer().attempt
    assert sent(out, m.Update) == [state.update]
    _, out = play(again, v.Tick(), now=ANNOUNCE_S)
    assert len(sent(out, m.Update)) == 1  # and once more when nobody answers


def test_an_accepted_offer_survives_a_restart_and_is_fetched_again():
    _, out = play(ready(), offer())
    saved = [i.saved for i in out if isinstance(i, v.Save)][-1]
    _, out = play(initial(DEVICE, saved, FACTS), v.Connected())
    assert kinds(out) == ["Send", "Send", "Send", "Fetch", "StartTrainer"]
    assert sent(out, m.Hello)[0].working_on == offer().attempt


def test_busy_with_another_run_until_the_coordinator_names_the_new_one():
    state, _ = play(ready(), offer())
    state, out = play(state, offer(run="r2"))
    assert sent(out, m.Decline)[0].refusal == Refusal("busy", detail="working on r1/s1/r1/a1")
    state, _ = play(state, m.Welcome("c2", run="r2"))
    assert state.task is None
    state, out = play(state, replace(offer(run="r2"), attempt=Attempt("r2", 1, 1, 2)))
    assert sent(out, m.Accept)


def test_a_run_made_anew_under_an_old_name_is_another_run():
    old, new = offer(3, made_ms=1), offer(made_ms=2)
    state, _ = play(ready(), old, v.Fetched(old.attempt), trained(old.attempt), m.Ack(old.attempt))
    state, out = play(state, new)
    assert sent(out, m.Accept) == [m.Accept("d1", new.attempt)]  # although that attempt of the first one is over
    state, _ = play(ready(), old, v.Fetched(old.attempt), trained(old.attempt))
    state, out = play(state, m.Welcome("c2", run="r1", made_ms=2))
    assert "StopServe" in kinds(out)  # trained on the weights of the first one
    assert (state.task, state.update) == (None, None)
    assert "welcomed" in [one.event for one in out if isinstance(one, v.Log)]
    state, _ = play(state, new, old, m.Abort(old.attempt), m.Drain("r1", made_ms=1))
    assert state.task.attempt == new.attempt  # whatever comes late from the first one


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"modalities": {"acc": (40, 3)}}, "acc: a sample here is [40, 3], the model takes [50, 3]"),
        ({"modalities": {"video": (1,)}}, "this device has video, the model takes acc"),
        ({"label_names": ("rest", "swim")}, "labels the model does not know: swim"),
    ],
)
def test_data_that_does_not_fit_the_model_is_declined_with_the_difference(change, words):
    state = replace(ready(), facts=replace(FACTS, **change))
    _, out = play(state, offer())
    refusal = sent(out, m.Decline)[0].refusal
    assert refusal.reason == "data"
    assert words in refusal.detail


def test_a_full_disk_is_declined_with_both_numbers():
    state = replace(ready(), budget=Budget(disk_bytes=1999))
    _, out = play(state, offer())
    refusal = sent(out, m.Decline)[0].refusal  # 1000 + 500 to receive, 500 for the new task part
    assert (refusal.reason, refusal.needed, refusal.allowed, refusal.unit) == ("disk", 2000.0, 1999.0, "B")
    _, out = step(ready(), v.Received(offer(), v.Disk(missing_bytes=1500, free_bytes=1600)), 0.0)
    refusal = sent(out, m.Decline)[0].refusal
    assert (refusal.needed, refusal.allowed, refusal.unit) == (2000.0, 1600.0, "B")


def test_an_offer_that_waited_for_the_data_is_judged_by_the_room_there_was():
    state, _ = step(initial(DEVICE, v.Saved(), None), v.Connected(), 0.0)
    state, _ = step(state, v.Received(offer(), v.Disk(missing_bytes=1500, free_bytes=1600)), 0.0)
    _, out = step(state, v.TrainerReady(FACTS), 0.0)
    assert [(one.refusal.reason, one.refusal.allowed) for one in sent(out, m.Decline)] == [("disk", 1600.0)]


def test_an_unasked_welcome_is_answered_with_a_hello_and_an_asked_one_is_not():
    state, out = play(ready(), m.Welcome("c1", run="r1"))
    assert len(sent(out, m.Hello)) == 1
    _, out = play(state, m.Welcome("c1", run="r1"))
    assert sent(out, m.Hello) == []


def test_another_coordinator_hears_at_once_what_the_last_one_knew():
    busy = offer()
    state, _ = play(ready(), m.Welcome("c1", run="r1"), busy)
    state, out = play(state, m.Welcome("c2", run="r1"))
    assert sent(out, m.Accept) == [m.Accept("d1", busy.attempt)]
    assert "Fetch" in kinds(out)
    state, _ = play(state, v.Fetched(busy.attempt), trained(busy.attempt))
    state, out = play(state, m.Welcome("c2", run="r1"))
    assert sent(out, m.Update) == []
    _, out = play(state, m.Welcome("c3", run="r1"))
    assert [update.attempt for update in sent(out, m.Update)] == [busy.attempt]


def test_after_a_drain_the_trainer_gives_its_memory_back():
    why = "this device is left out of the run"
    state, out = play(ready(), m.Drain("r1", reason=why))
    assert out[-1] == v.StopTrainer(why)
    state, out = play(state, m.Welcome("c2", run="r2"))
    assert "StartTrainer" in kinds(out)


def test_only_a_final_drain_takes_what_is_retained_between_rounds():
    busy, private = offer(), ObjectRef("7" * 64, 10)
    result = trained(busy.attempt)
    result = replace(result, result=replace(result.result, retained={"own/head": private}))
    before, _ = play(ready(), busy, v.Fetched(busy.attempt), result, m.Ack(busy.attempt))
    for final in (False, True):
        state, out = play(before, m.Drain("r1", final=final))
        (garbage,) = [one for one in out if isinstance(one, v.CollectGarbage)]
        assert (private.id in garbage.keep, bool(state.retained)) == (not final, not final)


def test_an_illegal_move_tells_the_story():
    state, _ = play(ready(), offer())
    with pytest.raises(
        MachineError, match=r"(?s)TrainingEnded cannot happen now on d1:\n.*Connected.*Offer r1/s1/r1/a1"
    ):
        play(state, trained())


ATTEMPTS = st.builds(Attempt, st.sampled_from(["r1", "r2"]), st.just(1), st.integers(1, 3), st.integers(1, 2))


class AgentInTheWild(RuleBasedStateMachine):
    """The machine against a coordinator, a trainer, a disk and a power switch that do anything they might do."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.disk = v.Saved()
        self.boot()

    def boot(self):
        self.state = initial(DEVICE, self.disk, FACTS)
        self.trainer = "down"  # what the process really does
        self.trains: Attempt | None = None
        self.interrupted = False
        assert self.state.working_on == (
            self.disk.offer.attempt if self.disk.offer else self.disk.update.attempt if self.disk.update else None
        )

    def feed(self, event):
        if not isinstance(event, v.Tick | v.Connected | v.Disconnected | v.TrainerReady | v.TrainerLost):
            self.now += 0.1
        self.state, out = step(self.state, event, self.now)
        for instruction in typed(self.state, out):
            self.perform(instruction)
        return out

    def perform(self, instruction):
        if isinstance(instruction, v.Save):
            self.disk = instruction.saved
        elif isinstance(instruction, v.StartTrainer):
            assert self.trainer == "down"
            self.trainer = "warming"
        elif isinstance(instruction, v.StopTrainer):
            assert self.trainer == "idle"
            self.trainer = "down"
        elif isinstance(instruction, v.Train):
            assert self.trainer == "idle", "two trainings at a time"
            self.trainer, self.trains, self.interrupted = "training", instruction.offer.attempt, False
        elif isinstance(instruction, v.Interrupt):
            assert instruction.attempt == self.trains
            self.interrupted = True
        elif isinstance(instruction, v.Send) and isinstance(instruction.message, m.Update):
            assert self.disk.update == instruction.message, "announced before it was on disk"
        elif isinstance(instruction, v.Send) and isinstance(instruction.message, m.Accept):
            assert self.disk.offer is not None
            assert self.disk.offer.attempt == instruction.message.attempt

    @rule(attempt=ATTEMPTS, batch_size=st.sampled_from([16, 64]))
    def is_offered(self, attempt, batch_size):
        before = self.state
        new = replace(offer(job=job(batch_size=batch_size)), attempt=attempt)
        out = self.feed(v.Received(new))
        if before.closed is not None and before.closed.run == attempt.run and attempt <= before.closed:
            answers = [*sent(out, m.Accept), *sent(out, m.Decline), *sent(out, m.Update)]
            assert not answers, "an attempt that is over was taken up again"

    @rule(attempt=ATTEMPTS)
    def is_aborted(self, attempt):
        before = self.state
        self.feed(v.Received(m.Abort(attempt)))
        for held in ("task", "update", "waiting"):
            had = getattr(before, held)
            of = had[0] if isinstance(had, tuple) else had  # an offer waits with the room there was for it
            if of is not None and not (of.attempt.run == attempt.run and of.attempt <= attempt):
                assert getattr(self.state, held) == had, "an abort dropped something newer"

    @rule(attempt=ATTEMPTS, accepted=st.booleans())
    def is_acknowledged(self, attempt, accepted):
        self.feed(v.Received(m.Ack(attempt, accepted)))

    @precondition(lambda self: self.state.update is not None)
    @rule()
    def its_update_is_acknowledged(self):
        self.feed(v.Received(m.Ack(self.state.update.attempt)))
        assert self.state.update is None
        assert self.disk.update is None

    @rule(run=st.sampled_from(["r1", "r2", ""]), coordinator=st.sampled_from(["c1", "c2"]))
    def is_welcomed(self, run, coordinator):
        self.feed(v.Received(m.Welcome(coordinator, run=run)))

    @rule(run=st.sampled_from(["r1", "r2"]))
    def is_drained(self, run):
        self.feed(v.Received(m.Drain(run)))
        assert all(held is None or held.attempt.run != run for held in (self.state.task, self.state.update))

    @rule()
    def is_granted(self):
        self.feed(v.Received(m.Grant("d1", "up", missing={"c" * 64: b"\x01"})))

    @rule(connected=st.booleans())
    def connection_changes(self, connected):
        self.feed(v.Connected() if connected else v.Disconnected())

    @rule(seconds=st.sampled_from([0.5, 20.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.feed(v.Tick())

    @precondition(lambda self: self.trainer == "warming")
    @rule(lives=st.booleans())
    def trainer_warms_up(self, lives):
        self.trainer = "idle" if lives else "down"
        self.feed(v.TrainerReady(FACTS) if lives else v.TrainerLost())

    @rule(attempt=ATTEMPTS)
    def fetches_something(self, attempt):
        self.feed(v.Fetched(attempt))

    @precondition(lambda self: self.state.task is not None)
    @rule(fails=st.booleans())
    def fetches_what_it_needs(self, fails):
        attempt = self.state.task.attempt
        self.feed(v.Fetched(attempt, Refusal("disk", 2.0, 1.0, "B") if fails else None))

    @precondition(lambda self: self.trains is not None)
    @rule(outcome=st.sampled_from(["done", "refused", "killed"]))
    def training_ends(self, outcome):
        attempt, self.trains = self.trains, None
        self.trainer = "down" if outcome == "killed" else "idle"
        wanted = self.state.abandoned is None
        result = trained().result if outcome == "done" else v.Result(refusal=Refusal("ceiling", 2.0, 1.0, "B"))
        self.feed(v.Progressed(attempt, 1, 4, 4, 0.5))
        out = self.feed(v.TrainingEnded(attempt, result, alive=outcome != "killed"))
        kind = m.Update if outcome == "done" else m.Decline
        assert len(sent(out, kind)) == wanted

    @rule()
    def power_fails(self):
        update = self.state.update
        task = self.state.task
        self.boot()
        assert self.state.update == update, "an unsent update was lost"
        assert (self.state.task and self.state.task.attempt) == (task and task.attempt)

    @invariant()
    def disk_agrees_with_memory(self):
        assert self.disk.update == self.state.update
        assert self.disk.offer == (self.state.task.offer if self.state.task else None)

    @invariant()
    def trainer_does_what_the_state_says(self):
        state = self.state
        assert state.trainer.value == self.trainer
        training = state.task is not None and state.task.phase is v.TaskPhase.TRAINING
        working = state.abandoned or (state.task.attempt if training else None)
        assert working == self.trains
        assert self.interrupted or state.abandoned is None, "abandoned, but the trainer was not told"
        both = state.abandoned is not None and training
        assert not both, "one training at a time"
        assert (state.trainer is v.TrainerPhase.TRAINING) == (working is not None)

    @invariant()
    def nothing_over_is_in_hand(self):
        closed = self.state.closed
        for held in (self.state.task, self.state.update):
            if held is not None and closed is not None and held.attempt.run == closed.run:
                assert held.attempt > closed


TestAgentInTheWild = AgentInTheWild.TestCase
TestAgentInTheWild.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
