"""Shortfalls: fewer encoder stages or a smaller rank than scheduled, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from edgefl.models.spec import modality_of, rank_start
from edgefl.plan.stages import encoder_stage
from edgefl.records import Refusal
from edgefl.report import units
from edgefl.report.folding import listed
from edgefl.report.refusals import refusal_of, refusal_text
from edgefl.run_records import RunReport

#: Up to so many devices have a sentence of their own.
_APART = 3
_SHALLOW, _NARROW = "fewer encoder stages than the schedule asks", "low-rank terms of a smaller rank"
#: In place of a limit that a run of an earlier version has not recorded.
UNKNOWN = Refusal("reason not on record")


class Shortfall(NamedTuple):
    """Encoder stages (0: embeddings) trained by a device in a stage, and asked of it; ``rank`` 0: the whole one."""

    device: str
    stage: int
    rounds: tuple[int, ...]
    trained: tuple[int, ...]
    asked: tuple[int, ...]
    limit: Refusal
    rank: int = 0

    @property
    def what(self) -> str:
        """Kind of the shortfall: encoder stages, or rank alone."""
        return _SHALLOW if self.trained != self.asked else _NARROW

    @property
    def text(self) -> str:
        """ "stages 3–6 instead of embeddings + stages 1–6, rank 4"."""
        depth = f"{units.stage_words(self.trained)} instead of {units.stage_words(self.asked)}"
        return ", ".join([depth] * (self.what == _SHALLOW) + [f"rank {self.rank}"] * (self.rank > 0))


def shortfalls(report: RunReport) -> list[Shortfall]:
    """Shortfalls by device, stage and depth; modalities without data on the device do not count."""
    asked = {stage.get("index"): tuple(stage.get("trained", ())) for stage in report.stages}
    drawing = {stage.get("index") for stage in report.stages if stage.get("draw")}
    limits = _limits(report)
    found: dict[tuple[str, int, tuple[int, ...], tuple[int, ...], int], list[int]] = {}
    for row in report.assignments:
        own = {modality_of(part) for part in row.trained}
        parts = [part for part in asked.get(row.stage, ()) if modality_of(part) in own]
        whole, trained = _numbers(parts), _numbers(row.trained)
        if row.stage in drawing:  # each round of such a stage asks for one of its encoder stages
            parts, whole = [part for part in parts if (n := encoder_stage(part)) is None or n in trained], trained
        # A slice begins at the rank of those that lack it.
        rank = min(set(map(rank_start, parts)) - set(map(rank_start, row.trained)), default=0)
        if row.status == "done" and (set(trained) < set(whole) or rank):
            found.setdefault((row.device, row.stage, trained, whole, rank), []).append(row.round)
    return [
        Shortfall(device, stage, tuple(rounds), trained, whole, limits.get((device, stage), UNKNOWN), rank)
        for (device, stage, trained, whole, rank), rounds in found.items()
    ]


def _numbers(parts: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({n for part in parts if (n := encoder_stage(part)) is not None}))


def _limits(report: RunReport) -> dict[tuple[str, int], Refusal]:
    """(device, stage) -> limit that shortened its last plan."""
    return {
        (str(placement.get("device", "")), event.stage): refusal_of(placement["shortened"])
        for event in report.events
        if event.kind == "stage_planned"
        for placement in event.data.get("placements", [])
        if placement.get("shortened")
    }


def sentences(report: RunReport) -> list[str]:
    """A sentence per device on its last partly trained stage; one sentence for many devices."""
    found: dict[str, list[Shortfall]] = {}
    for one in shortfalls(report):
        found.setdefault(one.device, []).append(one)
    if len(found) > _APART:
        kinds: dict[str, dict[str, None]] = {}
        for device, rows in found.items():
            kinds.setdefault(_last(rows).what, {})[device] = None
        return [f"{len(names)} devices ({listed(list(names))}) trained {what}." for what, names in kinds.items()]
    return [_sentence(device, rows) for device, rows in found.items()]


def _sentence(device: str, rows: Sequence[Shortfall]) -> str:
    stages, last = sorted({row.stage for row in rows}), _last(rows)
    where = f"stages {units.spans(stages)}, in stage {last.stage}" if len(stages) > 1 else f"stage {last.stage}:"
    why = refusal_text(msgspec.structs.asdict(last.limit))
    return f"{device} trained {last.what} in {where} {last.text} ({why})."


def _last(rows: Sequence[Shortfall]) -> Shortfall:
    return max(rows, key=lambda row: row.stage)
