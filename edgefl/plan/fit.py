"""The planner of one stage: per device the largest micro-batch, then the deepest training, that fits its budget.

Order of retreat: whole batch, smaller micro-batches, then without storing the frozen prefix's outcome (which takes
disk), then fewer trained encoder stages (from the input side), each again from the whole batch. What a device has
declined with a measurement is not offered again, nor anything larger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from edgefl.models.spec import EncoderSpec, ModelSpec, match_parts
from edgefl.plan.eligibility import verdict
from edgefl.plan.exchange import packed_bytes, packing_of, sent
from edgefl.plan.prefix import can_cache, prefixes, stored_bytes, with_cache
from edgefl.plan.schedule import restrict, shallower, trained_stages
from edgefl.plan.values import Cache, Candidate, Hyper, Job, Placement, Slots, Stage, Transfer
from edgefl.records import Cost, Figure, Figures, Refusal


class Priced(NamedTuple):
    """What a round needs: memory of its largest moment in bytes, FLOPs of a usual round.

    ``filling``: FLOPs for every sample through one part of a stored prefix, once; {} where nothing is stored.
    """

    peak: int
    flops: float
    filling: Mapping[str, float] = {}


#: price(job, samples)
Price = Callable[[Job, Mapping[str, int]], Priced]
_MEMORY = frozenset({"memory", "step_memory"})
#: What a pretrained generator of ``edgefl.data.generators`` makes from what.
_GENERATED = {"transformers": ("vision", "text"), "diffusers": ("text", "vision")}


def micro_batches(batch_size: int) -> list[int]:
    """0 (the whole batch), then halves of it down to about 1/32, smallest 1."""
    sizes, size = [0], batch_size // 2
    while size >= 1 and size * 32 >= batch_size:
        sizes.append(size)
        size //= 2
    return sizes


def place(
    model: ModelSpec,
    stage: Stage,
    hyper: Hyper,
    slots: Slots,
    candidate: Candidate,
    part_bytes: Mapping[str, int],
    price: Price,
    *,
    last: bool = False,
    before: Stage | None = None,
    transfer: Transfer | None = None,
) -> Placement:
    """What ``candidate`` trains in ``stage``; a placement with a refusal when nothing fits.

    ``last``: the run's last round is one of this stage's; where that costs more, the device has to be able to pay it.
    ``before``: the stage whose rounds came before, from whose stored prefix this one's goes on. ``transfer``: how parts
    travel; the first and last rounds of a stage, in which some come whole, take more bytes.
    """
    filled = msgspec.structs.replace(candidate, samples=completed(slots, candidate.samples, model.encoders))
    refusal = _unfit(model, hyper, slots, filled)
    if refusal is not None:
        return Placement(device=candidate.device, stage=stage, refusal=refusal)
    own = restrict(stage, [m for m in model.encoders if filled.samples.get(m, 0) > 0])
    if needs_pairs(slots) and not any(candidate.class_counts):
        own = _without_labels(own, slots)
    job = Job(model=model, stage=own, hyper=hyper, slots=slots, transfer=transfer or Transfer())
    for variant in shallower(own):
        for cache in _stores(msgspec.structs.replace(job, stage=variant)):
            chosen = with_cache(msgspec.structs.replace(job, stage=variant), cache)
            found = _largest(chosen, stage, candidate, part_bytes, price, last=last, before=before)
            if isinstance(found, Placement):
                return found
            refusal = found or refusal
            if found is not None and found.reason in _MEMORY:
                break  # what is not stored takes more memory
    if refusal is None:
        told = candidate.declined
        refusal = told[-1].refusal if told else Refusal(reason="error", detail="no variant is left")
    return Placement(device=candidate.device, stage=own, refusal=refusal)


def _stores(job: Job) -> tuple[Cache, ...]:
    """How the job's prefixes may be stored, the best first."""
    return (job.hyper.cache, "") if job.hyper.cache and can_cache(job) else ("",)


def _largest(
    job: Job,
    stage: Stage,
    candidate: Candidate,
    part_bytes: Mapping[str, int],
    price: Price,
    *,
    last: bool,
    before: Stage | None,
) -> Placement | Refusal | None:
    """The job with the largest micro-batch that fits; else why the last one tried does not; None: none was tried."""
    refusal = None
    for micro in micro_batches(job.hyper.batch_size):
        if _declined(job.stage, micro or job.hyper.batch_size, job.hyper.cache, candidate):
            continue
        job = msgspec.structs.replace(job, hyper=msgspec.structs.replace(job.hyper, micro_batch=micro))
        priced = price(job, candidate.samples)
        cost = dearest = _cost(job, stage, candidate, part_bytes, priced)
        if last and job.model.matching != "none":
            ending = msgspec.structs.replace(job, last=True)
            dearest = _cost(ending, stage, candidate, part_bytes, price(ending, candidate.samples))
        refusal = verdict(dearest, candidate)
        if refusal is None:
            return Placement(
                device=candidate.device,
                stage=job.stage,
                micro_batch=micro,
                cache=job.hyper.cache,
                cost=dearest,
                predicted=_figures(cost),
                predicted_first=_first(job, before, cost, priced.filling),
                predicted_last=_figures(dearest) if dearest != cost else {},
            )
        if refusal.reason not in _MEMORY:
            break  # a smaller micro-batch costs more FLOPs and as many bytes: only a shallower stage can help
    return refusal


def _first(job: Job, before: Stage | None, cost: Cost, filling: Mapping[str, float]) -> Figures:
    """The figures of a stage's first round: what ``before`` has not stored yet is computed."""
    if not filling:
        return {}
    known = prefixes(msgspec.structs.replace(job, stage=before)) if before is not None else {}
    there = {part for prefix in known.values() for part in prefix.parts}
    more = sum(flops for part, flops in filling.items() if part not in there)
    return _figures(msgspec.structs.replace(cost, flops=cost.flops + more))


def trained_depth(stage: Stage) -> int:
    """How many encoder stages the stage trains; embeddings count as one."""
    return len(trained_stages(stage))


def _unfit(model: ModelSpec, hyper: Hyper, slots: Slots, candidate: Candidate) -> Refusal | None:
    for modality, shape in candidate.modalities.items():
        spec = model.encoders.get(modality)
        if spec is not None and tuple(spec.input_shape) != tuple(shape):
            detail = f"{modality} samples have shape {tuple(shape)}, the model takes {tuple(spec.input_shape)}"
            return Refusal(reason="data", detail=detail)
    if not any(candidate.samples.get(modality) for modality in model.encoders):
        own = ", ".join(m for m in candidate.samples if m) or "no modality"
        return Refusal(reason="data", detail=f"this device has {own}, the model takes {', '.join(model.encoders)}")
    unknown = not candidate.class_counts and not needs_pairs(slots)  # its trainer will tell
    labelled = None if unknown else sum(candidate.class_counts)
    usable = usable_samples(slots, candidate.samples, list(model.encoders), labelled)
    if usable < hyper.batch_size:
        return Refusal(
            reason="data",
            needed=float(hyper.batch_size),
            allowed=float(usable),
            unit="samples",
            detail="fewer usable samples than one batch",
        )
    return None


def usable_samples(
    slots: Slots, samples: Mapping[str, int], modalities: Sequence[str], labelled: int | None = None
) -> int:
    """Most samples that can be trained on, by what the terms of the objective need: labels, or two modalities.

    ``labelled``: how many have a label; None: all.
    """
    counts = sorted((samples.get(m, 0) for m in modalities), reverse=True)
    some = min(samples.get("", 0), sum(counts))
    paired = counts[1] if len(counts) > 1 else 0
    if "ignore" in slots.missing:
        some = paired = min(counts, default=0)
    known = some if labelled is None else min(some, labelled)
    return max(known if needs_labels(slots) else 0, paired if needs_pairs(slots) else 0)


def held_out(hyper: Hyper, usable: int) -> int:
    """How many of the ``usable`` samples are only tested on: one batch at least stays for training."""
    return max(0, min(int(hyper.holdout * usable), usable - hyper.batch_size))


def completed(slots: Slots, samples: Mapping[str, int], encoders: Mapping[str, EncoderSpec]) -> dict[str, int]:
    """``samples`` (modality -> how many have it, "" -> all) with those that the recipe's generator will make.

    A pretrained generator makes its one kind of modality from its other; ``nearest`` makes what a local sample has
    beside another modality, and some do if there are more modalities than samples.
    """
    options = slots.missing.get("completion")
    if options is None:
        return dict(samples)
    kinds = _GENERATED.get(str(options.get("generator", "nearest")))
    paired = sum(samples.get(m, 0) for m in encoders) > samples.get("", 0)
    found = dict(samples)
    for target, spec in encoders.items():
        sources = [m for m in encoders if m != target and (kinds is None or (encoders[m].kind, spec.kind) == kinds)]
        if kinds is not None or (paired and samples.get(target, 0)):
            made = sum(samples.get(m, 0) for m in sources)
            found[target] = min(samples.get("", 0), samples.get(target, 0) + made)
    return {m: count for m, count in found.items() if count or m in samples}


def complete_only(slots: Slots) -> bool:
    """Whether only samples with every modality are trained on."""
    return "ignore" in slots.missing or not needs_labels(slots)


def needs_labels(slots: Slots) -> bool:
    """Whether a task of the objective is learned from labels."""
    return "cross_entropy" in slots.objective


def needs_pairs(slots: Slots) -> bool:
    """Whether a task of the objective is learned from pairs of modalities."""
    return bool({"clip", "margin"} & set(slots.objective))


def _without_labels(stage: Stage, slots: Slots) -> Stage:
    """What a device without labels trains beside others that have them: not the classifier, nor what only it needs."""
    useless = {"task"} if {"mcm", "gmc"} & set(slots.objective) else {"task", "fusion"}
    kept = tuple(part for part in stage.trained if part not in useless)
    return msgspec.structs.replace(stage, trained=kept)


def _declined(variant: Stage, micro: int, cache: Cache, candidate: Candidate) -> bool:
    """Whether the device declined this, or something that needs at most as much: what is stored takes less memory.

    For want of disk, or of range in what is stored, it declined the storing alone.
    """
    depth = trained_depth(variant)
    for was in candidate.declined:
        if was.cached and was.refusal.reason in {"disk", "cache"}:
            if cache:
                return True
        elif depth >= was.depth and micro >= was.micro_batch and (was.cached or not cache):
            return True
    return False


def _cost(job: Job, stage: Stage, candidate: Candidate, part_bytes: Mapping[str, int], priced: Priced) -> Cost:
    """Down: what is present here and the round before may have changed, so all that anybody trains in ``stage``.

    Frozen parts came once, earlier.
    """
    exchange = job.slots.exchange
    here = set(job.stage.present)
    small = [part for part in match_parts(job.model) if part in here] if job.last else []
    if job.model.matching == "prior" and len(small) < 2:  # there is nothing to learn to predict
        small = []
    trained = _bytes(sent(job.stage, exchange), part_bytes)
    up = _packed(sent(job.stage, exchange), part_bytes, job.transfer.up, job.transfer.top) + _bytes(small, part_bytes)
    down = [part for part in sent(stage, exchange) if part in here]
    return Cost(
        step_peak_bytes=priced.peak,
        flops=priced.flops,
        filling_flops=sum(priced.filling.values()),
        payload_down_bytes=_packed(down, part_bytes, job.transfer.down, job.transfer.top),
        payload_up_bytes=up,
        disk_bytes=_bytes(job.stage.present, part_bytes)
        + trained
        + _bytes(small, part_bytes)
        + _beside(down, trained, part_bytes, job.transfer)
        + stored_bytes(job, candidate.samples),
    )


def _bytes(parts: Sequence[str], part_bytes: Mapping[str, int]) -> int:
    return sum(part_bytes.get(part, 0) for part in parts)


def _packed(parts: Sequence[str], part_bytes: Mapping[str, int], rules: Sequence[tuple[str, str]], top: float) -> int:
    return sum(packed_bytes(part_bytes.get(part, 0), packing_of(rules, part), top) for part in parts)


def _beside(down: Sequence[str], trained: int, part_bytes: Mapping[str, int], transfer: Transfer) -> int:
    """Bytes on disk for packed exchange: packed parts and what they are based on, and what was not sent."""
    lossy = any(packing != "f32" for _, packing in transfer.up)
    based = [part for part in down if packing_of(transfer.down, part) != "f32"]
    return _bytes(based, part_bytes) + _packed(based, part_bytes, transfer.down, transfer.top) + lossy * trained


def _figures(cost: Cost) -> dict[str, Figure]:
    memory = "meta device, live bytes of one training step"
    flops = "meta device, 2 per multiply-accumulate"
    return {
        "step_peak_bytes": Figure(float(cost.step_peak_bytes), "predicted", memory),
        "flops": Figure(cost.flops, "predicted", flops),
        "payload_down_bytes": Figure(float(cost.payload_down_bytes), "predicted", "parts the round before changed"),
        "payload_up_bytes": Figure(float(cost.payload_up_bytes), "predicted", "trained parts"),
    }
