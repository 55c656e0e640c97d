"""Reads what ``edgefl plan`` prices: the run file, the devices' profiles and their shares of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from edgefl.budget.prices import RunPrice
from edgefl.cli.data_shares import data_of
from edgefl.config.profiles import fleet_profile, load_run
from edgefl.config.settings import DeviceProfile, RunConfig
from edgefl.config.slots import RecipeConfig
from edgefl.config.yaml_files import parse_bytes
from edgefl.data.prepare import Share
from edgefl.errors import ConfigError, Problem
from edgefl.plan.compile import compile_run
from edgefl.plan.job import Candidate, RunPlan
from edgefl.records import Capabilities
from edgefl.registry import choose

#: Whose accounting ``--convention`` knows.
CONVENTIONS = ("lw-fedmml",)
#: Profile of the devices of a run file that names none.
UNKNOWN_DEVICE = "cpu"
#: Idle trainer on a CPU after its toy round. Each agent measures its own in a run.
TRAINER_BYTES = 266 * 10**6
#: CUDA context with torch's kernels on a card, about (read, not measured: 300 to 600 MB). Agents measure the rest.
CUDA_CONTEXT_BYTES = 600 * 10**6


class PlanOptions(NamedTuple):
    """Options of ``edgefl plan``; what is left out is the run's.

    ``profiles``: of the devices to plan for; ``samples``: per device; ``batch_sizes``: to price the schedules with.
    """

    profiles: Sequence[str] = ()
    samples: int | None = None
    trainer_base: str = ""
    convention: str = ""
    batch_sizes: Sequence[int] = ()


def price_of(name: str, overrides: Sequence[str], options: PlanOptions) -> RunPrice:
    """Price of the run file ``name``. Raises ConfigError, DataError, ModelError."""
    if options.convention not in {"", *CONVENTIONS}:
        known = ", ".join(CONVENTIONS)
        raise ConfigError("--convention", [Problem("value", f"{options.convention!r} is none of: {known}")])
    config, recipe = load_run(name, overrides)
    devices = _devices(config, options.profiles)
    plan, shares = _compile(config, recipe, [device for device, _ in devices], options.samples)
    # torch only now: errors in the files are reported before it has taken its seconds.
    from edgefl.models.checkpoints import check_pretrained
    from edgefl.pricing.run_price import PlannedDevice, PriceOptions, price_run

    check_pretrained(plan.model)
    base = _base(options.trainer_base)
    _check_batches(options.batch_sizes, shares)
    planned = [
        PlannedDevice(profile.name, _candidate(profile, shares[device], plan, base)) for device, profile in devices
    ]
    schedule = choose("schedule", {"schedule": recipe.schedule})
    batch_size = config.training.batch_size
    sizes = list(dict.fromkeys(options.batch_sizes)) or [batch_size]
    asked = PriceOptions(config.training.rounds, schedule.name, schedule.options, batch_size, sizes, options.convention)
    return price_run(plan, planned, asked)


def _check_batches(sizes: Sequence[int], shares: dict[str, Share]) -> None:
    largest = max(share.samples[""] for share in shares.values())
    if (size := max(sizes, default=0)) > largest:
        text = f"{size} rows are more than any device's share ({largest}); give --samples, or a smaller batch"
        raise ConfigError("--batch-size", [Problem("value", text)])


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


def assumptions(name: str, overrides: Sequence[str], options: PlanOptions) -> list[str]:
    """Assumptions of a plan about settings that the run file leaves out, as sentences."""
    config, _ = load_run(name, overrides)
    found = []
    if not options.profiles and not config.fleet:
        count = max(1, config.round.devices or 1)
        found.append(
            f"The run file names no fleet: planned for {count} device{'' if count == 1 else 's'} of profile "
            f"{UNKNOWN_DEVICE}, without a budget; --device PROFILE plans for yours."
        )
    if config.data.source is None and options.samples is None:
        found.append("data.source is not given: each device has as many samples as the test set; --samples says other.")
    return found


def _scaled(share: Share, samples: int | None) -> Share:
    if samples is None:
        return share
    factor = samples / max(1, share.samples[""])
    scaled = {modality: round(count * factor) for modality, count in share.samples.items()}
    counts = tuple(round(count * factor) for count in share.class_counts)
    return msgspec.structs.replace(share, samples=scaled, class_counts=counts)


def _base(text: str) -> int:
    if text:
        try:
            return int(parse_bytes(text))
        except ValueError as error:
            raise ConfigError("--trainer-base", [Problem("value", str(error))]) from error
    return TRAINER_BYTES


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
