"""A report for programs: JSON with every row, CSV with one line per figure."""

from __future__ import annotations

import csv
import io
import re

import msgspec

from edgefl.records import FIGURES, Figure
from edgefl.run_records import RunReport

#: Grows when a field changes its meaning or goes away; new fields leave it as it is.
SCHEMA = "edgefl.report/1"
#: First characters of a cell that a spreadsheet takes for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"-?[0-9.]+(e[+-]?[0-9]+)?|-?inf|nan")
CSV_COLUMNS = (
    "run", "device", "stage", "round", "attempt", "status", "figure", "unit",
    "predicted", "measured", "kind", "source", "reason", "refusal", "needed", "allowed",
)  # fmt: skip


def to_json(report: RunReport) -> str:
    """The whole report as indented JSON; ``schema`` names its form."""
    body = {"schema": SCHEMA, **msgspec.to_builtins(report)}
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"


def to_csv(report: RunReport) -> str:
    """One line per device, attempt and figure, in base units (B, FLOP, s, J, °C). A missing number is an empty field
    with its ``reason`` in the next column."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in report.assignments:
        refusal = row.refusal
        where = (report.run, row.device, row.stage, row.round, row.attempt, row.status)
        why = ("", "", "") if refusal is None else (refusal.reason, _field(refusal.needed), _field(refusal.allowed))
        for name in [name for name in FIGURES if name in row.predicted or name in row.measured]:
            unknown = Figure(reason="not trained" if refusal or row.status != "done" else "not recorded")
            plan, told = row.predicted.get(name, Figure()), row.measured.get(name, unknown)
            origin = (told.kind, told.source) if name in row.measured else ("", "")
            values = (_field(plan.value), _field(told.value))
            writer.writerow(map(_inert, (*where, name, FIGURES[name], *values, *origin, told.reason, *why)))
        if refusal is not None and not row.predicted and not row.measured:
            writer.writerow(map(_inert, (*where, *[""] * 7, *why)))
    return out.getvalue()


def _inert(cell: object) -> object:
    """Texts that a spreadsheet would take for a formula are quoted; numbers stay."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA) or _NUMBER.fullmatch(cell):
        return cell
    return "'" + cell


def _field(value: float | None) -> str:
    """Empty for None; whole numbers without a decimal point."""
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() else repr(float(value))
