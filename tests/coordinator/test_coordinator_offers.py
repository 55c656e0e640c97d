"""What the coordinator's messages and rows are made of: plans, offers, names of transfers, and what a restart keeps."""

from __future__ import annotations

import hashlib
from typing import Any, get_args

import pytest
from coordinator_fixture import MODEL, a_plan, place
from msgspec.structs import replace
from test_coordinator_machine import (
    ASYNC,
    FIRST,
    KEEPING,
    MADE_MS,
    NOT_BEGUN,
    POLICY,
    REF,
    TIMEOUTS,
    Play,
    of,
    rounds_of,
)
from test_coordinator_records import told, training, warnings

from coordinator.core import moves as do
from coordinator.core import state as v
from coordinator.core.assignments import (
    in_progress,
    key_of,
    offer,
    offer_for,
    row_of,
    separate_figures,
    served_parts,
    transfer_name,
    transfer_of,
)
from coordinator.core.known_devices import ask, not_asked
from coordinator.core.machine import STORY_LINES, step
from coordinator.core.moves import Steps
from coordinator.core.round_rules import is_buffered, open_round
from coordinator.core.state import decode, resumed
from edgefl.aggregation.history import Memory, Track
from edgefl.aggregation.server_state import PACKED
from edgefl.aggregation.weights import SIGNATURES
from edgefl.plan.job import Candidate, Decline, Job, Placement, Slots, Transfer
from edgefl.plan.stages import with_closing
from edgefl.protocol.messages import Hello, PackedPart, Update
from edgefl.records import Attempt, Budget, Capabilities, EvaluationRow, Figure, ObjectRef, Refusal
from edgefl.run_records import AssignmentRow

A = Hello(
    "a",
    session="s1",
    agent_version="1.2",
    profile="pi",
    capabilities=Capabilities(cores=3),
    budget=Budget(disk_bytes=5),
    modalities={"acc": (8, 3)},
    samples={"": 8, "acc": 7},
    class_counts=(5, 3),
)


def ref(number: int) -> ObjectRef:
    return ObjectRef(f"{number:064x}", number)


# --- plans


def test_the_planner_is_asked_with_all_that_is_known_of_a_device() -> None:
    declined = (Decline(1, 4, refusal=Refusal("memory", 2.0, 1.0)),)
    devices = {"b": v.Device(Hello("b")), "a": v.Device(A, declined=declined, factors={"flops": 2.0}, holds=1)}
    steps = Steps(replace(Play().state, devices=devices, stage=2, tickets=6), 0.0)
    ask(steps, [])
    assert steps.out == []
    ask(steps, ["b", "a"])
    known = Candidate(
        "a", A.capabilities, A.budget, A.samples, A.modalities, A.class_counts, declined, "entering", {"flops": 2.0}
    )
    assert steps.out == [do.Plan(7, 2, (known, Candidate("b")))]
    assert (steps.state.tickets, [one.ticket for one in steps.state.devices.values()]) == (7, [7, 7])
    ask(steps, ["b"])
    assert steps.out[1:] == [do.Plan(8, 2, (Candidate("b"),))]
    assert [one.ticket for one in steps.state.devices.values()] == [8, 7]


def test_factors_are_told_with_three_decimals() -> None:
    play = Play(replace(POLICY, devices=1))
    play.hello("a")
    (plan,) = play.plans
    stage, hyper = play.plan.stages[0], play.plan.hypers[0]
    placed = replace(place(stage, hyper, plan.candidates[0]), factors={"flops": 1.23456})
    out = play.send(do.Planned(0.0, plan.ticket, (placed, Placement("unknown"))))
    assert told(out)[0][2]["placements"][0]["factors"] == {"flops": 1.235}


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"profile": "jetson"}, True),
        ({"budget": Budget(disk_bytes=6)}, True),
        ({"samples": {"": 8}}, True),
        ({"modalities": {}}, True),
        ({"class_counts": (4, 4)}, True),
        ({"capabilities": Capabilities(cores=3, trainer_base_bytes=1)}, True),
        ({"capabilities": Capabilities(cores=4)}, False),
        ({"session": "s2"}, False),
        ({"agent_version": "1.3"}, False),
        ({"working_on": FIRST}, False),
    ],
)
def test_a_device_is_planned_again_when_it_says_something_new_that_its_placement_depends_on(
    change: dict[str, Any], again: bool
) -> None:
    play = Play(replace(POLICY, devices=1))
    play.send(do.Joined(0.0, A))
    play.finish_plan()
    before = play.state.devices["a"]
    play.state = replace(play.state, devices={"a": replace(before, declined=(Decline(),), factors={"flops": 2.0})})
    out = play.send(do.Joined(0.0, replace(A, **change)))
    device = play.state.devices["a"]
    assert [one.device for plan in of(do.Plan, out) for one in plan.candidates] == (["a"] if again else [])
    assert (device.placement is None, device.declined, device.factors) == (
        (True, (), {}) if again else (False, (Decline(),), {"flops": 2.0})
    )


def test_a_new_stage_asks_for_everyones_placement_also_where_an_answer_is_out() -> None:
    play = training()
    for name in ("a", "b"):
        play.announce(name)
        play.receive(name)
    play.finish_aggregate()
    play.hello("c")  # asked for in stage 1
    out = play.finish_evaluate()
    (plan,) = of(do.Plan, out)
    assert (plan.stage, [one.device for one in plan.candidates]) == (2, ["a", "b", "c"])
    assert play.state.phase is v.Phase.PLANNING


# --- offers


@pytest.mark.parametrize(("at", "deadline", "left"), [(30.0, 100.0, 70.0), (99.5, 100.0, 1.0), (30.0, 0.0, 0.0)])
def test_an_offer_holds_the_seconds_that_are_left(at: float, deadline: float, left: float) -> None:
    play = training(replace(POLICY, deadline_s=deadline))
    steps = Steps(play.state, at)
    offer(steps, "b")
    assert steps.out == [do.SendOffer("b", FIRST, play.state.devices["b"].placement, left)]


#: A state of the model: parts of stage 1 and 2, a cluster's and a device's own, a packed part, one device's signature.
STATE = {
    "acc/embed": ref(1),
    "acc/stage1": ref(2),
    "acc/stage2": ref(3),
    "task": ref(4),
    "prototypes": ref(5),
    "@a/task": ref(6),
    "#1/acc/stage1": ref(7),
    f"{PACKED}{ref(6).id}/{ref(1).id}/delta+int8": ref(8),
    f"{SIGNATURES}b": ref(9),
    "server/memory": ref(10),
}


def offered(name: str, stage: int = 1, number: int = 1, memory: Memory | None = None, **changes: Any) -> Any:
    plan = a_plan(server={"cluster": {"lsh": {}}}, slots=Slots(missing={"zero": {}}), **changes)
    state = v.State(plan, memory=memory or Memory())
    hyper = replace(plan.hypers[0], micro_batch=2)
    placement = Placement(name, plan.stages[stage - 1], hyper)
    return offer_for(do.SendOffer(name, Attempt("r1", stage, number, 3, MADE_MS), placement, 9.0), STATE, state)


def test_an_offer_holds_the_job_and_the_parts_in_the_devices_scope() -> None:
    transfer = Transfer(up=(("task", "int8"),), down=(("*", "delta+int8"),), top=0.5)
    clustered = Memory(devices={"a": Track(cluster=1)})
    made = offered("a", memory=clustered, transfer=transfer, stages=rounds_of("keep"))
    plan = a_plan(stages=rounds_of("keep"))
    assert made.attempt == Attempt("r1", 1, 1, 3, MADE_MS)
    assert made.deadline_s == 9.0
    assert made.job == Job(
        plan.model, plan.stages[0], replace(plan.hypers[0], micro_batch=2), Slots(missing={"zero": {}}), "sketch",
        transfer,
    )  # fmt: skip
    assert made.manifest == {"acc/embed": ref(1), "acc/stage1": ref(7), "task": ref(6), "prototypes": ref(5)}
    assert made.packed == {"task": PackedPart(ref(8), ref(1).id, "delta+int8")}
    assert made.transfer == transfer_name("d", made.attempt)
    assert (made.chunk_bytes, made.credit) == (0, 0), "who sends it knows them"
    alone = offered("b")
    assert (alone.job.signature, alone.manifest["acc/stage1"]) == ("", ref(2)), "it has signed, and has no cluster"
    assert alone.job.transfer.whole, "a stage's last round"
    assert "acc/stage2" in offered("b", stage=2).manifest


def test_the_closing_round_asks_for_no_signature_and_offers_no_prototypes() -> None:
    model = replace(MODEL, matching="classifier")
    stages, hypers = with_closing(model, a_plan().stages), (*a_plan().hypers, a_plan().hypers[0])
    made = offered("a", stage=3, model=model, stages=stages, hypers=hypers)
    assert made.job.signature == ""
    assert made.manifest.keys() == {"acc/embed", "acc/stage1", "acc/stage2", "task"}


def test_parts_beside_a_stages_own_have_figures_of_their_own() -> None:
    plan = a_plan(server={"repair": {"poverty": {}}, "cluster": {"lsh": {}}})
    figures = dict.fromkeys(("poverty", "layers"), "layer_down_bytes") | {"prototypes": "prototypes_down_bytes"}
    assert separate_figures(plan) == figures


def test_what_is_served_is_everything_but_what_the_server_keeps_for_itself() -> None:
    assert STATE.keys() - served_parts(STATE).keys() == {f"{SIGNATURES}b", "server/memory"}


def test_the_last_round_of_a_stage_is_sent_whole() -> None:
    plan = a_plan(transfer=Transfer(top=0.3))  # stage 2 has two rounds
    whole = [transfer_of(plan, Attempt("r1", stage, number)).whole for stage, number in ((1, 1), (2, 1), (2, 2))]
    assert whole == [True, False, True]
    assert transfer_of(plan, FIRST).top == 0.3


def test_the_last_round_is_packed_where_the_run_file_says_so() -> None:
    plan = a_plan(transfer=Transfer(closing="packed"))
    assert not transfer_of(plan, Attempt("r1", 2, 2, 1)).whole


def test_names_of_transfers_and_of_kept_updates_outlive_the_process_that_gave_them() -> None:
    """By hand: the first 12 digits of the hash of run, attempt, time and device; 24 of the device's."""
    attempt = Attempt("r1", 1, 2, 3, MADE_MS)
    tail = hashlib.sha256(b"r1/s1/r2/a3/7/cam").hexdigest()[:12]
    assert transfer_name("u", attempt, "cam") == f"u-s1r2a3-{tail}"
    assert transfer_name("d", attempt) == "d-s1r2a3-" + hashlib.sha256(b"r1/s1/r2/a3/7/").hexdigest()[:12]
    assert key_of("cam", attempt) == "1.2.3/" + hashlib.sha256(b"cam").hexdigest()[:24]


def test_the_attempts_in_progress_are_the_open_one_and_those_of_stragglers() -> None:
    play = training(KEEPING, stages=rounds_of("keep"))
    assert in_progress(play.state) == {FIRST: ["a", "b"]}
    play.announce("a")
    play.receive("a")
    play.wait(POLICY.deadline_s)
    assert in_progress(play.state) == {FIRST: ["b"]}, "no round is open: it is being aggregated"
    play.finish_aggregate()
    play.finish_evaluate()
    assert in_progress(play.state) == {play.opened[-1]: ["a"], FIRST: ["b"]}


# --- rows


@pytest.mark.parametrize("status", [name for part in get_args(v.Status) for name in get_args(part)])
def test_a_row_of_the_ledger_holds_the_part_and_its_prediction_while_it_is_one(status: Any) -> None:
    plan = a_plan()
    predicted = {"flops": Figure(3.0)}
    placement = Placement("a", plan.stages[1], replace(plan.hypers[1], micro_batch=2), predicted=predicted)
    update = Update("a", FIRST, {"task": REF}, {"task": 5}, {"loss": 2.0})
    why, measured = Refusal("data"), {"wall_s": Figure(4.0)}
    part = v.Assignment(placement, status, update, why)
    row = row_of(v.State(plan), Attempt("r1", 2, 1, 4), "a", part, measured)
    assert row == AssignmentRow(
        "a", 2, 1, 4, status, why, 4, 2, plan.stages[1].trained, {"task": 5}, {"loss": 2.0},
        predicted if status in {"offered", "refused"} else {}, measured,
    )  # fmt: skip
    empty = row_of(v.State(plan), FIRST, "a", replace(part, update=None))
    assert (empty.samples, empty.metrics, empty.measured) == ({}, {}, {})


def test_devices_that_are_not_asked_are_on_record_with_the_reason() -> None:
    refusal = Refusal("memory", 2.0, 1.0, "B")
    refused = Placement("a", a_plan().stages[0], refusal=refusal)
    devices = {"a": v.Device(Hello("a"), placement=refused), "b": v.Device(Hello("b")), "c": v.Device(Hello("c"))}
    assert not_asked(replace(Play().state, devices=devices)) == {"a": v.Assignment(refused, "refused", refusal=refusal)}


def test_a_decline_is_on_record_with_what_the_device_measured() -> None:
    play = training()
    figures = {"step_peak_bytes": Figure(7.0)}
    out = play.send(do.Declined(0.0, "a", FIRST, Refusal("data"), figures))
    assert [(row.status, row.measured) for row in of(AssignmentRow, out)] == [("declined", figures)]
    out = play.decline("b", Refusal("ceiling", 1e9, 1.0, "B"))
    (plan,) = play.plans
    no = Refusal("ceiling", 2.0, 1.0, "B")
    placed = Placement("b", play.plan.stages[0], refusal=no)
    out = play.send(do.Planned(0.0, plan.ticket, (placed,)))
    assert [(row.status, row.refusal) for row in of(AssignmentRow, out)][:1] == [("refused", no)]


@pytest.mark.parametrize(("reason", "times"), [("packed", 1), ("damaged", 3)])
def test_a_device_whose_decline_says_nothing_of_sizes_is_planned_again(reason: str, times: int) -> None:
    play = training(stages=rounds_of("async"))
    for time in range(times):
        assert of(do.Plan, play.decline("a", Refusal(reason, detail=f"object {time}")))
        play.finish_plan()
    assert not of(do.Plan, play.decline("a", Refusal(reason, detail="another")))
    play = training(stages=rounds_of("async"))
    play.decline("a", Refusal(reason))
    play.finish_plan()
    assert of(do.Plan, play.decline("a", Refusal("ceiling", 2.0, 1.0, "B"))), "another reason is another matter"


# --- rounds


@pytest.mark.parametrize(("online", "works", "answer"), [(True, True, []), (True, False, []), (False, True, ["a"])])
def test_a_heartbeat_brings_a_missed_device_back_where_it_says_what_it_works_on(
    online: bool, works: bool, answer: list[str]
) -> None:
    play = training()
    play.accept("a")
    if not online:
        play.send(do.DeviceOffline(0.0, "a"))
    out = play.send(do.HeartbeatSeen(0.0, "a", FIRST if works else None, works))
    assert [name for kind, name, _ in told(out) if kind == "device_joined"] == answer
    assert (play.status("a"), play.state.devices["a"].online) == ("accepted", True)
    play.send(do.DeviceOffline(0.0, "a"))
    assert play.send(do.HeartbeatSeen(0.0, "a", None, False)) == [do.SendWelcome("a")], "it is to introduce itself"
    assert not play.state.devices["a"].online


def test_a_device_that_is_being_planned_again_at_the_deadline_keeps_nothing_to_deliver_later() -> None:
    play = training(KEEPING, stages=rounds_of("keep"))
    play.announce("a")
    play.receive("a")
    play.decline("b", Refusal("ceiling", 2.0, 1.0, "B"))
    play.wait(POLICY.deadline_s)
    assert (play.status("b"), play.state.stragglers) == ("late", {})


def test_what_each_warning_is_about_is_in_its_data() -> None:
    def about(out: list[do.Instruction]) -> list[tuple[str, str]]:
        return [(data["about"], data["text"]) for kind, _, data in told(out) if kind == "warning"]

    play = Play(replace(POLICY, devices=9))
    for _ in range(101):
        out = play.hello("a")
        play.send(do.DeviceOffline(0.0, "a"))
    assert about(out) == [("comings", "a: it connected 101 times; its joins and leaves are not recorded any more")]
    play = training()
    out = play.send(do.Joined(0.0, Hello("a", samples={"gyro": 1})))
    assert about(out) == [("claim", "a: it now says it has 0 samples; in this run the first 8 count")]
    said = replace(Update("b", FIRST, {"task": REF}, {"task": 8}), figures={"energy_j": Figure(-1.0)})
    play.send(do.Announced(0.0, said))
    assert about(play.receive("b")) == [("figures", "b: implausible figures are left out: energy j -1.00 J")]


def test_without_assignments_a_round_is_closed_by_the_number_of_updates() -> None:
    state = training().state
    assert not is_buffered(state)
    assert not is_buffered(replace(state, open=None))
    assert is_buffered(replace(state, open=replace(state.open, assignments={})))
    assert is_buffered(training(ASYNC).state)
    closing = replace(state.plan.stages[0], trained=("match/acc",))
    assert not is_buffered(replace(training(ASYNC).state, plan=a_plan(policy=ASYNC, stages=(closing,))))


@pytest.mark.parametrize(("number", "kept"), [(2, True), (3, False)])
def test_an_update_that_arrived_while_the_server_aggregated_may_be_too_old_for_the_next_round(
    number: int, kept: bool
) -> None:
    play = training(ASYNC, stages=rounds_of("async"))  # one round late at most
    part = replace(play.state.assignments["a"], status="done", update=Update("a", FIRST), attempt=FIRST)
    working = replace(play.state.assignments["b"], status="accepted", attempt=FIRST)
    state = replace(
        play.state, open=None, number=number, buffered={key_of("a", FIRST): part}, stragglers={"b": working}
    )
    steps = Steps(state, 0.0)
    open_round(steps)
    assert (list(steps.state.buffered), list(steps.state.stragglers)) == (
        ([key_of("a", FIRST)], ["b"]) if kept else ([], [])
    )
    old = Refusal("late", 2.0, 1.0, "rounds", "its model is too old")
    late = [(one.device, one.refusal) for one in of(AssignmentRow, steps.out) if one.status == "late"]
    assert late == ([] if kept else [("b", old), ("a", old)])
    aborted = [do.SendAbort("b", FIRST, "its model is too old")]
    assert of(do.SendAbort, steps.out) == ([] if kept else aborted), "what has arrived needs none"


def test_an_update_out_of_line_is_left_out_and_the_round_needs_another() -> None:
    play = Play(replace(POLICY, devices=3, quorum=1.0, largest_change=2.0))
    for name in ("a", "b", "c"):
        play.hello(name)
    while play.plans:
        play.finish_plan()
    for name, norm in (("a", 9.0), ("b", 9.0), ("c", 90.0)):
        play.announce(name)
        play.fetches.pop(name)
        out = play.send(do.UpdateStored(0.0, name, FIRST, changes={"task": v.Change(norm, 1.0)}))
    (row,) = [one for one in of(AssignmentRow, out) if one.status == "rejected"]
    assert (row.device, row.refusal.reason, row.refusal.needed, row.refusal.allowed) == ("c", "change", 10.0, 2.0)
    assert [one[:2] for one in told(out) if one[0] == "rejected"] == [("rejected", "c")]
    aborted = [one for one in of(do.SendAbort, out) if one.device == "c"]
    assert aborted == [do.SendAbort("c", FIRST, row.refusal.detail)], "what it has not sent of it does not count either"
    assert play.state.phase is v.Phase.RETRYING, "two of three"
    assert play.state.devices["c"].bad == 1


def test_what_was_left_out_of_the_model_is_warned_of() -> None:
    play = training()
    for name in ("a", "b"):
        play.announce(name)
        play.receive(name)
    refused = {"device": "b", "part": "task", "reason": "shape", "detail": "tensor 'w' is [2], expected [3]"}
    out = play.send(do.Aggregated(0.0, FIRST, {"task": REF}, {"refused": [refused]}))
    text = "part task of b was left out: tensor 'w' is [2], expected [3]"
    assert [row for row in told(out) if row[0] == "warning"] == [("warning", "b", {"text": text})]


def test_an_evaluation_of_finite_figures_warns_of_nothing_and_long_lists_are_cut() -> None:
    def evaluated(*values: float) -> list[str]:
        play = training()
        for name in ("a", "b"):
            play.announce(name)
            play.receive(name)
        play.finish_aggregate()
        names = ("acc", "gyro", "ecg", "eeg", "emg")
        rows = (EvaluationRow(available=(name,), value=value) for name, value in zip(names, values, strict=False))
        assert play.evaluate is not None
        return warnings(play.send(do.Evaluated(0.0, play.evaluate.attempt, tuple(rows))))

    nan = float("nan")
    assert evaluated(1.0, 2.0) == []
    taken = (
        "the evaluation cannot calculate with the model: round 1 of stage 1 is taken back and done again without b, "
    )
    taken += "whose change was the longest in it; no device is blamed"
    four = "accuracy with acc, accuracy with ecg, accuracy with eeg"
    begin = "the evaluation has no figure for {} of its rows: {} is not a finite number; the model has diverged"
    assert evaluated(nan, 1.0, nan, nan) == [begin.format(3, four), taken]
    assert evaluated(nan, nan, nan, nan) == [begin.format(4, f"{four}, …"), taken]


def test_another_attempts_evaluation_is_impossible_and_says_so() -> None:
    play = training()
    for name in ("a", "b"):
        play.announce(name)
        play.receive(name)
    play.finish_aggregate()
    with pytest.raises(do.IllegalMoveError, match="this attempt is not being evaluated"):
        step(play.state, do.Evaluated(0.0, replace(FIRST, attempt=8)))
    play = training()
    for name in ("a", "b"):
        play.announce(name)
        play.receive(name)
    with pytest.raises(do.IllegalMoveError, match="this attempt is not being aggregated"):
        step(play.state, do.Aggregated(0.0, replace(FIRST, attempt=8)))


def test_the_story_of_a_run_has_a_line_for_each_event_that_changed_something_and_the_last_forty() -> None:
    state, _ = step(v.State(a_plan(policy=POLICY), TIMEOUTS), do.Begin(1.5, NOT_BEGUN))
    for event in (do.Joined(2.0, A), do.Tick(2.5), do.HeartbeatSeen(2.5, "a"), do.Accepted(3.0, "a", FIRST)):
        state, _ = step(state, event)
    story = ["1.500 Begin [starting -> joining]", "2.000 Joined a [joining -> joining]"]
    assert state.story == (*story, "3.000 Accepted a r1/s1/r1/a1 [joining -> joining]")
    for count in range(STORY_LINES):
        state, _ = step(state, do.DeviceOffline(float(count), "z"))
    assert len(state.story) == STORY_LINES
    assert state.story[0].startswith("0.000 DeviceOffline z")


# --- restarts


def test_what_a_restart_keeps_of_a_run_and_of_one_that_failed() -> None:
    play = training(KEEPING, stages=rounds_of("keep"))
    play.announce("a")
    play.receive("a")
    play.wait(POLICY.deadline_s)  # b goes on with it
    play.finish_aggregate()
    play.finish_evaluate()
    play.decline("a", Refusal("ceiling", 2.0, 1.0, "B"))
    was = decode(v.State(play.plan, TIMEOUTS), ((kind, name, row) for (kind, name), row in play.kept.items()))
    here = play.state
    assert was == v.State(
        here.plan, TIMEOUTS, phase=v.Phase.ROUND, stage=1, number=2, attempt=here.attempt, tries=1, planned_stage=1,
        devices=here.devices, stragglers=here.stragglers, closed=FIRST, last_aggregated=("a",),
        open=replace(here.open, opened_at=0.0, deadline_at=0.0),
    ), "times are of a process' clock"  # fmt: skip
    state = resumed(replace(was, tries=2), 50.0)
    assert (state.phase, state.tries, state.evaluating) == (v.Phase.ROUND, 2, None)
    assert (state.open.opened_at, state.open.deadline_at) == (50.0, 50.0 + POLICY.deadline_s)
    assert state.stragglers == {"b": replace(was.stragglers["b"], offered_at=None, first_offered_at=None)}
    assert {name: (one.online, one.ticket) for name, one in state.devices.items()} == {"a": (False, 0), "b": (False, 0)}
    assert state.devices["a"].placement is None, "it was being planned again"
    assert state.devices["b"].placement == was.devices["b"].placement
    assert state.returning == dict.fromkeys(("a", "b"), 50.0 + TIMEOUTS.grace_s)
    again = decode(v.State(play.plan), [("outline", "", {"returning": ["a"], "paused": "web", "evaluating": FIRST})])
    assert again == v.State(play.plan, returning={"a": 0.0}, paused="web", evaluating=FIRST)
    assert decode(v.State(play.plan), []) is None
    failed = resumed(replace(was, tries=2, phase=v.Phase.FAILED), 50.0)
    assert (failed.phase, failed.tries, failed.open, failed.stragglers) == (v.Phase.JOINING, 0, None, {})


def test_tries_are_counted_over_a_restart_and_begin_again_with_the_next_round() -> None:
    play = training(replace(POLICY, quorum=1.0))  # twice at most
    play.decline("a", Refusal("data"))
    play.decline("b", Refusal("data"))
    play.wait(TIMEOUTS.retry_pause_s)
    play.restart()
    for name in ("a", "b"):
        play.hello(name, working_on=play.opened[-1])
    play.decline("a", Refusal("data"))
    (fail,) = of(do.Fail, play.decline("b", Refusal("data")))
    assert fail.message.endswith("it was tried 2 times")
    play = training(replace(POLICY, quorum=1.0), stages=rounds_of("keep"))
    for again in (True, False):
        if again:
            play.decline("a", Refusal("data"))
            play.decline("b", Refusal("data"))
            play.wait(TIMEOUTS.retry_pause_s)
        for name in ("a", "b"):
            play.announce(name)
            play.receive(name)
        play.finish_aggregate()
        play.finish_evaluate()
        assert play.state.open.tries == 1


@pytest.mark.parametrize(
    ("every", "number", "evaluated"),
    [
        ("round", 1, True),
        ("stage", 1, False),
        ("stage", 2, True),
        (1, 1, True),
        (2, 1, False),
        (2, 2, True),
        (3, 2, True),
    ],
)
def test_a_round_that_was_not_evaluated_is_when_the_run_goes_on(every: str | int, number: int, evaluated: bool) -> None:
    last = Attempt("r1", 2, number, 1)
    plan = a_plan(evaluate_every=every, policy=POLICY)  # stage 2 has two rounds
    state, out = step(v.State(plan, TIMEOUTS), do.Begin(3.0, do.Position(2, number, 1, {}, last, MADE_MS)))
    assert of(do.Evaluate, out) == ([do.Evaluate(last)] if evaluated else [])
    assert state.evaluating == (last if evaluated else None)
    assert (state.made_ms, state.began_at) == (MADE_MS, 3.0)


def test_a_run_to_which_no_device_comes_fails_after_the_time_to_join() -> None:
    state, _ = step(v.State(a_plan(policy=POLICY), TIMEOUTS), do.Begin(3.0, NOT_BEGUN))
    assert (state.phase, state.until, state.began_at) == (v.Phase.JOINING, 13.0, 3.0)
    assert step(state, do.Tick(12.9))[1] == []
    (fail, end) = step(state, do.Tick(13.0))[1]
    assert (fail, end) == (do.Fail("RunError", "no device connected within 10 s"), do.SaveEnd("failed"))
