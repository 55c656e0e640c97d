"""Updates left out, scaled down or trimmed by the slot combine, by device."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from edgefl.report import units
from edgefl.report.grid import Column, Grid, Record, table
from edgefl.run_records import RoundRow, RunReport

_NOTE = (
    "By the slot combine, beside the other devices' updates of the round. It is no refusal: some are always the "
    "furthest from the others, and honest devices with other data than theirs often. Trimmed: values of its weights "
    "that did not count; a device alone far above the others is what to look at."
)


def left_out(report: RunReport) -> Grid:
    """One row per device: rounds with its update left out, scaled or trimmed. No rows for a plain mean."""
    done = [row for row in report.rounds if row.status == "done"]
    factors: dict[str, list[float]] = {}
    trimmed: dict[str, list[float]] = {}
    for row in done:
        for name, factor in _factors(row):
            factors.setdefault(_device(name), []).append(factor)
        for name, share in _trimmed(row):
            trimmed.setdefault(_device(name), []).append(share)
    scaled = {device: [factor for factor in own if factor] for device, own in factors.items()}

    def mean(values: list[float] | None, *, percent: bool = False) -> str:
        return units.number(statistics.fmean(values) * (100 if percent else 1)) if values else ""

    columns: list[Column[str]] = [
        Column("device", lambda device: device, key=True, text=True),
        Column("left out", lambda device: factors.get(device, []).count(0.0), "rounds"),
        Column("scaled down", lambda device: len(scaled.get(device, [])), "rounds"),
        Column("", lambda device: mean(scaled.get(device)), "mean ×"),
        Column("trimmed", lambda device: mean(trimmed.get(device), percent=True), "% of values"),
    ]
    notes = Counter(str(_screened(row).get("note") or "") for row in done)
    told = [f"In {count} of {len(done)} rounds: {note}" for note, count in notes.items() if note]
    devices = {*factors, *trimmed, *({device for row in done for device in row.participants} if told else ())}
    return table("Combination of the updates", columns, sorted(devices), [_NOTE, *told], "Every update counted whole.")


def _screened(row: RoundRow) -> Record:
    found = row.record.get("screened", {})
    return found if isinstance(found, dict) else {}


def _factors(row: RoundRow) -> Iterator[tuple[str, float]]:
    yield from dict(_screened(row).get("factors", {})).items()


def _trimmed(row: RoundRow) -> Iterator[tuple[str, float]]:
    """(update's name, trimmed share) of each part in a round."""
    for part in row.record.get("parts", {}).values():
        yield from dict(part.get("trimmed", {})).items()


def _device(name: str) -> str:
    """Device in an update's name, without the staleness of late ones."""
    return name.partition("~")[0]
