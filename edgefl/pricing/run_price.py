"""Prices of a run in advance: every schedule on a typical share, and each device's placements.

On request also the schedules by a paper's convention (``totals``), to compare with its figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import NamedTuple, TypeVar

import msgspec
import torch

from edgefl.aggregation.weights import wanted
from edgefl.budget.fit import Account, DevicePlan, RunPrice, StagePrice, limits, place, trained_depth, verdict
from edgefl.budget.stage_cost import Price, StageTraffic, beside_tensors, draw_costs, draw_jobs, moved
from edgefl.errors import ModelError
from edgefl.models.parts import part_layout, part_size_bytes
from edgefl.models.spec import ModelSpec, is_encoder, is_lora, task_parts
from edgefl.models.staged import build, check_lora
from edgefl.plan.compile import warnings_of
from edgefl.plan.job import Arrival, Candidate, Hyper, Job, RunPlan, Stage
from edgefl.plan.packed_sizes import Layout, object_bytes
from edgefl.plan.periods import exchangeable, period_length, period_of
from edgefl.plan.privacy import spending
from edgefl.plan.stages import draws, encoder_stage, planned, stage_before, trained_rank
from edgefl.plan.training_samples import can_cache, with_cache
from edgefl.pricing.round_price import Pricer, process_pricer
from edgefl.records import has_card
from edgefl.registry import Choice, choose, chosen, methods
from edgefl.resources.tensor_counters import FlopCounter
from edgefl.training.batches import meta_input

T = TypeVar("T")
#: Operations an element of a layer norm.
NORM = 5
#: Rows of a traced pass.
_ROWS = 2


class PlannedDevice(NamedTuple):
    """A device to plan for, as it would join, and the name of its profile."""

    profile: str
    candidate: Candidate


class PriceOptions(NamedTuple):
    """The run's ``rounds``, ``schedule``, its options (``slot``), ``batch_size``; ``batch_sizes``: for all schedules.

    ``convention``: the paper by whose accounting they are shown as well; "": none.
    """

    rounds: Sequence[int]
    schedule: str
    slot: Mapping[str, float | str]
    batch_size: int
    batch_sizes: Sequence[int]
    convention: str = ""


class _Run(NamedTuple):
    """Inputs of every price of one run."""

    plan: RunPlan
    devices: Sequence[PlannedDevice]
    part_bytes: Mapping[str, int]
    pricer: Pricer
    layouts: Mapping[str, Layout]

    def layers(self, stage: Stage) -> dict[str, int]:
        """Layers of a stage for single exchange -> bytes; {} without periods."""
        if period_length(self.plan, stage) == 1:
            return {}
        trained = {part: {name: shape for name, (_, shape) in self.layouts[part].items()} for part in stage.trained}
        return exchangeable(trained, sum(self.part_bytes[part] for part in trained))


def price_run(plan: RunPlan, devices: Sequence[PlannedDevice], options: PriceOptions) -> RunPrice:
    """Price of every schedule with each batch size, and each device's placement in each stage."""
    check_lora(plan.model)
    model = build(plan.model, device="meta")
    layouts = {part: part_layout(model, part) for part in model.parts_present}
    sizes = {part: object_bytes(layout) for part, layout in layouts.items()}
    run = _Run(plan, devices, sizes, process_pricer(), layouts)
    on_cuda = any(device.candidate.capabilities.torch_device.startswith("cuda") for device in devices)
    common = msgspec.structs.replace(plan.hypers[0], precision=plan.hypers[0].precision if on_cuda else "f32")
    shares = [device.candidate.samples for device in devices]
    pace, upload = choose("pace", plan.server), chosen("upload", plan.slots.upload)[0]
    schedules: list[StagePrice] = []
    for schedule, stages in schedules_of(plan.model, options.rounds, options.slot).items():
        for size in options.batch_sizes:
            hyper = msgspec.structs.replace(common, batch_size=size)
            schedules += _stage_prices(run, schedule, stages, hyper, _typical(shares, size))
    accounts = schedules_of(plan.model, options.rounds, {"embed": "frozen"}) if options.convention else {}
    return RunPrice(
        name=plan.name,
        recipe=plan.recipe,
        model_bytes=sum(run.part_bytes.values()),
        samples=_typical(shares, options.batch_size)[""],
        batch_size=options.batch_size,
        trainer_base_bytes=devices[0].candidate.capabilities.trainer_base_bytes,
        schedules=tuple(schedules),
        devices=tuple(row for device in devices for row in _device_plans(run, device)),
        convention=options.convention,
        accounts=tuple(
            Account(schedule, *totals(plan.model, stages, plan.hypers[0].epochs))
            for schedule, stages in accounts.items()
            if any(is_encoder(part) and not is_lora(part) for stage in stages for part in stage.trained)
        ),
        schedule=options.schedule,
        warnings=warnings_of(plan),
        period=period_of(plan.slots.repair).rounds,
        spending=spending(plan),
        omits=upload.name if upload.method.most else "",
        fewest_rounds=pace.bind(pace.method.fewest)() if pace.method.fewest else 0,
    )


def schedules_of(
    model: ModelSpec, rounds: Sequence[int], options: Mapping[str, float | str] | None = None
) -> dict[str, tuple[Stage, ...]]:
    """Schedule -> stages, with its own of these ``options``; without schedules with nothing to train.

    Schedules by budget are left out: their devices train the whole model, or as in another schedule.
    """
    found: dict[str, tuple[Stage, ...]] = {}
    for name, schedule in methods("schedule").items():
        if not schedule.by_budget:
            with suppress(ModelError):
                stages = Choice(schedule, dict(options or {})).bind(schedule.stages)(model, rounds)
                found[name] = planned(model, stages)
    return found


def _stage_prices(
    run: _Run, schedule: str, stages: Sequence[Stage], hyper: Hyper, samples: dict[str, int]
) -> Iterator[StagePrice]:
    """A schedule's stages, in order: the outcome of a frozen prefix is stored once."""
    plan, stored = run.plan, set[str]()
    device = Candidate(samples=samples, class_counts=(1,) * plan.model.classes)
    for stage in stages:
        before = stage_before(stages, stage)
        job = Job(model=plan.model, stage=stage, hyper=hyper, slots=plan.slots, transfer=plan.transfer)
        if not can_cache(job):
            job = with_cache(job, "")
        whole = StageTraffic(stage, run.part_bytes, before, wanted(plan.server), run.layers(stage), run.layouts)
        jobs = draw_jobs(job, whole)
        prices = [run.pricer(one, samples) for one, _ in jobs]
        priced = max(prices, key=lambda one: one.peak)
        moves = [moved(one, device, own) for one, own in jobs]
        traffic = max(moves, key=lambda one: one.whole_up_bytes)
        first = traffic.joining_down_bytes + traffic.signature_bytes if before is None else traffic.entering_down_bytes
        yield StagePrice(
            schedule=schedule,
            stage=stage.index,
            rounds=stage.rounds,
            step_peak_bytes=priced.peak,
            flops_per_round=fmean(one.flops for one in prices),
            flops_per_sample=fmean(one.sample_flops for one in prices),
            payload_down_bytes=round(fmean(one.payload_down_bytes for one in moves)),
            payload_up_bytes=round(fmean(one.payload_up_bytes for one in moves)),
            filling_flops=sum(flops for part, flops in priced.cache_fill_flops.items() if part not in stored),
            whole_bytes=first + traffic.whole_up_bytes,
            batch_size=hyper.batch_size,
            memory=dict(priced.memory),
            libraries_bytes=beside_tensors(job, priced, run.part_bytes)[1],
            exceeds=tuple(_exceeding(job, samples, run.pricer, whole, run.devices)) if stage.rounds else (),
            layer_bytes=traffic.layer_bytes + traffic.layers_up_bytes,
        )
        stored |= set(priced.cache_fill_flops) if stage.rounds else set()


def _device_plans(run: _Run, device: PlannedDevice) -> Iterator[DevicePlan]:
    """Placements of one device in each stage with rounds."""
    plan, newcomer = run.plan, device.candidate
    for stage, hyper in zip(plan.stages, plan.hypers, strict=True):
        if not stage.rounds:
            continue
        before = stage_before(plan.stages, stage)
        device_ = newcomer if before is None else msgspec.structs.replace(newcomer, arrival="entering")
        job = Job(plan.model, stage, hyper, plan.slots, transfer=plan.transfer)
        placement = place(
            job,
            device_,
            run.part_bytes,
            run.pricer,
            before=before,
            signature=wanted(plan.server),
            layers=run.layers(stage),
            layouts=run.layouts,
        )
        fits = placement.refusal is None
        yield DevicePlan(
            newcomer.device,
            device.profile,
            placement,
            has_card(newcomer.capabilities),
            tuple(limits(placement.cost, device_)) if fits else (),
            trained_depth(stage) - trained_depth(placement.stage) if fits else 0,
            trained_rank(plan.model, stage),
        )


def _exceeding(
    job: Job, samples: dict[str, int], price: Price, traffic: StageTraffic, devices: Sequence[PlannedDevice]
) -> Iterator[str]:
    """Names of devices with budgets below the whole stage in whole batches, by the typical share's price."""
    for device in devices:
        own = device.candidate
        arrival: Arrival = "joining" if traffic.before is None else "entering"
        alike = msgspec.structs.replace(own, samples=samples, arrival=arrival)
        cost, _, _ = draw_costs(job, alike, price, traffic)
        flops = cost.flops * own.samples.get("", 0) / samples[""]
        if verdict(msgspec.structs.replace(cost, flops=flops), alike) is not None:
            yield own.device


def _typical(shares: Sequence[Mapping[str, int]], least: int) -> dict[str, int]:
    """The mean share (of one batch at least), all modalities present."""
    mean = max(least, round(sum(samples[""] for samples in shares) / len(shares)))
    return dict.fromkeys({modality for samples in shares for modality in samples}, mean)


class Totals(NamedTuple):
    """Totals of all rounds: bytes down and up of one client, FLOPs of one sample."""

    bytes: float
    flops: float


def totals(model: ModelSpec, stages: Sequence[Stage], epochs: int) -> Totals:
    """A schedule's stages, each with its rounds of ``epochs`` epochs, as LW-FedMML counts (arXiv 2407.15426).

    It is there to compare with the paper's figures; nothing runs like it. One client. Bytes: parameters and buffers, a
    ViT with its unused pooler, a DistilBERT with its table of position numbers; of a round down and up, 4 bytes a
    value; layer-wise also each stage with rounds once more, one way, when it is finished. FLOPs: of one sample over all
    epochs, 1 a multiply-accumulate, 5 an element of a layer norm; what is trained counts three times its forward pass,
    what is frozen once, and every encoder stage whole.
    """
    sizes, flops = part_bytes(model), part_flops(model)
    # Whether each stage trains one encoder stage, which is then frozen.
    numbers = [{n for part in stage.trained if (n := encoder_stage(part))} for stage in stages]
    alone = len(stages) > 1 and all(len(n) == 1 for n in numbers)
    sent = spent = 0.0
    for one, rounds in ((one, stage.rounds / len(draws(stage))) for stage in stages for one in draws(stage)):
        trained = set(one.trained)
        finished = [p for p in trained if encoder_stage(p)] if rounds and alone else []
        sent += 2 * rounds * sum(sizes[part] for part in trained) + sum(sizes[part] for part in finished)
        forward = sum(flops[part] * (3 if part in trained else 1) for part in one.present if part in flops)
        spent += rounds * epochs * forward
    return Totals(sent, spent)


def part_bytes(model: ModelSpec) -> dict[str, int]:
    """Part -> bytes, including extras of `transformers`' whole models: pooler, position numbers."""
    built = build(model, device="meta")
    sizes = {part: part_size_bytes(built, part) for part in built.parts_present}
    for m, encoder in model.encoders.items():
        if encoder.kind == "text":
            sizes[f"{m}/embed"] += 8 * (encoder.positions or encoder.input_shape[0])
        elif encoder.kind == "vision":
            sizes[f"{m}/embed"] += 4 * (encoder.width**2 + encoder.width)
    return sizes


def part_flops(model: ModelSpec) -> dict[str, float]:
    """Part -> operations of one sample's forward pass, for encoders, heads, fusion and task."""
    built = build(model, device="meta").eval()
    found: dict[str, float] = {}

    def ran(part: str, work: Callable[[], T]) -> T:
        with torch.no_grad(), FlopCounter({torch.ops.aten.native_layer_norm: _norm}) as counter:
            result = work()
        found[part] = counter.flops / 2 / _ROWS
        return result

    projected, tokens = {}, {}
    for m in model.encoders:
        x = meta_input(Job(model=model), m, _ROWS)
        state = ran(f"{m}/embed", lambda: built.embed(m, x))  # noqa: B023 - run at once
        for k in range(1, model.stages + 1):
            state = ran(f"{m}/stage{k}", lambda: built.stage(m, k, state))  # noqa: B023 - the same
        tokens[m] = ran(f"{m}/norm", lambda: built.norm(m, state))  # noqa: B023 - the same
        pooled = built.pool_tokens(m, tokens[m])
        projected[m] = ran(f"head/{m}", lambda: built.project(m, pooled))  # noqa: B023 - the same
    if model.classes:
        fused = ran("fusion", lambda: built.fuse(projected, tokens=tokens))
        for part in task_parts(model):
            ran(part, lambda: built.part(part)(fused))  # noqa: B023 - the same
    return found


def _norm(x: Sequence[int], *_: object, **__: object) -> int:
    return 2 * NORM * math.prod(x)
