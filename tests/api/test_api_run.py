"""A real run through the Python interface, from a thread that has an event loop, as notebooks do; a study; frames."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from fleet_fixture import share
from report_fixture import run_report

import edgefl
from edgefl.api.results import Plan, Report
from edgefl.api.running import in_thread
from edgefl.api.study_cells import Work, combinations, planned
from edgefl.budget.fit import DevicePlan, RunPrice
from edgefl.errors import ConfigError, ExportError
from edgefl.plan.job import Placement
from edgefl.records import Refusal
from edgefl.report.tables import COLUMNS, table

BOTH = ("acc", "gyro")

FIELDS: dict[str, Any] = {
    "name": "tiny",
    "data": {"source": "all.npz"},
    "model": {
        "stages": 1,
        "encoders": {m: {"kind": "sensor", "width": 16, "depth": 1, "heads": 2, "patch": 4} for m in BOTH},
        "head": {"width": 16, "out": 8, "dropout": 0.0},
        "fusion_width": 16,
    },
    "training": {"rounds": [1], "batch_size": 8},
    "fleet": [{"name": "one", "budget": {"step_memory_bytes": "64 MiB"}}],
}


class Done(NamedTuple):
    study: edgefl.Study
    events: list[edgefl.EventRow]
    threads: set[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("api")
    share(60, *BOTH, seed=5).save_npz(place / "all.npz")
    return place


def of(folder: Path, **more: object) -> dict[str, Any]:
    return {**FIELDS, "data": {"source": folder / "all.npz"}, **more}


@pytest.fixture(scope="module")
def done(folder: Path) -> Done:
    """One cell's run, begun inside a running event loop."""
    events: list[edgefl.EventRow] = []
    threads: set[int] = set()

    def on_event(event: edgefl.EventRow) -> None:
        events.append(event)
        threads.add(threading.get_ident())

    async def notebook() -> edgefl.Study:
        return edgefl.study(of(folder), {"training.epochs": [1]}, directory=folder / "studies", on_event=on_event)

    return Done(asyncio.run(notebook()), events, threads)


def test_a_run_ends_with_its_report_and_tells_its_events(done: Done) -> None:
    (cell,) = done.study.cells
    assert cell.run is not None, cell.error
    assert cell.overrides == {"training.epochs": 1}
    assert cell.run.status == "done"
    assert cell.run.directory.name == cell.run.id
    assert cell.run.id.startswith("tiny-")
    assert 0.25 < (cell.run.accuracy or 0) <= 1
    assert {"run_started", "round_started", "update", "run_finished"} <= {event.kind for event in done.events}
    assert len(done.threads) == 1
    assert threading.get_ident() not in done.threads
    with pytest.raises(ExportError, match="has no bundle ''") as caught:
        cell.run.load_bundle()
    assert "edgefl export" in caught.value.remedy


def test_a_cell_that_is_done_is_kept(done: Done, folder: Path) -> None:
    (cell,) = done.study.cells
    assert cell.run is not None
    before = {path: path.stat().st_mtime_ns for path in cell.run.directory.rglob("*")}
    began = time.monotonic()
    again = edgefl.study(of(folder), {"training.epochs": [1]}, directory=folder / "studies")
    assert time.monotonic() - began < 5
    assert again.cells == done.study.cells
    assert {path: path.stat().st_mtime_ns for path in cell.run.directory.rglob("*")} == before


def test_a_study_as_a_frame(done: Done) -> None:
    found = done.study.to_pandas()
    (cell,) = done.study.cells
    assert cell.run is not None
    (row,) = found.to_dict("records")
    assert row["training.epochs"] == 1
    assert (row["run"], row["status"], row["error"]) == (cell.run.id, "done", "")
    assert row["accuracy"] == cell.run.accuracy
    assert row["step_peak_bytes"] > 0
    assert row["flops"] > 0
    assert row["run_s"] > 0


def test_a_report_as_frames(done: Done, folder: Path) -> None:
    (cell,) = done.study.cells
    assert cell.run is not None
    report = edgefl.load_report("latest", directory=folder / "studies")
    assert (report.id, report.status, report.accuracy) == (cell.run.id, "done", cell.run.accuracy)
    assert report == edgefl.load_report(cell.run.directory)
    figures = report.to_pandas()
    assert list(figures.columns) == list(COLUMNS["figures"])
    assert len(figures) == len(table(report.record, "figures").rows) > 0
    types = {name: str(kind) for name, kind in figures.dtypes.items()}
    assert {name for name, kind in types.items() if kind == "int64"} == {"stage", "round", "attempt"}
    assert {name for name, kind in types.items() if kind == "float64"} == {"predicted", "measured", "needed", "allowed"}
    peak = figures[figures.figure == "step_peak_bytes"]
    assert (peak.unit == "B").all()
    assert peak.measured.max() > 0
    scores = report.to_pandas("scores")
    best = scores[(scores.metric == "accuracy") & (scores["mask"] == "none")]
    assert best.value.iloc[-1] == report.accuracy
    (device,) = report.to_pandas("devices").to_dict("records")
    assert (device["device"], device["samples"], device["step_memory_limit"]) == ("one", 48, 64 * 2**20)
    assert report.headline.startswith("1 of 1 devices trained")
    assert report.id in report.to_html(interactive=False)


def test_missing_figures_are_missing_and_not_zero() -> None:
    frame = Report(run_report(), Path("r")).to_pandas()
    rows = table(run_report(), "figures").rows
    absent = sum(row[list(COLUMNS["figures"]).index("measured")] is None for row in rows)
    assert absent > 0
    assert frame.measured.isna().sum() == absent


def test_a_grid_is_every_combination_and_a_cell_has_the_id_of_what_it_trains(folder: Path) -> None:
    grid = {"training.epochs": [1, 2], "seed": [1, 2]}
    cells = combinations(grid)
    assert cells == [{"training.epochs": e, "seed": s} for e in (1, 2) for s in (1, 2)]
    assert combinations([{"seed": 1}, {"recipe": "fedavg"}]) == [{"seed": 1}, {"recipe": "fedavg"}]
    ids = {planned(Work(of(folder)), cell).run for cell in cells}
    assert len(ids) == 4
    assert (
        planned(Work(of(folder), {"seed": 2}), {"training.epochs": 1}).run in ids
    )  # the same settings, said otherwise
    assert planned(Work(of(folder, name="other")), cells[0]).run not in ids


def test_no_cell_starts_if_the_settings_of_one_are_wrong(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.epochs"):
        edgefl.study(of(folder), {"training.epochs": [1, "many"]}, directory=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_cell_that_fails_is_told_and_the_others_go_on(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "torn.npz").write_bytes(b"not a zip")
    cells = [{"data.source": str(tmp_path / "torn.npz")}, {"data.source": str(tmp_path / "torn.npz"), "seed": 2}]
    found = edgefl.study(of(folder), cells, directory=tmp_path / "s")
    assert [cell.run for cell in found.cells] == [None, None]
    assert all("torn.npz" in cell.error for cell in found.cells)
    assert list(found.to_pandas().status) == ["failed", "failed"]


@pytest.mark.slow
def test_an_error_in_the_callback_ends_the_run_and_its_processes(tmp_path: Path, folder: Path) -> None:
    def fail(event: edgefl.EventRow) -> None:
        raise ValueError(event.kind)

    with pytest.raises(ValueError, match="run_started"):
        edgefl.run(of(folder), directory=tmp_path / "runs", on_event=fail, export=False, page=False)
    (run,) = (tmp_path / "runs").iterdir()
    assert not processes_of(run)


def processes_of(run: Path) -> list[str]:
    """Command lines of the running processes that name the run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # it has ended
                continue
            if run.name in line:
                found.append(line)
    return found


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """As a program in the foreground: a shell has those in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_cancels_what_runs_in_the_thread() -> None:
    ended = []

    def work(begin: Any) -> int:
        async def sleep() -> None:
            begin()
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        try:
            asyncio.run(sleep())
        except asyncio.CancelledError as error:
            raise KeyboardInterrupt("go on with X") from error
        return 0

    with pytest.raises(KeyboardInterrupt, match="go on with X"):
        in_thread(work)
    assert ended == [True]


def test_a_plan_as_a_frame_and_its_verdict() -> None:
    limit = Refusal("step_memory", 8.0, 16.0, "B")
    over = Refusal("step_memory", 32.0, 16.0, "B")
    plans = (
        DevicePlan("a", "cpu", Placement(), limits=(limit,)),
        DevicePlan("b", "cpu", Placement(refusal=over)),
    )
    good, bad = Plan(RunPrice(devices=plans[:1])), Plan(RunPrice(devices=plans), ("assumed",))
    assert (good.fits, bad.fits) == (True, False)
    rows = bad.to_pandas().to_dict("records")
    assert [(row["device"], row["fits"], row["limit"], row["needed"], row["allowed"]) for row in rows] == [
        ("a", True, "step_memory", 8.0, 16.0),
        ("b", False, "step_memory", 32.0, 16.0),
    ]
    assert bad.verdict.startswith("1 of 2 devices fit")


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str], folder: Path, done: Done) -> None:
    edgefl.study(of(folder), {"training.epochs": [1]}, directory=folder / "studies").to_pandas()
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert msgspec.json.encode(done.events)
