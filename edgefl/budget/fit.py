"""Planner of one stage: for each device the deepest training, then the largest micro-batch, within its budget.

A predicted cost is held against the budget; the first limit that refuses is given with both numbers.

Order of fallbacks: whole batch, smaller micro-batches, the smallest with activation checkpointing, the same with
weights on disk (the outcome of all these is the same); then the low-memory optimiser, where the run file names one;
then without storing the frozen prefix's outcome (which takes disk); then a smaller rank of the low-rank terms, where
the run file names some; then fewer trained encoder stages (from the input side); each again from the whole batch.
Where the step is on a card and the process' memory is short, smaller steps and optimisers do not help: whole parts and
whole batches come through the process. What a device has declined with a measurement is not offered again, nor
anything larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Literal

import msgspec

from edgefl.budget.stage_cost import (
    OWN_CODE,
    Price,
    StageTraffic,
    cost_of,
    draw_costs,
    figures_of,
    filled,
    first_figures,
    largest_layer,
)
from edgefl.label_spaces import keyed_spaces, samples_key, spaces_in
from edgefl.models.spec import MISSING, ModelSpec, is_encoder, task_parts
from edgefl.plan.job import LEAST_BYTES_ON_DISK, Candidate, Decline, Draw, Job, Placement, Stage
from edgefl.plan.packed_sizes import Layout
from edgefl.plan.periods import LARGEST_SHARE, period_of
from edgefl.plan.privacy import Spending
from edgefl.plan.stages import is_closing, narrower, of_spaces, restrict, shallower, trained_rank, trained_stages
from edgefl.plan.training_samples import (
    after_completion,
    can_cache,
    needs_pairs,
    prefixes,
    unlabelled,
    usable_samples,
)
from edgefl.records import (
    GPU,
    GPU_MEMORY,
    HOST,
    LAYER,
    METHOD,
    Budget,
    Capabilities,
    Cost,
    Refusal,
    has_card,
    is_modality,
)
from edgefl.registry import chosen
from edgefl.resources.gpu_memory import SEGMENT_BYTES

#: Reason of a decline that says nothing of sizes -> how often the same job is offered again in a stage.
OF_NO_SIZE = {"packed": 1, "damaged": 3}


def gpu_limit(budget: Budget, has: Capabilities) -> int | None:
    """GPU memory limit of a step in bytes, by the budget and the card; None: no limit of its own.

    ``gpu_free_bytes`` is without the CUDA context and what others use. Of either the allocator keeps what it held
    before a round, and takes up to a segment more than its tensors.
    """
    if not has.torch_device.startswith("cuda"):
        return None
    there = has.gpu_memory_bytes and (has.gpu_free_bytes or has.gpu_memory_bytes)
    whole = least(budget.gpu_memory_bytes, there)
    return None if whole is None else max(0, whole - has.gpu_idle_bytes - SEGMENT_BYTES)


def least(allowed: int | None, there: int) -> int | None:
    """The smaller of a limit (None: none) and an available amount (0: unknown); None without either."""
    return min((n for n in (allowed, there or None) if n is not None), default=None)


def verdict(cost: Cost, candidate: Candidate) -> Refusal | None:
    """None when ``cost`` fits every limit of the device's budget; else the first limit that refuses."""
    return next((limit for limit in limits(cost, candidate) if (limit.needed or 0) > (limit.allowed or 0)), None)


def limits(cost: Cost, candidate: Candidate) -> list[Refusal]:
    """Each limit of the device's budget beside the amount that ``cost`` needs, as a Refusal, exceeded or not.

    The whole-process limit needs the idle trainer's own size, which the device measures; before it did, only
    ``step_memory_bytes`` speaks for memory. In a GPU's own memory the step has to fit there, and the process then holds
    what passes through it; where processor and GPU share one pool, both are one process with one budget.
    """
    budget, has = candidate.budget, candidate.capabilities
    base, card = has.trainer_base_bytes, has_card(has)
    first = filled(cost, cost.filling_flops, candidate)
    host = least(budget.memory_bytes, has.memory_total_bytes)
    process = base + cost.modules_bytes + (cost.staging_bytes if card else first.step_peak_bytes)
    # The round of the stage that moves most is the device's first one, or the last one, which any may be.
    coming = {"joining": cost.joining_down_bytes, "entering": cost.entering_down_bytes, "staying": 0}[candidate.arrival]
    signature = cost.signature_bytes if candidate.arrival == "joining" else 0
    payload = max(coming + signature, cost.payload_down_bytes) + max(cost.payload_up_bytes, cost.whole_up_bytes)
    joules = budget.energy_j if first.energy_j else None
    step = float(first.step_peak_bytes)
    checks = [
        ("step_memory", step, budget.step_memory_bytes, "B", "memory above the idle trainer", GPU if card else ""),
        ("memory", float(process), host if base else None, "B", "trainer process", HOST if card else ""),
        ("memory", step, gpu_limit(budget, has), "B", GPU_MEMORY, GPU),
        ("flops", first.flops, budget.flops, "FLOP", "one round", ""),
        ("payload", float(payload), budget.payload_bytes, "B", "tensors down and up in one round", ""),
        ("energy", first.energy_j, joules, "J", "one round, by the profile's power", ""),
        ("disk", float(cost.disk_bytes), budget.disk_bytes, "B", "objects and rows kept on the device", ""),
    ]
    return [
        Refusal(reason, needed, float(allowed), unit, detail, where)
        for reason, needed, allowed, unit, detail, where in checks
        if allowed is not None
    ]


#: Detail of a refusal where a stage trains so little that each of its layers is most of it.
NO_LAYER = (
    f"none of the stage's layers is at most {LARGEST_SHARE:.0%} of what it trains, so none can be exchanged alone; "
    "train more in one stage (slots.schedule: end_to_end), or exchange everything in each round (slots.repair)"
)
_MEMORY = frozenset({"memory", "step_memory"})


def micro_batches(batch_size: int) -> list[int]:
    """0 (the whole batch), then halves of it down to about 1/32, smallest 1."""
    sizes, size = [0], batch_size // 2
    while size >= 1 and size * 32 >= batch_size:
        sizes.append(size)
        size //= 2
    return sizes


def place(
    job: Job,
    candidate: Candidate,
    part_bytes: Mapping[str, int],
    price: Price,
    *,
    before: Stage | None = None,
    signature: str = "",
    layers: Mapping[str, int] | None = None,
    layouts: Mapping[str, Layout] | None = None,
) -> Placement:
    """Placement of the largest variant of ``job`` within ``candidate``'s budget, or with a refusal.

    ``job.stage``: as all devices train it. ``part_bytes`` to ``layouts``: as in ``StageTraffic``; a prefix stored in
    ``before`` is used again.
    """
    model, stage, slots = job.model, job.stage, job.slots
    filled = msgspec.structs.replace(candidate, samples=after_completion(slots, candidate.samples, model.encoders))
    lacking = (was.refusal for was in candidate.declined if was.refusal.reason == METHOD)
    refusal = next(lacking, None) or _unfit(job, filled)
    if period_of(slots.repair).layers and not layers and stage.rounds > 1:
        refusal = refusal or Refusal(LAYER, detail=NO_LAYER)
    if refusal is not None:
        return Placement(device=candidate.device, stage=stage, refusal=refusal)
    own = restrict(stage, [m for m in model.encoders if filled.samples.get(m, 0) > 0])
    own = of_spaces(own, [space for space in spaces_in(model.label_names) if candidate.samples.get(samples_key(space))])
    if is_closing(stage) and (refusal := _unteachable(model, own, filled)) is not None:
        return Placement(device=candidate.device, stage=own, refusal=refusal)
    if needs_pairs(slots) and not any(candidate.class_counts):
        # Without labels, beside others that have them: no classifier, nor what only it needs.
        fused = any(term.method.unlabelled for term in chosen("objective", slots.objective))
        useless = {*task_parts(model), *(() if fused else ("fusion", MISSING))}
        own = msgspec.structs.replace(own, trained=tuple(part for part in own.trained if part not in useless))
    job = msgspec.structs.replace(job, stage=own)
    if not candidate.capabilities.torch_device.startswith("cuda"):
        job = _with(job, precision="f32")
    traffic = StageTraffic(stage, part_bytes, before, signature, layers or {}, layouts or {})
    return _largest(job, candidate, price, traffic)


def _with(job: Job, **changes: object) -> Job:
    """The job with changed hyper-parameters."""
    return msgspec.structs.replace(job, hyper=msgspec.structs.replace(job.hyper, **changes))


def _largest(job: Job, candidate: Candidate, price: Price, traffic: StageTraffic) -> Placement:
    """Placement of the first fitting variant of ``job``, or with the last refusal."""
    refusal, whole, short = None, None, False
    larger = _stages(job.stage)[:-1]
    for variant in _fallbacks(job, traffic.stage):
        if variant.hyper.low_memory and not short:
            continue  # another optimiser takes less memory, and nothing else
        short = False
        useless = ""  # where weights cannot lie, whatever the pieces
        places = _places(variant, candidate, traffic.part_bytes)
        for weights, (micro, checkpointed) in product(places, _pieces(variant)):
            if weights == useless:
                continue
            one = _with(variant, micro_batch=micro, checkpoint=checkpointed, weights=weights)
            if _declined(one, candidate):
                short = True
                continue
            cost, priced, drawn = draw_costs(one, candidate, price, traffic)
            refusal = verdict(cost, candidate)
            if refusal is None:
                less = one.stage != job.stage
                return Placement(
                    device=candidate.device,
                    stage=one.stage,
                    hyper=one.hyper,
                    cost=cost,
                    factors=candidate.factors,
                    predicted=figures_of(cost, declared=bool(one.model.declared)),
                    predicted_first=first_figures(one, traffic.before, cost, priced, candidate),
                    shortened=(whole or candidate.declined[-1].refusal) if less else None,
                    layer=largest_layer(one, traffic.layers),
                    rank=trained_rank(one.model, one.stage),
                    draws=tuple(Draw(stage, own, figures_of(own)) for stage, own in drawn),
                )
            whole = refusal if variant.stage == job.stage else whole
            if refusal.reason not in _MEMORY or refusal.where == HOST:
                # A smaller micro-batch costs more FLOPs and as many bytes. With weights on disk a larger one may fit.
                if not short:
                    break
                useless = weights
                continue
            short = True
            # It spares activations alone. Where the rest is too much, a smaller stage can help; the smallest is
            # tried in all pieces, for the least that the device lacks.
            rest = priced._replace(peak=priced.peak - priced.memory.get("activations", priced.peak))
            least_step = cost_of(one, candidate, rest, traffic).step_peak_bytes
            spared = msgspec.structs.replace(cost, step_peak_bytes=least_step)
            if variant.stage in larger and verdict(spared, candidate):
                useless = weights
    if refusal is None:
        declined = candidate.declined
        refusal = declined[-1].refusal if declined else Refusal(reason="error", detail="no variant is left")
    return Placement(device=candidate.device, stage=job.stage, refusal=refusal)


def _stages(stage: Stage) -> list[Stage]:
    """Variants of the stage by falling cost: each depth, with each rank."""
    return [narrow for shallow in shallower(stage) for narrow in narrower(shallow, stage)]


def _fallbacks(job: Job, stage: Stage) -> Iterator[Job]:
    """Variants of the job by falling cost: each stage, with and without stored prefix, then low-memory optimiser."""
    for smaller_stage in _stages(job.stage):
        at_depth = msgspec.structs.replace(job, stage=smaller_stage)
        # Prefixes are not stored where others train them in ``stage``.
        moving = {part for prefix in prefixes(at_depth).values() for part in prefix.parts} & set(stage.trained)
        stores = job.hyper.cache and can_cache(at_depth) and not moving
        for cache in (job.hyper.cache, "") if stores else ("",):
            stored = _with(at_depth, cache=cache)
            yield stored
            if (smaller := job.hyper.low_memory_optimizer) is not None:
                yield _with(stored, optimizer=smaller.optimizer, lr=smaller.lr, low_memory=True)


def _pieces(job: Job) -> list[tuple[int, bool]]:
    """(micro-batch, activation checkpointing) of a step, from most memory to least; own training code has no choice."""
    if job.model.declared:
        return [(0, False)]
    pieces = [(size, False) for size in micro_batches(job.hyper.batch_size)]
    if any(is_encoder(part) for part in job.stage.trained):
        pieces.append((pieces[-1][0], True))
    return pieces


def _places(job: Job, candidate: Candidate, part_bytes: Mapping[str, int]) -> Sequence[Literal["memory", "disk"]]:
    """Storage of the weights to try, memory before disk."""
    large = any(part_bytes.get(part, 0) > LEAST_BYTES_ON_DISK for part in job.stage.present)
    on_card = candidate.capabilities.torch_device.startswith("cuda")
    if job.model.declared or job.hyper.weights == "memory" or not large or on_card:
        return ("memory",)
    return ("disk",) if job.hyper.weights == "disk" else ("memory", "disk")


def trained_depth(stage: Stage) -> int:
    """Number of encoder stages trained in the stage; embeddings count as one."""
    return len(trained_stages(stage))


def _unfit(job: Job, candidate: Candidate) -> Refusal | None:
    model, slots = job.model, job.slots
    if model.declared:  # what the data has to be, only the device's own code knows
        return _uncounted(candidate.budget)
    told, spaces = keyed_spaces(candidate.samples), spaces_in(model.label_names)
    if unknown_sets := sorted(told - spaces.keys()):
        known, first = ", ".join(spaces) or "none", unknown_sets[0][:64]
        more = f" and {len(unknown_sets) - 1} more" if len(unknown_sets) > 1 else ""
        return Refusal("data", detail=f"its labels are of the set {first}{more}, the model knows {known}")
    for modality, shape in candidate.modalities.items():
        spec = model.encoders.get(modality)
        if shape and spec is not None and tuple(spec.input_shape) != tuple(shape):
            detail = f"{modality} samples have shape {tuple(shape)}, the model takes {tuple(spec.input_shape)}"
            return Refusal(reason="data", detail=detail)
    if not any(candidate.samples.get(modality) for modality in model.encoders):
        own = ", ".join(filter(is_modality, candidate.samples)) or "no modality"
        return Refusal(reason="data", detail=f"this device has {own}, the model takes {', '.join(model.encoders)}")
    unknown = not candidate.class_counts and not needs_pairs(slots)  # its trainer will tell
    labelled = None if unknown else sum(candidate.class_counts)
    if labelled is not None and (refusal := unlabelled(slots, candidate.samples.get("", 0), labelled)) is not None:
        return refusal
    usable = usable_samples(slots, candidate.samples, list(model.encoders), labelled)
    size = job.hyper.batch_size
    if usable < size:
        return Refusal("data", float(size), float(usable), "samples", "fewer usable samples than one batch")
    return None


def _uncounted(budget: Budget) -> Refusal | None:
    """Refusal of a budget of FLOPs, which nothing holds own training code to."""
    if budget.flops is None:
        return None
    detail = f"{OWN_CODE}, whose FLOPs are not known: leave budget.flops out"
    return Refusal("flops", None, budget.flops, "FLOP", detail)


def _unteachable(model: ModelSpec, own: Stage, candidate: Candidate) -> Refusal | None:
    """Refusal of a device without data for its matcher networks: labels or a second modality."""
    if model.matching == "classifier" and candidate.class_counts and not any(candidate.class_counts):
        return Refusal("data", detail="none of its samples has a label, which a matching classifier learns from")
    if model.matching == "prior" and len(own.trained) < 2:
        return Refusal("data", detail="it has one modality, from which a matching network has none to predict")
    return None


def decline_of(placement: Placement, refusal: Refusal) -> Decline:
    """The declined placement as a record for later plans."""
    hyper, depth = placement.hyper, trained_depth(placement.stage)
    size = hyper.micro_batch or hyper.batch_size
    spared = hyper.checkpoint, hyper.low_memory
    return Decline(depth, size, bool(hyper.cache), refusal, *spared, placement.rank, hyper.weights == "disk")


def _declined(job: Job, candidate: Candidate) -> bool:
    """True if the device declined this job or a smaller one.

    A disk or cache refusal rules out caching only, a disk's without it weights on disk only; reasons in OF_NO_SIZE say
    nothing of sizes. Jobs with and without a stored prefix are not compared.
    """
    hyper, depth, rank = job.hyper, trained_depth(job.stage), trained_rank(job.model, job.stage)
    for was in candidate.declined:
        if was.refusal.reason in OF_NO_SIZE or was.cached != bool(hyper.cache):
            continue
        if was.cached and was.refusal.reason in {"disk", "cache"}:
            return True
        if was.on_disk and was.refusal.reason == "disk":
            if hyper.weights == "disk":
                return True
            continue
        if was.refusal.where == HOST:  # no smaller step brings less through the process
            if depth >= was.depth and rank >= was.rank:
                return True
            continue
        less = depth < was.depth or rank < was.rank or (hyper.micro_batch or hyper.batch_size) < was.micro_batch
        spares = hyper.checkpoint > was.checkpoint or hyper.low_memory > was.low_memory
        if not less and not spares and (hyper.weights == "disk") <= was.on_disk:
            return True
    return False


class StagePrice(msgspec.Struct, frozen=True):
    """One stage of one schedule on one share. Bytes of a usual round; FLOPs forward + backward.

    ``step_peak_bytes``: of the step's tensors alone, which are the same on every device.
    """

    schedule: str = ""
    stage: int = 0
    rounds: int = 0
    step_peak_bytes: int = 0
    flops_per_round: float = 0.0
    flops_per_sample: float = 0.0
    payload_down_bytes: int = 0
    payload_up_bytes: int = 0
    filling_flops: float = 0.0  # once: what no earlier stage has stored of the frozen prefix
    whole_bytes: int = 0  # down and up of the stage's first and last transfers, in which parts come whole
    batch_size: int = 0
    memory: dict[str, int] = {}  # what step_peak_bytes consists of
    libraries_bytes: int = 0  # that a step on a CPU takes besides its tensors
    exceeds: tuple[str, ...] = ()  # devices whose budgets are short of the whole stage in whole batches
    layer_bytes: int = 0  # down and up in a round inside a period


class DevicePlan(msgspec.Struct, frozen=True):
    """Placement of one device in one stage."""

    device: str = ""
    profile: str = ""
    placement: Placement = Placement()
    card: bool = False  # the step is in the GPU's own memory
    limits: tuple[Refusal, ...] = ()  # of a placement that fits: each limit of its budget, and what is needed of it
    left_out: int = 0  # encoder stages that the device's budget leaves out of this stage's training
    whole_rank: int = 0  # that the stage trains where budgets allow it, as ``Placement.rank``


class Account(msgspec.Struct, frozen=True):
    """A schedule by a paper's accounting: bytes of one client, FLOPs of one sample."""

    schedule: str = ""
    payload_bytes: float = 0.0
    flops: float = 0.0


class DeviceMonth(msgspec.Struct, frozen=True):
    """A device's month: bytes of its runs and of waiting, on the link; joules of its runs, None: unknown.

    ``counted``: which of "runs" and "waiting" are counts of a run that has been, not predictions.
    """

    device: str = ""
    runs_bytes: int = 0
    idle_bytes: int = 0
    energy_j: float | None = None
    counted: tuple[str, ...] = ()


class RunPrice(msgspec.Struct, frozen=True):
    """Predicted costs of a run: stages of each schedule, placements of devices.

    ``samples``: size of the share that the schedules are priced on, at least a batch of theirs. ``batch_size`` and
    ``schedule``: the run's, which ``devices`` are planned with.
    """

    name: str = ""
    recipe: str = ""
    model_bytes: int = 0
    samples: int = 0
    batch_size: int = 0
    trainer_base_bytes: int = 0
    schedules: tuple[StagePrice, ...] = ()
    devices: tuple[DevicePlan, ...] = ()
    convention: str = ""
    accounts: tuple[Account, ...] = ()  # by that convention
    schedule: str = ""
    warnings: tuple[str, ...] = ()
    period: int = 1  # rounds from one whole exchange to the next
    fewest_rounds: int = 0  # after which a stage may end; 0: after all of them
    omits: str = ""  # the upload that may leave out parts, so that bytes up are the most; "": none does
    spending: Spending | None = None  # of a private run
    runs_a_month: int = 0
    months: tuple[DeviceMonth, ...] = ()  # of each device, if runs a month are given
