"""The figures behind ``edgefl plan``: schedules priced on one share, and a placement per device and stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from edgefl.aggregation.clusters import wanted
from edgefl.budget.fit import place
from edgefl.budget.traffic import moved, object_bytes
from edgefl.cli.data_shares import data_of
from edgefl.config.load import fleet_profile, load_run
from edgefl.config.recipe import RecipeConfig
from edgefl.config.schema import DeviceProfile, RunConfig
from edgefl.config.yaml_files import parse_bytes
from edgefl.data.prepare import Share
from edgefl.errors import ConfigError, ModelError, Problem
from edgefl.models.spec import ModelSpec
from edgefl.plan.compile import compile_run, schedule_of
from edgefl.plan.frozen_prefix import can_cache, with_cache
from edgefl.plan.job import Candidate, Hyper, Job, RunPlan, Stage
from edgefl.plan.plan_warnings import warnings_of
from edgefl.plan.schedule import SCHEDULES, Embed, stage_before, with_closing
from edgefl.records import Capabilities, has_card
from edgefl.report.prices import Account, DevicePlan, RunPrice, StagePrice

#: Whose accounting ``--convention`` knows.
CONVENTIONS = ("lw-fedmml",)
#: Profile of the devices of a run file that names none.
UNKNOWN_DEVICE = "cpu"
#: Idle trainer on a CPU after its toy round. Each agent measures its own in a run.
TRAINER_BYTES = 266 * 10**6
#: CUDA context with torch's kernels on a card, about (read, not measured: 300 to 600 MB). Agents measure what is free.
CUDA_CONTEXT_BYTES = 600 * 10**6


def price_run(
    name: str,
    overrides: Sequence[str],
    *,
    profiles: Sequence[str],
    samples: int | None,
    trainer_base: str,
    convention: str = "",
    batch_sizes: Sequence[int] = (),
) -> RunPrice:
    """Price the run file ``name``; the schedules with each of ``batch_sizes``, by default the run's.

    Raises ConfigError, DataError, ModelError.
    """
    if convention not in {"", *CONVENTIONS}:
        known = ", ".join(CONVENTIONS)
        raise ConfigError("--convention", [Problem("value", f"{convention!r} is none of: {known}")])
    config, recipe = load_run(name, overrides)
    devices = _devices(config, profiles)
    plan, shares = _compile(config, recipe, [device for device, _ in devices], samples)
    # torch only now: what is wrong with the files is told before it has taken its seconds.
    from edgefl.models.checkpoints import check_pretrained
    from edgefl.pricing.round_price import Pricer

    check_pretrained(plan.model)
    part_bytes = _part_bytes(plan)
    base = _base(trainer_base)
    pricer = Pricer()
    _check_batches(batch_sizes, shares)
    batch_sizes = list(dict.fromkeys(batch_sizes)) or [config.training.batch_size]
    own_schedule, embed = schedule_of(recipe)
    on_cuda = any(profile.torch_device.startswith("cuda") for _, profile in devices)
    common = msgspec.structs.replace(plan.hypers[0], precision=plan.hypers[0].precision if on_cuda else "f32")
    schedules = tuple(
        price
        for schedule, stages in _schedules(plan.model, config.training.rounds, embed).items()
        for hyper in [msgspec.structs.replace(common, batch_size=size) for size in batch_sizes]
        for price in _priced(plan, schedule, stages, hyper, _typical(shares, hyper.batch_size), part_bytes, pricer)
    )
    devices_planned = tuple(
        DevicePlan(
            device,
            profile.name,
            place(
                plan.model,
                stage,
                hyper,
                plan.slots,
                candidate,
                part_bytes,
                pricer,
                before=before,
                transfer=plan.transfer,
                signature=wanted(plan.server),
            ),
            has_card(candidate.capabilities),
        )
        for device, profile in devices
        for newcomer in [_candidate(profile, shares[device], plan, base)]
        for stage, hyper in zip(plan.stages, plan.hypers, strict=True)
        if stage.rounds
        for before in [stage_before(plan.stages, stage)]
        for candidate in [newcomer if before is None else msgspec.structs.replace(newcomer, arrival="entering")]
    )
    return RunPrice(
        name=plan.name,
        recipe=plan.recipe,
        model_bytes=sum(part_bytes.values()),
        samples=_typical(shares, config.training.batch_size)[""],
        batch_size=config.training.batch_size,
        trainer_base_bytes=base,
        schedules=schedules,
        devices=devices_planned,
        convention=convention,
        accounts=_accounts(plan, config.training.rounds) if convention else (),
        schedule=own_schedule,
        warnings=warnings_of(plan),
    )


def _check_batches(sizes: Sequence[int], shares: dict[str, Share]) -> None:
    largest = max(share.samples[""] for share in shares.values())
    if (size := max(sizes, default=0)) > largest:
        text = f"{size} rows are more than any device's share ({largest}); give --samples, or a smaller batch"
        raise ConfigError("--batch-size", [Problem("value", text)])


def _schedules(model: ModelSpec, rounds: Sequence[int], embed: Embed = "auto") -> dict[str, tuple[Stage, ...]]:
    """Every schedule's stages; of a model that one of them has nothing to train of, the others'.

    Mixed has none of its own: a device trains the whole model as in end_to_end, or at most what progressive has it do.
    """
    found: dict[str, tuple[Stage, ...]] = {}
    for schedule, build in SCHEDULES.items():
        if schedule == "mixed":
            continue
        with suppress(ModelError):
            found[schedule] = with_closing(model, build(model, rounds, embed))
    return found


def _accounts(plan: RunPlan, rounds: Sequence[int]) -> tuple[Account, ...]:
    """The schedules by LW-FedMML's accounting, with the run's rounds."""
    from edgefl.pricing.paper_accounting import totals

    return tuple(
        Account(schedule, *totals(plan.model, stages, plan.hypers[0].epochs))
        for schedule, stages in _schedules(plan.model, rounds, "frozen").items()
        if schedule != "heads"
    )


def _devices(config: RunConfig, profiles: Sequence[str]) -> list[tuple[str, DeviceProfile]]:
    if profiles:
        found = [fleet_profile(profile, None) for profile in profiles]
        return [(f"{profile.name}-{i}", profile) for i, profile in enumerate(found, start=1)]
    if config.fleet:
        return [(device.name, fleet_profile(device.profile, device.budget)) for device in config.fleet]
    unknown = fleet_profile(UNKNOWN_DEVICE, None)  # a file for agents elsewhere, which say themselves what they are
    return [(f"device-{i}", unknown) for i in range(1, max(1, config.round.devices or 1) + 1)]


def _compile(
    config: RunConfig, recipe: RecipeConfig, devices: list[str], samples: int | None
) -> tuple[RunPlan, dict[str, Share]]:
    """The plan, and the share of each device."""
    shapes, names, own = data_of(config, devices)
    plan = compile_run(config, recipe, run="plan", shapes=shapes, label_names=names)
    return plan, {share.device: _scaled(share, samples) for share in own}


def assumptions(name: str, overrides: Sequence[str], profiles: Sequence[str], samples: int | None) -> list[str]:
    """Assumptions of a plan about settings that the run file leaves out, as sentences."""
    config, _ = load_run(name, overrides)
    found = []
    if not profiles and not config.fleet:
        count = max(1, config.round.devices or 1)
        found.append(
            f"The run file names no fleet: planned for {count} device{'' if count == 1 else 's'} of profile "
            f"{UNKNOWN_DEVICE}, without a budget; --device PROFILE plans for yours."
        )
    if config.data.source is None and samples is None:
        found.append("data.source is not given: each device has as many samples as the test set; --samples says other.")
    return found


def _scaled(share: Share, samples: int | None) -> Share:
    if samples is None:
        return share
    factor = samples / max(1, share.samples[""])
    scaled = {modality: round(count * factor) for modality, count in share.samples.items()}
    counts = tuple(round(count * factor) for count in share.class_counts)
    return msgspec.structs.replace(share, samples=scaled, class_counts=counts)


def _typical(shares: dict[str, Share], least: int) -> dict[str, int]:
    """The mean share (of one batch at least), all modalities present."""
    mean = max(least, round(sum(share.samples[""] for share in shares.values()) / len(shares)))
    modalities = {modality for share in shares.values() for modality in share.samples}
    return dict.fromkeys(modalities, mean)


def _part_bytes(plan: RunPlan) -> dict[str, int]:
    from edgefl.models.parts import part_layout
    from edgefl.models.staged import build

    model = build(plan.model, device="meta")
    return {part: object_bytes(part_layout(model, part)) for part in model.parts_present}


def _base(text: str) -> int:
    if text:
        try:
            return int(parse_bytes(text))
        except ValueError as error:
            raise ConfigError("--trainer-base", [Problem("value", str(error))]) from error
    return TRAINER_BYTES


def _priced(
    plan: RunPlan,
    schedule: str,
    stages: Sequence[Stage],
    hyper: Hyper,
    samples: dict[str, int],
    part_bytes: dict[str, int],
    pricer: Any,
) -> list[StagePrice]:
    """A schedule's stages, in order: a prefix is stored once."""
    found: list[StagePrice] = []
    stored: set[str] = set()
    for stage in stages:
        price, cache_fill_flops = _price(plan, schedule, stages, stage, hyper, samples, part_bytes, pricer)
        fresh = sum(flops for part, flops in cache_fill_flops.items() if part not in stored)
        stored |= set(cache_fill_flops) if stage.rounds else set()
        found.append(msgspec.structs.replace(price, filling_flops=fresh))
    return found


def _price(
    plan: RunPlan,
    schedule: str,
    stages: Sequence[Stage],
    stage: Stage,
    hyper: Hyper,
    samples: dict[str, int],
    part_bytes: dict[str, int],
    pricer: Any,
) -> tuple[StagePrice, Mapping[str, float]]:
    before = stage_before(stages, stage)
    job = Job(model=plan.model, stage=stage, hyper=hyper, slots=plan.slots, transfer=plan.transfer)
    if not can_cache(job):
        job = with_cache(job, "")
    priced = pricer(job, samples)
    device = Candidate(samples=samples, class_counts=(1,) * plan.model.classes)
    bytes_ = moved(job, stage, before, device, part_bytes, wanted(plan.server))
    first = bytes_.joining + bytes_.signature if before is None else bytes_.entering
    price = StagePrice(
        schedule=schedule,
        stage=stage.index,
        rounds=stage.rounds,
        step_peak_bytes=priced.peak,
        flops_per_round=priced.flops,
        flops_per_sample=priced.sample_flops,
        payload_down_bytes=bytes_.down,
        payload_up_bytes=bytes_.up,
        whole_bytes=first + bytes_.whole_up,
        batch_size=hyper.batch_size,
        memory=dict(priced.memory),
    )
    return price, priced.cache_fill_flops


def _candidate(profile: DeviceProfile, share: Share, plan: RunPlan, base: int) -> Candidate:
    samples, card = share.samples, profile.gpu_memory_bytes or 0
    untold = profile.torch_device == "cuda" and not card and not profile.unified  # where is the step?
    return Candidate(
        device=share.device,
        capabilities=Capabilities(
            memory_total_bytes=0 if untold else profile.memory_bytes or 0,
            gpu_memory_bytes=card,
            trainer_base_bytes=base,
            speed=profile.speed.record(),
            torch_device=profile.torch_device,
            gpu_free_bytes=max(1, card - CUDA_CONTEXT_BYTES) if card else 0,
        ),
        budget=profile.budget.record(),
        samples=samples,
        modalities={m: encoder.input_shape for m, encoder in plan.model.encoders.items() if samples.get(m)},
        class_counts=share.class_counts,
    )
