"""The sentence on top of a report, and the timeline, from runs worked out by hand."""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import datetime

import msgspec
import pytest
from report_fixture import MIB
from rich.console import Console

from edgefl.records import Budget, EvaluationRow, Figure, Refusal
from edgefl.report import bills, budget_plots, decisions, fleet_plots, story, tables, timeline
from edgefl.report.writers import print_report, to_html
from edgefl.run_records import AssignmentRow, DeviceRow, EndToEnd, EventRow, RoundRow, RunReport


def trained(device: str, step: float, up: float, down: float, flops: float, **more: object) -> AssignmentRow:
    values = {"step_peak_bytes": step, "payload_up_bytes": up, "payload_down_bytes": down, "flops": flops}
    figures = {name: Figure(float(value)) for name, value in values.items()}
    row = AssignmentRow(device=device, stage=1, round=1, attempt=1, status="done", measured=figures)
    return msgspec.structs.replace(row, **more)


RUN = RunReport(
    run="r",
    status="done",
    devices=(
        DeviceRow("box", budget=Budget(step_memory_bytes=100 * MIB)),
        DeviceRow("wrist", budget=Budget(step_memory_bytes=20 * MIB, payload_bytes=8 * MIB)),
    ),
    rounds=(RoundRow(1, 1, 1, "done", 10.0, 20.0, ("box", "wrist")),),
    assignments=(trained("box", 12 * MIB, MIB, MIB, 3e9), trained("wrist", 10 * MIB, MIB, 2 * MIB, 1e9)),
    evaluations=(
        EvaluationRow(1, 1, ("acc", "gyro"), "none", "accuracy", 0.992, 10),
        EvaluationRow(1, 1, ("acc",), "zero", "accuracy", 0.5, 10),
    ),
    end_to_end={"box": EndToEnd(60 * MIB, 44e9, 25 * MIB), "wrist": EndToEnd(50 * MIB, 4e9, 20 * MIB)},
)


def test_the_sentence_of_a_run_worked_out_by_hand() -> None:
    # wrist: 10 of 20 MiB of memory, 3 of 8 MiB of bytes; box: 12 of 100 MiB: the tightest is wrist's memory, 50 %.
    # memory 12 of 60 MiB: a fifth; FLOPs 2e9 of a mean 24e9: 1/12; bytes 2.5 of a mean 22.5 MiB: a ninth.
    assert story.headline(RUN) == (
        "2 of 2 devices trained; test accuracy 99.2 %; the tightest, wrist, used 50 % of its memory budget; a fifth of "
        "end-to-end’s memory, 1/12 of its FLOPs, a ninth of its bytes (this run as measured, end to end as predicted)."
    )


def test_the_tightest_budget_is_told_with_both_numbers_and_the_round() -> None:
    assert story.tightest_where(RUN) == (
        "Tightest budget: wrist, step memory, 10.0 MiB of 20.0 MiB in stage 1, round 1."
    )
    narrow = DeviceRow("wrist", budget=Budget(payload_bytes=4 * MIB))
    assert story.tightest_where(msgspec.structs.replace(RUN, devices=(RUN.devices[0], narrow))) == (
        "Tightest budget: wrist, payload of a round, 3.00 MiB of 4.00 MiB in stage 1, round 1."
    )
    assert story.tightest_where(RunReport(run="r")) == ""
    assert story.tightest_where(RUN) in to_html(RUN, interactive=False)


def test_the_short_report_names_the_slowest_round_and_the_payload_budget() -> None:
    second = RoundRow(1, 2, 1, "done", 20.0, 95.2, ("box", "wrist"))
    later = tuple(msgspec.structs.replace(row, round=2) for row in RUN.assignments)
    events = (EventRow(89.0, "update", 1, 2, "box"), EventRow(95.2, "update", 1, 2, "wrist"))
    report = msgspec.structs.replace(
        RUN, rounds=(*RUN.rounds, second), assignments=(*RUN.assignments, *later), events=events
    )
    told = story.slowest(report)
    assert told == "Slowest: stage 1, round 2, 1 min 15 s, waited for wrist: training 1 min 15 s."
    assert story.slowest(RUN) == "", "a single round"
    budgets = "Payload of a round at most: wrist 3.00 MiB of 8.00 MiB; each device's: --html."
    assert story.payload_used(report) == budgets
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(report, console)
    shown = console.export_text()
    assert told in shown
    assert budgets in shown


def test_of_equal_shares_the_sentence_and_the_table_of_budgets_have_the_same_first() -> None:
    alike = [DeviceRow(name, budget=Budget(payload_bytes=4 * MIB)) for name in ("box", "wrist")]
    rows = tuple(trained(name, MIB, MIB, MIB, 1e9) for name in ("box", "wrist"))
    report = msgspec.structs.replace(RUN, devices=tuple(alike), assignments=rows)
    assert "; the tightest, box, used 50 % of its payload budget" in story.headline(report)
    columns = tables.COLUMNS["budgets"]
    told = [dict(zip(columns, row, strict=True)) for row in tables.table(report, "budgets").rows]
    first = max(told, key=lambda row: row["share"])  # as pandas' nlargest(1, "share")
    assert (first["device"], first["budget"], first["share"]) == ("box", "payload_bytes", 0.5)


def test_a_bill_s_line_holds_what_a_round_took_against_each_budget() -> None:
    told = {bill.device: bill.facts for bill in bills.bills(RUN)}
    assert told["wrist"] == (
        "trained 1 of 1 rounds · step memory 10.0 MiB of 20.0 MiB · payload of a round 3.00 MiB of 8.00 MiB"
    )
    assert told["box"] == "trained 1 of 1 rounds · step memory 12.0 MiB of 100 MiB"  # no other budget


def test_only_what_is_known_is_said() -> None:
    bare = msgspec.structs.replace(RUN, end_to_end={}, evaluations=(), devices=(DeviceRow("box"), DeviceRow("wrist")))
    assert story.headline(bare) == "2 of 2 devices trained."
    assert story.headline(RunReport(run="r")) == "No device has joined yet."
    unmeasured = msgspec.structs.replace(RUN, assignments=(msgspec.structs.replace(RUN.assignments[0], measured={}),))
    assert story.headline(unmeasured) == "1 of 2 devices trained; test accuracy 99.2 %."
    assert story.savings(unmeasured) == []


def test_a_figure_that_one_round_lacks_is_no_saving() -> None:
    partial = {**RUN.assignments[1].measured, "flops": Figure(reason="lost")}
    rows = (RUN.assignments[0], msgspec.structs.replace(RUN.assignments[1], measured=partial))
    assert [one.name for one in story.savings(msgspec.structs.replace(RUN, assignments=rows))] == ["memory", "bytes"]


@pytest.mark.parametrize(
    ("spent", "words"),
    [
        (20, "a fifth"),
        (21, "a fifth"),
        (50, "half"),
        (28, "28 %"),
        (87, "87 %"),
        (8, "1/12"),
        (100, "100 %"),
        (130, "1.3 times"),
    ],
)
def test_a_share_is_said_as_people_say_it(spent: float, words: str) -> None:
    assert story.ratio(story.Saving("memory", "B", spent, None, 100.0)) == words


def test_the_model_of_the_most_modalities_gives_the_score() -> None:
    rows = [
        EvaluationRow(1, 1, ("a",), "none", "accuracy", 0.2, 1),
        EvaluationRow(1, 1, ("a", "b"), "none", "accuracy", 0.9, 1),
    ]
    assert "test accuracy 90.0 %" in story.headline(msgspec.structs.replace(RUN, evaluations=tuple(rows)))


def test_what_went_wrong_is_said_with_both_numbers_and_the_device_s_own_words() -> None:
    memory = Refusal("step_memory", 26.4 * MIB, 24.0 * MIB, "B", "memory above the idle trainer")
    error = Refusal("error", detail="IndexError: index out of range in self")
    rows = (
        AssignmentRow(device="wrist", stage=2, round=1, attempt=1, status="refused", refusal=memory),
        AssignmentRow(device="box", stage=1, round=1, attempt=1, status="declined", refusal=error),
    )
    assert story.troubles(msgspec.structs.replace(RUN, assignments=rows, rounds=())) == [
        (
            "wrist: refused by the plan in stage 2, step memory over budget: needs 26.4 MiB, allowed 24.0 MiB; "
            "not asked in this stage."
        ),
        "box: declined in stage 1, training failed: IndexError: index out of range in self; no update in this stage.",
    ]
    assert story.troubles(RUN) == []


def test_a_device_refused_in_several_stages_is_told_from_the_least_to_the_most_it_needed() -> None:
    rows = tuple(
        AssignmentRow("wrist", stage, 1, 1, "refused", Refusal("payload", needed * MIB, 8.0 * MIB, "B"))
        for stage, needed in ((4, 8.36), (5, 9.87), (6, 11.4))
    )
    assert story.troubles(msgspec.structs.replace(RUN, assignments=rows, rounds=())) == [
        (
            "wrist: refused by the plan in stages 4–6, bytes over budget: needs 8.36 to 11.4 MiB, allowed 8.00 MiB; "
            "not asked in these stages."
        )
    ]


def test_a_recall_is_said_in_words() -> None:
    rows = (EvaluationRow(1, 1, ("acc", "gyro"), "none", "acc_to_gyro_recall_at_1", 0.017, 10),)
    assert "; test recall at 1 (acc to gyro) 1.7 %" in story.headline(msgspec.structs.replace(RUN, evaluations=rows))


# The timeline


def at(seconds: float, kind: str, device: str = "", **data: object) -> EventRow:
    stage = 0 if kind in {"run_started", "device_joined", "device_left"} else 1
    return EventRow(1000.0 + seconds, kind, stage, stage, device, data)


def test_a_round_is_cut_into_what_the_device_did() -> None:
    # Offered at 10, announced after 6 s of which 4 in training steps, the update there at 19; the round ends at 20.
    figures = {"wall_s": Figure(6.0), "compute_s": Figure(4.0)}
    rows = (trained("box", 1, 1, 1, 1, measured=figures), AssignmentRow("wrist", 1, 1, 1, "lost"))
    events = (
        *(
            at(0, "run_started"),
            at(2, "device_joined", "box"),
            at(2, "device_joined", "wrist"),
            at(10, "round_started"),
        ),
        *(at(14, "device_left", "wrist"), at(19, "update", "box"), at(20, "round_closed"), at(24, "run_finished")),
    )
    report = msgspec.structs.replace(
        RUN, assignments=rows, events=events, rounds=(RoundRow(1, 1, 1, "done", 1010.0, 1020.0),)
    )
    assert timeline.length(report) == (1000.0, 24.0)
    assert [(span.device, span.activity, span.start, span.end) for span in timeline.spans(report)] == [
        ("box", "not joined yet", 0, 2),
        ("box", "waits", 2, 10),
        ("box", "fetches, prepares", 10, 12),
        ("box", "trains", 12, 16),
        ("box", "sends", 16, 19),
        ("box", "waits", 19, 24),
        ("wrist", "not joined yet", 0, 2),
        ("wrist", "waits", 2, 10),
        ("wrist", "no update", 10, 14),
        ("wrist", "away", 14, 24),
    ]
    trains = [row for row in timeline.busy(timeline.spans(report), 24.0, parts=6) if row["activity"] == "trains"]
    assert [row["devices"] for row in trains] == [0, 0, 0, 1, 0, 0]


def test_whom_the_plan_refused_is_shown_so_for_the_stage() -> None:
    rows = (AssignmentRow("wrist", 1, 1, 1, "refused", Refusal("step_memory", 2, 1, "B")),)
    rounds = (RoundRow(1, 1, 1, "done", 1010.0, 1020.0), RoundRow(2, 1, 1, "done", 1020.0, 1030.0))
    report = msgspec.structs.replace(RUN, devices=(DeviceRow("wrist"),), assignments=rows, rounds=rounds)
    found = [(span.activity, span.start, span.end) for span in timeline.spans(report)]
    assert found == [("refused", 0.0, 10.0), ("waits", 10.0, 20.0)]


def test_spans_of_a_run_without_rounds_are_none() -> None:
    assert timeline.spans(RunReport(run="r")) == []


def test_an_operator_s_pause_and_a_device_left_out_are_on_the_timeline() -> None:
    events = (
        *(at(0, "run_started"), at(0, "device_joined", "box"), at(0, "device_joined", "wrist")),
        *(at(4, "left_out", "wrist", by="web"), at(5, "pausing", by="web"), at(6, "paused", by="web")),
        *(at(9, "resumed", by="terminal"), at(10, "taken_in", "wrist", by="web"), at(12, "paused", by="web")),
        at(14, "run_stopped", by="web"),
    )
    rounds = (RoundRow(1, 1, 1, "done", 1001.0, 1006.0),)
    report = msgspec.structs.replace(RUN, assignments=(), events=events, rounds=rounds)
    assert timeline.pauses(report) == [(6.0, 9.0, "web"), (12.0, 14.0, "web")]
    found = [(span.activity, span.start, span.end) for span in timeline.spans(report) if span.device == "wrist"]
    assert found == [("waits", 0, 4), ("left out", 4, 10), ("waits", 10, 14)]
    chart = fleet_plots.over_time(report)
    assert chart is not None
    assert "Shaded: the operator had paused the run." in chart.caption
    shaded = chart.spec()["layer"][0]
    assert [(row["start"], row["end"], row["by"]) for row in shaded["data"]["values"]] == [
        (6, 9, "web"),
        (12, 14, "web"),
    ]


def test_a_pause_that_goes_on_lasts_as_long_as_the_record() -> None:
    events = (at(0, "run_started"), at(3, "paused", by="web"), at(5, "heard", "box"))
    assert timeline.pauses(msgspec.structs.replace(RUN, rounds=(), events=events)) == [(3.0, 5.0, "web")]


def test_one_sentence_tells_of_many_devices_with_one_reason_and_names_the_worst() -> None:
    def refused(device: str, stage: int, needed: float) -> AssignmentRow:
        why = Refusal("step_memory", needed * MIB, 4.0 * MIB, "B")
        return AssignmentRow(device=device, stage=stage, round=1, attempt=1, status="refused", refusal=why)

    rows = tuple(refused(f"d{n}", 2 + n % 2, 5.0 + n) for n in range(4))
    assert story.troubles(msgspec.structs.replace(RUN, assignments=rows, rounds=())) == [
        (
            "4 devices (d0 and 3 more): refused by the plan in stages 2–3, the most by d3, step memory over budget: "
            "needs 8.00 MiB, allowed 4.00 MiB; not asked in these stages."
        )
    ]
    apart = story.troubles(msgspec.structs.replace(RUN, assignments=rows[:3], rounds=()))
    assert [text.split(":")[0] for text in apart] == ["d0", "d1", "d2"]


def test_many_that_are_away_are_counted() -> None:
    rounds = tuple(RoundRow(1, n, 1, "done") for n in (1, 2))
    events = tuple(EventRow(0.0, "round_started", 1, n) for n in (1, 2))
    devices = tuple(DeviceRow(f"d{n}") for n in range(5))
    report = RunReport(run="r", devices=devices, rounds=rounds, events=events)
    assert story.troubles(report) == [
        "5 devices (d0 and 4 more): not connected yet, not offered in up to 2 of 2 rounds."
    ]


def test_whom_end_to_end_would_not_fit_is_said_with_both_numbers() -> None:
    prices = {
        "box": EndToEnd(60 * MIB, 44e9, 25 * MIB, Refusal("payload", 25 * MIB, 16 * MIB, "B")),
        "wrist": EndToEnd(50 * MIB, 4e9, 20 * MIB, Refusal("step_memory", 50 * MIB, 20 * MIB, "B")),
    }
    chart = budget_plots.against_end_to_end(msgspec.structs.replace(RUN, end_to_end=prices))
    assert chart is not None
    assert chart.caption.endswith(
        "In whole batches, without the planner's fallbacks to smaller steps or fewer parts, 2 of 2 devices could not "
        "train the whole model, each by the first of its limits that is short: box (bytes over budget: needs 25.0 MiB, "
        "allowed 16.0 MiB); wrist (step memory over budget: needs 50.0 MiB, allowed 20.0 MiB)."
    )
    plain = budget_plots.against_end_to_end(RUN)
    assert plain is not None
    assert "could not" not in plain.caption


def at_time(clock: str) -> float:
    return datetime.fromisoformat(f"2026-11-02 {clock}").astimezone().timestamp()


def after_a_revocation(*more: AssignmentRow) -> RunReport:
    """Six rounds of three devices; cam-c is revoked in the third, or before it."""
    names = ("cam-a", "cam-b", "cam-c")
    rounds, events, rows = [], [], []
    for number in range(1, 7):
        present = names if number < 3 else names[:2]
        rounds.append(RoundRow(1, number, 1, "done", participants=present))
        if number == 3 and not more:
            events.append(EventRow(at_time("16:11:59"), "device_left", device="cam-c", data={"reason": "revoked"}))
        events.append(EventRow(at_time("16:12:00") + number, "round_started", 1, number))
        rows += [AssignmentRow(name, 1, number, 1, "done") for name in present]
        if number == 3 and more:
            when = at_time("16:12:03") + 1.5
            events.append(EventRow(when, "device_left", device="cam-c", data={"reason": "revoked"}))
    joined = [EventRow(at_time("16:00:00"), "device_joined", device=name) for name in names]
    return RunReport(
        run="r4",
        status="done",
        devices=tuple(DeviceRow(name) for name in names),
        rounds=tuple(rounds),
        events=(*joined, *events),
        assignments=(*rows, *more),
    )


def test_a_revoked_device_is_told_on_top_with_the_time_and_its_rounds() -> None:
    report = after_a_revocation()
    assert story.troubles(report) == ["cam-c: revoked at 2026-11-02 16:11:59, 4 rounds of 6 (stages 1 (rounds 3–6))."]
    assert "cam-c: revoked at 2026-11-02 16:11:59" in to_html(report, interactive=False)
    started_again = (*report.events, EventRow(at_time("16:13:00"), "run_started"))
    resumed = msgspec.structs.replace(report, events=(*started_again, EventRow(0.0, "round_started", 1, 6)))
    assert decisions.absences(resumed)["cam-c"] == {"revoked": [(1, n) for n in (3, 4, 5, 6)]}


def test_the_round_in_which_a_device_was_revoked_counts_and_is_no_other_decision() -> None:
    row = AssignmentRow("cam-c", 1, 3, 1, "left_out", Refusal("revoked"))
    assert story.troubles(after_a_revocation(row)) == [
        "cam-c: revoked at 2026-11-02 16:12:04, 4 rounds of 6 (stages 1 (rounds 3–6))."
    ]
    (found,) = decisions.refusals(after_a_revocation(row)).rows
    assert [cell.text for cell in found][3:] == ["operator", "revoked", "", "", "out of the fleet"]


def test_only_an_operator_leaves_a_device_out_and_who_was_lost_or_refused_has_another_word() -> None:
    reasons = {
        "lost": Refusal(),
        "left_out": Refusal("left_out", detail="this device is left out of the run (web)"),
        "refused": Refusal("payload", 9.0 * MIB, 8.0 * MIB, "B"),
        "rejected": Refusal("not_finite"),
    }
    rows = tuple(
        AssignmentRow(f"d-{status}", 2, 1, 1, status, None if status == "lost" else why)
        for status, why in reasons.items()
    )
    report = msgspec.structs.replace(RUN, assignments=rows, rounds=())
    assert story.troubles(report) == [
        "d-lost: lost contact in stage 2; no update in this stage.",
        "d-left_out: left out by the operator in stage 2; left out of this stage.",
        (
            "d-refused: refused by the plan in stage 2, bytes over budget: needs 9.00 MiB, allowed 8.00 MiB; "
            "not asked in this stage."
        ),
        "d-rejected: without a usable update in stage 2, update holds NaN or infinity; no update in this stage.",
    ]
    then = {row[0].text: row[-1].text for row in decisions.refusals(report).rows}
    assert [name for name, text in then.items() if "left out" in text] == ["d-left_out"]


def test_a_device_that_was_silent_is_told_to_have_lost_contact() -> None:
    rounds = tuple(RoundRow(1, n, 1, "done") for n in (1, 2))
    left = EventRow(1.0, "device_left", device="d0", data={"reason": "silent for 35 s"})
    events = (EventRow(0.0, "device_joined", device="d0"), EventRow(0.5, "round_started", 1, 1), left)
    events = (*events, EventRow(2.0, "round_started", 1, 2))
    rows = (AssignmentRow("d0", 1, 1, 1, "done"),)
    report = RunReport(run="r", devices=(DeviceRow("d0"),), rounds=rounds, events=events, assignments=rows)
    assert story.troubles(report) == [
        "d0: lost contact (silent for 35 s), not offered in 1 of 2 rounds (stages 1 (round 2))."
    ]


def last_round(accuracies: Sequence[float], last: int, evaluated: Sequence[int] = (1, 2, 3)) -> RunReport:
    """Three rounds of three devices, the last of ``last``; accuracies of the evaluated ones."""
    names = ("cam-a", "cam-b", "cam-c")
    rounds = tuple(RoundRow(1, n, 1, "done", participants=names if n < 3 else names[:last]) for n in (1, 2, 3))
    rows = tuple(
        EvaluationRow(1, n, ("acc",), "none", "accuracy", value, 10)
        for n, value in zip(evaluated, accuracies, strict=True)
    )
    return RunReport(run="r3", devices=tuple(map(DeviceRow, names)), rounds=rounds, evaluations=rows)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (
            last_round((0.9, 0.996, 0.933), 1),
            "test accuracy 93.3 % (99.6 % a round before; the last round is of 1 of 3 devices)",
        ),
        (
            last_round((0.996, 0.933), 2, (1, 3)),
            "test accuracy 93.3 % (99.6 % 2 rounds before; the last round is of 2 of 3 devices)",
        ),
        (last_round((0.9, 0.996, 0.933), 3), "test accuracy 93.3 %"),
        (last_round((0.9, 0.92, 0.933), 1), "test accuracy 93.3 %"),
        (last_round((0.9, 0.9330001, 0.933), 1), "test accuracy 93.3 %"),
        (last_round((0.933,), 1, (3,)), "test accuracy 93.3 %"),
        (last_round((0.996, 0.933), 1, (1, 2)), "test accuracy 93.3 %"),
    ],
)
def test_the_sentence_tells_what_the_last_round_was_worth(report: RunReport, words: str) -> None:
    assert f"; {words}." in story.headline(report)
