"""Runs `edgefl run` as a user would and gives back the finished run's report."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from edgefl.run_records import RunReport


def run(name: str, *overrides: str, label: str = "") -> RunReport:
    """The report of one run of the run file ``name`` with ``overrides``; raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "edgefl.cli.main", "run", name, "--no-export", "--format", "json"]
    for item in overrides:
        command += ["--set", item]
    started = time.monotonic()
    sys.stderr.write(f"{label or name}: running … ")
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder:
        done = subprocess.run([*command, "--runs", str(Path(folder) / "runs")], stdout=subprocess.PIPE, check=True)
    sys.stderr.write(f"{time.monotonic() - started:.0f} s\n")
    return msgspec.json.decode(done.stdout, type=RunReport)


def largest(report: RunReport, figure: str) -> float:
    """The highest measured value of a figure over devices and rounds. Raises ValueError when nothing was measured."""
    return max(v for a in report.assignments if (f := a.measured.get(figure)) and (v := f.value) is not None)


def total(report: RunReport, figure: str) -> float:
    """The measured values of a figure added up over devices and rounds."""
    return sum(v for a in report.assignments if (f := a.measured.get(figure)) and (v := f.value) is not None)


def accuracy(report: RunReport, available: tuple[str, ...], missing: str) -> float:
    """The global model's accuracy after the last round. Raises ValueError when it was not evaluated."""
    rows = [
        row
        for row in report.evaluations
        if row.metric == "accuracy" and row.available == available and row.missing == missing
    ]
    return max(rows, key=lambda row: (row.stage, row.round)).value
