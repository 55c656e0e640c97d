"""Work that a run's devices did not do: rounds they missed, and encoder stages they left out; and how it is told."""

from __future__ import annotations

import csv
import io
from typing import Any

import msgspec
import pytest
from report_fixture import MIB
from rich.console import Console

from edgefl.records import Capabilities, EvaluationRow, Figure, Refusal
from edgefl.report import decisions, resources, shortfall, story
from edgefl.report.attendance import attendance
from edgefl.report.compare import Comparison, compare, grids, headline
from edgefl.report.compare_output import to_csv, to_json
from edgefl.report.grid import print_grids
from edgefl.report.refusals import REASONS
from edgefl.report.writers import to_html
from edgefl.run_records import OPEN, AssignmentRow, DeviceRow, EventRow, RoundRow, RunReport

LIMIT = Refusal("payload", 12.0 * MIB, 8.0 * MIB, "B")
WHOLE = tuple(f"{m}/{part}" for m in ("acc", "gyro") for part in ("embed", "stage1", "stage2"))
BOX = {"": 8, "acc": 8, "gyro": 8}


def trained(device: str, stage: int, parts: tuple[str, ...]) -> AssignmentRow:
    figures = {"payload_up_bytes": Figure(2.0 * MIB, "counted", "chunks"), "step_peak_bytes": Figure(9.0 * MIB)}
    return AssignmentRow(device, stage, 1, 1, "done", trained=(*parts, "task"), measured=figures)


def run(schedule: str, rows: tuple[AssignmentRow, ...], *scores: float, **more: Any) -> RunReport:
    """Two devices in stages 1 and 2, a round each."""
    stages = (
        {"index": 1, "trained": [part for part in WHOLE if not part.endswith("2")] + ["task"]},
        {"index": 2, "trained": [*WHOLE, "task"]},
    )
    recipe = {"name": "own", "schedule": {schedule: {"embed": "auto"} if schedule == "layerwise" else {}}}
    values = {
        "run": schedule,
        "status": "done",
        "finished_at": 30.0,
        "config": {"run": {"slots": {"schedule": {schedule: {}}}}, "recipe": recipe},
        "stages": stages,
        "devices": (DeviceRow("box", samples=BOX), DeviceRow("wrist", samples={"": 8, "acc": 8})),
        "rounds": tuple(RoundRow(s, 1, 1, "done", 10.0 * s, 10.0 * s + 4, ("box",)) for s in (1, 2)),
        "assignments": rows,
        "evaluations": tuple(EvaluationRow(n, 1, ("acc",), "none", "accuracy", v, 9) for n, v in enumerate(scores, 1)),
    }
    return RunReport(**(values | more))


ACC = tuple(part for part in WHOLE if part.startswith("acc"))
FULL = (
    *(trained("box", 1, WHOLE[:2] + WHOLE[3:5]), trained("box", 2, WHOLE)),
    *(trained("wrist", 1, ACC[:2]), trained("wrist", 2, ACC)),
)
#: Of wrist in stage 2 nothing.
MISSED = (*FULL[:3], AssignmentRow("wrist", 2, 1, 1, "refused", LIMIT, trained=ACC))
#: Of box in stage 2 the second encoder stage alone.
LESS = (FULL[0], trained("box", 2, ("acc/stage2", "gyro/stage2")), *FULL[2:])


def planned(**more: object) -> EventRow:
    return EventRow(1.0, "stage_planned", 2, 1, data={"placements": [{"device": "box", "ok": True, **more}]})


def shown(found: Comparison) -> str:
    console = Console(record=True, width=160, file=io.StringIO())
    print_grids(grids(found), console)
    return console.export_text()


def test_device_rounds_and_who_missed_some_and_why() -> None:
    assert attendance(run("layerwise", FULL))[:2] == (4, 4)
    work = attendance(run("layerwise", MISSED))
    assert (work.trained, work.of) == (3, 4)
    assert [one.text for one in work.missed] == ["wrist trained 1 of 2 rounds (bytes over budget)"]
    none = attendance(run("layerwise", (*FULL[:2], *(AssignmentRow("wrist", s, 1, 1, "lost") for s in (1, 2)))))
    assert [one.text for one in none.missed] == ["wrist trained no round (lost contact)"]


@pytest.mark.parametrize("status", sorted(OPEN))
def test_an_open_round_adds_what_has_moved_and_its_status_is_in_words(status: str) -> None:
    """Its bytes are on record while they move, long before its FLOPs, which no device owes yet."""
    costs = {"flops": Figure(10.0), "payload_up_bytes": Figure(40.0)}
    done = AssignmentRow("box", 1, 1, 1, "done", predicted=costs, measured=costs)
    moving = AssignmentRow("box", 2, 1, 1, status, predicted=costs, measured={"payload_up_bytes": Figure(4.0)})
    assert resources.measured("flops", [done, moving]) == resources.measured("flops", [done])
    assert resources.measured("payload_up_bytes", [done, moving]).value == 44.0
    assert resources.predicted("flops", [done, moving]) == resources.predicted("flops", [done])
    (missed, _) = attendance(run("layerwise", (done, moving))).missed
    assert missed.why == (REASONS[status],)


def test_what_client_selection_leaves_out_is_not_missed() -> None:
    joined = tuple(EventRow(0.0, "device_joined", device=name) for name in ("box", "wrist"))
    begun = tuple(EventRow(10.0 * s, "round_started", s, 1) for s in (1, 2))
    chosen = run("layerwise", FULL[:3], events=(*joined, *begun))
    assert attendance(chosen) == (3, 3, ())
    away = run("layerwise", FULL[:3], events=(joined[0], *begun))
    assert [one.text for one in attendance(away).missed] == ["wrist trained 1 of 2 rounds (not connected yet)"]


def test_totals_that_leave_out_a_device_s_rounds_say_so_everywhere() -> None:
    found = compare([run("layerwise", FULL, 0.9, 0.9), run("progressive", MISSED, 0.9, 0.9)])
    who = "wrist trained 1 of 2 rounds (bytes over budget)"
    assert f"B: {who}; its totals are of 3 of 4 device rounds" in found.remarks
    told = headline(found)
    assert told.startswith("B (progressive) to A (layerwise): accuracy 90.0 % (+0.0 points)")
    assert "≥ 0.750× the payload sent" in told
    assert "1.00× the step memory" in told  # a peak is no sum
    assert told.endswith("totals of 3 of 4 device rounds (wrist 1 of 2).")
    sent = next(line for line in found.lines if line.name == "payload sent")
    assert (sent.ratios, sent.figures[1].reason) == ((1.0, None), f"without 1 of 4 device rounds: {who}")
    text = shown(found)
    assert "3 / 4" in text
    assert f"without 1 of 4 device rounds: {who}" in text
    rows = {(row["label"], row["figure"]): row for row in csv.DictReader(io.StringIO(to_csv(found)))}
    assert rows["B", "payload sent"]["reason"] == sent.figures[1].reason
    assert (rows["A", "device rounds"]["value"], rows["B", "device rounds"]["value"]) == ("4.0", "3.0")
    assert who in to_json(found)


def test_runs_that_missed_the_same_rounds_are_compared_as_they_are() -> None:
    found = compare([run("layerwise", MISSED), run("progressive", MISSED)])
    sent = next(line for line in found.lines if line.name == "payload sent")
    assert (sent.ratios, sent.figures[1].reason) == ((1.0, 1.0), "")
    assert "device rounds" not in headline(found)
    first = compare([run("layerwise", MISSED), run("progressive", FULL)])
    assert "≤ 1.33× the payload sent" in headline(first)
    assert "A itself: totals of 3 of 4 device rounds" in headline(first)


def test_a_last_score_stands_beside_those_of_the_last_rounds() -> None:
    first = run("layerwise", FULL, 0.97, 0.98, 0.98, 0.98)
    found = compare([first, run("end_to_end", FULL, 0.5, 0.996, 0.804, 0.996, 0.938)])
    lines = {line.name: [figure.value for figure in line.figures] for line in found.lines}
    assert lines["accuracy, acc"] == [0.98, 0.938]
    over = {of: lines[f"accuracy, acc: {of} of the last 4 rounds"] for of in ("median", "lowest", "highest")}
    assert over == {"median": [0.98, pytest.approx(0.967)], "lowest": [0.97, 0.804], "highest": [0.98, 0.996]}
    note = "B: accuracy, acc was 80.4 % to 99.6 % over its last 4 rounds; the last, 93.8 %, says little alone"
    assert note in found.remarks
    assert not [text for text in found.remarks if text.startswith("A: accuracy")]  # one point
    assert "93.8 % (−4.2 points; median of the last 4 rounds 96.7 %, −1.3 points)" in headline(found)
    assert "80.4–99.6" in shown(found)
    once = compare([run("layerwise", FULL, 0.9), run("end_to_end", FULL, 0.9)])
    assert not [line for line in once.lines if line.group == "recent"]


def test_another_schedule_is_one_line_with_the_names() -> None:
    found = compare([run(name, FULL) for name in ("layerwise", "progressive", "end_to_end")])
    assert [tuple(one) for one in found.settings] == [("schedule", ("layerwise", "progressive", "end_to_end"))]
    assert [row for row in shown(found).splitlines() if row.startswith("schedule ")]
    other = run("layerwise", FULL)
    config = {"run": {}, "recipe": {"name": "own", "schedule": {"layerwise": {"embed": "frozen"}}}}
    same = compare([run("layerwise", FULL), msgspec.structs.replace(other, config=config)])
    assert [tuple(one) for one in same.settings] == [("recipe.schedule.layerwise.embed", ("auto", "frozen"))]
    assert headline(same).startswith("B to A:")  # the schedule is the same
    frozen = compare([run("progressive", FULL), msgspec.structs.replace(other, config=config)])
    assert frozen.settings[0].values == ("progressive", "layerwise {embed: frozen}")
    unset = compare([run("layerwise", FULL), run("layerwise", FULL, config={"run": {"seed": 1}})])
    assert "not set" in shown(unset)


def test_seconds_between_rounds_are_told_apart_from_the_rounds() -> None:
    lines = {line.name: line.figures[0].value for line in compare([run("layerwise", FULL)] * 2).lines}
    assert (lines["whole run"], lines["in rounds"], lines["between rounds"]) == (30.0, 8.0, 22.0)


def test_a_device_that_trained_fewer_encoder_stages_is_named_with_the_limit() -> None:
    less = run("progressive", LESS, events=(planned(shortened=msgspec.structs.asdict(LIMIT)),))
    said = (
        "box trained fewer encoder stages than the schedule asks in stage 2: stage 2 instead of embeddings + stages "
        "1–2 (bytes over budget: needs 12.0 MiB, allowed 8.00 MiB)."
    )
    assert story.troubles(less) == [said]
    page = to_html(less, interactive=False)
    assert said in page
    assert "trains fewer" in page  # where the page says what a stage trains
    (row,) = decisions.refusals(less).rows
    assert [cell.text for cell in row] == [
        *("box", "2", "1", "plan", "bytes over budget", "12.0 MiB", "8.00 MiB"),
        "trained stage 2 instead of embeddings + stages 1–2",
    ]
    found = compare([run("layerwise", FULL), less])
    assert f"B: {said.removesuffix('.')}" in found.remarks


def test_devices_of_a_smaller_rank_are_named_apart_from_those_of_less_depth() -> None:
    whole = (
        "lora/a/stage1",
        "lora/4/a/stage1",
        "lora/8/a/stage1",
        "lora/a/stage2",
        "lora/4/a/stage2",
        "lora/8/a/stage2",
    )
    own = {
        "whole": whole,
        "four": (whole[0], whole[3]),
        "eight": (*whole[:2], *whole[3:5]),
        "late": whole[3:],
        "late-four": whole[3:4],
    }
    report = RunReport(
        stages=({"index": 1, "trained": whole},),
        assignments=tuple(AssignmentRow(name, 1, 1, 1, "done", trained=parts) for name, parts in own.items()),
    )
    found = {one.device: (one.rank, one.text) for one in shortfall.shortfalls(report)}
    assert found == {
        "four": (4, "rank 4"),
        "eight": (8, "rank 8"),
        "late": (0, "stage 2 instead of stages 1–2"),
        "late-four": (4, "stage 2 instead of stages 1–2, rank 4"),
    }
    assert shortfall.sentences(report) == [
        "2 devices (four, eight) trained low-rank terms of a smaller rank.",
        "2 devices (late, late-four) trained fewer encoder stages than the schedule asks.",
    ]


def test_a_device_without_a_modality_trains_all_that_is_asked_of_it() -> None:
    assert shortfall.shortfalls(run("layerwise", FULL)) == []  # wrist has no gyro


def test_a_run_that_has_not_recorded_the_limit_says_so() -> None:
    (one,) = shortfall.shortfalls(run("progressive", LESS, events=(planned(),)))
    assert one.limit == shortfall.UNKNOWN
    assert shortfall.sentences(run("progressive", LESS))[0].endswith("(reason not on record).")


def test_many_devices_that_trained_less_are_one_sentence() -> None:
    rows = tuple(msgspec.structs.replace(LESS[1], device=f"d{n}") for n in range(5))
    less = run("progressive", rows, devices=tuple(DeviceRow(f"d{n}", capabilities=Capabilities()) for n in range(5)))
    assert shortfall.sentences(less) == [
        "5 devices (d0 and 4 more) trained fewer encoder stages than the schedule asks."
    ]
