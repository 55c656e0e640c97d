"""One run of a saving, as a user would start it, and what is kept of its report: one line of JSON a run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import yaml

from benchmarks.accuracy.claims.outcome import own
from edgefl.process.parent_death import leashed
from edgefl.run_records import AssignmentRow, RunReport

Values = dict[str, Any]


class Run(NamedTuple):
    """A run to be made: its task, the saving's name, its seed and its run file."""

    task: str
    saving: str
    seed: int
    values: Values

    @property
    def about(self) -> dict[str, Any]:
        """The fields by which an outcome tells which run it is of."""
        return {"task": self.task, "method": self.saving, "seed": self.seed, "file": digest(self.values)}


class Point(msgspec.Struct, frozen=True):
    """Accuracy with every modality after a round, and what all rounds up to it took."""

    accuracy: float
    payload_bytes: float
    flops: float


class Outcome(msgspec.Struct, frozen=True):
    """A finished run: which, what came of it, what it cost. ``error``: why there is nothing else."""

    task: str
    method: str  # the saving's name
    seed: int
    file: str = ""  # digest of the run file
    metrics: dict[str, float] = {}  # on the test set: "<modalities at hand>|<mask>|<metric>"
    own: dict[str, float] = {}  # on the devices' own samples: "<received or trained>|<task>", mean over devices
    payload_bytes: float = 0.0
    flops: float = 0.0
    step_peak_bytes: float = 0.0
    reserved_peak_bytes: float = 0.0  # what torch's allocator held of a GPU, like step_peak_bytes; 0: no GPU
    wall_s: float = 0.0
    error: str = ""
    points: tuple[Point, ...] = ()  # of every round that was evaluated


def done(runs: Iterable[Run], rows: Iterable[Outcome]) -> list[Outcome]:
    """The rows of these runs that ended well."""
    wanted = {tuple(run.about.values()) for run in runs}
    return [row for row in rows if not row.error and (row.task, row.method, row.seed, row.file) in wanted]


def digest(values: Values) -> str:
    """Of a run file, wherever its encoders lie."""
    encoders = values["model"]["encoders"]
    named = {m: {**e, "pretrained": Path(e["pretrained"]).name} for m, e in encoders.items()}
    told = json.dumps({**values, "model": {**values["model"], "encoders": named}}, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def made(run: Run) -> Outcome:
    """Run it: a broker, a coordinator, the agents in one process with a trainer for all. A failure is told, too."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="edgefl-savings-") as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump(run.values, sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "edgefl.cli.main", "run", str(file), "--format", "json", "--no-export"]
        command += ["--no-page", "--trainers", "1", "--runs", str(Path(folder) / "runs")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(leashed(command), check=False, capture_output=True, env=environment)
    wall_s = time.monotonic() - started
    if ended.returncode:
        told = ended.stderr.decode(errors="replace").strip()
        reason = " ".join(told[max(told.rfind("error: "), 0) :].split())
        return Outcome(**run.about, wall_s=wall_s, error=reason or f"status {ended.returncode}")
    report = msgspec.json.decode(ended.stdout, type=RunReport)
    return Outcome(**run.about, **figures_of(report), wall_s=wall_s)


def figures_of(report: RunReport) -> dict[str, Any]:
    """The figures of a finished run's report, as fields of ``Outcome``."""
    last = max(((row.stage, row.round) for row in report.evaluations), default=None)
    rows = [row for row in report.assignments if row.status == "done"]
    return {
        "metrics": {
            f"{'+'.join(row.available)}|{row.missing}|{row.metric}": row.value
            for row in report.evaluations
            if (row.stage, row.round) == last
        },
        "own": own(rows),
        "payload_bytes": sum(_values(rows, "payload_up_bytes") + _values(rows, "payload_down_bytes")),
        "flops": sum(_values(rows, "flops")),
        "step_peak_bytes": _peak(rows, "step_peak_bytes"),
        "reserved_peak_bytes": _peak(rows, "cuda_reserved_peak_bytes"),
        "points": tuple(_points(report, rows)),
    }


def _points(report: RunReport, rows: list[AssignmentRow]) -> Iterator[Point]:
    whole = [row for row in report.evaluations if row.missing == "none" and row.metric == "accuracy"]
    for one in sorted(whole, key=lambda row: (row.stage, row.round)):
        until = [row for row in rows if (row.stage, row.round) <= (one.stage, one.round)]
        payload = sum(_values(until, "payload_up_bytes") + _values(until, "payload_down_bytes"))
        yield Point(one.value, payload, sum(_values(until, "flops")))


def _peak(rows: Iterable[AssignmentRow], figure: str) -> float:
    """That of the stage that takes most: the median over its devices and rounds.

    Not the highest: the first round of a process also holds what libraries take once.
    """
    stages: dict[int, list[float]] = {}
    for row in rows:
        stages.setdefault(row.stage, []).extend(_values([row], figure))
    return max((median(values) for values in stages.values() if values), default=0.0)


def _values(rows: Iterable[AssignmentRow], figure: str) -> list[float]:
    return [v for row in rows if (f := row.measured.get(figure)) is not None and (v := f.value) is not None]
