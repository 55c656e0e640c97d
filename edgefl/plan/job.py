"""Values of a plan: stages, hyper-parameters, slots of a recipe, one device's job."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from edgefl.groups import members
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.records import Budget, Capabilities, Cost, Figures, Refusal

#: What of a device's training is sent: all that is trained, the mappings (heads) only, or nothing.
Exchange = Literal["all", "mappings", "nothing"]
#: How the frozen prefix's outcome is stored; "": computed in every step.
Cache = Literal["", "f16", "f32"]
Optimizer = Literal["adamw", "sgd", "adafactor", "apollo"]
#: Where weights of large linear maps lie on a processor. "auto", of a plan: on disk where memory does not hold them.
Weights = Literal["auto", "memory", "disk"]
#: Larger weights of linear maps are laid on disk, where weights are: others are few bytes.
LEAST_BYTES_ON_DISK = 2**18
#: What matrices are multiplied in, on a GPU.
Precision = Literal["f32", "bf16"]
#: One slot of a recipe: {choice: {option: value}}. Only ``objective`` may hold several choices.
Slot = dict[str, dict[str, float | str]]


class Stage(msgspec.Struct, frozen=True):
    """One stage: present and trained parts; the trained ones are exchanged each round.

    ``depth`` is how many encoder stages exist; ``index`` counts from 1. ``fallback_depth``: how many exist for devices
    that cannot train all of ``trained``; 0: as many. ``draw``: the order in which rounds train one encoder stage each,
    beside the parts of ``trained`` outside encoder stages; "": every round trains all.
    """

    index: int = 1
    depth: int = 1
    rounds: int = 0
    present: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    fallback_depth: int = 0
    draw: Literal["", "random", "cyclic"] = ""


class LowMemoryOptimizer(msgspec.Struct, frozen=True):
    """Fallback optimiser with its learning rates, if the usual one's state does not fit."""

    optimizer: Optimizer = "adafactor"
    lr: dict[str, float] = {}


class Hyper(msgspec.Struct, frozen=True):
    """Local training of one round.

    ``micro_batch`` = 0: the whole batch at once. ``lr`` and ``weight_decay`` by group: "encoder", "head"
    (head covers head/*, fusion and task). ``clip_norm`` = 0: no gradient clipping. ``checkpoint``: activation
    checkpointing of trained blocks. The planner chooses ``micro_batch``, ``checkpoint``, ``weights``, whether ``cache``
    is used, and ``low_memory_optimizer`` in place of the optimiser; then ``low_memory`` is set.
    """

    epochs: int = 1
    batch_size: int = 16
    micro_batch: int = 0
    optimizer: Optimizer = "adamw"
    lr: dict[str, float] = {}
    weight_decay: dict[str, float] = {}
    momentum: float = 0.9
    clip_norm: float = 0.0
    holdout: float = 0.0  # share of the local samples that is only tested on
    cache: Cache = ""
    seed: int = 0
    precision: Precision = "f32"
    checkpoint: bool = False
    low_memory_optimizer: LowMemoryOptimizer | None = msgspec.field(default=None, name="lean")
    low_memory: bool = msgspec.field(default=False, name="leaned")
    weights: Weights = "memory"


class RateFall(msgspec.Struct, frozen=True):
    """Schedule of learning rates over a run's rounds: warm-up over the first ``warmup``, then the fall.

    "step": times ``factor`` after every ``rounds`` of them.
    """

    kind: Literal["none", "cosine", "step"] = "none"
    rounds: int = 0
    factor: float = 1.0
    warmup: int = 0


class Transfer(msgspec.Struct, frozen=True):
    """Packing of parts by direction: (pattern of names, packing of ``edgefl.protocol.packing``), first fit.

    ``top``: share of the values that "delta+top" sends; ``closing``: of a stage's last round; ``whole``: this round
    everything is sent as it is.
    """

    up: tuple[tuple[str, str], ...] = ()
    down: tuple[tuple[str, str], ...] = ()
    top: float = 0.1
    whole: bool = False
    closing: Literal["whole", "packed"] = "whole"


class Slots(msgspec.Struct, frozen=True):
    """A recipe as far as a device needs it: choices, each {name: options} with exactly one name; and the exchange."""

    objective: Slot = {}  # several terms are summed
    missing: Slot = {}
    prototypes: Slot = {}
    repair: Slot = {}
    upload: Slot = {}
    exchange: Exchange = "all"
    statistics: bool = False  # batch norm's are taken at the weights received, before they are evaluated


class PeriodRound(msgspec.Struct, frozen=True):
    """One device's round of a period, in which only the first begins with the model and only the last sends it.

    ``resumes``: the trained parts go on from the device's own; ``whole``: everything trained is uploaded, as in every
    round outside of periods; else ``layers``: those asked for ("part|tensor"). ``largest``: of the device's layers that
    may be exchanged alone, in its offers; it names no larger one as its poverty layer.
    """

    resumes: bool = False
    whole: bool = True
    layers: tuple[str, ...] = ()
    largest: str = ""


#: The round of a device where the recipe has no periods.
WHOLE_ROUND = PeriodRound()


class Job(msgspec.Struct, frozen=True):
    """Instructions for one device's training of one round, besides the tensors."""

    model: ModelSpec = ModelSpec()
    stage: Stage = Stage()
    hyper: Hyper = Hyper()
    slots: Slots = Slots()
    signature: str = ""  # what clusters are made of, and has not been sent yet: sketch or bases
    transfer: Transfer = Transfer()
    period: PeriodRound | None = None  # None: the recipe has no periods
    k: int | msgspec.UnsetType = msgspec.UNSET  # of the prototype mask, where hold-outs have chosen it


class Decline(msgspec.Struct, frozen=True):
    """A declined placement: trained depth, memory options, reason. ``micro_batch``: its rows, never 0."""

    depth: int = 0
    micro_batch: int = 0
    cached: bool = False
    refusal: Refusal = Refusal()
    checkpoint: bool = False
    low_memory: bool = msgspec.field(default=False, name="leaned")
    rank: int = 0  # of the low-rank terms, as in ``Placement``
    on_disk: bool = False


#: State of the model that a device holds when it is planned: none; the one of the stage before; that of this stage.
Arrival = Literal["joining", "entering", "staying"]


class Preparation(msgspec.Struct, frozen=True):
    """Reading of data asked of devices before their hello: windows, statistics.

    ``id`` "": nothing is asked. ``least``: fewest samples of a modality for sending its ``Moments``.
    ``signature``: what its hello carries of its data for clusters, "": nothing; ``seed``, ``classes``: as it is made.
    """

    id: str = ""
    encoders: dict[str, EncoderSpec] = {}  # without mean and std
    least: int = 2
    signature: str = ""
    seed: int = 0
    classes: int = 0


class Candidate(msgspec.Struct, frozen=True):
    """A device's data for the planner: from its hello, and from measurements of earlier rounds."""

    device: str = ""
    capabilities: Capabilities = Capabilities()
    budget: Budget = Budget()
    samples: dict[str, int] = {}  # modality -> samples that have it; "" -> all
    modalities: dict[str, tuple[int, ...]] = {}
    class_counts: tuple[int, ...] = ()
    declined: tuple[Decline, ...] = ()  # of this stage
    arrival: Arrival = "joining"
    factors: dict[str, float] = {}  # figure -> measured / predicted, learned from earlier rounds


class Draw(msgspec.Struct, frozen=True):
    """A draw of a placement's stage, with its own cost."""

    stage: Stage = Stage()
    cost: Cost = Cost()
    predicted: Figures = {}


class Placement(msgspec.Struct, frozen=True):
    """A device's planned training in one stage with its predicted cost, or the refusal."""

    device: str = ""
    stage: Stage = Stage()
    hyper: Hyper = Hyper()
    cost: Cost = Cost()
    predicted: Figures = {}
    refusal: Refusal | None = None
    factors: dict[str, float] = {}  # those of the candidate, which the predictions hold
    predicted_first: Figures = {}  # of the stage's first round: a frozen prefix is stored, FLOPs are counted
    shortened: Refusal | None = None  # why ``stage`` trains less depth or rank than all devices'; None: it does not
    layer: str = ""  # the largest layer ("part|tensor") that it may be asked for alone; "": the recipe has no periods
    rank: int = 0  # of the low-rank terms that it trains; 0: none, or all devices have the same
    draws: tuple[Draw, ...] = ()  # of each draw of the stage, which ``cost`` bounds; (): nothing is drawn


class RoundPolicy(msgspec.Struct, frozen=True):
    """Policy for starting, closing and retrying rounds. Seconds; ``quorum``: share of the devices offered."""

    devices: int = 1  # wait for this many before the first round
    eligible: tuple[str, ...] = ()  # devices, and groups as group:NAME, that take part; none named: all
    excluded: tuple[str, ...] = ()  # the same, that do not
    join_s: float = 60.0  # at most this long
    quorum: float = 0.5
    deadline_s: float = 600.0
    max_attempts: int = 3
    mode: Literal["lockstep", "async"] = (
        "lockstep"  # async: the server steps after ``buffer`` updates, and nobody waits
    )
    buffer: int = 1
    late: Literal["drop", "keep"] = "drop"  # what becomes of updates that come after the close; async keeps them
    alpha: float = 0.5  # an update that is s rounds late weighs (1 + s) ** -alpha
    max_staleness: int = 10  # rounds; what is later is dropped
    quarantine_after: int = 2  # rejected updates in a row; 0: never
    quarantine_rounds: int = 0  # 0: the rest of the run
    largest_share: float = 0.5  # of a part's weight that one of three or more devices may have
    largest_change: float = 10.0  # times the median of the other devices' changes; beyond it is left out; 0: none is
    clip_change: float = 3.0  # times the same; beyond it is scaled down to it; 0: none is

    def share(self, devices: int) -> int:
        """Number of updates for a quorum of ``devices``, at least one."""
        return max(1, math.ceil(self.quorum * devices - 1e-9))

    @property
    def keeps(self) -> bool:
        """True if updates made from an earlier round's model count."""
        return self.mode == "async" or self.late == "keep"


class RunPlan(msgspec.Struct, frozen=True):
    """Fully resolved run for the coordinator. ``hypers[i]`` belongs to ``stages[i]``."""

    run: str = ""
    name: str = ""
    recipe: str = ""
    seed: int = 0
    model: ModelSpec = ModelSpec()
    stages: tuple[Stage, ...] = ()
    hypers: tuple[Hyper, ...] = ()
    lr_fall: RateFall = RateFall()
    slots: Slots = Slots()
    server: dict[str, Slot] = {}  # role -> slot: cluster, select, repair, weight, combine, optimise
    policy: RoundPolicy = RoundPolicy()
    evaluate_every: Literal["round", "stage"] | int = "round"  # a number: of rounds of a stage
    test: str = ""  # path of the test set (.npz); "": no evaluation
    chunk_bytes: int = 0  # 0: what each device's link carries
    credit: int = 16
    transfer: Transfer = Transfer()
    config: dict[str, object] = {}  # the run file as resolved, for the record
    fleet: str = ""  # whose identity the run was started with; "": without one
    groups: dict[str, tuple[str, ...]] = {}  # group -> devices, as they were when the run was made
    names: dict[str, str] = {}  # name that a device enrolled with -> shown name, of renamed ones, as above
    broker_given: bool = False  # by a URL on the command line, which is not kept: it may hold a password

    def takes(self, device: str) -> bool:
        """True for a device that may take part."""
        eligible, excluded = (members(named, self.groups) for named in (self.policy.eligible, self.policy.excluded))
        return device not in excluded and (not self.policy.eligible or device in eligible)
