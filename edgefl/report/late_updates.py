"""What was counted of updates made from earlier models, by round and by device."""

from __future__ import annotations

from typing import Any

from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, count, words
from edgefl.run_records import RoundRow, RunReport

NOTE = (
    "An update made from the model of s rounds ago moves the model by the change it makes, times (1 + s) to the power "
    "of −alpha. Too old: made from a model older than round.max_staleness, and dropped."
)


def stale(row: RoundRow) -> list[dict[str, Any]]:
    """The late updates of a round: device, staleness, factor."""
    found = row.record.get("stale", {})
    return list(found.values()) if isinstance(found, dict) else []


def of_round(row: RoundRow) -> Cell:
    """How many of a round's updates were late, and by how much."""
    late = stale(row)
    if not late:
        return words("")
    most = max(one["staleness"] for one in late)
    told = [f"{o['device']}: {o['staleness']} rounds, × {o['factor']:.2f}" for o in late]
    return Cell(f"{len(late)}, up to {most}", tip="; ".join(told))


def by_device(report: RunReport) -> Grid:
    """Each device's updates in the model: how many, how late, what they were damped by. No rows: none was late."""
    columns = (
        Column("device", key=True, text=True),
        Column("updates"),
        Column("of them late"),
        Column("staleness", "mean", tip="Rounds between the model it was made from and the one it joined, late ones."),
        Column("", "most", tip="Rounds."),
        Column("damped", "mean ×", tip="What the change of a late update was multiplied by."),
        Column("too old", tip="Updates, or work on them, that were dropped."),
    )
    late: dict[str, list[dict[str, Any]]] = {}
    for row in report.rounds:
        for one in stale(row):
            late.setdefault(str(one["device"]), []).append(one)
    old = [row.device for row in report.assignments if row.status == "late" and _is_too_old(row.refusal)]
    lines = []
    for device in sorted({*late, *old}):
        mine = late.get(device, [])
        fresh = sum(_brought(row, device) for row in report.rounds)
        steps = [one["staleness"] for one in mine]
        lines.append(
            (
                words(device),
                count(fresh + len(mine)),
                count(len(mine)),
                words(units.number(sum(steps) / len(steps)) if steps else ""),
                words(str(max(steps)) if steps else ""),
                words(units.number(sum(one["factor"] for one in mine) / len(mine)) if mine else ""),
                count(old.count(device)),
            )
        )
    return Grid("Late updates", columns, tuple(lines), (NOTE,), "No update was late.")


def _is_too_old(refusal: Any) -> bool:
    return refusal is not None and refusal.unit == "rounds"


def _brought(row: RoundRow, device: str) -> bool:
    """Whether an update that was not late was of this device."""
    weights = [told.get("devices", {}) for told in row.record.get("parts", {}).values() if isinstance(told, dict)]
    return any(device in devices for devices in weights)
