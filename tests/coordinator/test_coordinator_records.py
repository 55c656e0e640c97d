"""The coordinator's records: every event of a round with its data, every dropped message, every warning, by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from coordinator_fixture import STEP_BYTES
from msgspec.structs import replace
from test_coordinator_machine import ASYNC, FIRST, KEEPING, MADE_MS, POLICY, REF, Play, of, rounds_of

from coordinator.core import moves as do
from coordinator.core import state as v
from coordinator.core.assignments import expected
from coordinator.core.known_devices import (
    arrival_of,
    count_rejected,
    nearest_refusal,
    not_asked,
    readmit,
    reason_text,
    wait_for_able,
)
from coordinator.core.moves import Steps
from coordinator.core.replies import is_aggregated
from coordinator.core.round_rules import metric_means, quorum, release, summary
from edgefl import PROTOCOL_VERSION
from edgefl.budget.fit import trained_depth
from edgefl.plan.training_samples import LABEL_THEM, UNLABELLED
from edgefl.protocol.messages import Hello, Update
from edgefl.records import Attempt, Budget, Cost, EvaluationRow, Figure, Refusal
from edgefl.run_records import AssignmentRow, DeviceRow, EventRow

OLD = Attempt("r1", 1, 1, 9, MADE_MS)
NOBODY = {"reason": "", "needed": None, "allowed": None, "unit": "", "detail": "", "where": ""}


def told(out: list[do.Instruction]) -> list[tuple[str, str, dict[str, Any]]]:
    rows = [one for one in out if isinstance(one, EventRow)]
    assert {row.at for row in rows} <= {0.0}, "the ledger dates them"
    return [(row.kind, row.device, row.data) for row in rows]


def warnings(out: list[do.Instruction]) -> list[str]:
    return [data["text"] for kind, _, data in told(out) if kind == "warning"]


def training(policy=POLICY, **changes: Any) -> Play:
    return Play(policy, **changes).started("a", "b")


# --- events of a run


def test_a_placement_of_less_than_the_stage_is_told_with_the_limit() -> None:
    play = Play()
    play.hello("a")
    ticket = play.state.devices["a"].ticket
    limit = Refusal("payload", 9.0, 8.0, "B")
    placed = do.Placement("a", play.plan.stages[0], shortened=limit)
    ((_, _, data),) = [one for one in told(play.send(do.Planned(0.0, ticket, (placed,)))) if one[0] == "stage_planned"]
    assert data["placements"][0]["shortened"] == msgspec.structs.asdict(limit)


def test_every_event_of_a_round_with_its_data() -> None:
    play = Play()
    out = play.hello("a", profile="pi", budget=Budget(disk_bytes=5))
    budget = msgspec.to_builtins(Budget(disk_bytes=5))
    assert told(out) == [("device_joined", "a", {"profile": "pi", "samples": {"": 8}, "budget": budget})]
    assert of(DeviceRow, out) == [DeviceRow("a", "pi", budget=Budget(disk_bytes=5), samples={"": 8})]
    assert of(do.SendWelcome, out) == [do.SendWelcome("a")]
    play.hello("b")
    out = play.finish_plan()
    (planned, started) = told(out)
    hyper, stage = play.plan.hypers[0], play.plan.stages[0]
    how = {
        "micro_batch": 0, "cache": hyper.cache, "depth": trained_depth(stage), "checkpoint": hyper.checkpoint,
        "lean": "", "precision": hyper.precision,
    }  # fmt: skip
    costs = {"factors": {}, "step_peak_bytes": STEP_BYTES, "flops": None}
    placed = [{"device": name, "ok": True, **how, **costs, **NOBODY} for name in ("a", "b")]
    assert planned == ("stage_planned", "", {"placements": placed})
    assert not any("shortened" in one for one in planned[2]["placements"])
    assert started == ("round_started", "", {"participants": ["a", "b"], "attempt": 1})
    assert of(do.SavedRound, out) == [do.SavedRound(1, 1, 1)]
    assert [(one.device, one.deadline_s) for one in of(do.SendOffer, out)] == [("a", 100.0), ("b", 100.0)]
    out = play.send(do.Progressed(play.now, "a", FIRST, {"step": 3}))
    assert told(out) == [("progress", "a", {"step": 3})]
    play.announce("a")
    out = play.receive("a")
    data = {
        "loss": 1.0, "samples": 8, "seconds": None, "payload_up_bytes": None, "payload_down_bytes": None,
        "step_peak_bytes": None, "flops": None,
    }  # fmt: skip
    assert told(out) == [("update", "a", data)]
    assert of(do.SendAck, out) == [do.SendAck("a", FIRST)]
    out = play.decline("b", Refusal("data", 4.0, 2.0))
    assert told(out)[0] == ("declined", "b", {**NOBODY, "reason": "data", "needed": 4.0, "allowed": 2.0})
    play.now = 7.5
    out = play.finish_aggregate()
    assert told(out) == [
        (
            "round_closed", "",
            {"participants": ["a"], "late": [], "lost": [], "loss": 1.0, "seconds": 7.5, "payload_bytes": 0.0},
        )
    ]  # fmt: skip
    (closed,) = of(do.SavedRound, out)
    assert (closed.status, closed.participants, closed.metrics, closed.manifest) == (
        "done", ("a",), {"loss": 1.0}, {"task": REF},
    )  # fmt: skip
    row = EvaluationRow(available=("acc",), value=0.5)
    (attempt,) = [play.evaluate.attempt]
    out = play.send(do.Evaluated(play.now, attempt, (row, replace(row, value=float("nan")))))
    assert told(out)[0] == ("evaluated", "", {"values": [msgspec.to_builtins(row)]})
    assert warnings(out)[0] == (
        "the evaluation has no figure for 1 of its rows: accuracy with acc is not a finite number; "
        "the model has diverged"
    )
    assert ("stage_finished", "", {}) in told(out)


def test_a_finished_run_says_how_long_it_took() -> None:
    play = training()
    play.now = 3.0
    for _ in range(3):
        for name in ("a", "b"):
            play.announce(name)
            play.receive(name)
        play.finish_aggregate()
        out = play.finish_evaluate()
        if play.plans:
            play.finish_plan()
    assert told(out)[-1] == ("run_finished", "", {"status": "done", "seconds": 3.0})
    assert of(do.SaveEnd, out) == [do.SaveEnd("done")]


def test_figures_of_an_update_are_told_and_those_that_cannot_be_are_not() -> None:
    play = training()
    update = Update("a", FIRST, {"task": REF}, {"task": 8, "acc/stage1": 5}, {"loss": 1.0, "odd": 1e10})
    said = {"wall_s": Figure(2.5), "energy_j": Figure(-1.0), "step_peak_bytes": Figure(float(STEP_BYTES))}
    play.send(do.Announced(play.now, replace(update, figures=said)))
    counted = {"payload_up_bytes": Figure(70.0, "counted"), "process_peak_bytes": Figure(5e7)}
    out = play.send(do.UpdateStored(play.now, "a", FIRST, counted))
    assert told(out)[0] == (
        "update", "a",
        {
            "loss": 1.0, "samples": 8, "seconds": 2.5, "payload_up_bytes": 70.0, "payload_down_bytes": None,
            "step_peak_bytes": float(STEP_BYTES), "flops": None, "process_peak_bytes": 5e7, "energy_j": None,
        },
    )  # fmt: skip
    assert warnings(out) == ["a: implausible figures are left out: energy j -1.00 J"]
    (row,) = of(AssignmentRow, out)
    assert (row.status, row.samples, row.metrics) == ("done", {"task": 8, "acc/stage1": 5}, {"loss": 1.0})
    assert row.measured["payload_up_bytes"] == counted["payload_up_bytes"]
    assert play.state.devices["a"].factors == {"step_peak_bytes": 1.0}


def test_what_was_sent_again_has_passed_the_wire_too() -> None:
    play = training()
    own = {"wire_up_bytes": Figure(1100.0, "counted", "socket"), "payload_up_bytes": Figure(1000.0, "counted")}
    for device, said in (("a", own), ("b", {"wire_up_bytes": Figure(reason="restarted")})):
        play.send(do.Announced(play.now, Update(device, FIRST, {"task": REF}, {"task": 8}, {"loss": 1.0}, said)))
        counted = {"payload_up_bytes": Figure(1000.0, "counted"), "resent_up_bytes": Figure(300.0, "counted")}
        (row,) = of(AssignmentRow, play.send(do.UpdateStored(play.now, device, FIRST, counted)))
        wire = row.measured["wire_up_bytes"]
        if device == "a":
            assert (wire.value, wire.kind) == (1400.0, "counted")
            assert wire.source == "socket + the chunks that the coordinator received more than once"
        else:
            assert (wire.value, wire.reason) == (None, "restarted")


def test_a_device_that_ran_into_a_limit_is_offered_less_and_the_record_says_why() -> None:
    play = training()
    out = play.decline("a", Refusal("ceiling", 2.0, 1.0, "B", where="gpu"))
    assert (play.status("a"), [plan.candidates[0].device for plan in of(do.Plan, out)]) == ("replanning", ["a"])
    out = play.finish_plan()
    hyper, stage = play.plan.hypers[0], play.plan.stages[0]
    how = {"cache": hyper.cache, "depth": trained_depth(stage), "checkpoint": hyper.checkpoint, "lean": ""}
    data = {"micro_batch": 2, **how, "precision": hyper.precision, "reason": "ceiling", "where": "gpu"}
    assert told(out)[-1] == ("replanned", "a", data)
    assert [(one.device, one.placement.hyper.micro_batch) for one in of(do.SendOffer, out)] == [("a", 2)]
    assert play.status("a") == "offered"
    out = play.decline("a", Refusal("ceiling", 2.0, 1.0, "B", where="gpu"))
    assert (play.status("a"), of(do.Plan, out)) == ("declined", []), "the same numbers again"


# --- messages without effect


def test_what_is_dropped_is_counted_and_answered() -> None:
    aborted = [do.SendAbort("a", OLD, "this attempt is closed")]
    cases: list[tuple[Play, do.Event, str, list[do.Instruction]]] = [
        (training(), do.Accepted(0.0, "z", FIRST), "unknown device", [do.SendWelcome("z")]),
        (training(), do.Accepted(0.0, "a", OLD), "stale", aborted),
        (training(), do.Declined(0.0, "a", OLD), "stale", []),
        (
            training(), do.Announced(0.0, Update("a", OLD)), "stale",
            [do.SendAck("a", OLD, False, Refusal(reason="stale"))],
        ),
        (training(), do.UpdateStored(0.0, "a", OLD), "late", []),
        (training(), do.UpdateStored(0.0, "a", FIRST), "duplicate", []),
        (training(), do.UpdateInvalid(0.0, "a", FIRST, Refusal("x")), "duplicate", []),
        (training(), do.DeviceOffline(0.0, "z"), "duplicate", []),
        (training(), do.Planned(0.0, 99), "stale plan", []),
        (training(), do.ResumeAsked(0.0, "web"), "not paused", []),
        (training(), do.LeaveOutAsked(0.0, "web", "z"), "not in the run", []),
        (training(), do.TakeInAsked(0.0, "web", "a"), "not left out", []),
    ]  # fmt: skip
    done = training()
    done.announce("a")
    done.receive("a")
    cases.append((done, do.Announced(0.0, Update("a", FIRST)), "duplicate", [do.SendAck("a", FIRST)]))
    cases.append((done, do.Accepted(0.0, "a", FIRST), "duplicate", []))
    cases.append((done, do.Declined(0.0, "a", FIRST), "duplicate", []))
    cases.append((done, do.Progressed(0.0, "a", FIRST), "late", []))
    refused = training()
    refused.decline("a", Refusal("data"))
    late = [do.SendAck("a", FIRST, False, Refusal(reason="late"))]
    cases.append((refused, do.Announced(0.0, Update("a", FIRST)), "late", late))
    joined = training()
    joined.hello("c")
    cases.append((joined, do.Accepted(0.0, "c", FIRST), "out of turn", []))
    for play, event, reason, answer in cases:
        before = play.state
        for count in (1, 2):
            out = play.send(event)
            assert out == answer, reason
            assert play.state.dropped == {**before.dropped, reason: before.dropped.get(reason, 0) + count}
        assert (play.state.open, play.state.devices) == (before.open, before.devices), reason


def test_an_update_that_is_in_the_model_is_acknowledged_when_it_is_announced_again() -> None:
    play = training()
    for name in ("a", "b"):
        play.announce(name)
        play.receive(name)
    play.finish_aggregate()
    play.finish_evaluate()
    play.finish_plan()
    assert is_aggregated(play.state, "a", FIRST)
    assert not is_aggregated(play.state, "a", OLD)
    assert play.announce("a", FIRST) == [do.SendAck("a", FIRST)]
    assert play.accept("a", FIRST) == [], "it is done with it: nothing to abort"
    play.hello("c")
    assert play.announce("c", FIRST) == [do.SendAck("c", FIRST, False, Refusal("stale"))]


# --- devices


def test_a_device_that_changes_what_it_says_is_warned_of_once() -> None:
    play = training()
    out = play.send(do.Joined(0.0, Hello("a", "s1", samples={"": 9})))
    assert warnings(out) == ["a: it now says it has 9 samples; in this run the first 8 count"]
    assert warnings(play.send(do.Joined(0.0, Hello("a", "s2", samples={"": 10})))) == []
    out = play.send(do.Joined(0.0, Hello("a", "s1", samples={"": 1})))
    assert warnings(out) == [
        "a: two agents use this identity and take turns at the broker; stop one, or enrol it under its own name"
    ]
    assert play.state.devices["a"].warned == ("claim", "twin")
    assert play.state.devices["a"].claim.samples == {"": 8}


def test_only_a_hundred_connections_are_recorded() -> None:
    play = Play(replace(POLICY, devices=9))
    kinds: list[str] = []
    for _ in range(102):
        kinds += [kind for kind, _, _ in told(play.hello("a"))]
        kinds += [kind for kind, _, _ in told(play.send(do.DeviceOffline(0.0, "a", "gone")))]
    assert (kinds.count("device_joined"), kinds.count("device_left"), kinds.count("warning")) == (100, 100, 1)
    assert play.state.devices["a"].connections == 102


def test_a_distant_release_is_told_each_time_and_operators_once() -> None:
    play = Play()
    far = Hello("a", protocol=PROTOCOL_VERSION + 2, agent_version="9.0")
    for count in (1, 2):
        out = play.send(do.Joined(0.0, far))
        (drain,) = of(do.SendDrain, out)
        assert drain.device == "a"
        assert drain.reason.startswith(
            f"its agent is release 9.0 (protocol {PROTOCOL_VERSION + 2}), this coordinator is"
        )
        assert play.state.dropped == {"protocol": count}
        about = [("warning", "a", {"text": f"a is refused: {drain.reason}", "about": "protocol"})]
        assert told(out) == (about if count == 1 else [])
    assert play.state.devices == {}


def test_what_a_device_holds_says_how_it_arrives() -> None:
    device = v.Device(Hello("a"))
    assert arrival_of(None, 2, (1, 1, 1)) == "joining"
    assert arrival_of(device, 1, (1, 1, 1)) == "joining"
    holds = {number: arrival_of(replace(device, holds=number), 3, (1, 1, 1)) for number in (1, 2, 3, 4)}
    assert holds == {1: "joining", 2: "entering", 3: "staying", 4: "staying"}
    assert arrival_of(replace(device, holds=1), 3, (1, 0, 1)) == "entering", "a stage without rounds changed nothing"


def test_the_nearest_refusal_is_named_with_both_numbers() -> None:
    def refused(**refusals: Refusal) -> v.State:
        play = Play()
        stage = play.plan.stages[0]
        placements = {name: do.Placement(name, stage, refusal=one) for name, one in refusals.items()}
        devices = {name: v.Device(Hello(name), placement=one) for name, one in placements.items()}
        return replace(play.state, devices=devices, stage=1)

    assert nearest_refusal(refused()) == ""
    one = Refusal("memory", 2.0**21, 2.0**20, "B")
    text = "no device can train stage 1: the nearest, 'a', needs 2.00 MiB and is allowed 1.00 MiB (memory)"
    assert nearest_refusal(refused(a=one)) == text
    further = Refusal("memory", 2.0**20, 2.0**22, "B")
    assert nearest_refusal(refused(b=further, a=one, c=Refusal("data"))) == f"{text} (3 devices were refused)"
    nothing = Refusal("disk", 1.0, 0.0, "B")
    assert nearest_refusal(refused(a=nothing, b=one)).startswith("no device can train stage 1: the nearest, 'b'")
    assert reason_text(Refusal("disk", 1.0, None, detail="full")) == "is refused for disk: full"
    assert reason_text(Refusal()) == "is refused for an unknown reason"
    assert (
        reason_text(replace(one, detail="of the step"))
        == "needs 2.00 MiB and is allowed 1.00 MiB (memory: of the step)"
    )


def test_unusable_updates_are_counted_until_the_quarantine() -> None:
    play = training(replace(POLICY, quarantine_after=2, quarantine_rounds=3))
    refusal = Refusal("range", 2.0, 1.0)
    why = {**NOBODY, "reason": "range", "needed": 2.0, "allowed": 1.0}
    steps = Steps(play.state, 0.0)
    count_rejected(steps, "a", refusal)
    assert told(steps.out) == [("rejected", "a", why)]
    assert steps.state.devices["a"].barred == 0
    count_rejected(steps, "a", replace(refusal, reason="parts"))
    counts = {"range": 1, "parts": 1}
    assert told(steps.out)[2] == (
        "quarantined", "a", {"bad": 2, "rounds": 3, "rejected": counts, **why, "reason": "parts"},
    )  # fmt: skip
    device = steps.state.devices["a"]
    assert (device.bad, device.rejected, device.barred) == (2, counts, 4)
    count_rejected(steps, "a", refusal)
    assert told(steps.out)[-1][0] == "rejected", "once"
    (left,) = not_asked(steps.state).values()
    assert (left.status, left.refusal) == (
        "quarantined",
        Refusal(
            "quarantine", 3.0, 1.0, "updates",
            "3 updates in a row could not be used (in all: parts × 1, range × 2); not asked until round 4 of the run",
        ),
    )  # fmt: skip
    for number, back in ((4, False), (5, True)):
        later = Steps(replace(steps.state, number=number), 0.0)
        readmit(later)
        assert (told(later.out), later.state.devices["a"].barred) == (
            [("readmitted", "a", {})] if back else [],
            0 if back else 4,
        )
    assert later.state.devices["a"].bad == 0


def test_a_quarantine_for_good_never_ends() -> None:
    play = training(replace(POLICY, quarantine_after=1, quarantine_rounds=0))
    steps = Steps(play.state, 0.0)
    count_rejected(steps, "a", Refusal("range"))
    assert not_asked(steps.state)["a"].refusal.detail.endswith(
        "(in all: range × 1); not asked until the end of the run"
    )
    steps = Steps(replace(steps.state, number=99), 0.0)
    readmit(steps)
    assert steps.state.devices["a"].barred == -1
    never = Steps(training(replace(POLICY, quarantine_after=0)).state, 0.0)
    for _ in range(9):
        count_rejected(never, "a", Refusal("range"))
    assert never.state.devices["a"].barred == 0


# --- rounds


def test_a_round_that_fails_says_who_did_what_and_waits_longer_each_time() -> None:
    play = training(replace(POLICY, quorum=1.0, max_attempts=3))
    play.announce("a")
    play.receive("a")
    out = play.decline("b", Refusal("data", 4.0, 2.0, "samples"))
    why = "needs 4 samples and is allowed 2 samples (data)"
    text = f"attempt r1/s1/r1/a1 got 1 of 2 updates it needs (a done; b declined ({why}))"
    assert warnings(out) == [f"{text}; it is tried again"]
    assert of(do.SendAbort, out) == [do.SendAbort("a", FIRST, "the attempt failed")]
    assert of(do.SavedRound, out) == [do.SavedRound(1, 1, 1, "failed", participants=("a",))]
    assert len(of(do.EndTransfers, out)) == 1
    assert (play.state.phase, play.state.until) == (v.Phase.RETRYING, 1.0)
    assert of(do.SavedRound, play.wait(1.0)) == [do.SavedRound(1, 1, 2)]
    for name in ("a", "b"):
        play.decline(name, Refusal("data"))
    assert play.state.until == play.now + 2.0
    play.wait(2.0)
    play.decline("a", Refusal("data"))
    (fail,) = of(do.Fail, play.decline("b", Refusal("data")))
    assert "attempt r1/s1/r1/a3 got 0 of 2 updates" in str(fail)
    assert "it was tried 3 times" in str(fail)


def test_the_quorum_is_a_share_of_what_was_offered_rounded_up() -> None:
    play = Play(replace(POLICY, devices=3, quorum=0.5))
    for name in ("a", "b", "c"):
        play.hello(name)
    while play.plans:
        play.finish_plan()
    assert quorum(play.state) == 2
    play.leave_out("c")
    assert quorum(play.state) == 1
    assert quorum(replace(play.state, plan=replace(play.plan, policy=replace(POLICY, quorum=0.0)))) == 1
    assert quorum(replace(play.state, plan=replace(play.plan, policy=replace(POLICY, mode="async", quorum=1.0)))) == 1


def test_the_metrics_of_a_round_are_means_by_samples() -> None:
    play = training()
    for name, samples, metrics in (
        ("a", {"task": 3, "acc/stage1": 1}, {"loss": 1.0, "x": 4.0}),
        ("b", {"task": 1}, {"loss": 5.0}),
    ):
        play.send(do.Announced(0.0, Update(name, FIRST, {"task": REF}, samples, metrics)))
        play.receive(name)
    assert metric_means(play.state) == {"loss": 2.0, "x": 4.0}
    assert summary(play.state, 9.0)["seconds"] == 9.0


def test_one_that_is_left_out_ends_its_part() -> None:
    play = training()
    out = play.leave_out("a")
    why = Refusal("left_out", detail="this device is left out of the run (terminal)")
    assert told(out)[0] == ("left_out", "a", {"by": "terminal"})
    assert of(do.SendAbort, out) == [do.SendAbort("a", FIRST, why.detail)]
    assert of(do.SendDrain, out) == [do.SendDrain("a", "this device is left out of the run")]
    assert [(row.status, row.refusal) for row in of(AssignmentRow, out)] == [("left_out", why)]
    assert (play.status("a"), play.state.devices["a"].left_out) == ("left_out", "terminal")
    assert of(do.SendDrain, play.hello("a")) == of(do.SendDrain, out)
    out = play.take_in("a")
    assert told(out) == [("taken_in", "a", {"by": "web", "online": True})]
    assert of(do.SendWelcome, out) == [do.SendWelcome("a")]
    steps = Steps(play.state, 0.0)
    release(steps, "a", why)
    assert steps.out == [], "its part has ended already"


def test_a_pause_is_recorded_with_who_asked() -> None:
    play = training()
    assert told(play.pause()) == [("pausing", "", {"by": "terminal"})]
    assert told(play.pause()) == []
    assert play.state.dropped == {"paused already": 1}
    assert told(play.resume()) == [("resumed", "", {"by": "web"})]
    early = Play()
    assert told(early.pause()) == [("paused", "", {"by": "terminal", "run": "r1"})]
    play.now = 4.0
    assert told(play.stop()) == [("run_stopped", "", {"by": "terminal", "seconds": 4.0})]


def test_a_straggler_is_named_and_its_staleness_counted() -> None:
    play = training(KEEPING, stages=rounds_of("keep"))
    play.announce("a")
    play.receive("a")
    play.wait(POLICY.deadline_s)
    closed = told(play.finish_aggregate())[0][2]
    assert (closed["updates"], closed["behind"], closed["staleness"]) == (1, ["b"], {})
    started = told(play.finish_evaluate())[-1]
    assert started[:2] == ("round_started", "")
    assert started[2]["behind"] == ["b"]
    play.announce("b", FIRST)
    play.receive("b")
    play.announce("a")
    play.receive("a")
    closed = told(play.finish_aggregate())[0][2]
    assert (closed["participants"], closed["staleness"]) == (["a", "b"], {"b": 1})


def test_an_async_round_closes_when_the_buffer_is_full() -> None:
    play = training(ASYNC, stages=rounds_of("async"))
    play.hello("c")
    play.finish_plan()
    for name in ("a", "c"):
        assert play.aggregate is None
        play.announce(name)
        play.receive(name)
    assert [update.device for update in play.aggregate.updates] == ["a", "c"]


@pytest.mark.parametrize(("seconds", "status"), [(99.9, "offered"), (100.0, "late")])
def test_who_has_not_answered_at_the_deadline_is_late(seconds: float, status: str) -> None:
    play = training()
    play.announce("a")
    play.receive("a")
    out = play.wait(seconds)
    assert play.status("b") == status
    aborts = [do.SendAbort("b", FIRST, "the round is closed")] if status == "late" else []
    assert of(do.SendAbort, out) == aborts


def test_one_that_went_offline_is_waited_for_in_the_grace_and_then_lost() -> None:
    play = training()
    play.announce("a")
    play.receive("a")
    assert told(play.send(do.DeviceOffline(0.0, "b", "will"))) == [("device_left", "b", {"reason": "will"})]
    play.wait(4.9)
    assert play.status("b") == "offered"
    play.hello("b", FIRST)
    play.wait(10.0)
    assert play.status("b") == "accepted", "back in time: the grace is over"
    play.send(do.DeviceOffline(play.now, "b"))
    play.wait(4.9)
    assert play.aggregate is None
    play.wait(0.2)
    assert play.status("b") == "lost"


def test_an_update_of_no_samples_has_no_part_in_the_means() -> None:
    play = training()
    for name, samples, loss in (("a", {}, 9.0), ("b", {"task": 2}, 1.0)):
        play.send(do.Announced(0.0, Update(name, FIRST, {"task": REF}, samples, {"loss": loss})))
        play.receive(name)
    assert metric_means(play.state) == {"loss": 1.0}
    alone = training()
    alone.send(do.Announced(0.0, Update("a", FIRST, {"task": REF}, {}, {"loss": 9.0})))
    alone.receive("a")
    assert metric_means(alone.state) == {}


def waiting_with(**devices: v.Device) -> Steps:
    steps = Steps(replace(Play().state, devices=devices, stage=1, phase=v.Phase.PLANNING), 5.0)
    wait_for_able(steps)
    return steps


def test_without_a_device_that_can_train_a_run_fails_or_waits_and_says_why() -> None:
    stage = Play().plan.stages[0]

    def device(refusal: Refusal | None, **changes: Any) -> v.Device:
        return v.Device(Hello("a"), placement=do.Placement("a", stage, refusal=refusal), **changes)

    unlabelled, budget = Refusal(UNLABELLED), Refusal("memory", 2.0**21, 2.0**20, "B")
    text = "no device can train stage 1: the nearest, 'a', is refused for "
    assert waiting_with(a=device(unlabelled)).out == [do.Fail("DataError", f"{text}{UNLABELLED}", LABEL_THEM)]
    (fail,) = waiting_with(a=device(unlabelled), b=device(budget)).out
    assert fail == do.Fail(
        "BudgetError",
        "no device can train stage 1: the nearest, 'b', needs 2.00 MiB and is allowed 1.00 MiB (memory) "
        "(2 devices were refused)",
    )
    (fail,) = waiting_with(a=device(None, barred=-1), b=device(budget)).out
    assert fail == do.Fail("RunError", "every device that can train stage 1 is in quarantine: a")
    steps = waiting_with(a=device(budget), b=device(None, left_out="web"), c=v.Device(Hello("c")))
    assert (steps.state.phase, steps.state.until) == (v.Phase.WAITING, 15.0)
    assert warnings(steps.out) == [
        "no device that can train stage 1 is connected (left out of the run: b); waiting 10 s for one"
    ]
    wait_for_able(steps)
    assert len(steps.out) == 1, "said once"


def test_what_a_round_is_expected_to_cost_depends_on_what_the_device_holds_and_on_its_place() -> None:
    """Whole parts in a stage's last round, a signature once, no prototypes in the very first round."""
    cost = Cost(
        joining_down_bytes=100, entering_down_bytes=60, prototypes_down_bytes=7, whole_up_bytes=50, signature_bytes=3
    )
    usual = {"payload_down_bytes": Figure(40.0), "payload_up_bytes": Figure(20.0), "flops": Figure(5.0)}
    stages = tuple(replace(stage, rounds=n) for stage, n in zip(Play().plan.stages, (2, 3), strict=True))
    placement = do.Placement("a", stages[0], cost=cost, predicted=usual)

    def bytes_of(stage: int, number: int, holds: int | None, **changes: Any) -> list[float | None]:
        state = replace(Play(stages=stages).state)
        if holds is not None:
            state = replace(state, devices={"a": v.Device(Hello("a"), holds=holds)})
        found = expected(state, Attempt("r1", stage, number, 1), replace(placement, **changes), "a")
        return [found[name].value for name in ("payload_down_bytes", "payload_up_bytes", "flops")]

    assert bytes_of(1, 1, None) == [93.0, 23.0, 5.0]
    assert bytes_of(1, 2, None) == [100.0, 53.0, 5.0]
    assert bytes_of(2, 1, None) == [100.0, 23.0, 5.0]
    assert bytes_of(2, 1, 0) == [100.0, 23.0, 5.0]
    assert bytes_of(2, 1, 1) == [60.0, 20.0, 5.0]
    assert bytes_of(2, 2, 2) == [40.0, 20.0, 5.0]
    assert bytes_of(2, 3, 2) == [40.0, 50.0, 5.0]
    first = {**usual, "flops": Figure(9.0)}
    flops = [bytes_of(*place, predicted_first=first)[2] for place in ((2, 1, 2), (2, 2, 2), (2, 2, 1), (2, 2, None))]
    assert flops == [9.0, 5.0, 9.0, 9.0]
    assert expected(Play(stages=stages).state, FIRST, replace(placement, predicted={}), "a") == {}


def test_a_heartbeat_that_reports_work_stands_for_a_lost_acceptance() -> None:
    play = training()
    play.send(do.HeartbeatSeen(0.0, "a", FIRST))
    assert play.status("a") == "accepted"
    late = play.now + play.state.timeouts.offer_s
    assert of(do.SendOffer, play.send(do.HeartbeatSeen(late, "b", None)))[0].device == "b", "it knows of no offer"
    assert play.send(do.HeartbeatSeen(0.0, "z")) == [do.SendWelcome("z")]
