"""Runs side by side for programs: JSON, CSV and Parquet, in base units."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

import msgspec

from edgefl.report.compare import Comparison, label
from edgefl.report.parquet import parquet_file
from edgefl.report.writers import inert

#: Grows when a field changes its meaning or goes away; new fields leave it as it is.
SCHEMA = "edgefl.compare/1"
CSV_COLUMNS = ("label", "run", "group", "figure", "unit", "value", "ratio", "points", "kind", "source", "reason")
#: Of Parquet, whose values are numbers: a setting's value is in a column of its own.
PARQUET_COLUMNS = (*CSV_COLUMNS, "setting")
#: Its columns that are no texts.
_NUMBERS = dict.fromkeys(("value", "ratio", "points"), "float64")

_Row = tuple[str | float | None, ...]


def to_json(found: Comparison) -> str:
    """Runs, figures with their ratios, settings and remarks as indented JSON; ``schema`` names its form."""
    keys = ("run", "name", "recipe", "status", "started_at", "finished_at")
    body = {
        "schema": SCHEMA,
        "runs": [
            {"label": label(index), **{key: getattr(run, key) for key in keys}} for index, run in enumerate(found.runs)
        ],
        "figures": [
            {**msgspec.to_builtins(line), "ratios": line.ratios, "points": line.points} for line in found.lines
        ],
        "settings": {setting.path: setting.values for setting in found.settings},
        "remarks": found.remarks,
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"


def to_csv(found: Comparison) -> str:
    """One line per run and figure, and per run and setting that differs; base units, shares of one."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in _rows(found):
        cells = dict(zip(PARQUET_COLUMNS, row, strict=True))
        setting = cells.pop("setting")
        cells["value"] = setting if cells["group"] == "settings" else cells["value"]
        writer.writerow(map(inert, cells.values()))
    return out.getvalue()


def to_parquet(found: Comparison) -> bytes:
    """The same rows with types; texts are as they are, without a spreadsheet's quotes. Needs the extra ``parquet``."""
    return parquet_file(dict.fromkeys(PARQUET_COLUMNS, "string") | _NUMBERS, _rows(found), SCHEMA)


def _rows(found: Comparison) -> Iterator[_Row]:
    """A row of ``PARQUET_COLUMNS`` for each run and figure, and for each run and setting."""
    for index, run in enumerate(found.runs):
        head = (label(index), run.run)
        for line in found.lines:
            figure, change = line.figures[index], (line.ratios[index], line.points[index])
            origin = (figure.kind, figure.source) if figure.value is not None else ("missing", "")
            yield (*head, line.group, line.name, line.unit, figure.value, *change, *origin, figure.reason, None)
        for setting in found.settings:
            yield (*head, "settings", setting.path, "", None, None, None, "", "", "", setting.values[index])
