"""Runs side by side: figures against the first run's, what cannot be compared, and the settings that differ."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ledger_fixture import ledger_in, saved_round
from report_fixture import MIB, run_report
from rich.console import Console
from test_cli_read import edgefl

from coordinator.core.moves import SaveEnd
from coordinator.ledger.ledger import Ledger
from edgefl.plan.job import RunPlan
from edgefl.records import Attempt, Capabilities, EvaluationRow, Figure
from edgefl.report import quality
from edgefl.report.compare import Comparison, compare, grids, headline
from edgefl.report.compare_output import to_csv, to_json
from edgefl.report.grid import print_grids
from edgefl.report.settings import differing
from edgefl.run_records import AssignmentRow, DeviceRow, Reference, RunReport


def real_run(runs: Path, name: str, config: dict[str, Any], *, sent: float, accuracy: float) -> None:
    """A run of one round on a ledger of its own; energy has no sensor."""
    figures = {"payload_up_bytes": Figure(sent, "counted", "chunks"), "energy_j": Figure(reason="no sensor")}
    with Ledger(ledger_in(runs / name)) as ledger:
        ledger.create(RunPlan(run=name, name="own", recipe="some", config=config), {}, {"acc/embed": 4}, at=100.0)
        done = AssignmentRow("a", 1, 1, 1, "done", batch_size=4, measured=figures)
        score = EvaluationRow(1, 1, ("acc",), "none", "accuracy", accuracy, 40)
        rows = [DeviceRow("a"), saved_round(Attempt(name, 1, 1, 1), "done"), done, score, SaveEnd("done")]
        ledger.commit(name, rows, [], 100.0 + sent / MIB)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    settings = {"training": {"epochs": 1, "lr": 0.1}, "data": {"source": "x.npz", "test": "here/test.npz"}}
    more = {"training": {"epochs": 2, "lr": 0.1}, "data": {"source": "x.npz", "test": "there/test.npz"}}
    real_run(folder, "r1-first", {"run": settings, "recipe": {"name": "some"}}, sent=2.0 * MIB, accuracy=0.8)
    real_run(folder, "r2-second", {"run": more, "recipe": {"name": "some"}}, sent=1.0 * MIB, accuracy=0.75)
    monkeypatch.setenv("EDGEFL_RUNS", str(folder))
    monkeypatch.setenv("COLUMNS", "80")
    return folder


def shown(found: Comparison, width: int) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    print_grids(grids(found), console)
    return console.export_text()


def line_of(text: str, beginning: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(beginning)).split()


def test_two_runs_of_two_ledgers_stand_side_by_side(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = edgefl("compare", "r1", str(runs / "r2-second"), capsys=capsys)
    assert code == 0
    assert line_of(out, "accuracy, acc")[-4:] == ["%", "80.0", "75.0", "−5.0"]
    assert line_of(out, "payload sent")[-4:] == ["MiB", "2.00", "1.00", "0.500×"]
    assert line_of(out, "whole run")[-4:] == ["s", "2.00", "1.00", "0.500×"]
    assert line_of(out, "energy")[:6] == ["energy", "J", "—", "b", "—", "b"]  # never a zero
    assert "b  no sensor" in out
    assert line_of(out, "training.epochs") == ["training.epochs", "1", "2"]
    assert "training.lr" not in out  # the same in both
    assert "test.npz" not in out  # where a run's files lie is no setting
    assert max(map(len, out.splitlines())) <= 80


def test_json_and_csv_hold_the_same_figures(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = json.loads(edgefl("compare", "r1", "r2", "--format", "json", capsys=capsys)[1])
    assert [(run["label"], run["run"]) for run in body["runs"]] == [("A", "r1-first"), ("B", "r2-second")]
    figures = {line["name"]: line for line in body["figures"]}
    assert figures["payload sent"]["ratios"] == [1.0, 0.5]
    assert figures["energy"]["figures"][1] == {"value": None, "kind": "measured", "source": "", "reason": "no sensor"}
    assert body["settings"] == {"training.epochs": ["1", "2"]}
    rows = list(csv.DictReader(io.StringIO(edgefl("compare", "r1", "r2", "--format", "csv", capsys=capsys)[1])))
    cells = {(row["label"], row["figure"]): row for row in rows}
    assert (cells["B", "payload sent"]["value"], cells["B", "payload sent"]["ratio"]) == (str(1.0 * MIB), "0.5")
    assert (cells["A", "energy"]["value"], cells["A", "energy"]["reason"]) == ("", "no sensor")
    assert cells["A", "energy"]["kind"] == "missing"
    score = cells["B", "accuracy, acc"]
    assert (score["ratio"], float(score["points"])) == ("", pytest.approx(-5.0))
    assert figures["accuracy, acc"]["ratios"] == [None, None]
    assert cells["B", "training.epochs"]["value"] == "2"


def test_a_run_that_is_not_there_one_alone_and_one_twice(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = edgefl("compare", "r1", "r2-secnd", capsys=capsys)
    assert code == 17
    assert "Did you mean r2-second?" in told
    assert edgefl("compare", "r1", capsys=capsys)[0] == 2
    code, _, told = edgefl("compare", "r1", str(runs / "r1-first"), capsys=capsys)
    assert (code, "again" in told) == (2, True)


def test_what_can_not_be_compared_is_said_with_the_reason() -> None:
    first = run_report()
    there = EvaluationRow(1, 1, ("image", "text"), "none", "rsum", 120.0, 40)
    other = RunReport(
        run="pairs",
        status="interrupted",
        config={"data": {"source": "other"}},
        part_bytes={"image/embed": 1, "text/embed": 1},
        devices=(DeviceRow("a", capabilities=Capabilities(machine="aarch64", cores=4)),),
        evaluations=(there,),
    )
    found = compare([first, other, msgspec.structs.replace(first, config={"seed": 4})])
    missed = (
        "A, C: orin-nano trained 11 of 12 rounds (lost contact), nano trained 11 of 12 rounds (memory ceiling hit "
        "while training), tiny trained 2 of 12 rounds (step memory over budget); its totals are of 36 of 48 device "
        "rounds"
    )
    assert found.remarks == (
        missed,
        "B: interrupted; its figures are of the 0 rounds it finished",
        "B: scores cannot be compared with A's: rsum is not accuracy",
        "B: a model of image + text, A's of acc + gyro: another task, whose scores are not comparable",
        "B: on another kind of machine than A: seconds and joules are not comparable",
        "C: other data than A's (data, seed): a difference in score is not the method's alone",
    )
    scores = {line.name: [figure.reason for figure in line.figures] for line in found.lines if line.group == "scores"}
    assert scores["accuracy, acc + gyro"] == ["", "measured by rsum", ""]
    assert scores["rsum, image + text"][0] == "measured by accuracy"
    steps = next(line for line in found.lines if line.name.startswith("step memory"))
    assert [figure.value is None for figure in steps.figures] == [False, True, False]
    assert steps.figures[1].reason == "no round was trained"
    energy = next(line for line in found.lines if line.name == "energy")
    assert energy.ratios == (None, None, None)  # a lower bound has no ratio


def test_simple_models_stand_beside_the_runs_and_one_that_is_better_is_said() -> None:
    first = run_report()
    (score,) = {row.value for row in quality.latest(first.evaluations) if row.missing == "none"}
    better = Reference("accuracy", {"majority": 0.25, "forest": score + 0.1}, 80)
    both = compare([first, msgspec.structs.replace(first, reference=better)])
    lines = {line.name: line for line in both.lines if line.group == "reference"}
    assert [line.figures[1].value for line in lines.values()] == [0.25, score + 0.1]
    assert "scikit-learn" in lines["accuracy, forest"].figures[0].reason
    text = shown(both, 100)
    assert line_of(text, "accuracy, majority")[-3:] == ["—", "a", "25.0"]
    assert f"B: Below a simple model: forest has {100 * score + 10:.1f} %" in text
    assert "accuracy, forest" in to_csv(both)
    assert "Simple models" not in shown(compare([first, first]), 100)


def test_unequal_work_is_said_in_the_sentence_and_who_did_not_train_is_named() -> None:
    first = run_report()
    wrist = first.assignments[0].device
    fewer = tuple(row for row in first.assignments if row.device != wrist)
    other = msgspec.structs.replace(first, rounds=first.rounds[:1], assignments=fewer)
    found = compare([first, other])
    done = [sum(row.status == "done" for row in run.rounds) for run in found.runs]
    assert done[0] != done[1]
    told, first_told = headline(found).split("; A itself: ")
    assert f"totals of {done[1]} rounds against {done[0]}, totals of 3 of 4 device rounds ({wrist} 0 of 1)" in told
    assert first_told.startswith("totals of 36 of 48 device rounds (orin-nano 11 of 12, nano 11 of 12, tiny 2 of 12)")
    assert any(text.startswith(f"B: {wrist} trained no round") for text in found.remarks)
    same = headline(compare([first, first]))
    assert "device rounds" not in same


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_a_terminal(width: int) -> None:
    one = run_report()
    settings = {**one.config, "training": {"epochs": 3, "batch_size": 16}}
    text = shown(compare([one, msgspec.structs.replace(one, config=settings)]), width)
    assert max(map(len, text.splitlines())) <= width
    assert line_of(text, "FLOPs, forward and backward")[-1] == "1.00×"
    assert line_of(text, "training.lr")[-2:] == ["not", "set"]  # a dash is a figure that was not measured


def test_settings_differ_by_their_smallest_common_whole() -> None:
    fleet = [{"name": "a", "profile": "p"}, {"name": "b", "profile": "q"}]
    runs: list[object] = [
        {"seed": 1, "fleet": fleet, "source": {"har": {"window": 5, "step": None}}, "rounds": [1, 2]},
        {"seed": 1, "fleet": [fleet[0], {"name": "b", "profile": "z"}], "source": "x.npz", "rounds": [1, 3]},
    ]
    assert [(one.path, one.values) for one in differing(runs)] == [
        ("fleet.b.profile", ("q", "z")),
        ("source", ("{har: {window: 5}}", "x.npz")),
        ("rounds", ("[1,2]", "[1,3]")),
    ]


def test_secrets_are_not_shown() -> None:
    runs = [RunReport(config={"broker": f"mqtt://me:word{n}@host{n}"}) for n in (1, 2)]
    text = to_json(compare(runs)) + to_csv(compare(runs))
    assert "mqtt://host1" in text
    assert "word" not in text
