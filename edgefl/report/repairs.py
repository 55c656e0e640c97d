"""Layers of devices that were replaced before the updates were combined, and why others were not."""

from __future__ import annotations

from typing import Any

from edgefl.report import units
from edgefl.report.grid import Column, Grid, count, words
from edgefl.run_records import RoundRow, RunReport

NOTE = (
    "A device whose batches lacked modalities after complete ones has a poverty layer, the one that changed most. It "
    "is replaced by the mean of its cluster's donors in the round."
)


def repaired(row: RoundRow) -> dict[str, dict[str, Any]]:
    """device -> what replaced its layer (part, tensor, donors), or why nothing did (kept)."""
    found = row.record.get("repaired", {})
    return {name: told for name, told in found.items() if isinstance(told, dict)} if isinstance(found, dict) else {}


def substitutions(report: RunReport) -> Grid:
    """How many updates had their layer replaced and how many not, by reason. No rows: the recipe repairs nothing."""
    columns = (
        Column("poverty layer", key=True, text=True),
        Column("updates"),
        Column("devices"),
        Column("rounds"),
    )
    met: dict[tuple[bool, str], list[tuple[str, int]]] = {}
    for number, row in enumerate((row for row in report.rounds if row.status == "done"), start=1):
        for device, told in repaired(row).items():
            kept = str(told.get("kept", ""))
            met.setdefault((bool(kept), f"kept: {kept}" if kept else "replaced"), []).append((device, number))
    if met and (False, "replaced") not in met:
        met[False, "replaced"] = []
    lines = [
        (
            words(text),
            count(len(found)),
            count(len({device for device, _ in found})),
            words(units.spans(sorted({number for _, number in found}))),
        )
        for (_, text), found in sorted(met.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1]))
    ]
    return Grid("Substitutions", columns, tuple(lines), (NOTE,), "No layer was to be replaced.")
