"""Totals of figures over rounds, as sums and maxima, and devices' use of their budgets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from edgefl.budget.fit import gpu_limit
from edgefl.records import FIGURES, NOT_TRAINED, Figure, has_card
from edgefl.report.refusals import REASONS
from edgefl.run_records import OPEN, AssignmentRow, DeviceRow, RunReport

#: Figures of which the largest counts; the others add up over rounds.
PEAKS = frozenset(
    {"process_peak_bytes", "step_peak_bytes", "temperature_c", "cuda_allocated_peak_bytes", "cuda_reserved_peak_bytes"}
)
#: Of a figure that the plan does not hold.
_UNKNOWN = Figure(kind="predicted", reason="not predicted: the device's speed, or its power, is not in its profile")


def total(name: str, figures: Sequence[Figure]) -> Figure:
    """The figure ``name`` over several rounds: the maximum of peaks, the sum of everything else.

    All missing: None with the reasons. Some missing: what is known, and a reason that says how many rounds it leaves
    out (so it is a lower bound). Doubtful where one of them is.
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
    kind = "doubtful" if any(figure.kind == "doubtful" for figure in known) else known[0].kind
    return Figure(max(values) if name in PEAKS else sum(values), kind, sources, reason)


def measured(name: str, assignments: Iterable[AssignmentRow]) -> Figure:
    """Total of a measured (or counted) figure over attempts with a cost, with or without an update."""
    figures = [row.measured.get(name) or unknown(row) for row in assignments if row.measured]
    return total(name, [figure for figure in figures if figure.reason != NOT_TRAINED])


def unknown(row: AssignmentRow) -> Figure:
    """A missing figure of an attempt, with its reason: not trained (yet), or not reported."""
    if row.status in OPEN:
        return Figure(reason=NOT_TRAINED)
    flops = row.measured.get("flops")
    told = flops is not None and flops.reason != NOT_TRAINED
    if row.status == "done" or told:
        return Figure(reason="not recorded")
    moved = any(row.measured.get(name, Figure()).value for name in ("payload_down_bytes", "payload_up_bytes"))
    if flops is None and (moved or row.status in {"late", "lost"}):
        return Figure(reason=f"the device has not told: {REASONS.get(row.status, row.status)}")
    return Figure(reason=NOT_TRAINED)


def predicted(name: str, assignments: Iterable[AssignmentRow]) -> Figure:
    """Total of a predicted figure over the attempts of :func:`measured`; over all if none trained."""

    def is_compared(row: AssignmentRow) -> bool:
        return row.status == "done" or row.measured.get(name, Figure()).value is not None

    rows = list(assignments)
    trained = [row for row in rows if row.measured and row.predicted and is_compared(row)]
    figures = [row.predicted.get(name, _UNKNOWN) for row in trained or rows if row.predicted]
    if not figures:
        refused = bool(rows) and all(row.refusal for row in rows)
        return Figure(kind="predicted", reason="not predicted: refused" if refused else "no plan on record")
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


def by_round(report: RunReport) -> dict[tuple[int, int], list[AssignmentRow]]:
    """Assignments of each round, by stage and round."""
    rows: dict[tuple[int, int], list[AssignmentRow]] = {}
    for row in report.assignments:
        rows.setdefault((row.stage, row.round), []).append(row)
    return rows


def of_devices(report: RunReport, names: Collection[str]) -> RunReport:
    """The report with these devices' rows alone; rounds and scores are the fleet's."""
    return replace(
        report,
        devices=tuple(row for row in report.devices if row.device in names),
        assignments=tuple(row for row in report.assignments if row.device in names),
        end_to_end={name: price for name, price in report.end_to_end.items() if name in names},
    )


def by_group(report: RunReport) -> dict[str, RunReport]:
    """Group -> its part of the report; groups without a device of the run are left out."""
    parts = {group: of_devices(report, names) for group, names in sorted(report.groups.items())}
    return {group: part for group, part in parts.items() if part.devices}


def device_row(report: RunReport, name: str) -> DeviceRow:
    """The device's own row; an empty one when it never said hello."""
    return next((device for device in report.devices if device.device == name), DeviceRow(device=name))


def fleet(name: str, report: RunReport, stage: int | None = None) -> Figure:
    """Total of a measured figure over all devices, in one stage or the whole run."""
    return measured(name, [row for row in report.assignments if stage is None or row.stage == stage])


def origins(report: RunReport) -> dict[str, list[str]]:
    """Figure -> its distinct origins, ``kind: source`` or why it is missing, in the ledger's order."""

    def origin(figure: Figure) -> str:
        if figure.value is None:
            return f"missing: {figure.reason or 'not recorded'}"
        return f"{figure.kind}: {figure.source or 'source not named'}"

    found: dict[str, list[str]] = {}
    for name in FIGURES:
        both = [each[name] for row in report.assignments for each in (row.measured, row.predicted) if name in each]
        if both:
            found[name] = list(dict.fromkeys(map(origin, both)))
    return found


def step_limit(device: DeviceRow) -> float | None:
    """The device's limit on step memory in bytes, from whichever of its memory budgets is tightest."""
    budget, has = device.budget, device.capabilities
    base = has.trainer_base_bytes
    limits = [float(budget.step_memory_bytes)] if budget.step_memory_bytes is not None else []
    if budget.memory_bytes is not None and base and not has_card(has):
        limits.append(max(0.0, float(budget.memory_bytes - base)))
    if budget.gpu_memory_bytes is not None and (allowed := gpu_limit(budget, has)) is not None:
        limits.append(float(allowed))
    return min(limits, default=None)


def process_limit(device: DeviceRow) -> float | None:
    """Trainer process limit in bytes, if the tightest memory budget; None otherwise, or for a GPU's own memory."""
    allowed, has = device.budget.memory_bytes, device.capabilities
    if allowed is None or has_card(has) or not has.trainer_base_bytes:
        return None
    return float(allowed) if step_limit(device) == max(0.0, float(allowed - has.trainer_base_bytes)) else None


#: Budget -> what it limits, in words.
LIMITED = {
    "memory": "step memory",
    "process memory": "process memory",
    "GPU memory": "GPU memory",
    "payload": "payload of a round",
    "FLOP": "FLOPs of a round",
    "energy": "energy of a round",
    "disk": "disk",
}
_PAYLOAD = ("payload_up_bytes", "payload_down_bytes")
#: Budget -> its field in a profile, and the figures it limits the sum of; none: it is checked before, not measured.
LIMITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "memory": ("step_memory_bytes", ("step_peak_bytes",)),
    "process memory": ("memory_bytes", ("process_peak_bytes",)),
    "GPU memory": ("gpu_memory_bytes", ("cuda_reserved_peak_bytes",)),
    "payload": ("payload_bytes", _PAYLOAD),
    "FLOP": ("flops", ("flops",)),
    "energy": ("energy_j", ("energy_j",)),
    "disk": ("disk_bytes", ()),
}
_UNITS = {"FLOP": "FLOP", "energy": "J"}


class Limit(NamedTuple):
    """A device's budget of a round: its kind, a key of ``LIMITED``; field, amount, and figures it limits the sum of."""

    what: str
    name: str
    allowed: float
    unit: str
    figures: tuple[str, ...]


def limits(device: DeviceRow) -> list[Limit]:
    """The device's budgets of a round, of every kind that it has."""
    fields = {what: (name, getattr(device.budget, name), figures) for what, (name, figures) in LIMITS.items()}
    return [
        Limit(what, name, float(allowed), _UNITS.get(what, "B"), figures)
        for what, (name, allowed, figures) in fields.items()
        if allowed is not None
    ]


class Use(NamedTuple):
    """Use of a device's budget in a round. ``what``: a key of ``LIMITED``; ``share``: spent / allowed."""

    share: float
    device: str
    what: str
    stage: int
    round: int
    spent: float
    allowed: float
    unit: str


def uses(device: DeviceRow, row: AssignmentRow) -> Iterator[Use]:
    """Measured use of each of the device's limited budgets by an assignment."""
    for what, _, allowed, unit, names in limits(device):
        values = [row.measured[name].value for name in names if name in row.measured]
        if allowed and names and len(values) == len(names) and None not in values:
            spent = sum(filter(None, values))
            yield Use(spent / allowed, row.device, what, row.stage, row.round, spent, allowed, unit)
