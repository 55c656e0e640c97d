"""A run file before it runs: the shares of its data, its devices, and the price of its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from edgefl.budget.fit import RunPrice
from edgefl.config.profiles import RunSource, fleet_profile, load_run
from edgefl.config.settings import DeviceProfile, RunConfig
from edgefl.config.yaml_files import Overrides, parse_bytes
from edgefl.data.label_sets import plain_names
from edgefl.data.levels import levels_in
from edgefl.data.population import ROWS, Population
from edgefl.data.prepare import Prepared, Share, prepare_population, prepare_shares
from edgefl.data.sources import as_test, has_manifest, load
from edgefl.encoder_kinds import encoder_kind, kind_names
from edgefl.errors import ConfigError, Problem
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.plan.compile import compile_run
from edgefl.plan.job import Candidate, RunPlan
from edgefl.plan.preparation import read_as
from edgefl.plan.stages import OWN_HOLDOUT, by_holdouts
from edgefl.records import Budget, Capabilities
from edgefl.registry import choose
from edgefl.report.grid import Cell, Column, Grid, table
from edgefl.run_records import DeviceRow

#: Whose accounting ``--convention`` knows.
CONVENTIONS = ("lw-fedmml",)
#: Profile of the devices of a run file that names none.
UNKNOWN_DEVICE = "cpu"
#: Idle trainer on a CPU after its toy round. Each agent measures its own in a run.
TRAINER_BYTES = 266 * 10**6
#: CUDA context with torch's kernels on a card, about (read, not measured: 300 to 600 MB). Agents measure the rest.
CUDA_CONTEXT_BYTES = 600 * 10**6
#: Facts of a run's data: modality -> shape of one sample, label names, the devices' shares.
Data = tuple[Mapping[str, tuple[int, ...]], tuple[str, ...], Sequence[Share]]


def check_data_known(config: RunConfig, name: str) -> None:
    """Raise ConfigError for a run whose data and training only its devices know."""
    if config.model.own:
        text = "is trained by code and data of the devices, which are not here"
        way_out = (
            "Start `edgefl-coordinator run` here and `edgefl-agent run --trainer FILE.py:FUNCTION` on each device."
        )
        raise ConfigError(name, [Problem("model.own", text)], remedy=way_out)


def data_of(config: RunConfig, devices: Sequence[str]) -> Data:
    """The devices' data: shared out of the source; where it is on the devices alone, each has as much as the test set.

    Raises ConfigError where there is neither a source nor a test set, DataError.
    """
    return _data_of(config, devices)[0]


def _data_of(config: RunConfig, devices: Sequence[str]) -> tuple[Data, tuple[str, ...]]:
    """The devices' data, and the warnings of how it is shared out."""
    check_data_known(config, config.name)
    if config.data.source is not None:
        with TemporaryDirectory() as folder:
            prepared = shares_of(config, devices, Path(folder))
        return (prepared.signature, prepared.label_names, prepared.shares), prepared.warnings
    source = config.data.test
    if not source:
        text = "is needed, or data.test, to know the shapes of the samples"
        raise ConfigError(config.name, [Problem("data.source", text)])
    test = load(
        as_test(source), bad_samples=config.data.bad_samples, modalities=read_as(config, folder=has_manifest(source))
    )
    path = source if isinstance(source, str) else ""
    shares = [Share(device, path, test.samples(), test.class_counts()) for device in devices]
    return (test.signature(), test.label_names, shares), ()


def _data_in(past: PastRun) -> tuple[Data, tuple[str, ...]]:
    """The devices' data as a run had it."""
    shapes = {modality: encoder.input_shape for modality, encoder in past.model.encoders.items()}
    shares = [Share(row.device, "", row.samples, row.class_counts) for row in past.devices]
    return (shapes, past.model.label_names, shares), ()


def shares_of(config: RunConfig, devices: Sequence[str], folder: Path) -> Prepared:
    """Write every device's share and the test set of a run below ``folder``. Raises ConfigError, DataError."""
    return prepare_shares(config.shared, devices, folder, config.seed, _read_as(config))


def shared_together(config: RunConfig, devices: Sequence[str], folder: Path) -> tuple[Prepared, Population]:
    """The same with the shares in memory, to be saved as rows of one file."""
    return prepare_population(config.shared, list(devices), folder, config.seed, _read_as(config))


def _read_as(config: RunConfig) -> Mapping[str, EncoderSpec]:
    if config.data.source is None:
        raise ConfigError(config.name, [Problem("data.source", "is needed to share data out")])
    return read_as(config, folder=has_manifest(config.data.source))


def population_of(config: RunConfig, folder: Path, *, mapped: bool = False) -> Population | None:
    """The fleet's shares below ``folder``; None where they are files of their own. Raises DataError.

    ``mapped``: values are pages of their file, which processes share.
    """
    if not (folder / ROWS).is_file():
        return None
    names = config.device_names if mapped else list(config.device_names)
    return Population.load(folder, names, config.shared, config.seed, mapped=mapped)


def shares_table(name: str, prepared: Prepared) -> Grid:
    """How the data set ``name`` is partitioned: samples of each device, of each modality and of each class."""

    def modality(name: str) -> Column[Share]:
        def cell(share: Share) -> Cell:
            return Cell(str(share.samples.get(name, 0)), tone="" if share.samples.get(name) else "warn")

        return Column(name, cell, group="samples that have")

    def label(index: int, name: str) -> Column[Share]:
        return Column(name, lambda share: str(share.class_counts[index]), group="samples of class")

    numeric = levels_in(prepared.label_names) is not None  # levels of a number are no classes
    names = () if numeric else plain_names(prepared.label_names)
    columns: list[Column[Share]] = [
        Column("device", lambda share: share.device, key=True, text=True),
        Column("samples", lambda share: str(share.samples[""])),
        *map(modality, prepared.signature),
        *(label(index, name) for index, name in enumerate(names)),
        Column("discarded", lambda share: str(share.discarded), tip="samples that lost every modality"),
    ]
    shapes = ", ".join(f"{m} {list(shape)}" for m, shape in prepared.signature.items())
    whole = ", whole groups" if prepared.test_origin == "groups" else ""
    notes = [f"One sample: {shapes}. Test set: {prepared.test_samples} samples{whole}."]
    if not prepared.label_names:
        notes.append("No sample has a label: recipes that learn from labels cannot train on them.")
    if prepared.skipped:
        notes.append(f"Left out, in {len(prepared.skipped)} places; the first: {prepared.skipped[0]}.")
    notes += [f"Warning: {text}." for text in prepared.warnings]
    return table(f"Shares of {name}", columns, prepared.shares, notes)


class PastRun(NamedTuple):
    """A run that has been: its model and devices; ``wire``, ``idle``: bytes counted, as ``months`` takes them."""

    run: str
    model: ModelSpec
    devices: Sequence[DeviceRow]
    wire: Mapping[str, float]
    idle: Mapping[str, float]


class PlanOptions(NamedTuple):
    """Options of ``edgefl plan``; what is left out is the run's.

    ``profiles``: of the devices to plan for; ``samples``: per device; ``batch_sizes``: to price the schedules with.
    ``runs_a_month``: to price a month of each device; 0: none. ``past``: a run whose devices to plan for, without
    ``profiles``.
    """

    profiles: Sequence[str] = ()
    samples: int | None = None
    trainer_base: str = ""
    convention: str = ""
    batch_sizes: Sequence[int] = ()
    runs_a_month: int = 0
    past: PastRun | None = None


def price_of(file: RunSource, overrides: Overrides, options: PlanOptions) -> RunPrice:
    """Price of a run file. Raises ConfigError, DataError, ModelError."""
    if options.convention not in {"", *CONVENTIONS}:
        known = ", ".join(CONVENTIONS)
        raise ConfigError("--convention", [Problem("value", f"{options.convention!r} is none of: {known}")])
    config, recipe = load_run(file, overrides)
    past = None if options.profiles else options.past
    devices = _devices(config, options.profiles) if past is None else []
    (shapes, labels, own), warned = _data_of(config, [name for name, _ in devices]) if past is None else _data_in(past)
    plan = compile_run(config, recipe, run="plan", shapes=shapes, label_names=labels)
    shares = {share.device: _scaled(share, options.samples) for share in own}
    # torch only now: errors in the files are reported before it has taken its seconds.
    from edgefl.models.checkpoints import check_pretrained
    from edgefl.pricing.run_price import PlannedDevice, PriceOptions, price_run

    check_pretrained(plan.model)
    if find_spec("onnxscript") and find_spec("onnxruntime"):  # the extra export, which a run can go without
        from edgefl.export.rehearsal import rehearse

        rehearse(plan.model.encoders)
    try:
        base = int(parse_bytes(options.trainer_base)) if options.trainer_base else TRAINER_BYTES
    except ValueError as error:
        raise ConfigError("--trainer-base", [Problem("value", str(error))]) from error
    largest = max(share.samples[""] for share in shares.values())
    if (size := max(options.batch_sizes, default=0)) > largest:
        text = f"{size} rows are more than any device's share ({largest}); give --samples, or a smaller batch"
        raise ConfigError("--batch-size", [Problem("value", text)])
    planned = [
        PlannedDevice(profile.name, _candidate(profile, shares[device], plan, base)) for device, profile in devices
    ]
    for row in past.devices if past is not None else ():
        told = 0 if options.trainer_base else row.capabilities.trainer_base_bytes
        has = msgspec.structs.replace(row.capabilities, trainer_base_bytes=told or base)
        planned.append(PlannedDevice(row.profile, _joined(shares[row.device], has, row.budget, plan)))
    schedule = choose("schedule", recipe.slots)
    batch_size = config.training.batch_size
    sizes = list(dict.fromkeys(options.batch_sizes)) or [batch_size]
    asked = PriceOptions(config.training.rounds, schedule.name, schedule.options, batch_size, sizes, options.convention)
    price = price_run(plan, planned, asked)
    return msgspec.structs.replace(price, warnings=(*warned, *price.warnings))


def assumptions(file: RunSource, overrides: Overrides, options: PlanOptions) -> list[str]:
    """Assumptions of a plan about settings that the run file leaves out, as sentences."""
    config, recipe = load_run(file, overrides)
    found = []
    past = None if options.profiles else options.past
    if past is not None:
        count = len(past.devices)
        found.append(
            f"As in run {past.run}: its {count} device{'' if count == 1 else 's'}, with the samples, the budgets and "
            "the memory of an idle trainer that they told."
        )
    elif not options.profiles and not config.fleet:
        count = max(1, config.round.devices or 1)
        found.append(
            f"The run file names no fleet: planned for {count} device{'' if count == 1 else 's'} of profile "
            f"{UNKNOWN_DEVICE}, without a budget; --device PROFILE plans for yours."
        )
    if past is None and config.data.source is None and options.samples is None:
        found.append("data.source is not given: each device has as many samples as the test set; --samples says other.")
    if config.training.holdout is None and (needing := by_holdouts(recipe.slots)):
        found.append(
            f"training.holdout is not given: {OWN_HOLDOUT:.0%} of each device's samples are not trained on, by which "
            f"{' and '.join(needing)} goes."
        )
    return found


def _devices(config: RunConfig, profiles: Sequence[str]) -> list[tuple[str, DeviceProfile]]:
    if profiles:
        found = [fleet_profile(profile, None) for profile in profiles]
        return [(f"{profile.name}-{i}", profile) for i, profile in enumerate(found, start=1)]
    if config.fleet:
        return [(device.name, fleet_profile(device.profile, device.budget)) for device in config.fleet]
    unknown = fleet_profile(UNKNOWN_DEVICE, None)  # a file for agents elsewhere, which say themselves what they are
    return [(f"device-{i}", unknown) for i in range(1, max(1, config.round.devices or 1) + 1)]


def _scaled(share: Share, samples: int | None) -> Share:
    if samples is None:
        return share
    factor = samples / max(1, share.samples[""])
    scaled = {modality: round(count * factor) for modality, count in share.samples.items()}
    counts = tuple(round(count * factor) for count in share.class_counts)
    return msgspec.structs.replace(share, samples=scaled, class_counts=counts)


def _candidate(profile: DeviceProfile, share: Share, plan: RunPlan, base: int) -> Candidate:
    card = profile.gpu_memory_bytes or 0
    untold = profile.torch_device == "cuda" and not card and not profile.unified  # where is the step?
    has = Capabilities(
        memory_total_bytes=0 if untold else profile.memory_bytes or 0,
        gpu_memory_bytes=card,
        trainer_base_bytes=base,
        speed=profile.speed.record(),
        torch_device=profile.torch_device,
        gpu_free_bytes=max(1, card - CUDA_CONTEXT_BYTES) if card else 0,
    )
    return _joined(share, has, profile.budget.record(), plan)


def _joined(share: Share, has: Capabilities, budget: Budget, plan: RunPlan) -> Candidate:
    """A device with this share, as it would join the run."""
    samples, encoders = share.samples, plan.model.encoders
    held = {modality: encoder.input_shape for modality, encoder in encoders.items() if samples.get(modality)}
    return Candidate(share.device, has, budget, samples, held, share.class_counts)


def encoder_sizes() -> Grid:
    """The encoder sizes of each kind."""
    sizes = {name: encoder_kind(name).sizes for name in kind_names()}

    def field(name: str) -> Column[tuple[str, str]]:
        return Column(name, lambda row: str(sizes[row[0]][row[1]].get(name, "")))

    columns: list[Column[tuple[str, str]]] = [
        Column("kind", lambda row: row[0], key=True, text=True),
        Column("size", lambda row: row[1], key=True, text=True),
        *map(field, ("width", "depth", "heads", "patch", "vocabulary")),
    ]
    note = "Fields of model.encoders.<modality>; one that is given in the run file wins over the size's."
    return table("Encoder sizes", columns, [(kind, name) for kind, named in sizes.items() for name in named], [note])
