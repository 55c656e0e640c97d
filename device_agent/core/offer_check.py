"""Whether this device takes an offer: protocol, data and disk, each refusal with both numbers. Pure.

``freshness`` refuses old offers, ``machine`` a second one while busy, and the trainer what only torch or the data shows
(``device_agent/trainer/process.py``); docs/rounds.md has the table.
"""

from __future__ import annotations

from device_agent.core.state import DataFacts, Disk, State
from edgefl.models.spec import ModelSpec
from edgefl.protocol.messages import PROTOCOL_VERSION, Offer
from edgefl.records import Refusal


def check_offer(state: State, facts: DataFacts, offer: Offer, disk: Disk) -> Refusal | None:
    """None: take it. Memory and FLOPs were judged by the coordinator; the ceiling watches memory while training."""
    return _protocol(state) or _data(facts, offer) or _disk(state, offer, disk)


def _protocol(state: State) -> Refusal | None:
    if state.protocol in {0, PROTOCOL_VERSION}:
        return None
    detail = f"the coordinator speaks protocol {state.protocol}, this agent {PROTOCOL_VERSION}: update the older one"
    return Refusal("protocol", float(state.protocol), float(PROTOCOL_VERSION), "version", detail)


def _data(facts: DataFacts, offer: Offer) -> Refusal | None:
    model, hyper = offer.job.model, offer.job.hyper
    common = [modality for modality in facts.modalities if modality in model.encoders]
    if not common:
        here, there = ", ".join(facts.modalities) or "nothing", ", ".join(model.encoders) or "nothing"
        return Refusal("data", detail=f"this device has {here}, the model takes {there}")
    for modality in common if not facts.elastic else []:
        here_shape, there_shape = facts.modalities[modality], tuple(model.encoders[modality].input_shape)
        if here_shape != there_shape:
            return Refusal(
                "data", detail=f"{modality}: a sample here is {list(here_shape)}, the model takes {list(there_shape)}"
            )
    return _labels(facts, model) or _batch(facts, hyper.batch_size)


def _labels(facts: DataFacts, model: ModelSpec) -> Refusal | None:
    if not model.classes or not facts.class_counts:
        return None
    if model.label_names and facts.label_names:  # the trainer numbers labels by name, so the order is free
        used = [name for name, count in zip(facts.label_names, facts.class_counts, strict=False) if count]
        unknown = [name for name in used if name not in model.label_names]
        if unknown:
            there = ", ".join(model.label_names)
            return Refusal("data", detail=f"labels the model does not know: {', '.join(unknown)}; it knows {there}")
    elif len(facts.class_counts) > model.classes:
        detail = "the local data has more classes than the model"
        return Refusal("data", float(len(facts.class_counts)), float(model.classes), "classes", detail)
    return None


def _batch(facts: DataFacts, batch_size: int) -> Refusal | None:
    samples = facts.samples.get("", 0)
    if samples >= batch_size:
        return None
    return Refusal("data", float(batch_size), float(samples), "samples", "the local share does not fill one batch")


def _disk(state: State, offer: Offer, disk: Disk) -> Refusal | None:
    """An offer needs its manifest and, beside it, new versions of the parts it trains."""
    sizes = {ref.id: ref.size for ref in offer.manifest.values()}
    trained = sum(offer.manifest[part].size for part in offer.job.stage.trained if part in offer.manifest)
    needed = sum(sizes.values()) + trained
    allowed = state.budget.disk_bytes
    if allowed is not None and needed > allowed:
        return Refusal("disk", float(needed), float(allowed), "B", "objects of this round against budget.disk_bytes")
    needed = disk.missing_bytes + trained
    if disk.free_bytes is not None and needed > disk.free_bytes:
        return Refusal("disk", float(needed), float(disk.free_bytes), "B", "objects of this round against free space")
    return None
