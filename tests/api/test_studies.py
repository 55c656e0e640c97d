"""Studies: the file, and the page's example in small form."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from memory_fleet import share

from edgefl.api.study import at_once
from edgefl.api.study_cells import MOST_CELLS, Work, planned, read_study
from edgefl.api.study_pool import Told
from edgefl.cli.main import main
from edgefl.config.yaml_files import read_yaml, yaml_text
from edgefl.errors import ConfigError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "studies.md"


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
    place, said = tmp_path / "studies", list[str]()
    common = Work(given.run, given.overrides, "", str(place), in_process=True)
    cells = [planned(common, cell) for cell in given.cells()]
    first = place / cells[0].run / "events.jsonl"

    def kill() -> None:
        (worker,) = psutil.Process().children()
        assert "edgefl.api.study_worker" in worker.cmdline()
        os.kill(worker.pid, signal.SIGKILL)

    thread = when(lambda: first.is_file() and "round_started" in first.read_text("utf-8"), kill)
    found = at_once(cells, place, 1, told=Told(said.append))
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
