"""Studies: which cells run at once, what happens to those whose process dies, and the page's example in small form."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from memory_fleet import share

from edgefl.api.cells import planned
from edgefl.api.local_run import LocalOptions
from edgefl.api.study import AtOnce, at_once
from edgefl.api.study_engine import CellLostError, Estimate, Room, Work
from edgefl.api.study_file import MOST_CELLS, read_study
from edgefl.api.study_queue import AGAIN, Ended, Told, carry_out_all, fitting
from edgefl.cli.main import main
from edgefl.config.yaml_files import read_yaml, yaml_text
from edgefl.errors import BudgetError, ConfigError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "studies.md"
MIB = 2**20


class Playing:
    """An engine without processes: cells end by ``what``, a run's id -> an error, or how often its process is lost."""

    def __init__(self, what: dict[str, str | int] | None = None, sizes: dict[str, int] | None = None) -> None:
        self.what = what or {}
        self.sizes = sizes or {}
        self.tries: list[str] = []
        self.priced: list[str] = []
        self.busy = self.most = 0
        self.room = Room(3, 620 * MIB)

    async def carry_out(self, work: Work) -> str:
        self.busy += 1
        self.most = max(self.most, self.busy)
        self.tries.append(work.run)
        await asyncio.sleep(0.001)
        self.busy -= 1
        what = self.what.get(work.run, "")
        if isinstance(what, int) and self.tries.count(work.run) <= what:
            raise CellLostError(f"the process of {work.run} ended")
        return what if isinstance(what, str) else ""

    async def estimate(self, works: Sequence[Work]) -> list[Estimate]:
        self.priced += [work.run for work in works]
        return [Estimate(self.sizes.get(work.run, 100) * MIB, 10 * MIB) for work in works]

    async def close(self) -> None:
        pass


def works(tmp_path: Path, *names: str, **overrides: list[object]) -> list[Work]:
    return [
        Work(overrides={field: values[n] for field, values in overrides.items()}, run=name, directory=str(tmp_path))
        for n, name in enumerate(names)
    ]


def test_a_lost_cell_is_taken_up_again_twice_and_then_told_as_failed_while_others_go_on(tmp_path: Path) -> None:
    engine = Playing({"unlucky": AGAIN, "doomed": 99, "wrong": "no such column (Mend it.)"})
    said: list[str] = []
    ended: list[Ended] = []
    told = Told(said.append, ended.append)
    errors = asyncio.run(carry_out_all(engine, works(tmp_path, "doomed", "wrong", "fine", "unlucky"), 2, told))
    assert errors["fine"] == errors["unlucky"] == ""
    assert errors["wrong"] == "no such column (Mend it.)"
    assert "the process of doomed ended, 3 times" in errors["doomed"]
    assert {name: engine.tries.count(name) for name in errors} == {"doomed": 3, "wrong": 1, "fine": 1, "unlucky": 3}
    assert {(one.run, one.error) for one in ended} == set(errors.items())
    assert len([text for text in said if "taken up again" in text]) == 2 * AGAIN
    assert engine.most == 2


def test_as_many_workers_as_fit_and_one_price_whatever_the_seed(tmp_path: Path) -> None:
    cells = works(tmp_path, "a1", "a2", "b1", seed=[1, 2, 1], width=[8, 8, 16])
    engine, said = Playing(sizes={"b1": 290}), list[str]()

    def count(memory: int, workers: int = 4) -> int:
        return asyncio.run(fitting(engine, cells, workers, memory * MIB, Told(said.append)))

    assert count(700) == 2  # 290 measured and 10 predicted, of the larger kind
    assert (
        "2 of 4 workers: a cell takes about 300 MiB (290 MiB measured when it was priced, 10 MiB predicted" in said[-1]
    )
    assert len(engine.priced) == 2
    assert count(10_000) == 3  # no more than cells
    assert count(10_000, workers=1) == 1
    assert count(0, workers=0) == 2  # by what the engine has: three cores, and memory for two
    with pytest.raises(BudgetError, match=r"about 300 MiB, of 299 MiB"):
        count(299)


def test_run_files_that_differ_are_priced_each_whatever_the_seed(tmp_path: Path) -> None:
    files = [{"seed": seed, "recipe": recipe} for recipe in ("lw-fedmml", "pmcmfl") for seed in (1, 2)]
    cells = [Work(file, {}, str(i), str(tmp_path)) for i, file in enumerate(files)]
    engine = Playing(sizes={"1": 300})
    assert asyncio.run(fitting(engine, cells, 4, 620 * MIB, Told())) == 2
    assert engine.priced == ["1", "3"]


def test_cells_that_can_not_be_priced_are_left_to_say_why(tmp_path: Path) -> None:
    class Unpriced(Playing):
        """Prices the cells whose run's id is in ``sizes`` alone."""

        async def estimate(self, works: Sequence[Work]) -> list[Estimate]:
            return await super().estimate([work for work in works if work.run in self.sizes])

    said = list[str]()
    assert asyncio.run(fitting(Unpriced(), works(tmp_path, "a", "b", width=[8, 16]), 4, 0, Told(said.append))) == 2
    assert said == ["no cell can be priced; each says why"]
    names = [f"c{n}" for n in range(10)]
    cells = works(tmp_path, *names, width=list(range(10)))
    assert asyncio.run(fitting(Unpriced(sizes={"c9": 290}), cells, 4, 700 * MIB, Told(said.append))) == 2
    assert "the largest of the 1 of 10 kinds of cell that were priced" in said[-1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("grid: {seed: [1]}", "run"),
        ("{run: demo, grid: {}}", "has no cell"),
        ("{run: demo, grid: {training.epochs: []}}", "has no cell"),
        ("{run: demo, grid: {seed: [1]}, seeds: [2]}", "are in grid as well"),
        (f"{{run: demo, seeds: [{', '.join(map(str, range(MOST_CELLS + 1)))}]}}", "makes 10,001 cells"),
        ("{run: demo, seeds: [1], sedes: [2]}", "sedes"),
    ],
)
def test_a_study_file_that_is_wrong_is_told_before_anything_starts(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_study(tmp_path / "study.yaml")


def small(folder: Path) -> Path:
    """The page's study with a tiny run, one learning rate and one seed: two cells."""
    share(110, {"a": 1.0, "b": 1.0}, seed=5).save_npz(folder / "all.npz")
    sensors = {m: {"kind": "sensor", "width": 8, "depth": 1, "heads": 2, "patch": 4} for m in "ab"}
    run: dict[str, Any] = {
        "name": "tiny",
        "data": {"source": "all.npz"},
        "model": {"stages": 1, "encoders": sensors, "head": {"width": 8, "out": 8}, "fusion_width": 8},
        "training": {"rounds": [2], "batch_size": 6},
        "fleet": [{"name": "one"}, {"name": "two"}],
    }
    (folder / "tiny.yaml").write_text(yaml_text(run))
    (example,) = re.findall(r"```yaml\n(run:.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "page.yaml").write_text(example)
    assert len(read_study(folder / "page.yaml").cells()) == 12  # as the page says
    values, _ = read_yaml(folder / "page.yaml")
    grid = values["grid"]
    assert isinstance(grid, dict)
    grid["training.lr.encoder"] = grid["training.lr.encoder"][:1]
    (folder / "study.yaml").write_text(yaml_text({**values, "run": "tiny.yaml", "grid": grid, "seeds": [1]}))
    return folder / "study.yaml"


def when(condition: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """A thread that acts once the condition holds; it gives up after a minute."""

    def wait() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if condition():
                act()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_pages_example_in_small_form_survives_a_killed_worker_and_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = read_study(small(tmp_path))
    cells = [planned(given.run, given.overrides, cell) for cell in given.cells()]
    place, said = tmp_path / "studies", list[str]()
    first = place / cells[0].run / "events.jsonl"

    def kill() -> None:
        (worker,) = psutil.Process().children()
        assert "edgefl.api.study_worker" in worker.cmdline()
        os.kill(worker.pid, signal.SIGKILL)

    thread = when(lambda: first.is_file() and "round_started" in first.read_text("utf-8"), kill)
    found = at_once(cells, LocalOptions(given.run, runs=place, in_process=True), AtOnce(1, told=Told(said.append)))
    thread.join()
    assert [text for text in said if f"the process of {cells[0].run} ended" in text and "signal 9" in text]
    assert [cell.error for cell in found.cells] == ["", ""]
    assert [cell.run.status if cell.run else "" for cell in found.cells] == ["done", "done"]
    assert [cell.overrides["recipe"] for cell in found.cells] == ["lw-prototypes", "fedavg-ignore"]
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
    capfd.readouterr()
    for form in ("csv", "json"):
        with pytest.raises(SystemExit) as ended:
            main(["study", str(tmp_path / "study.yaml"), "--directory", str(place), "--format", form])
        assert ended.value.code in {0, None}
        out, err = capfd.readouterr()
        rows = list(csv.DictReader(out.splitlines())) if form == "csv" else json.loads(out)
        assert [row["run"] for row in rows] == [cell.run for cell in cells]
        assert [float(row["accuracy"]) for row in rows] == [cell.run.accuracy for cell in found.cells if cell.run]
        assert [row["step_peak_bytes"] for row in rows] == ([""] * 2 if form == "csv" else [None] * 2)  # not measured
        assert "2 of 2 cells" in err
        assert "was done before" in err
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()} == before
