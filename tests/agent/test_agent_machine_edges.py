"""The agent's machine at its edges: every line it logs, every refusal with its numbers, every limit by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from test_agent_machine import DEVICE, FACTS, ID, job, kinds, offer, play, ready, sent, trained

from device_agent.core import state as v
from device_agent.core.machine import GREETING_S, PROGRESS_S, MachineError, initial
from device_agent.core.offer_check import is_over, newest_closed
from device_agent.core.retained import restore_residuals, retained, retained_before
from edgefl import PROTOCOL_VERSION
from edgefl.protocol import messages as m
from edgefl.records import Attempt, Budget, Capabilities, Figure, ObjectRef, Refusal

FIRST = offer().attempt


def logs(instructions):
    return [(one.event, one.fields) for one in instructions if isinstance(one, v.Log)]


def fetched():
    """Training the first offer."""
    return play(ready(), offer(), v.Fetched(FIRST))[0]


def dropped(reason: str, what: object):
    return [("dropped", {"reason": reason, "what": str(what)})]


# --- what is logged


def test_every_step_of_a_round_is_logged_with_its_fields():
    text = "r1/s1/r1/a1"
    state, out = play(initial(DEVICE, v.Saved(), FACTS), v.Connected(), m.Welcome("c1", run="r1"))
    assert logs(out) == [("welcomed", {"run": "r1", "coordinator": "c1"})]
    state, out = play(state, v.TrainerReady(FACTS), offer())
    assert logs(out) == [("accepted", {"attempt": text, "parts": 2})]
    state, out = play(state, v.Fetched(FIRST), trained())
    assert logs(out) == [("trained", {"attempt": text, "loss": 0.5})]
    _, out = play(state, m.Ack(FIRST))
    assert logs(out) == [("delivered", {"attempt": text, "reason": ""})]
    _, out = play(state, m.Ack(FIRST, False, Refusal("range")))
    assert logs(out) == [("rejected", {"attempt": text, "reason": "range"})]
    _, out = play(state, m.Abort(FIRST, "deadline"))
    assert logs(out) == [("aborted", {"attempt": text, "reason": "deadline"})]
    _, out = play(state, m.Drain("r1", "finished"))
    assert logs(out) == [("drained", {"run": "r1", "reason": "finished"})]


def test_a_declined_offer_is_logged_with_both_numbers():
    _, out = play(ready(), offer(job=job(batch_size=64)))
    detail = "the local share does not fill one batch"
    fields = {"reason": "data", "needed": 64.0, "allowed": 32.0, "unit": "samples", "detail": detail}
    assert logs(out) == [("declined", {"attempt": "r1/s1/r1/a1", **fields})]


def test_what_is_dropped_is_logged_counted_and_changes_nothing_else():
    older = Attempt("r1", 1, 1, 0)
    waiting = initial(DEVICE, v.Saved(), None)
    asked = play(waiting, v.Connected(), offer(number=2))[0]
    cases = [
        (play(ready(), offer())[0], offer(), "duplicate-offer", FIRST),
        (play(ready(), offer(number=2))[0], offer(), "stale-offer", FIRST),
        (asked, offer(), "stale-offer", FIRST),
        (play(ready(), offer(), m.Abort(FIRST))[0], offer(), "closed-attempt", FIRST),
        (ready(), m.Grant("d1", "up-1"), "grant-without-update", "up-1"),
        (ready(), m.Ack(FIRST), "stale-ack", FIRST),
        (play(fetched(), trained())[0], m.Ack(older), "stale-ack", older),
        (play(ready(), m.Abort(FIRST))[0], m.Abort(FIRST), "stale-abort", FIRST),
        (ready(), v.Fetched(FIRST), "stale-fetch", FIRST),
        (play(ready(), offer())[0], v.Fetched(older), "stale-fetch", older),
    ]
    for state, event, reason, what in cases:
        state = replace(state, dropped={"other": 3})
        after, out = play(state, event)
        assert logs(out) == dropped(reason, what), reason
        assert after.dropped == {"other": 3, reason: 1}, reason
        assert play(after, event)[0].dropped[reason] == 2, reason
        assert (after.task, after.update, after.closed) == (state.task, state.update, state.closed), reason


@pytest.mark.parametrize(("phase", "kind"), [("fetching", "StopFetch"), ("training", "Interrupt")])
def test_a_newer_offer_ends_the_older_where_it_stands(phase, kind):
    state = play(ready(), offer())[0] if phase == "fetching" else fetched()
    after, out = play(state, offer(number=2))
    assert logs(out)[:1] == dropped("superseded", FIRST)
    assert next(name for name in kinds(out) if name != "Send") == kind
    assert next(one for one in out if type(one).__name__ == kind).attempt == FIRST
    assert after.abandoned == (FIRST if phase == "training" else None)


def test_a_newer_offer_ends_one_that_waits_for_the_trainer_with_a_word_of_what_it_cost():
    cold = initial(DEVICE, v.Saved(), FACTS)
    state = play(cold, v.Connected(), m.Welcome("c1", run="r1"), offer(), v.Fetched(FIRST))[0]
    assert state.task.phase is v.TaskPhase.READY
    after, out = play(state, offer(number=2))
    assert logs(out)[:1] == dropped("superseded", FIRST)
    assert kinds(out) == ["Send", "Save", "Send", "CollectGarbage", "Fetch"]
    assert out[0].message == m.Spent(DEVICE.device, FIRST, v.NOTHING_TRAINED)
    assert after.abandoned is None


def test_work_of_an_attempt_that_is_aborted_is_dropped_as_not_wanted():
    for state in (play(ready(), offer())[0], fetched()):
        after, out = play(state, m.Abort(FIRST, "deadline"))
        assert logs(out)[:1] == dropped("not-wanted", FIRST)
        assert after.dropped == {"not-wanted": 1}
        assert after.task is None


def test_an_attempt_that_is_aborted_before_its_offer_came_is_closed():
    after, out = play(ready(), m.Abort(FIRST, "deadline"))
    assert (after.closed, logs(out)) == (FIRST, [("aborted", {"attempt": str(FIRST), "reason": "deadline"})])
    assert logs(play(after, offer())[1]) == dropped("closed-attempt", FIRST)


def test_what_is_served_ends_with_its_own_attempt():
    for answer in (m.Ack(FIRST), m.Ack(FIRST, False, Refusal("range")), m.Abort(FIRST)):
        _, out = play(fetched(), trained(), answer)
        assert [one for one in out if isinstance(one, v.StopServe)] == [v.StopServe(FIRST)]


# --- the connection


def test_a_hello_says_all_that_is_known_of_the_device():
    state = replace(
        DEVICE, agent_version="9.9", profile="pi", budget=Budget(disk_bytes=5),
        capabilities=Capabilities(cores=4, gpu="of the profile", gpu_memory_bytes=11), run="r1", connected=True,
    )  # fmt: skip
    facts = replace(
        FACTS, runtime="torch 2", torch_device="cpu", gpu_memory_bytes=22, gpu_free_bytes=33, gpu_idle_bytes=44
    )
    has = Capabilities(
        cores=4, gpu="of the profile", gpu_memory_bytes=11, trainer_base_bytes=1000, runtime="torch 2",
        torch_device="cpu", gpu_free_bytes=33, gpu_idle_bytes=44,
    )  # fmt: skip
    hello = m.Hello(
        "d1", "s1", "9.9", profile="pi", capabilities=has, budget=Budget(disk_bytes=5),
        modalities={"acc": (50, 3)}, samples={"": 32, "acc": 32}, class_counts=(20, 12),
    )  # fmt: skip
    after, out = play(initial(state, v.Saved(), facts), v.Connected(), now=5.0)
    assert sent(out, m.Hello) == [hello]
    assert (after.greeting, after.greeted_at) == (True, 5.0)
    _, out = play(initial(state, v.Saved(), replace(facts, gpu="found")), v.Connected())
    (hello,) = sent(out, m.Hello)
    assert (hello.capabilities.gpu, hello.capabilities.gpu_memory_bytes) == ("found", 22)


def test_the_first_welcome_answers_the_hello_when_it_comes_in_time():
    state, _ = play(initial(DEVICE, v.Saved(), FACTS), v.Connected(), now=100.0)
    for after_s, hellos in ((GREETING_S, 0), (GREETING_S + 0.1, 1)):
        _, out = play(state, m.Welcome("c1", run="r1"), now=100.0 + after_s)
        assert len(sent(out, m.Hello)) == hellos
    known, _ = play(state, m.Welcome("c1", run="r1"), v.Disconnected(), now=100.0)
    known, _ = play(known, v.Connected(), now=200.0)
    _, out = play(known, m.Welcome("c1", run="r1"), now=300.0)
    assert sent(out, m.Hello) == [], "a coordinator that is known may take longer"


def test_a_welcome_sets_what_the_coordinator_says():
    state, _ = play(ready(), m.Welcome("c1", run="r1", heartbeat_s=3.0, protocol=7, release="1.2", made_ms=5))
    assert (state.heartbeat_s, state.protocol, state.release, state.made_ms, state.run) == (3.0, 7, "1.2", 5, "r1")
    state, _ = play(state, m.Welcome("c1", run="r1", heartbeat_s=0.0))
    assert state.heartbeat_s == 3.0


def test_a_heartbeat_says_what_is_worked_on_and_what_is_free():
    state, _ = play(ready(), offer(), now=100.0)
    state, out = play(state, v.Tick(memory_free_bytes=77), now=100.0)
    assert sent(out, m.Heartbeat) == [m.Heartbeat("d1", "s1", 1, FIRST, 77)]
    assert state.heartbeat_at == 100.0
    state, out = play(state, v.Disconnected(), v.Tick(), now=1000.0)
    assert out == []


def test_an_update_is_announced_again_after_a_while_and_not_once_it_is_fetched():
    state, _ = play(fetched(), trained(), now=100.0)
    _, out = play(state, v.Tick(), now=114.9)
    assert sent(out, m.Update) == []
    _, out = play(state, v.Tick(), now=115.0)
    assert sent(out, m.Update) == [state.update]
    asked, out = play(state, m.Grant("d1", "up"), now=110.0)
    assert [one for one in out if isinstance(one, v.Serve)] == [v.Serve(state.update, m.Grant("d1", "up"))]
    _, out = play(asked, v.Tick(), now=124.9)
    assert sent(out, m.Update) == []


def test_progress_is_told_once_a_second_and_at_the_end():
    state = replace(fetched(), progress_at=100.0)
    note = v.Progressed(FIRST, 1, 2, 9, 0.25)
    assert play(state, note, now=100.0 + PROGRESS_S - 0.1)[1] == []
    after, out = play(state, note, now=100.0 + PROGRESS_S)
    assert sent(out, m.Progress) == [m.Progress("d1", FIRST, 1, 2, 9, 0.25)]
    assert after.progress_at == 101.0
    assert len(play(state, replace(note, step=9), now=100.1)[1]) == 1
    assert play(replace(state, connected=False), note, now=200.0)[1] == []
    assert play(state, replace(note, attempt=offer(2).attempt), now=200.0)[1] == []


# --- what is refused


def strict(state, newest):
    return replace(state, strict=True, newest=newest)


def test_a_device_with_an_identity_never_goes_back():
    newest = Attempt("r2", 1, 5, 1, 20)
    state = strict(ready(), newest)
    _, out = play(state, offer(run="r0", made_ms=20))
    detail = "run r2 is newer; a device with an identity never goes back to an older run"
    assert sent(out, m.Decline)[0].refusal == Refusal("replay", detail=detail)
    _, out = play(state, offer(number=4, run="r2", made_ms=20))
    detail = "attempt r2/s1/r5/a1 of the same run came before"
    assert sent(out, m.Decline)[0].refusal == Refusal("replay", detail=detail)
    _, out = play(replace(state, task=None, run="r2", made_ms=20), offer(number=5, run="r2", made_ms=20))
    assert sent(out, m.Accept), "the newest itself is none"
    _, out = play(replace(state, strict=False), offer(number=4))
    assert sent(out, m.Accept), "without an identity nothing is remembered"


def test_a_welcome_to_an_older_run_is_dropped_by_a_device_with_an_identity():
    state = strict(ready(), Attempt("r2", 1, 5, 1, 20))
    after, out = play(state, m.Welcome("c9", run="r0", made_ms=20))
    assert logs(out) == dropped("old-run", "r0")
    assert after.coordinator == "c1"
    assert play(state, m.Welcome("c9", run="r3", made_ms=21))[0].coordinator == "c9"
    assert play(state, m.Welcome("c9"))[0].coordinator == "c9", "no run is no older run"


def test_what_is_taken_up_is_remembered_whether_it_was_accepted_or_declined():
    state = strict(ready(), None)
    assert play(state, offer())[0].newest == FIRST
    after, out = play(state, offer(job=job(batch_size=64)))
    assert after.newest == FIRST
    assert [one.saved.newest for one in out if isinstance(one, v.Save)] == [FIRST]
    assert play(ready(), offer())[0].newest is None


@pytest.mark.parametrize(
    ("drain", "closed"),
    [
        (m.Drain("r1", final=True), Attempt("r1", 1, 3, 2)),
        (m.Drain("r1"), FIRST),  # it may go on
        (m.Drain("r1", final=True, made_ms=9), FIRST),  # another run of this name
        (m.Drain("r2", final=True), FIRST),
    ],
)
def test_of_a_run_that_is_over_nothing_that_was_taken_up_is_taken_again(drain: m.Drain, closed: Attempt):
    newest = Attempt("r1", 1, 3, 2)
    before = replace(strict(ready(), newest), closed=FIRST)
    after, out = play(before, drain)
    assert (after.closed, after.newest) == (closed, newest)
    assert [one.saved.closed for one in out if isinstance(one, v.Save)] == [closed]
    assert play(replace(before, newest=None), drain)[0].closed == FIRST
    ended = drain.run == "r1" and not drain.made_ms
    assert (after.run, after.ended) == ("" if ended else "r1", Attempt("r1") if ended and drain.final else Attempt())


def test_a_coordinator_of_a_distant_release_is_refused_with_both_protocols():
    theirs = PROTOCOL_VERSION + 2
    state, _ = play(ready(), m.Welcome("c1", run="r1", protocol=theirs, release="7.0"))
    _, out = play(state, offer())
    refusal = sent(out, m.Decline)[0].refusal
    assert (refusal.reason, refusal.needed, refusal.allowed, refusal.unit) == (
        "protocol", float(theirs), float(PROTOCOL_VERSION), "version",
    )  # fmt: skip
    assert refusal.detail.startswith(f"the coordinator is release 7.0 (protocol {theirs}), this agent is release ")


def test_a_model_without_classes_takes_data_of_any_labels():
    unlabelled = replace(job().model, classes=0, label_names=())
    for facts in (FACTS, replace(FACTS, label_names=(), class_counts=(9, 9, 9))):
        state, _ = play(initial(DEVICE, v.Saved(), facts), v.Connected(), m.Welcome("c1", run="r1"))
        assert sent(play(state, offer(job=replace(job(), model=unlabelled)))[1], m.Accept)


def test_data_is_refused_with_what_is_here_and_what_the_model_takes():
    model = job().model
    cases = [
        ({"modalities": {}}, Refusal("data", detail="this device has nothing, the model takes acc")),
        ({"samples": {}}, Refusal("data", 16.0, 0.0, "samples", "the local share does not fill one batch")),
        ({"modalities": {"a": (1,), "b": (1,)}}, Refusal("data", detail="this device has a, b, the model takes acc")),
        (
            {"label_names": (), "class_counts": (1, 1, 1)},
            Refusal("data", 3.0, 2.0, "classes", "the local data has more classes than the model"),
        ),
        (
            {"label_names": ("swim", "fly"), "class_counts": (1, 1)},
            Refusal("data", detail="labels the model does not know: swim, fly; it knows run, rest"),
        ),
    ]  # fmt: skip
    for change, refusal in cases:
        _, out = play(replace(ready(), facts=replace(FACTS, **change)), offer())
        assert [one.refusal for one in sent(out, m.Decline)] == [refusal]
    fine = [
        {"label_names": ("swim", "run"), "class_counts": (0, 1)},  # no sample has the unknown label
        {"label_names": ("rest",), "class_counts": (1, 1, 1)},  # a label without a name is not looked at
        {"modalities": {"acc": ()}, "elastic": True},
        {"class_counts": ()},
        {"label_names": (), "class_counts": (1, 1)},
        {"samples": {"": 16}},
    ]
    for change in fine:
        _, out = play(replace(ready(), facts=replace(FACTS, **change)), offer())
        assert sent(out, m.Accept), change
    _, out = play(
        replace(ready(), facts=replace(FACTS, class_counts=(1, 1, 1))),
        offer(job=replace(job(), model=replace(model, classes=0))),
    )
    assert sent(out, m.Accept), "a model without classes takes any"


@pytest.mark.parametrize(("allowed", "kind"), [(2000, m.Accept), (1999, m.Decline)])
def test_disk_is_counted_for_each_object_once_and_for_the_trained_parts_again(allowed, kind):
    """Three parts of which two are one object, 1000 + 500 bytes, and 500 for the new version of the trained one."""
    same = replace(offer(), manifest={**offer().manifest, "acc/stage1": ObjectRef(ID, 1000)})
    _, out = play(replace(ready(), budget=Budget(disk_bytes=allowed)), same)
    assert sent(out, kind)
    _, out = play(ready(), v.Received(same, v.Disk(missing_bytes=1500, free_bytes=allowed)))
    assert sent(out, kind)


def test_a_refusal_of_the_disk_names_which():
    _, out = play(replace(ready(), budget=Budget(disk_bytes=1)), offer())
    assert sent(out, m.Decline)[0].refusal.detail == "objects of this round against budget.disk_bytes"
    _, out = play(ready(), v.Received(offer(), v.Disk(missing_bytes=1500, free_bytes=1)))
    assert sent(out, m.Decline)[0].refusal.detail == "objects of this round against free space"


def test_what_is_kept_when_an_offer_is_accepted():
    private, packed, base = "1" * 64, "2" * 64, "3" * 64
    state = replace(play(fetched(), trained())[0], retained=(v.RetainedParts(FIRST, {"own": ObjectRef(private, 1)}),))
    more = replace(offer(number=2), packed={"task": m.PackedPart(ObjectRef(packed, 9), base=base)})
    _, out = play(state, more)
    (garbage,) = [one for one in out if isinstance(one, v.CollectGarbage)]
    assert garbage.keep == {private, ID, "b" * 64, "c" * 64, packed, base}


def test_a_fetch_that_failed_is_a_decline():
    refusal = Refusal("disk", 1.0, 2.0, "B")
    after, out = play(play(ready(), offer())[0], v.Fetched(FIRST, refusal))
    assert sent(out, m.Decline) == [m.Decline("d1", FIRST, refusal)]
    assert after.task is None


def test_figures_of_a_training_that_ended_early_are_told():
    figures = {"train_s": Figure(1.0)}
    result = v.Result(refusal=Refusal("ceiling"), figures=figures)
    _, out = play(fetched(), v.TrainingEnded(FIRST, result))
    assert sent(out, m.Decline) == [m.Decline("d1", FIRST, Refusal("ceiling"), figures)]


def test_a_second_update_ends_the_serving_of_the_first():
    state, _ = play(fetched(), trained())
    state, out = play(state, offer(number=2), v.Fetched(offer(2).attempt), trained(offer(2).attempt))
    assert [one.attempt for one in out if isinstance(one, v.StopServe)] == [FIRST]


def test_an_illegal_move_names_the_event_and_the_device():
    with pytest.raises(
        MachineError, match=r"^TrainingEnded cannot happen now on d1:\n  Connected  \[trainer down, task -\]\n"
    ):
        play(replace(fetched(), task=None), trained())
    with pytest.raises(MachineError, match=r"^TrainerReady cannot happen now on d1"):
        play(fetched(), v.TrainerReady(FACTS))


# --- what is over, and what is retained


def test_only_attempts_of_the_same_run_are_over():
    closed = Attempt("r", 1, 2, 1, 5)
    assert is_over(closed, closed)
    assert is_over(closed, Attempt("r", 1, 1, 9, 5))
    assert not is_over(closed, Attempt("r", 1, 2, 2, 5))
    assert not is_over(closed, Attempt("r", 1, 1, 1, 6))
    assert not is_over(None, closed)
    older, other = Attempt("r", 1, 1, 1, 5), Attempt("q", 1, 1, 1, 5)
    assert [newest_closed(closed, each) for each in (older, closed, other)] == [closed, closed, other]
    assert newest_closed(None, older) == older


def of(number: int, **parts: str) -> v.RetainedParts:
    return v.RetainedParts(Attempt("r", 1, number, 1), {name: ObjectRef(text * 64, 1) for name, text in parts.items()})


def test_what_is_retained_is_of_this_round_and_the_one_before():
    state = replace(DEVICE, retained=(of(1, own="1"), of(2, own="2")))
    third = Attempt("r", 1, 3, 1)
    manifest = {"own": ObjectRef("3" * 64, 1)}
    assert retained_before(state, third) == [of(1, own="1"), of(2, own="2")]
    assert retained_before(state, Attempt("r", 1, 2, 2)) == [of(1, own="1")]
    assert retained_before(state, Attempt("r", 2, 1, 1)) == [of(1, own="1"), of(2, own="2")]
    assert retained_before(state, Attempt("q", 1, 3, 1)) == []
    assert retained(state, third, manifest) == (of(2, own="2"), v.RetainedParts(third, manifest))
    assert retained(state, third, {}) == (of(2, own="2"), v.RetainedParts(third, {}))
    assert retained(DEVICE, third, {}) == ()


def test_a_refused_update_leaves_the_residuals_of_the_round_before():
    first, second = of(1, own="1"), of(2, own="2")
    lost = {"lost/a": ObjectRef("a" * 64, 1)}, {"lost/a": ObjectRef("b" * 64, 1), "lost/b": ObjectRef("c" * 64, 1)}
    first, second = (
        replace(one, manifest={**one.manifest, **more}) for one, more in zip((first, second), lost, strict=True)
    )
    state = replace(DEVICE, retained=(first, second))
    after = restore_residuals(state, second.attempt)
    assert after.retained == (first, replace(second, manifest={**of(2, own="2").manifest, **lost[0]}))
    assert restore_residuals(state, first.attempt) == state
    alone = restore_residuals(replace(DEVICE, retained=(second,)), second.attempt)
    assert alone.retained == (of(2, own="2"),)


def test_an_update_that_does_not_count_after_all_restores_the_residuals_on_the_disk_too():
    """It was acknowledged, and left out when the round closed: as out of line, or since its attempt had failed."""
    first, second = (replace(of(n), manifest={"lost/a": ObjectRef(name * 64, 1)}) for n, name in ((1, "a"), (2, "b")))
    over = replace(DEVICE, retained=(first, second), closed=second.attempt)
    for times in (1, 0):
        over, out = play(over, m.Abort(second.attempt, "out of line"))
        assert [one.manifest for one in over.retained] == [first.manifest] * 2
        saved = [one.saved.retained for one in out if isinstance(one, v.Save)]
        assert saved == times * [over.retained]


def test_a_drain_of_another_run_deletes_nothing_while_there_is_work():
    idle, busy = ready(), play(ready(), offer())[0]
    done = play(fetched(), trained())[0]
    for state, cleans in ((idle, True), (busy, False), (done, False)):
        _, out = play(state, m.Drain("r0"))
        assert ("CollectGarbage" in kinds(out)) == cleans
