"""Prices a run before it starts: every schedule on one typical share, and each device's placement in each stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from edgefl.aggregation.weights import wanted
from edgefl.budget.fit import place
from edgefl.budget.prices import Account, DevicePlan, RunPrice, StagePrice
from edgefl.budget.stage_cost import StageTraffic, moved, object_bytes
from edgefl.errors import ModelError
from edgefl.models.parts import part_layout
from edgefl.models.spec import ModelSpec
from edgefl.models.staged import build
from edgefl.plan.compile import warnings_of
from edgefl.plan.job import Candidate, Hyper, Job, RunPlan, Stage
from edgefl.plan.stages import stage_before, with_closing
from edgefl.plan.training_samples import can_cache, with_cache
from edgefl.pricing.paper_accounting import totals
from edgefl.pricing.round_price import Pricer
from edgefl.records import has_card
from edgefl.registry import Choice, method, methods


class PlannedDevice(NamedTuple):
    """A device to plan for, as it would join, and the name of its profile."""

    profile: str
    candidate: Candidate


class PriceOptions(NamedTuple):
    """``rounds``, ``schedule``, its options and ``batch_size`` of the run; schedules are priced with ``batch_sizes``.

    ``convention``: the paper by whose accounting they are shown as well; "": none.
    """

    rounds: Sequence[int]
    schedule: str
    slot: Mapping[str, Any]
    batch_size: int
    batch_sizes: Sequence[int]
    convention: str = ""


class _Run(NamedTuple):
    """What every price of one run depends on."""

    plan: RunPlan
    part_bytes: Mapping[str, int]
    pricer: Pricer


def price_run(plan: RunPlan, devices: Sequence[PlannedDevice], options: PriceOptions) -> RunPrice:
    """Price of every schedule with each batch size, and what each device would train in each stage of the run."""
    run = _Run(plan, _part_bytes(plan.model), Pricer())
    on_cuda = any(device.candidate.capabilities.torch_device.startswith("cuda") for device in devices)
    common = msgspec.structs.replace(plan.hypers[0], precision=plan.hypers[0].precision if on_cuda else "f32")
    shares = [device.candidate.samples for device in devices]
    schedules = (
        price
        for schedule, stages in schedules_of(plan.model, options.rounds, options.slot).items()
        for size in options.batch_sizes
        for hyper in [msgspec.structs.replace(common, batch_size=size)]
        for price in _stage_prices(run, schedule, stages, hyper, _typical(shares, size))
    )
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
        accounts=_accounts(plan, options.rounds) if options.convention else (),
        schedule=options.schedule,
        warnings=warnings_of(plan),
    )


def schedules_of(
    model: ModelSpec, rounds: Sequence[int], options: Mapping[str, Any] | None = None
) -> dict[str, tuple[Stage, ...]]:
    """Every schedule's stages, with these ``options`` where it has them; without those that have nothing to train.

    A schedule by budget has none of its own: a device trains the whole model, or as in another schedule.
    """
    found: dict[str, tuple[Stage, ...]] = {}
    for name, schedule in methods("schedule").items():
        if not schedule.by_budget:
            with suppress(ModelError):
                stages = Choice(schedule, dict(options or {})).bind(schedule.stages)(model, rounds)
                found[name] = with_closing(model, stages)
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
        priced = run.pricer(job, samples)
        traffic = moved(job, device, StageTraffic(stage, run.part_bytes, before, wanted(plan.server)))
        first = traffic.joining + traffic.signature if before is None else traffic.entering
        yield StagePrice(
            schedule=schedule,
            stage=stage.index,
            rounds=stage.rounds,
            step_peak_bytes=priced.peak,
            flops_per_round=priced.flops,
            flops_per_sample=priced.sample_flops,
            payload_down_bytes=traffic.down,
            payload_up_bytes=traffic.up,
            filling_flops=sum(flops for part, flops in priced.cache_fill_flops.items() if part not in stored),
            whole_bytes=first + traffic.whole_up,
            batch_size=hyper.batch_size,
            memory=dict(priced.memory),
        )
        stored |= set(priced.cache_fill_flops) if stage.rounds else set()


def _device_plans(run: _Run, device: PlannedDevice) -> Iterator[DevicePlan]:
    """What one device would train in each stage that has rounds."""
    plan, newcomer = run.plan, device.candidate
    for stage, hyper in zip(plan.stages, plan.hypers, strict=True):
        if not stage.rounds:
            continue
        before = stage_before(plan.stages, stage)
        device_ = newcomer if before is None else msgspec.structs.replace(newcomer, arrival="entering")
        job = Job(plan.model, stage, hyper, plan.slots, transfer=plan.transfer)
        placement = place(job, device_, run.part_bytes, run.pricer, before=before, signature=wanted(plan.server))
        yield DevicePlan(newcomer.device, device.profile, placement, has_card(newcomer.capabilities))


def _accounts(plan: RunPlan, rounds: Sequence[int]) -> tuple[Account, ...]:
    """The schedules by LW-FedMML's accounting, with the run's rounds."""
    return tuple(
        Account(schedule, *totals(plan.model, stages, plan.hypers[0].epochs))
        for schedule, stages in schedules_of(plan.model, rounds, {"embed": "frozen"}).items()
        if method("schedule", schedule).encoders
    )


def _typical(shares: Sequence[Mapping[str, int]], least: int) -> dict[str, int]:
    """The mean share (of one batch at least), all modalities present."""
    mean = max(least, round(sum(samples[""] for samples in shares) / len(shares)))
    return dict.fromkeys({modality for samples in shares for modality in samples}, mean)


def _part_bytes(spec: ModelSpec) -> dict[str, int]:
    model = build(spec, device="meta")
    return {part: object_bytes(part_layout(model, part)) for part in model.parts_present}
