"""Table of exported bundles in a lower precision: accuracy, size and latency beside those in f32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgefl.export.bundle_format import read_manifest
from edgefl.export.precision_record import Reduced, SubsetLoss, Timing
from edgefl.report.grid import Cell, Column, Grid, table
from edgefl.run_records import BundleRow

MIB = 2**20


@dataclass(frozen=True)
class _Line:
    """One line about a bundle: its ``at``-th subset and its ``at``-th batch size, as far as there are any."""

    row: BundleRow
    of: Reduced
    at: int

    @property
    def loss(self) -> SubsetLoss | None:
        return self.of.losses[self.at] if self.at < len(self.of.losses) else None

    @property
    def timing(self) -> Timing | None:
        return self.of.timings[self.at] if self.at < len(self.of.timings) else None


def lower_precisions(rows: Sequence[BundleRow]) -> list[Grid]:
    """The table, for the written bundles that are in a lower precision; [] without any."""
    found = [(row, read_manifest(Path(row.path).parent).reduced) for row in rows]
    compared = [(row, one) for row, one in found if one is not None]
    if not compared:
        return []
    lines = [_Line(row, one, i) for row, one in compared for i in range(max(len(one.losses), len(one.timings)))]
    one = compared[0][1]
    where = f"{one.machine}, {one.threads} threads, {one.provider}"
    told = f"Right: {one.measure} in percent, on {one.data}. Latency: medians of calls in turn on {where}."
    left = [f"{row.name} {row.precision}: left in f32: {', '.join(each.left)}." for row, each in compared if each.left]
    return [table("Lower precision: f32 → exported", _columns(), lines, [told, *left])]


def _columns() -> list[Column[_Line]]:
    def name(line: _Line) -> str:
        return "" if line.at else f"{line.row.name} {line.row.precision}"

    def size(line: _Line) -> str:
        return "" if line.at else f"{line.of.before_bytes / MIB:.1f} → {line.row.size_bytes / MIB:.1f}"

    def right(line: _Line) -> Cell:
        one = line.loss
        return Cell(f"{one.before:.1f} → {one.after:.1f}", tone="good" if one.points <= 0 else "") if one else Cell()

    def latency(line: _Line) -> str:
        one = line.timing
        return f"{one.before_ms:.1f} → {one.after_ms:.1f}" if one else ""

    return [
        Column("bundle", name, key=True, text=True),
        Column("size", size, "MiB"),
        Column("given", lambda line: " + ".join(line.loss.given) if line.loss else "", text=True),
        Column("right", right, "%"),
        Column("samples", lambda line: line.loss.samples if line.loss else None),
        Column("batch", lambda line: line.timing.batch if line.timing else None),
        Column("latency", latency, "ms"),
    ]
