"""Price of a round in advance: the actual training step on the meta device, without data.

FLOPs are counted from the operations as they would run (2 per multiply-accumulate). Memory is the peak of live bytes:
weights, gradients, optimiser state, activations and batch. Nothing is allocated, so any model can be priced anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil, inf, sqrt
from statistics import NormalDist

import msgspec
import torch
from torch import nn

from edgefl.budget.stage_cost import MEMORY, Priced
from edgefl.models.check import state_shape
from edgefl.models.encoder import TokenState
from edgefl.models.spec import encoder_parts, with_lora
from edgefl.models.staged import StagedModel, build
from edgefl.patterns import Pattern
from edgefl.plan.job import Job
from edgefl.plan.stages import is_closing
from edgefl.plan.training_samples import (
    after_completion,
    built_parts,
    clusters_apart,
    held_out,
    prefixes,
    rows_of_step,
    together_in,
    usable_patterns,
    usable_samples,
    with_cache,
)
from edgefl.pricing.overhead import Overhead, Share, matchers, zero_prototypes
from edgefl.registry import chosen
from edgefl.resources.heap import Heap, peak_of_steps
from edgefl.resources.process_memory import MAPPED_BYTES
from edgefl.resources.tensor_counters import FlopCounter, LiveBytes
from edgefl.training.batches import LEAST_ROWS, meta_batch, meta_input
from edgefl.training.embeddings import BATCH
from edgefl.training.fill import matcher_of
from edgefl.training.flop_cache import FlopCounts, kind_of_step, linear_in, shapes_of
from edgefl.training.forward import Auxiliary, copied, kept_of, received_of, tables_of
from edgefl.training.optimizers import (
    Optimizer,
    may_update_in_backward,
    optimizer_in_backward,
    parameters_of,
)
from edgefl.training.prefix_cache import through_part
from edgefl.training.step import FusedAttention, make_optimizer, prepare, run_backward, run_forward
from edgefl.training.weights_on_disk import bytes_on_disk

#: Memory of a trainer's first round on a CPU beside tensors, which stays: code of libraries that is touched, Python's
#: objects. Where the trainer rehearses the round it is there before (decision 0100, torch 2.13 on x86-64).
LIBRARIES_BYTES = 2**22
#: What a first round still takes after its rehearsal, such as code and buffers of kernels for larger shapes: these
#: bytes and a share of the peak, at most so many. Fitted to 57 devices of random runs, held against 71 (decision 0102).
REMAINDER_BYTES, REMAINDER_SHARE, REMAINDER_MOST = 2**17, 1 / 16, 2**20
#: What an operation of the update takes, by one of forward and backward pass: 3.7 by 6.7 us in 81 steps of random runs.
UPDATE_CALLS = 0.55
#: More where patches are convolutions, whose kernels oneDNN makes with the first batch.
CONVOLUTION_BYTES = 7 * 2**20


class Pricer:
    """Prices of jobs from cached traces: a fleet of any size costs a few traces a stage."""

    def __init__(self) -> None:
        self._largest: dict[tuple[object, ...], Priced] = {}
        self._steps = FlopCounts()
        self._overhead = Overhead()
        self._stores: dict[tuple[bytes, str], tuple[int, float]] = {}
        self._convolved: dict[tuple[str, bytes], bool] = {}

    def __call__(self, job: Job, samples: Mapping[str, int]) -> Priced:
        """Price of ``job`` on a device with ``samples`` per modality ("" = all).

        The peak is of the largest batch that is to be expected; FLOPs are of the mean batch.
        """
        if job.model.declared:  # the parts come and go; of the training itself nothing is known
            return Priced(0, 0.0)
        raw, samples = samples, after_completion(job.slots, samples, job.model.encoders)
        modalities, size = list(job.model.encoders), job.hyper.batch_size
        total = usable_samples(job.slots, samples, modalities)
        whole = msgspec.structs.replace(job.slots, missing={})  # what is apart is drawn before any is left out
        judged = usable_samples(whole, raw, modalities)
        holdout = held_out(job.hyper, judged)
        trained = total - round(holdout * min(1.0, total / max(1, judged)))
        steps = trained // size * job.hyper.epochs
        own = [m for m in job.model.encoders if f"head/{m}" in job.stage.present]
        patterns = _shares(usable_patterns(job.slots, samples, modalities))
        share = {m: sum(part for pattern, part in patterns.items() if m in pattern) for m in own}
        step = 0.0
        if not is_closing(job.stage):
            largest = self._peak(job, most_rows(job, patterns, trained, own), steps)
            step = self._trace(job, {m: max(LEAST_ROWS, round(size * share[m])) for m in own})
        tried = _shares(usable_patterns(whole, raw, modalities))
        given = Share(samples.get("", 0), trained, holdout, patterns, tried)
        overhead = self._overhead(job, given)
        if is_closing(job.stage):
            held = price_closing(job, {m: round(samples.get("", 0) * share[m]) for m in own})
            calls = matchers(job, given, LiveBytes)
            return held._replace(flops=overhead, operations=calls, sample_flops=overhead / max(1, samples.get("", 0)))
        stores = {
            part: (peak, samples.get(m, 0) * by_row)
            for m, prefix in prefixes(job).items()
            for depth, part in enumerate(prefix.steps)
            for peak, by_row in [self._store(job, m, part, depth)]
        }
        return Priced(
            largest.peak,
            steps * step + overhead,
            {part: flops for part, (_, flops) in stores.items()},
            max((peak for peak, _ in stores.values()), default=0),
            largest.memory,
            step / size,
            steps * step,
            steps * largest.operations,
            steps * largest.written * (step / largest.flops if largest.flops else 1.0),
            largest.operations * min(steps, shapes_counted(job, patterns)),
            self.libraries(job, own),
            self._overhead.personal(job, given),
            largest.in_files,
            largest.holes + min(REMAINDER_MOST, REMAINDER_BYTES + int(REMAINDER_SHARE * largest.peak)),
        )

    def libraries(self, job: Job, own: Sequence[str]) -> int:
        """CPU memory of libraries in bytes besides tensors, for the modalities ``own``."""
        for m in own:
            key = (m, msgspec.msgpack.encode(shapes_of(job.model)))
            if key not in self._convolved:
                layers = build(job.model, encoder_parts(job.model, m), device="meta").modules()
                self._convolved[key] = any(isinstance(layer, nn.Conv1d | nn.Conv2d) for layer in layers)
            if self._convolved[key]:
                return LIBRARIES_BYTES + CONVOLUTION_BYTES
        return LIBRARIES_BYTES

    def _store(self, job: Job, m: str, part: str, depth: int) -> tuple[int, float]:
        """(peak in bytes, FLOPs by row) of taking samples through one frozen part."""
        how = shapes_of(job.model), job.hyper.cache, together_in(job), job.hyper.weights
        key = (msgspec.msgpack.encode(how), part)
        if key not in self._stores:
            self._stores[key] = price_part(job, m, part, depth)
        return self._stores[key]

    def _peak(self, job: Job, rows: Mapping[str, int], steps: int) -> Priced:
        """Price of a step with these rows, in a round of so many."""
        key = (*_kind_of_peak(job), *rows.items(), min(steps, 2))
        if key not in self._largest:
            price = self._largest[key] = price_step(job, rows, min(steps, 2))
            self._steps.put(kind_of_step(job, with_tables=True), meta_batch(job, rows).shape_key, price.flops)
        return self._largest[key]

    def _trace(self, job: Job, rows: Mapping[str, int]) -> float:
        """FLOPs of a step with these rows."""
        kind, shape = kind_of_step(job, with_tables=True), meta_batch(job, rows).shape_key
        step = self._steps.get(kind, shape, linear=linear_in(job))
        if step is None:
            step = price_step(job, rows).flops
            self._steps.put(kind, shape, step)
        return step


@cache
def process_pricer() -> Pricer:
    """The pricer shared in this process: runs of one model, such as a study's, are traced once."""
    return Pricer()


def shapes_counted(job: Job, patterns: Mapping[Pattern, float]) -> float:
    """Number of shapes of batches whose FLOPs a device counts before it knows those of the others."""
    if len(patterns) < 2:
        return 1
    each = {"rows": 1 + len(job.model.encoders), "patterns": len(patterns), "nothing": inf}
    return each[linear_in(job)]


def most_rows(job: Job, patterns: Mapping[Pattern, float], samples: int, own: Sequence[str]) -> dict[str, int]:
    """Expected largest number of rows of each modality in ``own`` over a stage's batches.

    The median of the maximum over all batches, by a normal approximation of the hypergeometric distribution: batches
    are drawn without replacement from ``samples``, and ``patterns`` are the shares of each set of modalities. Rounded
    up to a quarter of the batch, so that a fleet needs a few traces. With a ``repair`` that observes training,
    complete samples have batches of their own, and it is the batch size.
    """
    size = job.hyper.batch_size
    repair = chosen("repair", job.slots.repair)[0]
    if repair.method.observe is not None:
        return dict.fromkeys(own, size)
    batches = max(1, samples // size * job.hyper.epochs * max(1, job.stage.rounds))
    far = NormalDist().inv_cdf(0.5 ** (1 / batches))
    rows, grain = {}, max(1, size // 4)
    for m in own:
        share = sum(part for pattern, part in patterns.items() if m in pattern)
        left = max(0.0, (samples - size) / max(1, samples - 1))
        expected = size * share + far * sqrt(size * share * (1 - share) * left)
        rows[m] = min(size, max(LEAST_ROWS, ceil(expected / grain) * grain)) if share < 1 else size
    return rows


def _shares(patterns: Mapping[Pattern, int]) -> dict[Pattern, float]:
    total = sum(patterns.values())
    return {pattern: count / total for pattern, count in patterns.items()}


def _kind_of_peak(job: Job) -> tuple[object, ...]:
    """Cache key of a step's peak memory, besides the batch's shape."""
    hyper = job.hyper
    kind = kind_of_step(job, with_tables=True)
    on_disk = hyper.weights == "disk"
    return kind, hyper.optimizer, hyper.momentum > 0, hyper.precision, may_update_in_backward(job), on_disk


def price_part(job: Job, modality: str, part: str, depth: int) -> tuple[int, float]:
    """(peak live bytes, FLOPs by row) of taking samples through a frozen part, as many at a time as ``PrefixCache``.

    ``depth``: encoder stages done after the part.
    """
    encoder, rows = job.model.encoders[modality], together_in(job)
    with LiveBytes() as live, FusedAttention(), torch.no_grad():
        model = build(job.model, with_lora(job.model, part), device="meta").eval()
        aside = bytes_on_disk(job, model)
        shown = meta_input(with_cache(job, ""), modality, rows)
        with FlopCounter() as counter:
            if depth:
                stored = torch.float16 if job.hyper.cache == "f16" else torch.float32
                tokens = torch.empty((rows, *state_shape(job.model, modality, depth - 1)), dtype=stored, device="meta")
                real = torch.empty(tokens.shape[:2], dtype=torch.bool, device="meta")
                shown = TokenState(tokens, real if encoder.kind == "text" else None)
            state = through_part(model, modality, depth, shown)
        del shown, state
    heap = Heap(MAPPED_BYTES)
    heap.run(live.events)
    return max(live.peak, heap.peak) - aside, counter.flops / rows


def price_step(job: Job, rows: Mapping[str, int], steps: int = 2) -> Priced:
    """A training step with ``rows[m]`` rows of modality m, the second one of a round if it has so many ``steps``.

    The update is traced as well, without FLOPs: its temporaries may be the largest moment.
    """
    with LiveBytes() as live, FusedAttention():
        model = build(job.model, built_parts(job), device="meta", seed=0)
        prepare(model, job.stage.trained, checkpoint=job.hyper.checkpoint)
        in_files = bytes_on_disk(job, model)
        auxiliary = _meta_auxiliary(job, model)
        weights = live.live - in_files  # with what stands beside them: prototypes, copies to compare with
        batch = meta_batch(job, rows)
        inputs = live.live - in_files - weights
        trained = [p for p in model.parameters() if p.requires_grad] + auxiliary.extra
        before, made = live.live, len(live.events)
        optimizer = make_optimizer(model, job.stage.trained, job.hyper, auxiliary.extra)
        if steps > 1:
            _hold(optimizer)
        state = []
        repair = chosen("repair", job.slots.repair)[0]
        if repair.method.observe is not None:
            state = [torch.empty_like(p) for p in repair.bind(repair.method.observe)(job, model).copied]
        kept = live.live - before
        begun, ready = live.counted(), len(live.events)
        with FlopCounter() as counter:
            in_backward = optimizer_in_backward(job, optimizer, model)
            done = run_forward(model, job, batch, auxiliary)
            live.note = lambda: sum(p.grad.nbytes for p in trained if p.grad is not None)
            run_backward(model, job, batch, done, in_backward)
            flops = counter.flops
        del done
        passed, before = live.peak, live.live
        trained_until = live.counted()
        _hold(optimizer)
        late, held = live.live - before, live.counted()  # state that comes with the only update
        optimizer.step()
        (calls, wrote), (update_calls, update_wrote) = (
            [float(end - start) for start, end in zip(*ends, strict=True)]
            for ends in ((begun, trained_until), (held, live.counted()))
        )
        ended = len(live.events)
        del state
    peak = live.peak - in_files
    found = {"weights": weights, "gradients": live.noted, "optimizer": kept, "batch": inputs}
    if live.peak > passed:
        found["optimizer"] += late
    memory = {**found, "activations": peak - sum(found.values())}
    events = live.events
    heap = peak_of_steps(events[:made], events[made:ready], events[ready:ended], MAPPED_BYTES, steps)
    holes = max(0, heap - live.peak)
    return Priced(
        peak,
        float(flops),
        memory=memory,
        operations=calls + UPDATE_CALLS * update_calls,
        written=wrote + update_wrote,
        holes=holes,
        in_files=in_files,
    )


def _hold(optimizer: Optimizer) -> None:
    """Have the state of every parameter in memory, as after the first update."""
    for parameter in parameters_of(optimizer):
        optimizer.hold(parameter)


def price_closing(job: Job, samples: Mapping[str, int]) -> Priced:
    """Price of the closing round on ``samples[m]`` of modality m: inference, then one matcher network at a time.

    All projections are held meanwhile. The FLOPs are ``Overhead``'s.
    """
    own = [m for m in samples if f"match/{m}" in job.stage.trained]
    width = job.model.head.out
    with LiveBytes() as live, FusedAttention():
        model = build(job.model, built_parts(job), device="meta").requires_grad_(False).eval()
        weights = live.live
        with torch.no_grad():
            for m in own:
                rows = max(1, min(BATCH, rows_of_step(job), samples[m]))
                model.project(m, model.encode(m, meta_input(job, m, rows), job.stage.depth))
        held = [torch.empty((count, width), device="meta") for count in samples.values()]
        for m in own:
            small = model.part(f"match/{m}")
            state = [torch.empty_like(p) for p in small.parameters() for _ in range(3)]  # gradient and AdamW's two
            x = torch.empty((max(1, samples[m]), width), device="meta")
            with torch.no_grad():
                for one in small.values() if isinstance(small, torch.nn.ModuleDict) else (small,):
                    one(x)
            del state, x
        peak = live.peak
        del held
    memory = {**dict.fromkeys(MEMORY, 0), "weights": weights, "activations": peak - weights}
    return Priced(peak, 0.0, memory=memory)


def _meta_auxiliary(job: Job, model: StagedModel) -> Auxiliary:
    """Auxiliary tensors of the objective from the second round on, on the meta device."""
    terms = [term.method for term in chosen("objective", job.slots.objective)]
    heads = {m: model.part(f"head/{m}") for m in job.model.encoders if f"head/{m}" in job.stage.trained}
    taught = any("teacher" in term.auxiliaries for term in terms)
    received = received_of(job, model)
    return Auxiliary(
        tables_of(zero_prototypes(job), torch.device("meta")),
        {m: copied(head, trained=True) for m, head in heads.items()} if clusters_apart(job.slots, job.stage) else {},
        {m: copied(head, trained=False) for m, head in heads.items()} if taught else {},
        received,
        matcher_of(job.slots, {}, job.k),
        kept=kept_of(job, received, {}),
    )
