"""One run of the grid, as a user would start it, and what is kept of its report: one line of JSON a run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import yaml

from benchmarks.accuracy.table.grid import Cell, Settings, Values
from benchmarks.common.result_lines import add_row, rows_in
from edgefl.process.parent_death import leashed
from edgefl.run_records import AssignmentRow, DeviceRow, RunReport

#: Metrics of a device's own samples that are kept.
_OWN = ("received", "trained")
_RUNNING: set[subprocess.Popen[bytes]] = set()


class Outcome(msgspec.Struct, frozen=True):
    """A finished run: which, by what settings, what came of it, what it cost. ``error``: why there is nothing else."""

    task: str
    method: str
    start: str
    rate: float
    seed: int
    lr: float
    slots: dict[str, Any] = {}
    rounds: int = 0
    metrics: dict[str, float] = {}  # on the test set: "<modalities at hand>|<mask>|<metric>"
    patterns: dict[str, float] = {}  # what training samples have, such as "acc+gyro" or "acc" -> share of them
    own: dict[str, float] = {}  # on the devices' own samples: "<received or trained>|<task>", mean over devices
    score: float | None = None  # what is tuned by: of the models received last, on the devices' own samples
    payload_bytes: float = 0.0
    flops: float = 0.0
    step_peak_bytes: float = 0.0
    wall_s: float = 0.0
    error: str = ""
    file: str = ""  # digest of the run file: another grid's runs are others
    reserved_peak_bytes: float = 0.0  # what torch's allocator held of a GPU, like step_peak_bytes; 0: no GPU

    @property
    def cell(self) -> Cell:
        """Which run it was."""
        return Cell(self.task, self.method, self.start, self.rate, self.seed)


class Results:
    """The lines of a file, one a run; a line is written when its run has ended, so that nothing is run twice."""

    def __init__(self, path: Path, rows: list[Outcome] | None = None) -> None:
        self.path = path
        self.rows = rows_in(path, Outcome) if rows is None else rows

    def add(self, row: Outcome) -> None:
        """Append and keep."""
        add_row(self.path, row)
        self.rows.append(row)

    def of(self, cell: Cell) -> list[Outcome]:
        """The runs of a cell that ended well."""
        return [row for row in self.rows if row.cell == cell and not row.error]

    def only(self, keep: Callable[[Outcome], bool]) -> Results:
        """Those that ``keep`` approves of; nothing is written."""
        return Results(self.path, [row for row in self.rows if keep(row)])

    def newest(self) -> Results:
        """Of every cell the last run that ended well, or where none did, the failures; nothing is written."""
        good = {row.cell: row for row in self.rows if not row.error}
        return self.only(lambda row: row is good.get(row.cell, row))

    def tries(self, cell: Cell, values: Values) -> list[Outcome]:
        """The runs of a cell with exactly this run file."""
        return [row for row in self.rows if row.cell == cell and row.file == digest(values)]


def digest(values: Values) -> str:
    """Of a run file, wherever its encoders lie."""
    encoders = values["model"]["encoders"]
    named = {m: {**e, "pretrained": Path(e.get("pretrained", "")).name} for m, e in encoders.items()}
    told = json.dumps({**values, "model": {**values["model"], "encoders": named}}, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def run_cell(cell: Cell, settings: Settings, values: Values, *, trainers: int = 1) -> Outcome:
    """Run it: a broker, a coordinator, the agents in one process with ``trainers`` for all. A failure is told, too."""
    about = {**cell._asdict(), "lr": settings.lr, "slots": settings.slots, "file": digest(values)}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="edgefl-systems-") as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "edgefl.cli.main", "run", str(file), "--format", "json", "--no-export"]
        command += ["--no-page", "--trainers", str(trainers), "--runs", str(Path(folder) / "runs")]
        status, out, err = _run(command)
    wall_s = time.monotonic() - started
    if status:
        told = err.decode(errors="replace").strip().splitlines()
        reason = next((line for line in reversed(told) if line.startswith("error")), told[-1] if told else "")
        return Outcome(**about, wall_s=wall_s, error=reason or f"status {status}")
    report = msgspec.json.decode(out, type=RunReport)
    return Outcome(**about, **outcome_of(report), wall_s=wall_s)


def _run(command: list[str]) -> tuple[int, bytes, bytes]:
    """Status, stdout and stderr of a program that ends with this one, or by ``stop_all``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(leashed(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        _RUNNING.add(process)
        try:
            out, err = process.communicate()
        finally:
            _RUNNING.discard(process)
    return process.returncode, out, err


def stop_all() -> None:
    """End what is running, in good order: no broker or agent is left behind."""
    for process in list(_RUNNING):
        process.terminate()


def outcome_of(report: RunReport) -> dict[str, Any]:
    """The figures of a finished run's report, as fields of ``Outcome``."""
    last = max(((row.stage, row.round) for row in report.evaluations), default=None)
    metrics = {
        f"{'+'.join(row.available)}|{row.missing}|{row.metric}": row.value
        for row in report.evaluations
        if (row.stage, row.round) == last
    }
    done = [row for row in report.assignments if row.status == "done"]
    scores = [row.metrics["received_score"] for row in report.rounds[-3:] if "received_score" in row.metrics]
    return {
        "rounds": len(report.rounds),
        "metrics": metrics,
        "patterns": patterns(report.devices),
        "own": own(done),
        "score": fmean(scores) if scores else None,
        "payload_bytes": _sum(done, "payload_up_bytes") + _sum(done, "payload_down_bytes"),
        "flops": _sum(done, "flops"),
        "step_peak_bytes": _peak(done, "step_peak_bytes"),
        "reserved_peak_bytes": _peak(done, "cuda_reserved_peak_bytes"),
    }


def patterns(devices: Iterable[DeviceRow]) -> dict[str, float]:
    """The shares of the fleet's samples with both of two modalities, and with each alone; {} with more modalities."""
    counts: dict[str, int] = {}
    for device in devices:
        for name, count in device.samples.items():
            counts[name] = counts.get(name, 0) + count
    total, names = counts.pop("", 0), sorted(counts)
    if len(names) != 2 or not total:
        return {}
    a, b = (counts[name] for name in names)
    both = a + b - total  # every sample has something
    found = {"+".join(names): both, names[0]: a - both, names[1]: b - both}
    return {name: count / total for name, count in found.items()}


def own(done: Iterable[AssignmentRow]) -> dict[str, float]:
    """Means over the devices, each by its last round: accuracy of those with labels, mean recall at 1 of the others."""
    last = {row.device: row for row in done}
    found: dict[str, list[float]] = {}
    for row in last.values():
        for model in _OWN:
            recalls = [
                value
                for name, value in row.metrics.items()
                if name.startswith(f"{model}_") and name.endswith("_recall_at_1")
            ]
            if f"{model}_accuracy" in row.metrics:
                found.setdefault(f"{model}|accuracy", []).append(row.metrics[f"{model}_accuracy"])
            if recalls:
                found.setdefault(f"{model}|recall", []).append(fmean(recalls))
            if f"{model}_rsum" in row.metrics:
                found.setdefault(f"{model}|rsum", []).append(row.metrics[f"{model}_rsum"])
    return {name: fmean(values) for name, values in found.items()}


def _peak(done: Iterable[AssignmentRow], figure: str) -> float:
    """That of the stage that takes most: the median over its devices and rounds.

    Not the highest: the first round of a process also holds what libraries take once.
    """
    stages: dict[int, list[float]] = {}
    for row in done:
        stages.setdefault(row.stage, []).extend(_values([row], figure))
    return max((median(values) for values in stages.values() if values), default=0.0)


def _values(rows: Iterable[AssignmentRow], figure: str) -> list[float]:
    return [v for row in rows if (f := row.measured.get(figure)) is not None and (v := f.value) is not None]


def _sum(rows: Iterable[AssignmentRow], figure: str) -> float:
    return sum(_values(rows, figure))
