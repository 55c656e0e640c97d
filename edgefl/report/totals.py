"""Totals of the fleet: measured, predicted, and predicted for the same device rounds end to end."""

from __future__ import annotations

from typing import NamedTuple

from edgefl.records import FIGURES, Figure
from edgefl.report import resources
from edgefl.run_records import EndToEnd, RunReport

#: Sums of two figures of the ledger.
_BOTH_WAYS = {
    "payload_bytes": ("payload_up_bytes", "payload_down_bytes"),
    "wire_bytes": ("wire_up_bytes", "wire_down_bytes"),
}
#: The totals, in order.
TOTALS = ("step_peak_bytes", "process_peak_bytes", "flops", *_BOTH_WAYS, "compute_s", "energy_j")
#: Total -> field of the price of a round end to end.
_PRICED = {name: name for name in EndToEnd.__struct_fields__ if name != "refusal"}
_NOT_PLANNED = {"wire_bytes": "the plan has the payload alone", "process_peak_bytes": "the plan has the step alone"}
_NOT_PRICED = "no price of this end to end"


class Total(NamedTuple):
    """A figure over all devices and rounds: maximum of peaks, sum of everything else. Base units."""

    name: str
    unit: str
    measured: Figure
    predicted: Figure
    end_to_end: Figure


def totals(report: RunReport) -> list[Total]:
    """The fleet's totals. ``end_to_end``: of the device rounds that were trained."""
    return [_total(report, name, _BOTH_WAYS.get(name, (name,))) for name in TOTALS]


def _total(report: RunReport, name: str, parts: tuple[str, ...]) -> Total:
    spent = _sum([resources.fleet(part, report) for part in parts])
    planned = _sum([resources.predicted(part, report.assignments) for part in parts])
    if name in _NOT_PLANNED:
        planned = Figure(kind="predicted", reason=_NOT_PLANNED[name])
    return Total(name, FIGURES.get(name, "B"), spent, planned, _end_to_end(name, report))


def _sum(figures: list[Figure]) -> Figure:
    """Sum of totals; a missing or partial one leaves its reason."""
    values = [figure.value for figure in figures if figure.value is not None]
    reasons = "; ".join(dict.fromkeys(figure.reason for figure in figures if figure.reason))
    sources = ", ".join(dict.fromkeys(figure.source for figure in figures if figure.source))
    return Figure(sum(values) if len(values) == len(figures) else None, figures[0].kind, sources, reasons)


def _end_to_end(name: str, report: RunReport) -> Figure:
    if name not in _PRICED:
        return Figure(kind="predicted", reason=_NOT_PRICED)
    trained = [row.device for row in report.assignments if row.status == "done"]
    if not report.end_to_end:
        return Figure(kind="predicted", reason="the same run end to end is not priced" if trained else "not trained")
    prices = {device: getattr(price, _PRICED[name]) or None for device, price in report.end_to_end.items()}
    unknown = "speed or power not in the profile" if name in {"compute_s", "energy_j"} else _NOT_PRICED
    found = [Figure(prices.get(device), "predicted", "planner", unknown) for device in trained]
    return resources.total(name, found)
