"""The table of systems in one regime: run files load, tuning spends the same on everyone, figures and plots."""

from __future__ import annotations

import signal
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import yaml
from report_fixture import run_report

from benchmarks.accuracy import one_regime
from benchmarks.accuracy.table import collect, measures, page
from benchmarks.accuracy.table.collect import Outcome, Results, digest, outcome_of, own, patterns
from benchmarks.accuracy.table.grid import Cell, Grid, Settings
from benchmarks.common.exclusive import claimed
from edgefl.config.profiles import load_run
from edgefl.run_records import AssignmentRow, DeviceRow


@pytest.fixture(scope="module")
def grid() -> Grid:
    return Grid()


def outcome(method: str = "fedavg", seed: int = 1, rate: float = 0.5, **fields: object) -> Outcome:
    about = {"task": "har", "start": "pretrained", "lr": 1e-3, "rounds": 12}
    return Outcome(method=method, seed=seed, rate=rate, **{**about, **fields})


def accuracies(both: float, acc: float, gyro: float, mask: str = "zero") -> dict[str, float]:
    return {
        "acc+gyro|none|accuracy": both,
        f"acc|{mask}|accuracy": acc,
        f"gyro|{mask}|accuracy": gyro,
        "acc+gyro|none|macro_f1": 0.1,
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_cell_is_a_run_file_that_loads(grid, tmp_path):
    cells = [cell for cell in grid.cells() if (cell.seed, cell.rate) == (1, 0.5)]
    assert {cell.task for cell in cells} == set(grid.tasks)
    assert {cell.method for cell in cells} == set(grid.methods)
    for cell in cells:
        for settings in (*grid.trials(cell), *grid.more_trials(cell, grid.default(cell), grid.trials(cell))):
            (tmp_path / "run.yaml").write_text(yaml.safe_dump(grid.run_file(cell, settings)))
            config, _ = load_run(str(tmp_path / "run.yaml"))
            assert config.seed == 1
            assert config.data.missing.rate == 0.5
            assert config.training.lr.head == settings.lr
            started = {bool(encoder.pretrained) for encoder in config.model.encoders.values()}
            assert started == {cell.start == "pretrained"}


def test_every_method_of_a_task_is_run_alike(grid):
    """The same data, devices, rounds and share in a round; only recipe, slots and what the recipe needs differ."""
    for task in grid.tasks:
        cells = [c for c in grid.cells() if c.task == task and (c.seed, c.rate, c.start) == (1, 0.5, "pretrained")]
        files = [grid.run_file(cell, Settings(1e-3)) for cell in cells]
        for field in ("data", "training", "fleet", "round"):
            assert all(file[field] == files[0][field] for file in files)
        shares = {next(iter(file["slots"]["select"].values()))["share"] for file in files}
        assert shares == {grid.tasks[task]["share"]}


def test_half_of_the_people_are_complete(grid):
    file = grid.run_file(Cell("har", "mmic", "pretrained", 0.2, 1), Settings(1e-3))
    assert len(file["fleet"]) == 30
    assert len(file["data"]["missing"]["complete"]) == 15


class Recorder:
    """A runner whose runs score what their learning rate and slots say."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.ran: list[tuple[Cell, Settings]] = []

    def run(self, jobs, results, what):
        for cell, settings in jobs:
            self.ran.append((cell, settings))
            score = {1e-3: 0.5, 4e-3: 0.7}.get(settings.lr, 0.6) + (0.1 if settings.slots else 0.0)
            about = {**cell._asdict(), "lr": settings.lr, "slots": settings.slots, "score": score}
            results.add(outcome(**about, file=digest(self.grid.run_file(cell, settings))))
        return True


def test_tuning_spends_the_same_on_every_method_and_never_twice(grid, tmp_path):
    cells = [cell for cell in grid.cells() if cell.task == "har"]
    runner, tried = Recorder(grid), Results(tmp_path / "tuning.jsonl")
    assert one_regime.tune(grid, cells, runner, tried)
    spent = Counter(cell for cell, _ in runner.ran)
    assert set(spent.values()) == {grid.values["tuning"]["runs"]}
    assert {cell.seed for cell in spent}.isdisjoint(grid.seeds)  # the table's runs are others
    mine, plain = (grid.tuned_as(Cell("har", method, "pretrained", 0.2, 1)) for method in ("mmic", "fedavg"))
    assert one_regime.best(grid, tried, mine) == Settings(4e-3, grid.methods["mmic"]["tune"][0])
    assert one_regime.best(grid, tried, plain) == Settings(4e-3)
    assert [one.lr for cell, one in runner.ran if cell == plain] == [1e-3, 4e-3, 1.6e-2]  # on the better side
    again = Recorder(grid)
    assert one_regime.tune(grid, cells, again, Results(tmp_path / "tuning.jsonl"))
    assert again.ran == []


def test_what_failed_is_tried_once_more_and_another_grid_s_runs_do_not_count(grid, tmp_path):
    results, cell, one = Results(tmp_path / "r.jsonl"), Cell("har", "mmic", "pretrained", 0.2, 1), Settings(1e-3)
    values = grid.run_file(cell, one)
    failed = outcome(**{**cell._asdict(), "error": "error: no broker", "file": digest(values)})
    assert one_regime.due(grid, results, cell, one)
    results.add(failed)
    assert one_regime.due(grid, results, cell, one)
    results.add(failed)
    assert not one_regime.due(grid, results, cell, one)
    assert one_regime.best(grid, results, cell) is None
    other = {**values, "training": {**values["training"], "rounds": [1, 1, 1]}}
    assert digest(other) != digest(values)
    results.add(outcome(**{**cell._asdict(), "method": "fedavg", "file": digest(other)}))
    assert one_regime.due(grid, results, cell._replace(method="fedavg"), one)


def test_a_variant_takes_another_method_s_settings_and_keeps_its_own_change(grid):
    cell = Cell("har", "pmcmfl-matched", "pretrained", 0.5, 2)
    assert grid.tuned_as(cell) == grid.tuned_as(cell._replace(method="pmcmfl"))
    assert {one.rate for one in grid.cells() if one.method == cell.method} == {0.5}
    tuned = Settings(1e-3, {"objective": {"cross_entropy": {}, "prototype_contrast": {"weight": 0.01}}})
    slots = grid.run_file(cell, tuned)["slots"]
    assert (slots["objective"], slots["missing"]) == ("cross_entropy", {"prototype": {"by": "match"}})
    assert grid.run_file(cell._replace(method="pmcmfl"), tuned)["slots"]["objective"] == tuned.slots["objective"]


def test_an_alternative_that_has_left_the_grid_is_not_in_the_budget(grid, tmp_path):
    cells = [cell for cell in grid.cells() if cell[:2] == ("har", "pmcmfl")]
    tried, cell = Results(tmp_path / "tuning.jsonl"), grid.tuned_as(cells[0])
    slots = {"objective": {"cross_entropy": {}, "prototype_contrast": {"weight": 0.7}}}
    for one in (*grid.trials(cell), Settings(4e-3, slots)):
        about = {**cell._asdict(), "lr": one.lr, "slots": one.slots, "score": 0.5 + len(one.slots)}
        tried.add(outcome(**about, file=digest(grid.run_file(cell, one))))
    runner = Recorder(grid)
    assert one_regime.tune(grid, cells, runner, tried)
    assert [one.slots for _, one in runner.ran] == grid.methods["pmcmfl"]["tune"]
    assert one_regime.best(grid, tried, cell).slots != slots


def test_retrieval_is_tuned_by_rsum(grid, tmp_path):
    tried = Results(tmp_path / "tuning.jsonl")
    cell = grid.tuned_as(Cell("emoji_retrieval", "clip-fedavg", "pretrained", 0.5, 1))
    for lr, recall, total in ((1e-3, 0.10, 190.0), (4e-3, 0.11, 180.0)):
        about = {**cell._asdict(), "lr": lr, "score": recall, "own": {"received|rsum": total}}
        tried.add(outcome(**about, file=digest(grid.run_file(cell, Settings(lr)))))
    assert one_regime.best(grid, tried, cell) == Settings(1e-3)


def test_a_trial_that_failed_once_is_made_again(grid, tmp_path):
    cells = [cell for cell in grid.cells() if cell[:2] == ("har", "fedavg")]
    tried = Results(tmp_path / "tuning.jsonl")
    assert one_regime.tune(grid, cells, Recorder(grid), tried)
    last = tried.rows.pop()
    tried.rows.append(msgspec.structs.replace(last, error="error: no broker", score=None))
    again = Recorder(grid)
    assert one_regime.tune(grid, cells, again, tried)
    assert [one.lr for _, one in again.ran] == [last.lr]


def test_the_page_shows_the_newest_run_of_this_grid(grid, tmp_path):
    results, cell, one = Results(tmp_path / "r.jsonl"), Cell("har", "mmic", "pretrained", 0.2, 1), Settings(1e-3)
    digests = [digest(grid.run_file(cell, one)), "another grid"]
    for file, rounds in ((digests[0], 1), (digests[0], 2), (digests[1], 3)):
        results.add(outcome(**{**cell._asdict(), "lr": 1e-3, "slots": {}, "file": file, "rounds": rounds}))
    results.add(outcome(**{**cell._asdict(), "lr": 1e-3, "slots": {}, "file": digests[0], "error": "error: no broker"}))
    shown = results.only(one_regime.of_grid(grid)).newest()
    assert [row.rounds for row in shown.rows] == [2]
    assert len(results.rows) == 4


def test_the_command_writes_the_page_of_the_newest_runs(grid, tmp_path, monkeypatch):
    results, cell = Results(tmp_path / "table" / "runs.jsonl"), Cell("har", "lw-fedmml", "pretrained", 0.2, 1)
    file = digest(grid.run_file(cell, Settings(1e-3)))
    for value in (0.5, 0.9):
        about = {**cell._asdict(), "lr": 1e-3, "slots": {}, "file": file, "metrics": accuracies(value, 0.8, 0.6)}
        results.add(outcome(**about))
    monkeypatch.setattr(sys, "argv", ["one_regime", "--page", "--results", str(tmp_path / "table")])
    one_regime.main()
    (line,) = (line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| lw-fedmml |"))
    assert "| 90.0 |" in line


def test_results_survive_and_failures_are_run_again(tmp_path):
    results = Results(tmp_path / "a" / "runs.jsonl")
    results.add(outcome(metrics=accuracies(0.9, 0.8, 0.6)))
    results.add(outcome(seed=2, error="error: no broker"))
    again = Results(tmp_path / "a" / "runs.jsonl")
    assert again.rows == results.rows
    assert len(again.of(outcome().cell)) == 1
    assert again.of(outcome(seed=2).cell) == []


def test_two_commands_do_not_write_the_same_results(tmp_path):
    path = tmp_path / "results" / "runs.jsonl"
    with claimed(path), pytest.raises(SystemExit, match="another run of"), claimed(path):
        pass
    with claimed(path):
        assert path.read_bytes() == b""


def test_a_run_ends_with_the_benchmark_and_says_how_it_ended():
    assert collect._run([sys.executable, "-c", "print('x')"]) == (0, b"x\n", b"")
    with ThreadPoolExecutor(1) as pool:
        asleep = pool.submit(collect._run, [sys.executable, "-c", "import time; time.sleep(60)"])
        while not collect._RUNNING:
            time.sleep(0.01)
        collect.stop_all()
        assert asleep.result(timeout=30)[0] == -signal.SIGTERM
    assert not collect._RUNNING


def test_a_report_becomes_figures():
    report = run_report()
    found = outcome_of(report)
    done = [row for row in report.assignments if row.status == "done"]
    assert found["rounds"] == len(report.rounds)
    assert found["flops"] == pytest.approx(sum(row.measured["flops"].value for row in done))
    peaks = {stage: [r.measured["step_peak_bytes"].value for r in done if r.stage == stage] for stage in range(1, 7)}
    assert found["step_peak_bytes"] == max(statistics.median(values) for values in peaks.values() if values)
    payload = [row.measured[f"payload_{way}_bytes"].value for row in done for way in ("up", "down")]
    assert found["payload_bytes"] == pytest.approx(sum(payload))
    last = [
        row
        for row in report.evaluations
        if (row.stage, row.round) == (report.rounds[-1].stage, report.rounds[-1].round)
    ]
    assert len(found["metrics"]) == len({(row.available, row.missing, row.metric) for row in last})


def test_own_figures_are_each_devices_last_and_by_its_task():
    rows = [
        AssignmentRow(device="a", metrics={"trained_accuracy": 0.1}),
        AssignmentRow(device="a", metrics={"trained_accuracy": 0.5, "received_accuracy": 0.4}),
        AssignmentRow(device="b", metrics={"trained_accuracy": 0.7}),
        AssignmentRow(device="c", metrics={"trained_x_to_y_recall_at_1": 0.2, "trained_y_to_x_recall_at_1": 0.4}),
    ]
    assert own(rows) == pytest.approx({"trained|accuracy": 0.6, "received|accuracy": 0.4, "trained|recall": 0.3})


def test_the_accuracy_as_trained_by_hand():
    """Three quarters of the samples have both sensors, 1/16 the accelerometer alone, 3/16 the gyroscope alone."""
    shares = {"acc+gyro": 12 / 16, "acc": 1 / 16, "gyro": 3 / 16}
    row = outcome(metrics=accuracies(0.9, 0.8, 0.6), patterns=shares)
    assert measures.complete(row) == pytest.approx(90)
    assert measures.alone(row) == pytest.approx(70)
    assert measures.as_trained(row) == pytest.approx((12 * 90 + 80 + 3 * 60) / 16)
    assert measures.as_trained(outcome(metrics=accuracies(0.9, 0.8, 0.6))) is None
    turned = {name.replace("acc+gyro", "gyro+acc"): value for name, value in accuracies(0.9, 0.8, 0.6).items()}
    assert measures.as_trained(outcome(metrics=turned, patterns=shares)) == measures.as_trained(row)
    devices = [DeviceRow(samples={"": 10, "acc": 10, "gyro": 6}), DeviceRow(samples={"": 6, "acc": 3, "gyro": 6})]
    assert patterns(devices) == {"acc+gyro": 9 / 16, "acc": 4 / 16, "gyro": 3 / 16}


def test_one_modality_is_filled_in_as_the_method_does():
    both = accuracies(0.9, 0.5, 0.5) | accuracies(0.9, 0.8, 0.6, "prototype")
    row = outcome(metrics=both)
    assert measures.alone(row) == pytest.approx(70)
    assert measures.alone(row, "zero") == pytest.approx(50)
    assert measures.alone(outcome(), "zero") is None


def test_the_page_tells_figures_and_failures(grid, tmp_path):
    runs = Results(tmp_path / "page" / "runs.jsonl")
    for method, value in (("fedavg", 0.9), ("lw-fedmml", 0.89)):
        for seed in (1, 2):
            for rate in (0.2, 0.5):
                runs.add(
                    outcome(method, seed, rate, metrics=accuracies(value, 0.8, 0.6), payload_bytes=2**20, flops=1e9)
                )
    runs.add(outcome("mmic", 1, error="error: the broker went away"))
    page.write(
        grid, runs, Results(tmp_path / "none.jsonl"), tmp_path / "page.md", "python -m benchmarks.accuracy.one_regime"
    )
    text = (tmp_path / "page.md").read_text()
    assert "| lw-fedmml | pretrained | 89.0 ± 0.0 |" in text
    assert "the broker went away" in text
    assert (tmp_path / "page" / "har-bytes.svg").read_text().startswith("<?xml")


def test_lines_are_one_object_each(tmp_path):
    results = Results(tmp_path / "r.jsonl")
    results.add(outcome(slots={"weight": {"fediot": {"factor": 10}}}))
    (line,) = (tmp_path / "r.jsonl").read_bytes().splitlines()
    assert msgspec.json.decode(line, type=Outcome) == results.rows[0]
    assert Path(tmp_path / "r.jsonl").read_bytes().endswith(b"\n")
