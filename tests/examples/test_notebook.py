"""examples/notebook: its cells run on a report that is there; nightly as a notebook, in a kernel of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from report_fixture import run_report

import edgefl
from edgefl.api.results import Report

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "first_run.ipynb"


class Answers:
    """A bundle that says "rest" to everything."""

    def predict(self, inputs: Mapping[str, np.ndarray]) -> edgefl.Prediction:
        count = len(next(iter(inputs.values())))
        return edgefl.Prediction(("rest",) * count, np.zeros(count, np.int64))


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def test_it_is_stored_without_outputs() -> None:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert found["nbformat"] == 4
    assert [cell for cell in found["cells"] if cell.get("outputs") or cell.get("execution_count")] == []


def test_its_cells_run_on_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without training and export, which take 30 s: the report is the other tests', the bundle's answers are zeros."""
    mpl.use("agg")
    record = run_report()
    (tmp_path / "shares").mkdir()
    np.savez(tmp_path / "shares" / "test.npz", acc=np.zeros((4, 12, 3), np.float32), label=np.arange(4))
    run = edgefl.Run(tmp_path, Report(record, tmp_path))
    monkeypatch.setattr(edgefl.Run, "load_bundle", lambda _: Answers())
    asked: list[Any] = []
    monkeypatch.setattr(edgefl, "run", lambda *given, **more: asked.append((given, more)) or run)
    names: dict[str, Any] = {}
    for cell in cells():
        exec(compile(cell, NOTEBOOK.name, "exec"), names)  # noqa: S102 - the notebook's own cells
    assert asked[0][0] == ("demo",)
    assert names["peak"].measured.max() > 0
    assert len(names["answer"].labels) == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    root = NOTEBOOK.parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [out["text"] for cell in notebook.cells for out in cell.get("outputs", []) if "text" in out]
    assert any("4 of 4 devices trained" in text for text in printed)
    assert any("accelerometer alone" in text for text in printed)
    assert any("image/png" in out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", []))
