"""Cost of a round on one device, from the price of its steps and the sizes of its parts.

Bytes: a part that the device holds already does not travel again. Down: parts that the rounds since its last one have
changed; in its first round of a stage, also parts that are new or frozen since; in its first round of the run, every
part that is present. Up: trained parts, or the most that the recipe's upload sends of them. Beside them, but not in the
closing round, travel prototype tables (down from the run's second round on) and the signature that clusters are made of
(once).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from edgefl.models.spec import PROTOTYPES, EncoderSpec, ModelSpec, reconstruct_parts
from edgefl.plan.job import Candidate, Job, Stage, Transfer
from edgefl.plan.packed_sizes import Layout, object_bytes, sent_bytes
from edgefl.plan.periods import in_parts, period_of
from edgefl.plan.stages import draws, is_closing, kept, packing_of, sent
from edgefl.plan.training_samples import (
    VALUE_BYTES,
    after_completion,
    built_parts,
    is_rehearsed,
    prefixes,
    stored_bytes,
    together_in,
)
from edgefl.records import Cost, Figure, Figures, Speed, has_card
from edgefl.registry import chosen, signature


class StageTraffic(NamedTuple):
    """A stage as all devices train it, and the sizes of its parts: with a device's job, they give a round's bytes.

    ``part_bytes``: part -> bytes of its object in f32; ``before``: the stage whose rounds came before; ``signature``:
    what clusters are made of, which a device sends once, "" for none; ``layers``: those that may be exchanged alone ->
    bytes, where the recipe has periods; ``layouts``: part -> tensors, of those that may be packed.
    """

    stage: Stage
    part_bytes: Mapping[str, int]
    before: Stage | None = None
    signature: str = ""
    layers: Mapping[str, int] = {}
    layouts: Mapping[str, Layout] = {}

    def packed(self, parts: Sequence[str], rules: Sequence[tuple[str, str]], transfer: Transfer) -> dict[str, int]:
        """Part -> bytes as the rules of one direction pack it in a usual round; unknown parts count 0."""
        return {
            part: sent_bytes(self.layouts[part], packing_of(rules, part), transfer)
            if part in self.layouts
            else self.part_bytes.get(part, 0)
            for part in parts
        }


def moved(job: Job, candidate: Candidate, traffic: StageTraffic) -> Cost:
    """Cost with only the payload bytes of ``job``, a device's part of the stage."""
    stage, part_bytes, before, signature, layers, _ = traffic
    exchange, transfer, here = job.slots.exchange, job.transfer, set(job.stage.present)
    empty = {part for part in here if part_bytes.get(part) == object_bytes({})}
    changed = [part for part in sent(stage, exchange) if part in here - empty]
    # Parts without tensors, or that a device's samples say nothing of, stay the object that the coordinator has.
    lone = sum(candidate.samples.get(m, 0) > 0 for m in job.model.encoders) < 2
    untouched = empty | set(reconstruct_parts(job.model) if lone else ())
    trained = [part for part in sent(job.stage, exchange) if part not in untouched]
    tables_down, tables_up = prototype_bytes(job, candidate, part_bytes)
    known = set(before.present) - (set(sent(before, exchange)) - empty) if before is not None else set()
    # Parts come packed only where the device holds what they are a change of: of a first round they come whole, but for
    # those that the stage before has sent packed to its end.
    packed_to_the_end = transfer.closing == "packed" and not is_closing(job.stage)
    based = set(before.present) - known if before is not None and packed_to_the_end else set()
    held = [part for part in job.stage.present if part in based]
    first = [part for part in job.stage.present if part not in known | based]
    up = most_up(job, traffic.packed(trained, transfer.up, transfer))
    whole_up = up if packed_to_the_end else most_up(job, {part: part_bytes.get(part, 0) for part in trained})
    asked, largest = period_of(job.slots.repair).layers, layers.get(largest_layer(job, layers), 0)
    return Cost(
        payload_down_bytes=sum(traffic.packed(changed, transfer.down, transfer).values()) + tables_down,
        payload_up_bytes=up + tables_up,
        whole_up_bytes=whole_up + tables_up,
        joining_down_bytes=bytes_of(job.stage.present, part_bytes) + tables_down,
        entering_down_bytes=bytes_of(first, part_bytes)
        + sum(traffic.packed(held, transfer.down, transfer).values())
        + tables_down,
        prototypes_down_bytes=tables_down,
        signature_bytes=signature_bytes(signature, candidate.class_counts)
        if signature and not is_closing(job.stage)
        else 0,
        layer_bytes=min(asked, 1) * largest,
        layers_up_bytes=asked * largest,
    )


def most_up(job: Job, sizes: Mapping[str, int]) -> int:
    """Largest bytes of an update of parts with these ``sizes``, by the slot upload."""
    upload = chosen("upload", job.slots.upload)[0]
    if upload.method.most is None or is_closing(job.stage):
        return sum(sizes.values())
    return int(upload.bind(upload.method.most)(sizes))


def largest_layer(job: Job, layers: Mapping[str, int]) -> str:
    """The largest of the layers that a device trains, of equals the last by name; "" for none."""
    own = in_parts(layers, sent(job.stage, job.slots.exchange))
    return max(own, key=lambda name: (layers[name], name), default="")


def signature_bytes(kind: str, class_counts: Sequence[int]) -> int:
    """Bytes of a device's signature for clustering.

    ``kind``: the signature's name; ``class_counts``: the device's samples of each class.
    """
    return object_bytes(signature(kind).layout(class_counts))


def prototype_bytes(job: Job, candidate: Candidate, part_bytes: Mapping[str, int]) -> tuple[int, int]:
    """(down, up) of the prototype tables; (0, 0) without them. Global ones in ``part_bytes`` are that large."""
    if is_closing(job.stage):
        return 0, 0
    slot = chosen("prototypes", job.slots.prototypes)[0]
    if slot.method.local is None:
        return 0, 0
    own = [m for m in job.model.encoders if f"head/{m}" in job.stage.present and candidate.samples.get(m, 0) > 0]
    every = _layout(slot.bind(slot.method.rows)(job.model))
    mine = _layout(slot.bind(slot.method.local_rows)(job, candidate, own))
    return part_bytes.get(PROTOTYPES, object_bytes(every)), object_bytes(mine) if mine else 0


def _layout(tables: Mapping[str, tuple[int, int]]) -> Layout:
    """Tensor layout of prototype tables: means and sample counts by row."""
    from edgefl.prototypes.table import COUNT

    return {
        name: layout
        for table, (rows, width) in tables.items()
        for name, layout in ((table, ("F32", (rows, width))), (table + COUNT, ("F32", (rows,))))
    }


def bytes_of(parts: Sequence[str], part_bytes: Mapping[str, int]) -> int:
    """Bytes of these parts in f32; unknown parts count 0."""
    return sum(part_bytes.get(part, 0) for part in parts)


class Priced(NamedTuple):
    """Price of a round's training, or of one step: memory of its largest moment in bytes, FLOPs of a usual round.

    ``cache_fill_flops``: FLOPs for every sample through one part of a stored prefix, once; {} where nothing is stored;
    ``cache_fill_peak``: memory meanwhile. ``memory``: what ``peak`` consists of, by the names of ``MEMORY``.
    ``sample_flops``: of a step, by row. ``step_flops``, ``operations`` (views among them), ``written`` (bytes of what
    they make or change): of all training steps of the round. ``counted``: operations whose FLOPs are counted as they
    run, in a stage's first round.
    ``libraries``: memory on a CPU that a first round leaves in use; ``personal_flops``: FLOPs of judging the personal
    model, which a device has from its second round on; ``in_files``: bytes of weights that lie on disk; ``holes``: in a
    CPU's heap, between the tensors of a step, with what libraries take in every round.
    """

    peak: int
    flops: float
    cache_fill_flops: Mapping[str, float] = {}
    cache_fill_peak: int = 0
    memory: Mapping[str, int] = {}
    sample_flops: float = 0.0
    step_flops: float = 0.0
    operations: float = 0.0
    written: float = 0.0
    counted: float = 0.0
    libraries: int = 0
    personal_flops: float = 0.0
    in_files: int = 0
    holes: int = 0


#: What memory goes to. Activations are all that a step makes besides gradients; transit: parts that come and go.
MEMORY = ("weights", "gradients", "optimizer", "batch", "activations", "transit", "libraries")

#: Of a value that comes from a GPU to be stored: as f32, and beside it its magnitude or the copy that is written.
_OUTCOME_BYTES = 8

#: Of `transformers` 5.24 with one family's modules beside torch and edgefl.training: 162 MiB, and 9 for another family.
_MODULES_BYTES, _FAMILY_BYTES = 155 * 2**20, 10 * 2**20
#: What a step of its modules takes beside tensors, more than of our own: with RoBERTa and DINOv2 10 MiB in a trainer's
#: first round, 2 to 5 in the next.
_MODULES_STEP_BYTES = 8 * 2**20

#: How many times an operation's own time it takes to count its FLOPs as it runs: 4 to 7 on an x86-64 processor.
_COUNTING = 5

#: price(job, samples)
Price = Callable[[Job, Mapping[str, int]], Priced]


def cost_of(job: Job, candidate: Candidate, priced: Priced, traffic: StageTraffic) -> Cost:
    """Cost of a usual round, corrected by the device's measured factors."""
    part_bytes = traffic.part_bytes
    bytes_ = moved(job, candidate, traffic)
    factor, samples = candidate.factors, after_completion(job.slots, candidate.samples, job.model.encoders)
    exchanging = _exchanging(job, part_bytes, priced.in_files)
    transit = sum(exchanging.values())
    before, within = (0, 0) if has_card(candidate.capabilities) else beside_tensors(job, priced, part_bytes)
    memory = dict(priced.memory if priced.peak >= transit else exchanging)
    if within:
        memory["libraries"] = within
    whole = bytes_.joining_down_bytes + bytes_.whole_up_bytes + bytes_.signature_bytes
    # In a period a device retains what it trained in the round before, beside what it receives and what it trains; of
    # what a term keeps two rounds, since one may be tried again, and the third is written before one goes.
    times = int(period_of(job.slots.repair).rounds > 1) + 3 * terms_that_keep(job)
    retained = times * bytes_of(sent(job.stage, job.slots.exchange), part_bytes)
    in_file = _prefix_in_file(job, part_bytes)
    cost = msgspec.structs.replace(
        bytes_,
        step_peak_bytes=round((max(priced.peak, transit) + within) * factor.get("step_peak_bytes", 1.0)),
        flops=priced.flops * factor.get("flops", 1.0),
        filling_flops=sum(priced.cache_fill_flops.values()),
        filling_peak_bytes=max(priced.cache_fill_peak, in_file) + within if priced.cache_fill_peak else 0,
        disk_bytes=whole
        + _packed_on_disk(job, traffic)
        + retained
        + stored_bytes(job, samples)
        + max(priced.in_files, in_file),  # the frozen part's file is gone before the model's are made
        memory=memory,
        staging_bytes=_staging(job, part_bytes),
        modules_bytes=modules_bytes(job.model) + before,
        step_flops=priced.step_flops,
        personal_flops=priced.personal_flops,
        operations=priced.operations,
        written_bytes=priced.written,
    )
    return cost if job.model.declared else timed(cost, candidate)


def beside_tensors(job: Job, priced: Priced, part_bytes: Mapping[str, int]) -> tuple[int, int]:
    """CPU memory besides tensors in bytes: (in a trainer before its rounds, in a step).

    The rehearsal of a round takes most of what libraries do; of a large model there is none.
    """
    once = priced.libraries + (_MODULES_STEP_BYTES if modules_bytes(job.model) else 0)
    if is_rehearsed(job, bytes_of(job.stage.present, part_bytes)):
        return once, priced.holes
    return 0, once + priced.holes


def draw_jobs(job: Job, traffic: StageTraffic) -> list[tuple[Job, StageTraffic]]:
    """Job and traffic of each draw of the stage; of one without draws, its own."""
    pairs = zip(draws(job.stage, traffic.stage), draws(traffic.stage), strict=True)
    return [(msgspec.structs.replace(job, stage=own), traffic._replace(stage=whole)) for own, whole in pairs]


#: Figures of all draws together: a device that missed rounds downloads, and stores, what each of them changed.
_OF_SEVERAL = {"payload_down_bytes", "disk_bytes", "memory"}


def draw_costs(
    job: Job, candidate: Candidate, price: Price, traffic: StageTraffic
) -> tuple[Cost, Priced, list[tuple[Stage, Cost]]]:
    """The bound of a round's cost, the price of its largest step, and each draw with its cost ([] without draws)."""
    jobs = draw_jobs(job, traffic)
    prices = [price(one, candidate.samples) for one, _ in jobs]
    most = max(prices, key=lambda priced: priced.peak)
    whole = cost_of(job, candidate, most, traffic)
    if not job.stage.draw:
        return whole, most, []
    costs = [cost_of(one, candidate, priced, own) for (one, own), priced in zip(jobs, prices, strict=True)]
    fields = [name for name in Cost.__struct_fields__ if name not in _OF_SEVERAL]
    bound = {name: max(getattr(cost, name) for cost in costs) for name in fields}
    stages = [one.stage for one, _ in jobs]
    return msgspec.structs.replace(whole, **bound), most, list(zip(stages, costs, strict=True))


def modules_bytes(model: ModelSpec) -> int:
    """Memory of `transformers` in a trainer's process in bytes; 0 if no encoder uses its modules."""
    own = [encoder for encoder in model.encoders.values() if encoder.config]
    return _MODULES_BYTES + len(own) * _FAMILY_BYTES if own else 0


def _in_hand(job: Job, part_bytes: Mapping[str, int], parts: Iterable[str]) -> int:
    """Host bytes of the largest of these parts while it is encoded; twice with lossy packing."""
    lossy = any(packing != "f32" for _, packing in (*job.transfer.up, *job.transfer.down))
    return (2 if lossy else 1) * max((part_bytes.get(part, 0) for part in parts), default=0)


def _exchanging(job: Job, part_bytes: Mapping[str, int], in_files: int) -> dict[str, int]:
    """Memory while parts come and go: the model, and what is in hand of one part.

    What is received is copied from its file block by block; only a part whose weights go to a file is made whole first.
    Of one that is sent the pages are there beside what is in hand.
    """
    built = built_parts(job)
    moved = {*sent(job.stage, job.slots.exchange), *kept(job)}.intersection(built)
    made, read = (max((part_bytes.get(part, 0) for part in parts), default=0) for parts in (built, moved))
    in_hand = _in_hand(job, part_bytes, moved)
    return {
        "weights": max(0, bytes_of(built, part_bytes) - in_files),
        "transit": max(made, in_hand + min(read, in_files)) if in_files else in_hand,
    }


def _prefix_in_file(job: Job, part_bytes: Mapping[str, int]) -> int:
    """Bytes of the largest part of a stored prefix whose weights go to a file: made whole in memory first."""
    frozen = [part for prefix in prefixes(job).values() for part in prefix.parts] if job.hyper.weights == "disk" else []
    return max((part_bytes.get(part, 0) for part in frozen), default=0)


def _staging(job: Job, part_bytes: Mapping[str, int]) -> int:
    """Peak host memory in bytes of a round on a GPU with its own memory.

    The largest of: copies of sent and kept parts with one being encoded; a batch, raw or as stored prefixes; cache
    filling.
    """
    personal = chosen("repair", job.slots.repair)[0].method.mend
    staying = job.stage.trained if personal else kept(job)
    times = 1 + terms_that_keep(job)
    copies = times * bytes_of(sent(job.stage, job.slots.exchange), part_bytes) + bytes_of(staying, part_bytes)
    stored, width = prefixes(job), VALUE_BYTES.get(job.hyper.cache, 0)
    rows = sum(
        stored[m].tokens * stored[m].width * width if m in stored else _raw_bytes(encoder)
        for m, encoder in job.model.encoders.items()
    )
    exchanged = copies + _in_hand(job, part_bytes, built_parts(job))
    return max(exchanged, job.hyper.batch_size * rows, _cache_fill_peak(job, part_bytes))


def terms_that_keep(job: Job) -> int:
    """Number of objective terms with state of the trained parameters' size on the device."""
    return sum(term.method.keep is not None for term in chosen("objective", job.slots.objective))


def _raw_bytes(encoder: EncoderSpec) -> int:
    """Bytes of one input sample."""
    return prod(encoder.input_shape) * (8 if encoder.kind == "text" else 4)


def _cache_fill_peak(job: Job, part_bytes: Mapping[str, int]) -> int:
    """Peak host memory in bytes of filling the prefix cache: a frozen part, or the samples passed through it.

    Inside a prefix all tokens are stored, at its end those that are read later.
    """
    most = 0
    for m, prefix in prefixes(job).items():
        sample = max(_raw_bytes(job.model.encoders[m]), prefix.most * _OUTCOME_BYTES)
        most = max(most, together_in(job) * sample, *(part_bytes.get(part, 0) for part in prefix.parts))
    return most


def timed(cost: Cost, candidate: Candidate) -> Cost:
    """The cost with its seconds and joules on this device; 0 where unknown.

    Each is corrected by its own factor alone.
    """
    speed, factor = candidate.capabilities.speed, candidate.factors
    if not speed.flops:
        return cost
    flop_s, calls_s, flops = _flop_seconds(cost, speed), cost.operations * speed.operation_s, cost.flops
    plain = flops / factor.get("flops", 1.0) * flop_s + calls_s
    steps = cost.step_flops * flop_s + calls_s if cost.step_flops else plain
    links = ((cost.payload_down_bytes, speed.down_bytes), (cost.payload_up_bytes, speed.up_bytes))
    transfer = sum(payload / rate for payload, rate in links if rate)
    compute = steps * factor.get("compute_s", 1.0)
    energy = (plain + transfer) * speed.power_w * factor.get("energy_j", 1.0)
    return msgspec.structs.replace(cost, compute_s=compute, wall_s=max(compute, plain) + transfer, energy_j=energy)


def _flop_seconds(cost: Cost, speed: Speed) -> float:
    """Seconds that a FLOP takes with the bytes written beside it, as in the round's steps."""
    flops = cost.step_flops or cost.flops
    written_s = cost.written_bytes / speed.written_bytes if speed.written_bytes else 0.0
    return 1 / speed.flops + (written_s / flops if flops else 0.0)


def filled(cost: Cost, more: float, candidate: Candidate) -> Cost:
    """Cost of a round plus ``more`` FLOPs to fill the prefix cache.

    The filling adds to the wall time and the joules, not to the time of the steps; the peak is the larger of both.
    """
    if not more:
        return cost
    peak = max(cost.step_peak_bytes, cost.filling_peak_bytes)
    both = msgspec.structs.replace(cost, flops=cost.flops + more, step_peak_bytes=peak)
    speed = candidate.capabilities.speed
    if not speed.flops or not cost.flops:
        return both
    # Steps take what they took: filling is before them, and only in the wall time and the joules.
    seconds = more * _flop_seconds(cost, speed)
    rate = cost.energy_j / cost.wall_s if cost.wall_s else 0.0
    return msgspec.structs.replace(both, wall_s=cost.wall_s + seconds, energy_j=cost.energy_j + seconds * rate)


def _packed_on_disk(job: Job, traffic: StageTraffic) -> int:
    """Disk bytes of packed exchange: packed parts, their bases, and residuals."""
    transfer, exchange, part_bytes = job.transfer, job.slots.exchange, traffic.part_bytes
    down = [part for part in sent(traffic.stage, exchange) if part in job.stage.present]
    based = [part for part in down if packing_of(transfer.down, part) != "f32"]
    lossy = any(packing != "f32" for _, packing in transfer.up)
    # What was not sent is kept of two rounds, since one may be tried again, and the third is written before one goes.
    residuals = 3 * lossy * bytes_of(sent(job.stage, exchange), part_bytes)
    return bytes_of(based, part_bytes) + sum(traffic.packed(based, transfer.down, transfer).values()) + residuals


def first_figures(job: Job, before: Stage | None, cost: Cost, priced: Priced, candidate: Candidate) -> Figures:
    """Predicted figures of a stage's first round; {} where it is like any other.

    Its prefix cache is filled beyond ``before``, and the FLOPs of its shapes of batches are counted as they run.
    """
    counting = priced.counted * _COUNTING * candidate.capabilities.speed.operation_s if cost.compute_s else 0.0
    if not priced.cache_fill_flops and not counting:
        return {}
    known = prefixes(msgspec.structs.replace(job, stage=before)) if before is not None else {}
    there = {part for prefix in known.values() for part in prefix.parts}
    more = sum(flops for part, flops in priced.cache_fill_flops.items() if part not in there)
    first = filled(cost, more, candidate)
    seconds = {"compute_s": first.compute_s + counting, "wall_s": first.wall_s + counting}
    return figures_of(msgspec.structs.replace(first, **seconds) if counting else first)


#: Reason of what is not known of a round in which the device runs a function of its owner's.
OWN_CODE = "own training code"


def figures_of(cost: Cost, *, declared: bool = False) -> dict[str, Figure]:
    """A cost as ledger figures, without unknown ones; of a ``declared`` model only bytes are known."""
    unknown = Figure(kind="predicted", reason=OWN_CODE)
    memory = "meta device, live bytes of one training step"
    flops = "meta device, 2 per multiply-accumulate"
    return {
        "step_peak_bytes": unknown if declared else Figure(float(cost.step_peak_bytes), "predicted", memory),
        "flops": unknown if declared else Figure(cost.flops, "predicted", flops),
        "payload_down_bytes": Figure(float(cost.payload_down_bytes), "predicted", "parts the round before changed"),
        "payload_up_bytes": Figure(float(cost.payload_up_bytes), "predicted", "trained parts"),
        **{
            name: Figure(value, "predicted", "speed and power of the device's profile")
            for name, value in (("compute_s", cost.compute_s), ("wall_s", cost.wall_s), ("energy_j", cost.energy_j))
            if value
        },
    }
