"""Figures of many rounds as one: sums and maxima, with the reasons of missing values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgefl.records import FIGURES, Figure
from edgefl.registry import methods
from edgefl.report import units
from edgefl.run_records import AssignmentRow, DeviceRow, EvaluationRow, RunReport

#: Figures of which the largest counts; the others add up over rounds.
PEAKS = frozenset(
    {"process_peak_bytes", "step_peak_bytes", "temperature_c", "cuda_allocated_peak_bytes", "cuda_reserved_peak_bytes"}
)
#: Of a figure that the plan does not hold.
_UNKNOWN = Figure(kind="predicted", reason="not predicted: the device's speed, or its power, is not in its profile")


def masks() -> dict[str, str]:
    """Name -> sentence of each stand-in that inference can make; the first is the one the others are compared with."""
    offered = {name: one for name, one in methods("missing").items() if one.offered}
    return {name: f"The absent modality is replaced by {one.inferred or one.summary}." for name, one in offered.items()}


def total(name: str, figures: Sequence[Figure]) -> Figure:
    """The figure ``name`` over several rounds: the maximum of peaks, the sum of everything else.

    All missing: None with the reasons. Some missing: what is known, and a reason that says how many rounds it leaves
    out (so it is a lower bound).
    """
    if not figures:
        return Figure(reason="no round was trained")
    known = [figure for figure in figures if figure.value is not None]
    values = [figure.value for figure in figures if figure.value is not None]
    reasons = "; ".join(dict.fromkeys(figure.reason or "not recorded" for figure in figures if figure.value is None))
    if not values:
        return Figure(kind=figures[0].kind, source=figures[0].source, reason=reasons)
    sources = ", ".join(dict.fromkeys(figure.source for figure in known if figure.source))
    missing = len(figures) - len(known)
    reason = f"without {missing} of {len(figures)} rounds: {reasons}" if missing else ""
    return Figure(max(values) if name in PEAKS else sum(values), known[0].kind, sources, reason)


def measured(name: str, assignments: Iterable[AssignmentRow]) -> Figure:
    """The measured (or counted) figure over the attempts that trained, finished or not."""
    rows = [row for row in assignments if row.measured]
    return total(name, [row.measured.get(name, Figure()) for row in rows])


def predicted(name: str, assignments: Iterable[AssignmentRow]) -> Figure:
    """The predicted figure over the same attempts that :func:`measured` looks at; all of them when none trained."""
    rows = list(assignments)
    trained = [row for row in rows if row.measured and row.predicted]
    figures = [row.predicted.get(name, _UNKNOWN) for row in trained or rows if row.predicted]
    if not figures:
        return Figure(kind="predicted", reason="no plan on record")
    return total(name, figures)


def by_device(report: RunReport) -> dict[str, list[AssignmentRow]]:
    """Assignments of each device, devices in the order they introduced themselves."""
    rows: dict[str, list[AssignmentRow]] = {device.device: [] for device in report.devices}
    for row in report.assignments:
        rows.setdefault(row.device, []).append(row)
    return rows


def by_device_and_stage(report: RunReport) -> dict[tuple[str, int], list[AssignmentRow]]:
    """Assignments of each device in each stage, device by device, stage by stage."""
    rows: dict[tuple[str, int], list[AssignmentRow]] = {}
    for device, assignments in by_device(report).items():
        for row in sorted(assignments, key=lambda row: (row.stage, row.round, row.attempt)):
            rows.setdefault((device, row.stage), []).append(row)
    return rows


def device_row(report: RunReport, name: str) -> DeviceRow:
    """The device's own row; an empty one when it never said hello."""
    return next((device for device in report.devices if device.device == name), DeviceRow(device=name))


def fleet(name: str, report: RunReport, stage: int | None = None) -> Figure:
    """A measured figure over all devices, of one stage or of the whole run."""
    return measured(name, [row for row in report.assignments if stage is None or row.stage == stage])


def origins(report: RunReport) -> dict[str, list[str]]:
    """Figure -> its distinct origins, ``kind: source`` or why it is missing, in the ledger's order."""
    found: dict[str, list[str]] = {}
    for name in FIGURES:
        both = [each.get(name) for row in report.assignments for each in (row.measured, row.predicted)]
        origins = dict.fromkeys(_origin(figure) for figure in both if figure is not None)
        if origins:
            found[name] = list(origins)
    return found


def _origin(figure: Figure) -> str:
    if figure.value is None:
        return f"missing: {figure.reason or 'not recorded'}"
    return f"{figure.kind}: {figure.source or 'source not named'}"


def primary_metric(report: RunReport) -> str:
    """The metric the report leads with: accuracy when there is one, else the first on record."""
    names = list(dict.fromkeys(row.metric for row in report.evaluations))
    return "accuracy" if "accuracy" in names or not names else names[0]


def latest(rows: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """The rows of the last evaluated round."""
    if not rows:
        return []
    last = max((row.stage, row.round) for row in rows)
    return [row for row in rows if (row.stage, row.round) == last]


def score(row: EvaluationRow | None) -> str:
    """An evaluation in a table, where the column's header has the unit: percent of a share; empty for None."""
    if row is None:
        return ""
    return f"{100 * row.value:.1f}" if units.is_share(row.metric) else units.number(row.value)
