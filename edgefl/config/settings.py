"""Run and device files as frozen values. ``docs/configuration.md`` is generated from the descriptions here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from edgefl.config.encoder import EncoderConfig
from edgefl.config.lora import LoraConfig
from edgefl.config.slots import SlotsConfig
from edgefl.config.yaml_files import (
    Bytes,
    DeviceOrGroup,
    Modality,
    Name,
    Positive,
    Rate,
    Share,
    Values,
    as_text,
    parse_bytes,
    valid_names,
)
from edgefl.errors import Problem
from edgefl.groups import Groups, group_of, members, unknown_groups
from edgefl.records import MAX_CELL_NAME, Budget, Packing, Speed
from edgefl.sequences import Made
from edgefl.traces import NEEDS, Need


class BudgetConfig(Values):
    """Budget of one round on a device. Left out: no limit."""

    memory_bytes: Bytes | None = Field(
        None, description="whole trainer process, such as 3 GiB; with what it holds on a GPU of unified memory"
    )
    step_memory_bytes: Bytes | None = Field(None, description="what training adds to the idle trainer")
    flops: Annotated[float, Field(gt=0)] | None = Field(None, description="FLOPs of one round")
    payload_bytes: Bytes | None = Field(None, description="tensors received and sent in one round")
    disk_bytes: Bytes | None = Field(None, description="objects and rows kept on the device")
    energy_j: Annotated[float, Field(gt=0)] | None = Field(None, description="joules of one round, by speed.power_w")
    gpu_memory_bytes: Bytes | None = Field(
        None, description="what torch's allocator takes of a GPU's own memory; the CUDA context comes on top"
    )

    def record(self) -> Budget:
        """The same as it travels in messages."""
        return Budget(**self.model_dump())


class SpeedConfig(Values):
    """Speed of the device. Left out: not known, and then no seconds or joules are predicted."""

    flops: Annotated[float, Field(ge=0)] = Field(
        0.0, description="FLOPs a second while training, apart from calls and writes"
    )
    down_bytes: Bytes = Field(0, description="bytes a second from the broker")
    up_bytes: Bytes = Field(0, description="bytes a second to the broker")
    power_w: Annotated[float, Field(ge=0)] = Field(0.0, description="watts of the whole device while training")
    operation_s: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="seconds that an operation of a training step takes besides its FLOPs",
    )
    written_bytes: Annotated[float, Field(ge=0)] = Field(
        0.0, description="bytes a second of tensors that a training step makes or changes"
    )
    machine: str = Field("", description="kind of machine the figures are of; ratios are reported for it alone")
    matmul: dict[str, float] = Field({}, description="FLOPs a second of a matrix product, by type; for the record")
    disk_read_bytes: Bytes = Field(0, description="bytes a second read from disk; for the record")
    disk_write_bytes: Bytes = Field(0, description="bytes a second written and synced; for the record")

    def record(self) -> Speed:
        """The part of it that travels in messages."""
        return Speed(
            *(self.flops, self.down_bytes, self.up_bytes, self.power_w),
            *(self.operation_s, self.machine, self.written_bytes),
        )


class DeviceProfile(Values):
    """A kind of device: what it is, since when the figures stand and where they come from, and its budget."""

    name: Name = Field(description="the profile's name")
    description: str = Field("", description="what the device is")
    date: Annotated[str, pydantic.BeforeValidator(as_text)] = Field(
        "", description="when the figures were taken, such as 2026-11"
    )
    source: str = Field("", description="where they come from")
    budget: BudgetConfig = Field(BudgetConfig(), description="limits of one round")
    speed: SpeedConfig = Field(SpeedConfig(), description="what it does in a second")
    heartbeat_s: Annotated[float, Field(gt=0)] = Field(10.0, description="seconds between signs of life")
    torch_device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the trainer computes")
    trainer: str = Field("", description="own training code in place of EdgeFL's, FILE.py:FUNCTION or MODULE:FUNCTION")
    memory_bytes: Bytes | None = Field(
        None,
        description="memory of the device, beside what a GPU has of its own; `edgefl plan` takes it for a limit, with "
        "torch_device cuda only where unified or gpu_memory_bytes says what is in it",
    )
    gpu_memory_bytes: Bytes | None = Field(None, description="memory of the GPU that trains, where it has its own")
    unified: bool = Field(False, description="processor and GPU share memory_bytes (Jetson): one budget for both")
    plan_only: str = Field(
        "", description="why no agent runs on such a device: the profile is to plan with; `run` warns"
    )
    sensors: dict[str, str] = Field({}, description="what measures energy and temperature; for the record")
    notes: list[str] = Field([], description="what the figures do not say; for the record")

    def conflicts(self) -> list[Problem]:
        """Memory budgets that overlap, or of a GPU that does not train."""
        twice = {"gpu_memory_bytes": self.gpu_memory_bytes, "budget.gpu_memory_bytes": self.budget.gpu_memory_bytes}
        message = "counts unified memory twice: leave it out; budget.memory_bytes limits processor and GPU together"
        found = [Problem(field, message) for field, given in twice.items() if self.unified and given is not None]
        if not found and self.gpu_memory_bytes is not None and self.torch_device != "cuda":
            message = f"is of the GPU that trains, and torch_device is {self.torch_device}: set cuda, or leave it out"
            found.append(Problem("gpu_memory_bytes", message))
        return found


class HeadConfig(Values):
    """Projection head of each modality: two hidden layers, then the shared width."""

    kind: Literal["mlp", "none"] = Field(
        "mlp", description="mlp (LW-FedMML), or none: the encoders' tokens are fused as they are (PmcmFL)"
    )
    width: Positive = Field(256, description="hidden width (the paper: 4096)")
    out: Positive = Field(64, description="shared width (the paper: 256); without a head the encoders' own")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="dropout in the head")
    norm: Literal["batch", "layer", "none"] | None = Field(
        None,
        description="normalisation in the head: batch (LW-FedMML), layer, or none (AproMFL); default: none with "
        "weight: relationship, layer where optimise or repair moves the weights off the devices' mean, else batch",
    )


class ModelConfig(Values):
    """The model: one encoder a modality, cut into stages, heads and fusion; or one that devices' own code builds."""

    encoders: dict[Modality, EncoderConfig] = Field({}, description="modality: encoder")
    own: str = Field(
        "",
        description="file of edgefl.client.save: parts and first weights of a model that the devices train by their "
        "own code, in place of encoders and what follows them",
    )
    stages: Annotated[int, Field(ge=1, le=64)] = Field(6, description="stages each encoder is cut into")
    head: HeadConfig = Field(HeadConfig(), description="projection heads")
    fusion_width: Positive = Field(128, description="width of the fused representation")
    lora: LoraConfig | None = Field(
        None,
        description="low-rank terms are trained in place of the encoders that have them, which stay as they begin; "
        "default: none",
    )


class MissingConfig(Values):
    """Simulated loss of modalities and labels before training."""

    rate: Share = Field(0.0, description="share of samples that lose a modality, as `lose` says")
    lose: Literal["each", "one"] = Field(
        "each",
        description="each: every modality of every sample is lost with probability `rate`, by itself; one: `rate` of a "
        "device's samples, rounded down, lose exactly one that is drawn (FedMVP, MMiC)",
    )
    keep: Literal["discard", "one"] = Field("discard", description="a sample that loses all: discarded, or keeps one")
    devices: dict[DeviceOrGroup, list[Modality]] = Field({}, description="device: modalities that it lacks wholly")
    complete: list[DeviceOrGroup] = Field([], description="devices that the rate does not touch")
    unlabelled: list[DeviceOrGroup] = Field([], description="devices whose samples have no labels")

    def by_device(self, groups: Groups) -> MissingConfig:
        """The same with every group's devices in its place."""
        lacks: dict[str, list[str]] = {}
        for one, modalities in self.devices.items():
            for device in members([one], groups):
                lacks[device] = [*lacks.get(device, []), *modalities]
        complete, unlabelled = (sorted(members(named, groups)) for named in (self.complete, self.unlabelled))
        return self.model_copy(update={"devices": lacks, "complete": complete, "unlabelled": unlabelled})


class DataConfig(Values):
    """Where the data comes from, how it is shared out in local mode, and the coordinator's test set."""

    source: str | dict[str, dict[str, object]] | None = Field(
        None,
        description="folder with manifest.jsonl, .npz file, or {basic_motions: {…}}; shared out in local mode",
    )
    partition: dict[Literal["natural", "uniform", "dirichlet", "shards", "drawn"], dict[str, float] | None] = Field(
        {"uniform": {}},
        description="natural (by person, speaker, vendor), uniform, {dirichlet: {alpha: 0.5}}, shards by class, or "
        "{drawn: {each: 20}}: each device draws its own, so that there may be more devices than samples",
    )
    missing: MissingConfig = Field(MissingConfig(), description="modalities taken away")
    bad_samples: Literal["error", "skip"] = Field("error", description="what to do with samples that can't be read")
    test: str | dict[str, dict[str, object]] = Field(
        "",
        description="test set of the coordinator: .npz, folder with manifest.jsonl, or {av_digits: {…}} (its test "
        "part, unless `part` says another); empty: from the source",
    )

    label: Annotated[str, Field(max_length=MAX_CELL_NAME)] = Field(
        "",
        description="column of the table that labels came from; bundles know it, and `edgefl predict` finds the truth "
        "there",
    )

    @pydantic.field_validator("partition", mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        if isinstance(value, str):
            value = {value: {}}
        if isinstance(value, dict) and len(value) != 1:
            choices = "natural, uniform, {dirichlet: {alpha: 0.5}}, {shards: {each: 2}} or {drawn: {each: 20}}"
            raise ValueError(f"takes one choice: {choices}")
        return value


class RatesConfig(Values):
    """Learning rates: one for all stages, or a list with one a stage."""

    encoder: Rate | list[Rate] = Field(1e-3, description="of encoders")
    head: Rate | list[Rate] = Field(1e-3, description="of heads, fusion and task")


class DecayConfig(Values):
    """Weight decay."""

    encoder: Rate = Field(0.01, description="of encoders")
    head: Rate = Field(1e-6, description="of heads, fusion and task")


class LeanConfig(Values):
    """The low-memory optimiser, of devices whose memory does not hold the state of the run's own."""

    optimizer: Literal["sgd", "adafactor", "apollo"] = Field("adafactor", description="optimiser in place of the run's")
    lr: RatesConfig = Field(
        description="its learning rates; adafactor's are relative, such as 0.02; apollo's as adamw's"
    )


#: Options of a way in which rates fall, all of them required.
_FALL_OPTIONS = {"step": {"rounds", "factor"}}


class TrainingConfig(Values):
    """Local training. Lists hold one value a stage."""

    rounds: list[Annotated[int, Field(ge=0)]] = Field(description="rounds of each stage; end_to_end adds them up")
    epochs: Positive = Field(1, description="passes over the local data in a round")
    batch_size: Annotated[int, Field(ge=2)] = Field(16, description="samples a step")
    optimizer: Literal["adamw", "sgd", "adafactor", "apollo"] = Field(
        "adamw",
        description="local optimiser, fresh each round; apollo keeps little and takes adamw's rates; adafactor keeps "
        "little, its rates are relative",
    )
    lr: RatesConfig = Field(RatesConfig(), description="learning rates")
    lr_fall: dict[Literal["none", "cosine", "step"], dict[str, float]] = Field(
        {"none": {}},
        description="how all rates fall over the rounds of the run, whatever its stages: none, cosine (to 0), or "
        "{step: {rounds: 12, factor: 0.25}}: times the factor after every so many rounds",
    )
    lr_warmup: Annotated[int, Field(ge=0)] = Field(
        0, description="rounds at the start of the run in which all rates rise to their value; the fall follows"
    )
    lr_scale: Literal["none", "batch"] = Field(
        "none",
        description="batch: lr is meant for batches of 256, as papers print it, and taken times batch_size / 256; "
        "those of lean stay as they are",
    )
    weight_decay: DecayConfig = Field(DecayConfig(), description="weight decay")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="sgd only")
    clip_norm: Annotated[float, Field(ge=0)] = Field(0.0, description="gradient norm limit; 0: none")
    cache: Literal["none", "f16", "f32"] = Field(
        "f16",
        description="how a device stores what its frozen encoder parts make of its samples; none: computed in each "
        "step, as where each round trains another encoder stage",
    )
    precision: Literal["f32", "bf16"] = Field(
        "f32", description="what encoders and heads compute in on a GPU (bf16: mixed); a CPU always uses f32"
    )
    weights: Literal["auto", "memory", "disk"] = Field(
        "auto",
        description="where a processor keeps the weights of large linear maps in training: memory, a file on disk read "
        "and written a block of rows at a time, or auto: on disk where the device's memory does not hold them",
    )
    lean: LeanConfig | None = Field(
        None, description="optimiser and rates of a device whose memory does not hold the run's; default: none"
    )
    holdout: Annotated[float, Field(ge=0, le=0.5)] | None = Field(
        None,
        description="share of each device's samples that is only tested on: personal figures, returns; default: 0.2 "
        "where the classifiers stay on the devices (weight: relationship or own), or pace, select, upload or optimise "
        "goes by what they measure, or prototypes choose k, else 0",
    )

    @pydantic.field_validator("rounds", mode="before")
    @classmethod
    def _one_a_stage(cls, value: object) -> object:
        if isinstance(value, int):
            raise ValueError("takes one number a stage, such as [1, 1, 1, 1, 1, 1] for six stages")
        return value

    @pydantic.field_validator("lr_fall", mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        return {value: {}} if isinstance(value, str) else value

    @pydantic.field_validator("lr_fall")
    @classmethod
    def _one_fall(cls, value: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        names, step = set(value), value.get("step", {})
        valid = len(value) == 1 and all(set(options) == _FALL_OPTIONS.get(n, set()) for n, options in value.items())
        if not valid or ("step" in names and not (step["rounds"] >= 1 and step["rounds"].is_integer())):
            raise ValueError("takes one choice: none, cosine or {step: {rounds: 12, factor: 0.25}}")
        if "step" in names and not 0 < step["factor"] < 1:
            raise ValueError(f"step.factor is {step['factor']:g}: give a number between 0 and 1, such as 0.25")
        return value

    @pydantic.field_validator("lr_warmup")
    @classmethod
    def _ends_before_the_run(cls, value: int, info: pydantic.ValidationInfo) -> int:
        rounds = sum(info.data.get("rounds", []))
        if 0 < rounds <= value:
            raise ValueError(f"{value} rounds of {rounds}: give fewer, so that some have the full rate")
        return value


class RoundConfig(Values):
    """When rounds start and close."""

    devices: Positive | None = Field(None, description="devices to wait for; default: the fleet's number, or 1")
    eligible: list[DeviceOrGroup] = Field(
        [], description="devices that take part, by name or as group:NAME; default: all"
    )
    excluded: list[DeviceOrGroup] = Field([], description="devices that do not, by name or as group:NAME")
    join_s: Annotated[float, Field(gt=0)] = Field(60.0, description="wait at most this long for them")
    quorum: Share = Field(0.5, description="share of the devices offered that must deliver")
    deadline_s: Annotated[float, Field(gt=0)] = Field(600.0, description="a round closes after this long")
    max_attempts: Positive = Field(3, description="tries of a round before the run fails")
    buffer: Positive | None = Field(
        None, description="rounds: async: updates the server takes before it steps; default: half of `devices`"
    )
    late: Literal["drop", "keep"] = Field(
        "drop", description="updates that come after their round has closed: drop, or keep for the next round"
    )
    alpha: Annotated[float, Field(ge=0, le=10)] = Field(
        0.5, description="an update made s rounds ago weighs (1 + s) ** -alpha; 0: as much as any"
    )
    max_staleness: Annotated[int, Field(ge=1)] = Field(10, description="rounds; an update made longer ago is dropped")
    quarantine_after: Annotated[int, Field(ge=0)] = Field(
        2, description="unusable updates in a row before a device is not asked any more; 0: it always is"
    )
    quarantine_rounds: Annotated[int, Field(ge=0)] = Field(
        0, description="rounds until it is asked again; 0: not in this run"
    )
    largest_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5,
        description="the most that one device of three or more may weigh in a part's mean; the others share what is "
        "above it; 1: all of it",
    )
    largest_change: Annotated[float, Field(ge=0)] = Field(
        10.0,
        description="an update whose change is more than this many times the median of the others' is left out; "
        "0: none is",
    )
    clip_change: Annotated[float, Field(ge=0)] = Field(
        3.0,
        description="where three or more devices trained, a change of more than this many times the median of the "
        "others' is scaled down to it; 0: none is",
    )


class TransferConfig(Values):
    """How tensors cross the broker."""

    chunk_bytes: Annotated[int, pydantic.BeforeValidator(parse_bytes), Field(ge=1024, le=16 * 2**20)] | None = Field(
        None,
        description="bytes of a chunk; default: 96 KiB, up to 768 KiB where a device's link has been seen to be fast; "
        "lowered to what the broker allows",
    )
    credit: Annotated[int, Field(ge=1, le=1024)] = Field(16, description="chunks of 96 KiB in flight; fewer of larger")
    up: Packing | dict[str, Packing] = Field(
        "f32", description="how trained parts travel up; or {pattern of part names: how}, the first that fits"
    )
    down: Packing | dict[str, Packing] = Field("f32", description="the same, of what the server sends")
    top: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="share of the values that delta+top sends")
    closing: Literal["whole", "packed"] = Field(
        "whole",
        description="a stage's last round: whole, so that nothing is left behind in its parts, or packed like the "
        "others, as the next stage's first download of these parts then is, too",
    )


class FleetDevice(Values):
    """One device of local mode."""

    name: Name = Field(description="the device's name")
    profile: str = Field("cpu", description="device profile (name or file)")
    budget: dict[str, object] = Field({}, description="budget fields that differ from the profile's")
    groups: list[Name] = Field([], description="its groups; those of a fleet with an identity are in its directory")


class FleetKind(Values):
    """Devices of one profile in a fleet that is given by its size."""

    profile: str = Field("cpu", description="device profile (name or file)")
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(1.0, description="its weight among the kinds")
    budget: dict[str, object] = Field({}, description="budget fields that differ from the profile's")


class TraceConfig(Values):
    """When simulated devices are there, and how fast their links are; it needs `speed.flops` in their profiles."""

    states: str = Field(
        "synthetic",
        description="synthetic: drawn by the run's seed; or a file of devices' states, in the form of FLASH",
    )
    links: str = Field(
        "",
        description="file of link speeds, in the form of FLASH; default: drawn around the profile's, else around 10 "
        "Mbit/s down and 4 up",
    )
    needs: list[Need] = Field(list(NEEDS), description="a device is there while it is all of these; none: always")


class SizedFleet(Values):
    """A fleet by its size and the kinds of its devices, which are evenly spread."""

    devices: Annotated[int, Field(ge=1, le=10_000_000)] = Field(description="number of devices")
    kinds: list[FleetKind] = Field([FleetKind()], min_length=1, max_length=256, description="their kinds")
    trace: TraceConfig | None = Field(
        None,
        description="when they are there and how fast their links are, in one process; default: always, as profiled",
    )

    def __len__(self) -> int:
        return self.devices

    def __getitem__(self, place: int) -> FleetDevice:
        kind = self.kinds[self.numbers()[place]]
        return FleetDevice(name=self.names()[place], profile=kind.profile, budget=kind.budget)

    def names(self) -> Sequence[str]:
        """The devices' names, in order."""
        width = len(str(self.devices - 1))
        return Made(self.devices, lambda place: f"device-{place:0{width}d}")

    def numbers(self) -> bytes:
        """The number of each device's kind."""
        return spread(self.devices, tuple(kind.weight for kind in self.kinds))

    def __iter__(self) -> Iterator[FleetDevice]:  # type: ignore[override]  # pydantic's gives fields
        return map(self.__getitem__, range(self.devices))


@lru_cache(maxsize=4)
def spread(count: int, weights: tuple[float, ...]) -> bytes:
    """The kind of each of ``count`` devices: the one whose share is furthest behind what its weight has earned."""
    if len(weights) == 1:
        return bytes(count)
    total, given, places = sum(weights), [0] * len(weights), bytearray()
    for number in range(count):
        behind = [weight / total * (number + 1) - have for weight, have in zip(weights, given, strict=True)]
        best = behind.index(max(behind))
        given[best] += 1
        places.append(best)
    return bytes(places)


def _kept(optimizer: str, momentum: float) -> float:
    """How many copies of the weights an optimiser keeps, about."""
    return {"adamw": 2.0, "sgd": float(momentum > 0), "adafactor": 0.1, "apollo": 0.1}[optimizer]


class RunConfig(Values):
    """A run file."""

    name: Name = Field(description="the run's name")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of partition, missingness, weights and batches")
    recipe: str = Field("end_to_end", description="recipe (name or file)")
    slots: SlotsConfig = Field(SlotsConfig(), description="slots that differ from the recipe's")
    model: ModelConfig = Field(description="the model")
    data: DataConfig = Field(DataConfig(), description="the data")
    training: TrainingConfig = Field(description="local training")
    round: RoundConfig = Field(RoundConfig(), description="when rounds start and close")
    rounds: Literal["lockstep", "async"] = Field(
        "lockstep",
        description="lockstep: a round waits for its devices; async: the server steps after `round.buffer` updates, "
        "and who is done goes on with the newest model (FedBuff)",
    )
    evaluate: Literal["round", "stage"] | Annotated[int, Field(gt=0, strict=True)] = Field(
        "round",
        description="how often the global model is tested: each round, every so many rounds of a stage (a number), or "
        "after a stage's last round, which is always tested",
    )
    transfer: TransferConfig = Field(TransferConfig(), description="how tensors cross the broker")
    broker: str = Field("auto", description="auto, mosquitto, amqtt, or mqtt://host:port")
    fleet: Annotated[
        Annotated[list[FleetDevice], pydantic.Tag("FleetDevice")] | Annotated[SizedFleet, pydantic.Tag("SizedFleet")],
        pydantic.Discriminator(lambda given: "SizedFleet" if isinstance(given, dict | SizedFleet) else "FleetDevice"),
    ] = Field([], description="devices of local mode: a list, or their number")

    @pydantic.field_validator("broker")
    @classmethod
    def _address(cls, value: str) -> str:
        if value not in {"auto", "mosquitto", "amqtt"} and not re.match(r"mqtts?://", value):
            raise ValueError(f"{value!r} is not a broker; valid: auto, mosquitto, amqtt, mqtt://host:port, mqtts://…")
        return value

    @property
    def device_names(self) -> Sequence[str]:
        """Names of the devices of local mode, in their order."""
        return self.fleet.names() if isinstance(self.fleet, SizedFleet) else [device.name for device in self.fleet]

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Group -> its devices of local mode."""
        if isinstance(self.fleet, SizedFleet):
            return {}
        names = sorted({group for device in self.fleet for group in device.groups})
        return {group: tuple(sorted(one.name for one in self.fleet if group in one.groups)) for group in names}

    @property
    def shared(self) -> DataConfig:
        """The data as it is shared out in local mode."""
        return self.data.model_copy(update={"missing": self.data.missing.by_device(self.groups)})

    def conflicts(self) -> list[Problem]:
        """Lists that need one entry a stage, and names that must be known."""
        rounds = self.training.rounds
        stages = len(rounds) if self.model.own else self.model.stages  # counted when planned
        found = []
        if bool(self.model.encoders) == bool(self.model.own):
            found.append(Problem("model.encoders", "give one at least, or model.own, and not both"))
        lean = self.training.lean
        for field, values in (
            ("rounds", rounds),
            *((f"lr.{group}", rate) for group, rate in self.training.lr),
            *((f"lean.lr.{group}", rate) for group, rate in (lean.lr if lean is not None else ())),
        ):
            if isinstance(values, list) and len(values) != stages:
                message = f"has {len(values)} entries and model.stages is {stages}: give one a stage"
                found.append(Problem(f"training.{field}", message))
        if lean is not None and _kept(lean.optimizer, self.training.momentum) >= _kept(
            self.training.optimizer, self.training.momentum
        ):
            message = f"keeps no less than {self.training.optimizer}, the run's optimiser; leave training.lean out"
            found.append(Problem("training.lean.optimizer", message))
        if not any(rounds):
            found.append(Problem("training.rounds", "are all zero: nothing would be trained"))
        return [*found, *self._unknown_names()]

    def _unknown_names(self) -> list[Problem]:
        missing, found = self.data.missing, list[Problem]()
        names = self.device_names
        listed = Counter(names) if isinstance(names, list) else {}
        twice = sorted(name for name, count in listed.items() if count > 1)
        found += [Problem("fleet", f"names the device {name!r} twice") for name in twice]
        for field, given in (
            ("devices", [*missing.devices]),
            ("complete", missing.complete),
            ("unlabelled", missing.unlabelled),
        ):
            for group in unknown_groups(given, self.groups) if names else ():
                known = valid_names(group, [*self.groups]) if self.groups else "the fleet's devices have none (groups)"
                found.append(Problem(f"data.missing.{field}", f"no device of the fleet is in group {group!r}; {known}"))
        for field, given in (("complete", missing.complete), ("unlabelled", missing.unlabelled)):
            for device in sorted({one for one in given if not group_of(one)} - set(names)) if names else ():
                known = valid_names(device, list(names))
                found.append(Problem(f"data.missing.{field}", f"{device!r} is not in the fleet; {known}"))
        for device, lacks in missing.devices.items():
            path = f"data.missing.devices.{device}"
            if names and device not in names and not group_of(device):
                found.append(Problem(path, f"is not in the fleet; {valid_names(device, list(names))}"))
            for modality in sorted(set(lacks) - set(self.model.encoders)):
                known = valid_names(modality, list(self.model.encoders))
                found.append(Problem(path, f"the model has no modality {modality!r}; {known}"))
        return found
