"""The values that cross package borders: figures with their origin, budgets, costs, object references.

Frozen msgspec structs, so that they travel in messages as they are. Every field has a default and unknown fields
are ignored, which lets programs one minor version apart understand each other. Bytes, seconds, joules: the unit is
in the name.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Literal, get_args

import msgspec

#: Of a figure; "doubtful": as a device says it, and its coordinator doubts it.
Kind = Literal["measured", "counted", "predicted", "doubtful"]
#: How a part's values travel; "f32": as they are, "delta+…": as the change of what the other side holds.
Packing = Literal[
    "f32",
    "f16",
    "bf16",
    "int8",
    "delta+f16",
    "delta+bf16",
    "delta+int8",
    "delta+int4",
    "delta+top",
    "delta+eden1",
    "delta+eden2",
    "delta+eden3",
    "delta+eden4",
]
PACKINGS: tuple[Packing, ...] = get_args(Packing)

#: Every resource figure of the ledger, with its unit. ``report`` prints in this order.
FIGURES: dict[str, str] = {
    "process_peak_bytes": "B",  # kernel's high-water mark of the whole trainer process
    "step_peak_bytes": "B",  # the same above the idle trainer (runtime and data loaded, no model)
    "flops": "FLOP",  # forward + backward as run, 2 per multiply-accumulate
    "filling_flops": "FLOP",  # of these, what the frozen prefix of every sample took, once
    "payload_up_bytes": "B",  # tensors sent
    "payload_down_bytes": "B",  # tensors received
    "prototypes_up_bytes": "B",  # of these, prototype tables
    "prototypes_down_bytes": "B",
    "signature_up_bytes": "B",  # of these, what clusters are made of, once
    "layer_up_bytes": "B",  # of these, single layers, in rounds that exchange nothing else
    "layer_down_bytes": "B",  # of these, the layers a device was sent in place of its poverty layers
    "resent_up_bytes": "B",  # chunks of the upload that arrived though they had arrived before
    "resent_down_bytes": "B",  # chunks of the download that were sent though they had been sent before
    "wire_up_bytes": "B",  # what the device wrote to the broker's socket, offer to update, and the upload with repeats
    "wire_down_bytes": "B",  # what it read from it, offer to update
    "wall_s": "s",  # from accepting the offer to handing over the update
    "compute_s": "s",  # inside the training steps
    "energy_j": "J",
    "temperature_c": "°C",
    "cuda_allocated_peak_bytes": "B",  # of a round on a GPU: tensors, with those of the idle trainer
    "cuda_reserved_peak_bytes": "B",  # what torch's allocator held for them; the CUDA context lies outside both
}


#: Largest rank of low-rank terms: of maps up to 2,048 wide they then hold as much as the map itself.
MAX_RANK = 1024
#: Most smaller ranks: each makes a part more of every adapted one, and is tried for every device.
MAX_FALLBACK_RANKS = 7
#: A modality is also the first word of part names (``acc/stage1``), and a key of manifests and prototype tables.
_MODALITY = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
#: Names with another meaning in part names, manifests or prototype tables.
RESERVED = frozenset(
    {
        *("fused", "fusion", "group", "head", "id", "ids", "label", "label_names", "match", "meta", "missing"),
        *("lora", "prototypes", "reconstruct", "shared", "task"),
    }
)
MODALITY_RULE = (
    f"letters, digits, _ and -, beginning with a letter, at most 32, and none of {', '.join(sorted(RESERVED))}"
)


def is_modality(name: str) -> bool:
    """Whether ``name`` can name a modality; ``MODALITY_RULE`` says it in words."""
    return _MODALITY.fullmatch(name) is not None and name not in RESERVED


#: Reason of a figure that is missing because there was nothing to measure.
NOT_TRAINED = "not trained"


class Figure(msgspec.Struct, frozen=True):
    """One number with its origin. ``value`` is None, with a ``reason``, when it could not be had: never zero."""

    value: float | None = None
    kind: Kind = "measured"
    source: str = ""
    reason: str = ""


Figures = dict[str, Figure]


class Budget(msgspec.Struct, frozen=True):
    """Budget of a device for one round; None: no limit.

    ``memory_bytes`` limits the whole trainer process, with what it holds on a GPU that shares the machine's memory;
    ``step_memory_bytes`` limits what training adds to the idle trainer, wherever it computes, which says the same on
    machines whose runtimes differ in size. ``gpu_memory_bytes`` limits what torch's allocator takes of a GPU: the CUDA
    context comes on top.
    """

    memory_bytes: int | None = None
    step_memory_bytes: int | None = None
    flops: float | None = None
    payload_bytes: int | None = None
    disk_bytes: int | None = None
    energy_j: float | None = None
    gpu_memory_bytes: int | None = None


class Speed(msgspec.Struct, frozen=True):
    """Throughput and power of a device, from its profile; 0: not known."""

    flops: float = 0.0  # while training, 2 per multiply-accumulate, apart from calls and bytes written
    down_bytes: float = 0.0
    up_bytes: float = 0.0
    power_w: float = 0.0  # of the whole device, while training
    operation_s: float = 0.0  # seconds that an operation of a training step takes besides its FLOPs
    machine: str = ""  # the kind of machine these were measured on, as ``kind_of_machine`` says it; "": not known
    written_bytes: float = 0.0  # of tensors that a training step makes or changes, a second


#: Columns that a table's encoder takes, each a token, and values of a category.
MAX_COLUMNS, MAX_CATEGORIES = 512, 256
#: Bytes of all columns' descriptions, which every offer carries: a quarter of the largest message.
MAX_COLUMNS_BYTES = 30 * 1024
#: Characters of a column's name, and of a category's value.
MAX_CELL_NAME = 200
#: The form of a time of the day alone.
CLOCK = "%H:%M"
#: Forms of dates, as strptime has them; "": ISO 8601.
DATE_FORMS = (
    *("", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y%m%d", "%d %b %Y", "%b %d %Y", "%d-%m-%Y"),
    *("%d.%m.%y", "%d/%m/%y", "%m/%d/%y", CLOCK),
)
CellName = Annotated[str, msgspec.Meta(max_length=MAX_CELL_NAME)]


class TableColumn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One column of a modality's table: name, kind and coding.

    ``values``: the categories, in the order of their codes. ``unit``: a number's unit; a date's format, such as
    %d.%m.%Y ("": ISO 8601; the model gets days). Sensor channels are number columns; a text modality is one text
    column, an image or audio modality one file column.
    """

    name: CellName
    kind: Literal["number", "category", "date", "text", "file"] = "number"
    values: Annotated[tuple[CellName, ...], msgspec.Meta(max_length=MAX_CATEGORIES)] = ()
    unit: CellName = ""


class Moments(msgspec.Struct, frozen=True):
    """Statistics of a modality's values on a device: mean and variance of each channel of a sensor, column of a table.

    ``count``: time steps, or samples, that they are over; ``counts``: of each column the cells that are there, (): all.
    """

    count: int = 0
    mean: tuple[float, ...] = ()
    variance: tuple[float, ...] = ()  # mean squared distance from the mean
    counts: tuple[int, ...] = ()


class Traffic(msgspec.Struct, frozen=True):
    """Bytes on a device's link both ways, headers included, since its agent started; of these, while it had no run."""

    bytes: int = 0
    seconds: float = 0.0  # connected; 0: not measured
    idle_bytes: int = 0
    idle_s: float = 0.0


class Capabilities(msgspec.Struct, frozen=True):
    """Hardware and free resources of a device, as measured by its agent."""

    memory_total_bytes: int = 0
    memory_free_bytes: int = 0
    cores: int = 0
    gpu: str = ""
    gpu_memory_bytes: int = 0  # of its own; 0: it shares the machine's, or there is none
    disk_free_bytes: int = 0
    trainer_base_bytes: int = 0  # resident size of the idle trainer; 0: not measured yet
    machine: str = ""  # such as "aarch64"
    runtime: str = ""  # such as "torch 2.13.0"
    speed: Speed = Speed()
    torch_device: str = ""  # where its trainer computes, such as "cpu" or "cuda"
    gpu_free_bytes: int = 0  # of the GPU's own, without the CUDA context and what others used; 0: not measured yet
    gpu_idle_bytes: int = 0  # what the idle trainer's allocator holds of a GPU
    power_mode: str = ""  # of a Jetson, such as "MODE_30W"; "": not known
    traffic: Traffic = Traffic()


def kind_of_machine(has: Capabilities) -> str:
    """Kind of machine: the hardware that a device's speed depends on. Only machines of one kind are compared.

    At most 64 characters, the limit of a text from a device.
    """
    mode = f"{has.power_mode}, " if has.power_mode else ""  # 7 to 60 W on one board
    return f"{has.machine}, {has.cores} cores, {mode}{has.gpu or 'no GPU'}"[:64]


def has_card(has: Capabilities) -> bool:
    """Whether the trainer computes in a GPU's own memory."""
    return has.torch_device.startswith("cuda") and has.gpu_memory_bytes > 0


class Cost(msgspec.Struct, frozen=True):
    """Predicted cost of one round of one stage on one device."""

    step_peak_bytes: int = 0  # weights, gradients, optimiser state, activations and batch: above the idle trainer
    flops: float = 0.0  # whole round: steps x epochs, forward + backward, 2 per multiply-accumulate
    payload_down_bytes: int = 0  # of a usual round
    payload_up_bytes: int = 0
    disk_bytes: int = 0
    compute_s: float = 0.0  # these three: 0 where the device's speed is not known
    wall_s: float = 0.0
    energy_j: float = 0.0
    filling_peak_bytes: int = 0  # memory while that is done
    whole_up_bytes: int = 0  # of a stage's last round, in which parts travel as they are, or as transfer.closing says
    joining_down_bytes: int = 0  # of the device's first round in the run: every part that is present
    entering_down_bytes: int = 0  # of its first round in the stage, when it took part in the stage before
    prototypes_down_bytes: int = 0  # of the bytes down, from the run's second round on
    signature_bytes: int = 0  # up, once: what clusters are made of
    layer_bytes: int = 0  # down in a round between two whole exchanges, at most: one layer; 0: there are none
    layers_up_bytes: int = 0  # up in such a round, at most
    step_flops: float = 0.0  # of the round's training steps alone; 0: all of them
    operations: float = 0.0  # of the round's training steps
    written_bytes: float = 0.0  # of tensors that these make or change
    personal_flops: float = 0.0  # of the round, from the device's second one on: its personal model is judged
    filling_flops: float = 0.0  # once more: the frozen prefix's outcome of every sample, where it is stored
    memory: dict[str, int] = {}  # components of the step's peak, before factors learned of the device
    staging_bytes: int = 0  # host memory above the idle trainer where the step is in a GPU's own: parts, one batch
    modules_bytes: int = 0  # host memory of libraries in a trainer, before its rounds are measured


#: Which memory a refusal is about, where a card has its own: more on the card and more in the process help differently.
GPU, HOST = "gpu", "host"
#: The former in the words of a refusal's detail.
GPU_MEMORY = "memory of the GPU"


#: Reason of a refusal: the device has not installed a method that the job names.
METHOD = "method"


#: Reason of a refusal: the recipe exchanges single layers, and the stage has none that is small enough.
LAYER = "layer"
#: Reason of a refusal inside a period: the device does not retain what its next round goes on from.
OUT_OF_STEP = "out_of_step"


class Refusal(msgspec.Struct, frozen=True):
    """Why a device does not take part, or its update does not count, with both numbers where there are any."""

    reason: str = ""  # machine-readable: step_memory, memory, flops, payload, disk, data, busy, error, ceiling, ...
    needed: float | None = None
    allowed: float | None = None
    unit: str = ""
    detail: str = ""
    where: str = ""  # GPU or HOST, where they are two memories and one of them was short


class ObjectRef(msgspec.Struct, frozen=True):
    """An object by the sha256 (hex) of its bytes, and its size in bytes."""

    id: str = ""
    size: int = 0


#: {part name: object}; a whole model state, or the parts of one update.
Manifest = dict[str, ObjectRef]


def digest_of(manifest: Manifest) -> str:
    """The sha256 (hex) of a manifest: of every part's name and object; "" for an empty one."""
    lines = "".join(f"{part} {ref.id}\n" for part, ref in sorted(manifest.items()))
    return hashlib.sha256(lines.encode()).hexdigest() if lines else ""


class Attempt(msgspec.Struct, frozen=True, order=True):
    """Which attempt of which round of which stage of which run; on every message, so that stale ones are dropped.

    ``made_ms``: when the run was made, in milliseconds since the epoch: a new run under an old name is another run.
    """

    run: str = ""
    stage: int = 0
    round: int = 0
    attempt: int = 0
    made_ms: int = 0

    def same_run(self, other: Attempt) -> bool:
        """Whether both belong to one run."""
        return (self.run, self.made_ms) == (other.run, other.made_ms)

    def __str__(self) -> str:
        return f"{self.run}/s{self.stage}/r{self.round}/a{self.attempt}"


#: ``EvaluationRow.missing`` where prototypes of the samples' true classes fill in: what no matcher can exceed in hits.
ORACLE = "oracle"


class EvaluationRow(msgspec.Struct, frozen=True):
    """One figure of the global model on the test set.

    ``available``: the modalities given; ``missing``: how the others are filled in; ``matcher``: by what a sample finds
    its prototypes, where prototypes fill them in ("": not on record). Rows of ``ORACLE`` know the labels: they bound
    what a better matcher could give, and nothing is chosen or exported by them.
    """

    stage: int = 0
    round: int = 0
    available: tuple[str, ...] = ()
    missing: str = "none"  # none, zero, prototype, reconstruction, oracle
    metric: str = "accuracy"
    value: float = 0.0
    samples: int = 0
    matcher: str = ""  # cosine, l1, l2, classifier, prior
