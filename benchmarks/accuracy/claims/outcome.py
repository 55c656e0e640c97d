"""What is kept of a run of the table: one line of JSON each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from benchmarks.accuracy.claims.study import Cell, Trial
from benchmarks.common.result_lines import add_row, rows_in
from edgefl.report.repairs import repaired
from edgefl.run_records import AssignmentRow, RunReport

#: Metrics of the test set that are kept, of each condition.
KEPT = ("accuracy", "macro_f1", "recall_at_1", "rsum")
#: Metrics of a device's own samples that are kept: of the model as received, and as trained.
_OWN = ("received", "trained")


class Point(msgspec.Struct, frozen=True):
    """An evaluation. ``metrics``: "<modalities at hand>|<mask>|<metric>" -> value; costs: all devices' until then."""

    round: int = 0
    metrics: dict[str, float] = {}
    payload_bytes: float = 0.0
    flops: float = 0.0
    compute_s: float = 0.0


class Outcome(msgspec.Struct, frozen=True):
    """A finished run. ``file``: digest of the run file; ``acted``: what the method's parts did, by name.

    ``own``: on the devices' own samples, mean over devices; ``error``: why there is nothing else. ``devices``: the most
    that took part in a round; 0: not recorded. ``refused``: device -> bytes of step memory needed, and allowed.
    """

    paper: str
    task: str
    condition: str
    method: str
    seed: int
    file: str
    settings: dict[str, Any] = {}
    short: bool = False
    curve: tuple[Point, ...] = ()
    own: dict[str, float] = {}
    acted: dict[str, float] = {}
    step_peak_predicted: float = 0.0
    cpu_s: float = 0.0
    error: str = ""
    devices: int = 0
    refused: dict[str, tuple[float, float]] = {}

    @property
    def cell(self) -> Cell:
        """Which run it was."""
        return Cell(self.paper, self.task, self.condition, self.method, self.seed)


class Results:
    """The lines of a file, one a run; a line is written when its run has ended, so that nothing is run twice."""

    def __init__(self, path: Path, rows: Iterable[Outcome] | None = None) -> None:
        self.path = path
        self.rows = rows_in(path, Outcome) if rows is None else list(rows)

    def add(self, row: Outcome) -> None:
        """Append and keep."""
        add_row(self.path, row)
        self.rows.append(row)

    def of(self, cell: Cell, file: str) -> Outcome | None:
        """The last good run of exactly this run file."""
        found = [row for row in self.rows if row.cell == cell and row.file == file and not row.error]
        return found[-1] if found else None

    def only(self, keep: Callable[[Outcome], bool]) -> Results:
        """Those that ``keep`` approves of; nothing is written."""
        return Results(self.path, filter(keep, self.rows))


def outcome_of(trial: Trial, file: str, report: RunReport) -> Outcome:
    """The figures of a finished run's report."""
    done = [row for row in report.assignments if row.status == "done"]
    peaks: dict[int, list[float]] = {}
    for row in done:
        figure = row.predicted.get("step_peak_bytes")
        if figure is not None and figure.value is not None:
            peaks.setdefault(row.stage, []).append(figure.value)
    return Outcome(
        **trial.cell._asdict(),
        file=file,
        settings=trial.settings,
        short=trial.short,
        curve=curve_of(report, done),
        own=own(done),
        acted=acted(report),
        step_peak_predicted=max((median(values) for values in peaks.values()), default=0.0),
        cpu_s=_spent(done, "compute_s"),
        devices=max((len(row.participants) for row in report.rounds if row.status == "done"), default=0),
    )


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


def curve_of(report: RunReport, done: list[AssignmentRow]) -> tuple[Point, ...]:
    """A point for each evaluation, rounds counted over the stages."""
    order = {key: i for i, key in enumerate(sorted({(row.stage, row.round) for row in report.rounds}), start=1)}
    points: dict[tuple[int, int], dict[str, float]] = {}
    for row in report.evaluations:
        if row.metric.startswith(KEPT) or row.metric.endswith(KEPT):
            metric = f"{'+'.join(row.available)}|{row.missing}|{row.metric}"
            points.setdefault((row.stage, row.round), {})[metric] = round(row.value, 5)
    found = []
    for key, metrics in sorted(points.items()):
        until = [row for row in done if (row.stage, row.round) <= key]
        payload = _spent(until, "payload_up_bytes") + _spent(until, "payload_down_bytes")
        found.append(
            Point(order.get(key, 0), metrics, payload, _spent(until, "flops"), round(_spent(until, "compute_s"), 2))
        )
    return tuple(found)


def acted(report: RunReport) -> dict[str, float]:
    """How often MMiC's parts did something: updates with a layer lent, updates that asked for one, beta* over beta."""
    mended = [one for row in report.rounds for one in repaired(row).values()]
    betas = [row.record["momentum"]["beta"] for row in report.rounds if "momentum" in row.record]
    found: dict[str, float] = {}
    if mended:
        found |= {"substituted": sum("donors" in one for one in mended), "incomplete": len(mended)}
    if betas:
        found |= {"beta": round(fmean(betas), 4), "beta above": sum(beta > min(betas) + 1e-9 for beta in betas)}
    return found


def _spent(done: Iterable[AssignmentRow], figure: str) -> float:
    return sum(v for row in done if (f := row.measured.get(figure)) is not None and (v := f.value) is not None)
