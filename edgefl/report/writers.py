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
    """One line per device, attempt and figure, in base units (B, FLOP, s, J, °C). A number nobody has is an empty
    field with its ``reason`` beside it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in report.assignments:
        refusal = row.refusal
        why = ("", "", "") if refusal is None else (refusal.reason, _field(refusal.needed), _field(refusal.allowed))
        for name, unit in FIGURES.items():
            predicted, measured = row.predicted.get(name), row.measured.get(name)
            if predicted is None and measured is None:
                continue
            told = measured or Figure(reason="not trained" if refusal or row.status != "done" else "not recorded")
            plan = None if predicted is None else predicted.value
            where = (report.run, row.device, row.stage, row.round, row.attempt, row.status)
            origin = (told.kind, told.source, told.reason) if measured else ("", "", told.reason)
            cells = (*where, name, unit, _field(plan), _field(told.value), *origin, *why)
            writer.writerow(map(_inert, cells))
        if refusal is not None and not row.predicted and not row.measured:
            where = (report.run, row.device, row.stage, row.round, row.attempt, row.status)
            writer.writerow(map(_inert, (*where, "", "", "", "", "", "", "", *why)))
    return out.getvalue()


def _inert(cell: object) -> object:
    """A text that no spreadsheet takes for a formula; numbers are as they are."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA) or _NUMBER.fullmatch(cell):
        return cell
    return "'" + cell


def _field(value: float | None) -> str:
    """Empty for None; whole numbers without a decimal point."""
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() else repr(float(value))
