"""What of a device's training travels: all of it, the mappings only (AproMFL), or nothing (local training).

Kept parts go on from the device's own copy of its round before; if it is sent another one, that is the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgefl.models.spec import is_encoder, modality_of
from edgefl.plan.values import Exchange, Job, Stage

#: By the recipe's slot weight; every other choice exchanges all that is trained.
_EXCHANGE: dict[str, Exchange] = {"own": "nothing", "relationship": "mappings"}


def exchange_of(weight: Mapping[str, Any]) -> Exchange:
    """What a recipe's slot ``weight`` makes travel."""
    return _EXCHANGE.get(next(iter(weight), ""), "all")


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
