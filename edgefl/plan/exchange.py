"""What of a device's training travels: all of it, the mappings only (AproMFL), or nothing (local training).

Kept parts go on from the device's own copy of its round before; if it is sent another one, that is the teacher.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from edgefl.models.spec import is_encoder, modality_of
from edgefl.plan.job import Exchange, Job, Stage
from edgefl.registry import choose

#: Prefix of the residual of a part, among what a device retains.
RESIDUAL = "lost/"
#: Share of a device's samples that its own model is tested on. Of 100 samples 20: the standard error of an accuracy is
#: at most 11 points on one device, and 3 over twelve of them.
OWN_HOLDOUT = 0.2


def exchange_of(weight: Mapping[str, Any]) -> Exchange:
    """Parts that travel under a recipe's slot ``weight``."""
    exchange: Exchange = choose("weight", {"weight": weight}).method.exchange
    return exchange


def default_holdout(exchange: Exchange) -> float:
    """``training.holdout`` of a run file that sets none: only the device can judge a classifier that stays on it."""
    return 0.0 if exchange == "all" else OWN_HOLDOUT


def private(stage: Stage, exchange: Exchange) -> tuple[str, ...]:
    """The trained parts that never leave the device."""
    if exchange == "nothing":
        return stage.trained
    if exchange == "mappings":
        return tuple(part for part in stage.trained if modality_of(part) is None and not is_encoder(part))
    return ()


def sent(stage: Stage, exchange: Exchange) -> tuple[str, ...]:
    """The trained parts that are uploaded."""
    stay = set(private(stage, exchange))
    return tuple(part for part in stage.trained if part not in stay)


def kept(job: Job) -> tuple[str, ...]:
    """The trained parts that go on from the device's own copy."""
    exchange = job.slots.exchange
    if exchange == "mappings":
        heads = (part for part in job.stage.trained if part.startswith("head/"))
        return (*private(job.stage, exchange), *heads)
    return private(job.stage, exchange)


def packing_of(rules: Sequence[tuple[str, str]], part: str) -> str:
    """The packing of the first rule whose pattern fits the part; "f32" without one."""
    return next((packing for pattern, packing in rules if fnmatch.fnmatchcase(part, pattern)), "f32")


def packed_bytes(part_bytes: int, packing: str, top: float) -> int:
    """About how many bytes a part of ``part_bytes`` in f32 takes: "delta+top" sends 5 for a value of 4."""
    form = packing.removeprefix("delta+")
    share = {"f32": 1.0, "f16": 0.5, "bf16": 0.5, "int8": 0.25, "int4": 0.125, "top": min(1.0, 1.25 * top)}[form]
    return round(part_bytes * share)
