"""Shortfalls: devices that trained fewer encoder stages than scheduled, and the limits that caused it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from edgefl.models.spec import modality_of
from edgefl.plan.stages import encoder_stage
from edgefl.records import Refusal
from edgefl.report import units
from edgefl.report.folding import listed
from edgefl.report.refusals import refusal_of, refusal_text
from edgefl.run_records import RunReport

#: Up to so many devices have a sentence of their own.
_APART = 3
#: In place of a limit that a run of an earlier version has not recorded.
UNKNOWN = Refusal("reason not on record")


class Shortfall(NamedTuple):
    """Encoder stages (0: embeddings) trained by a device in a stage, and asked of it."""

    device: str
    stage: int
    rounds: tuple[int, ...]
    trained: tuple[int, ...]
    asked: tuple[int, ...]
    limit: Refusal

    @property
    def text(self) -> str:
        """ "stages 3–6 instead of embeddings + stages 1–6"."""
        return f"{stage_words(self.trained)} instead of {stage_words(self.asked)}"


def shortfalls(report: RunReport) -> list[Shortfall]:
    """Shortfalls by device, stage and depth; modalities without data on the device do not count."""
    asked = {stage.get("index"): tuple(stage.get("trained", ())) for stage in report.stages}
    limits = _limits(report)
    found: dict[tuple[str, int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for row in report.assignments:
        own = {modality_of(part) for part in row.trained}
        whole = _numbers(part for part in asked.get(row.stage, ()) if modality_of(part) in own)
        trained = _numbers(row.trained)
        if row.status == "done" and set(trained) < set(whole):
            found.setdefault((row.device, row.stage, trained, whole), []).append(row.round)
    return [
        Shortfall(device, stage, tuple(rounds), trained, whole, limits.get((device, stage), UNKNOWN))
        for (device, stage, trained, whole), rounds in found.items()
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


def stage_words(numbers: Sequence[int]) -> str:
    """ "embeddings + stages 1–6" of [0, 1, 2, 3, 4, 5, 6]; "heads alone" of none."""
    names = ["embeddings"] if 0 in numbers else []
    if stages := [n for n in numbers if n]:
        names.append(f"stage{'s' * (len(stages) > 1)} {units.spans(stages)}")
    return " + ".join(names) or "heads alone"


def sentences(report: RunReport) -> list[str]:
    """A sentence per device on its last partly trained stage; one sentence for many devices."""
    found: dict[str, list[Shortfall]] = {}
    for one in shortfalls(report):
        found.setdefault(one.device, []).append(one)
    if len(found) > _APART:
        who = f"{len(found)} devices ({listed(list(found))})"
        return [f"{who} trained fewer encoder stages than the schedule asks."]
    return [_sentence(device, rows) for device, rows in found.items()]


def _sentence(device: str, rows: Sequence[Shortfall]) -> str:
    stages, last = sorted({row.stage for row in rows}), max(rows, key=lambda row: row.stage)
    where = f"stages {units.spans(stages)}, in stage {last.stage}" if len(stages) > 1 else f"stage {last.stage}:"
    why = refusal_text(msgspec.structs.asdict(last.limit))
    return f"{device} trained fewer encoder stages than the schedule asks in {where} {last.text} ({why})."
