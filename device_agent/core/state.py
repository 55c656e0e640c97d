"""State, events and instructions of the agent's machine. Values only."""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from edgefl.plan.job import Preparation
from edgefl.protocol.messages import Decline, DownMessage, Grant, Offer, Update, UpMessage
from edgefl.records import NOT_TRAINED, Attempt, Budget, Capabilities, Figure, Figures, Manifest, Moments, Refusal
from edgefl.registry import Observed

#: Sign of life until a coordinator sets the interval (``Welcome.heartbeat_s``).
HEARTBEAT_S: Final = 10.0
#: Figures of an attempt that was dropped before its first step.
NOTHING_TRAINED: Final = {name: Figure(reason=NOT_TRAINED) for name in ("flops", "compute_s")}


class DataFacts(msgspec.Struct, frozen=True):
    """Facts on local data and trainer, reported by the warm trainer."""

    modalities: dict[str, tuple[int, ...]] = {}  # modality -> shape of one sample
    samples: dict[str, int] = {}  # modality -> samples that have it; "" -> all samples
    class_counts: tuple[int, ...] = ()
    label_names: tuple[str, ...] = ()
    skipped: int = 0  # bad samples left out
    elastic: bool = False  # read from files, again when the model is known; shapes here: as found, () where it resizes
    base_bytes: int = 0  # resident size of the idle trainer; of unified memory, with what it holds on the GPU
    runtime: str = ""
    gpu: str = ""
    gpu_memory_bytes: int = 0  # of its own
    torch_device: str = ""  # where the trainer computes, such as "cpu" or "cuda"
    gpu_free_bytes: int = 0  # as in Capabilities
    gpu_idle_bytes: int = 0  # as in Capabilities
    prepared: str = ""  # the id of the ``Preparation`` by which the data was read
    moments: dict[str, Moments] = {}
    signature: bytes = b""  # what that preparation asks for clusters
    problem: str = ""  # why nothing of it can be used as that preparation asks
    code: str = ""  # of the device's owner, which trains in place of EdgeFL's and alone knows the data


class Result(msgspec.Struct, frozen=True):
    """Result of one training: contents of an Update, with new parts in the store; or a refusal."""

    manifest: Manifest = {}
    samples: dict[str, int] = {}  # part -> samples it was trained on
    metrics: dict[str, float] = {}
    figures: Figures = {}
    observed: Observed = Observed()
    retained: Manifest = {}  # what stays here for the next round: private parts, a personal model
    refusal: Refusal | None = None


class RetainedParts(msgspec.Struct, frozen=True):
    """Parts of one attempt that stay on this device."""

    attempt: Attempt = Attempt()
    manifest: Manifest = {}


class Saved(msgspec.Struct, frozen=True):
    """State kept over restarts: accepted offer, unacknowledged update, newest closed attempt.

    ``retained``: of the last round trained and the one before it, since a round may be tried again.
    """

    offer: Offer | None = None
    update: Update | None = None
    closed: Attempt | None = None
    retained: tuple[RetainedParts, ...] = msgspec.field(default=(), name="kept")
    newest: Attempt | None = None  # that was ever taken up, by a device with an identity


class Disk(msgspec.Struct, frozen=True):
    """Disk space when an offer arrives: bytes missing of its objects, and free bytes (None: unknown)."""

    missing_bytes: int = 0
    free_bytes: int | None = None  # None: could not be asked


class Event(msgspec.Struct, frozen=True):
    """Base of the machine's events."""


class Instruction(msgspec.Struct, frozen=True):
    """Base of the machine's instructions."""


class TaskPhase(Enum):
    """Phase of the work on an accepted offer."""

    FETCHING = "fetching"  # parts of the offer are missing
    READY = "ready"  # every part is here and verified, the trainer is not free yet
    TRAINING = "training"


class TrainerPhase(Enum):
    """State of the trainer process."""

    DOWN = "down"
    WARMING = "warming"  # loads torch and the data
    IDLE = "idle"
    TRAINING = "training"


class Task(msgspec.Struct, frozen=True):
    """The offer this device accepted."""

    offer: Offer
    phase: TaskPhase = TaskPhase.FETCHING

    @property
    def attempt(self) -> Attempt:
        return self.offer.attempt


class State(msgspec.Struct, frozen=True):
    """State of the agent, the sole input of its decisions besides events and time.

    ``abandoned`` is the attempt the trainer still works on although it is not wanted any more: a step cannot be
    aborted, so until it ends nothing else trains.
    """

    fleet: str = ""
    device: str = ""
    session: str = ""  # the incarnation: new for each start of the process
    agent_version: str = ""
    profile: str = ""
    budget: Budget = Budget()
    capabilities: Capabilities = Capabilities()
    facts: DataFacts | None = None
    connected: bool = False
    coordinator: str = ""
    protocol: int | None = None  # the coordinator's, from its welcome; None: not heard yet
    release: str = ""  # the coordinator's, likewise
    run: str = ""  # the coordinator's run, from its welcome; "": none
    made_ms: int = 0  # when that run was made
    ended: Attempt = Attempt()  # the last run that is finished, from its drain
    drained: str = ""  # why the coordinator has nothing for this device, by its last drain
    greeting: bool = False  # a hello was sent and its welcome has not come yet
    greeted_at: float = 0.0
    heartbeat_s: float = HEARTBEAT_S
    heartbeat_at: float = 0.0
    ticked_at: float = 0.0
    link_bytes: int = 0  # at the last tick
    sequence: int = 0
    trainer: TrainerPhase = TrainerPhase.DOWN
    abandoned: Attempt | None = None
    task: Task | None = None
    waiting: tuple[Offer, Disk] | None = None  # came before the data was known
    update: Update | None = None
    announced_at: float = 0.0
    progress_at: float = 0.0
    declined: tuple[Offer, Decline] | None = None  # the last one, to answer the same offer the same way
    closed: Attempt | None = None  # this attempt and older ones of its run are over
    retained: tuple[RetainedParts, ...] = ()  # as in Saved
    dropped: dict[str, int] = {}  # reason -> messages dropped
    story: tuple[str, ...] = ()  # the last things that happened, for the error of an illegal move
    strict: bool = False  # it has an identity: nothing older than ``newest`` is taken up
    newest: Attempt | None = None  # as in Saved
    preparation: Preparation = Preparation()  # of the coordinator's run, from its welcome
    no_moments: bool = False  # it tells no statistics of its data

    @property
    def prepared(self) -> bool:
        """True if the data was read as the coordinator's run asks."""
        return self.facts is not None and self.facts.prepared == self.preparation.id

    @property
    def current(self) -> Attempt:
        """The coordinator's present run, as an attempt of it."""
        return Attempt(self.run, made_ms=self.made_ms)

    @property
    def working_on(self) -> Attempt | None:
        """The attempt in work at this device: training, or with an unacknowledged update."""
        work = self.task or self.update
        return work.attempt if work is not None else None


class Connected(Event, frozen=True):
    """The broker is connected (again) with all subscriptions."""


class Disconnected(Event, frozen=True):
    """The broker's connection is lost; the transport reconnects by itself."""


class Received(Event, frozen=True):
    """A message of the coordinator."""

    message: DownMessage
    disk: Disk = Disk()


class TrainerReady(Event, frozen=True):
    """The trainer has loaded torch and the data, and described it."""

    facts: DataFacts


class TrainerLost(Event, frozen=True):
    """The trainer ended although it was not training; the runner waits and reports it only when it may start again."""


class Fetched(Event, frozen=True):
    """Every object of the attempt's manifest is on disk and verified; or the refusal."""

    attempt: Attempt
    refusal: Refusal | None = None


class Progressed(Event, frozen=True):
    """One training step is done. ``loss``: of that step."""

    attempt: Attempt
    epoch: int = 0
    step: int = 0
    steps: int = 0
    loss: float = 0.0


class TrainingEnded(Event, frozen=True):
    """The trainer finished, refused or died (``alive`` False)."""

    attempt: Attempt
    result: Result
    alive: bool = True


class Tick(Event, frozen=True):
    """Time passed."""

    memory_free_bytes: int = 0
    link_bytes: int | None = None  # of all connections so far; None: not known


class Send(Instruction, frozen=True):
    """Publish a message (presence: on its own topic)."""

    message: UpMessage


class Save(Instruction, frozen=True):
    """Write the state to its file before any later instruction; on disk a second later (``FLUSH_S``)."""

    saved: Saved


class SaveFacts(Instruction, frozen=True):
    """Save the data's description for the next start's hello."""

    facts: DataFacts


class Fetch(Instruction, frozen=True):
    """Request the missing objects of an offer's manifest; when repeated, resume from disk in a new epoch."""

    offer: Offer


class StopFetch(Instruction, frozen=True):
    """Stop fetching: the objects are not wanted any more."""

    attempt: Attempt


class StartTrainer(Instruction, frozen=True):
    """Start the trainer unless it runs; let it load the data and describe it by ``preparation``."""

    preparation: Preparation = Preparation()


class StopTrainer(Instruction, frozen=True):
    """Stop the idle trainer to free its memory. ``reason``: the coordinator's for draining this device."""

    reason: str = ""


class Train(Instruction, frozen=True):
    """Train this offer on the idle trainer; ``retained``: parts kept from the last round."""

    offer: Offer
    retained: Manifest = {}


class Interrupt(Instruction, frozen=True):
    """Ask the trainer to stop after its current step; the end comes as TrainingEnded."""

    attempt: Attempt


class Serve(Instruction, frozen=True):
    """Send the chunks the coordinator asks for."""

    update: Update
    grant: Grant


class StopServe(Instruction, frozen=True):
    """Stop sending an update: delivered or not wanted."""

    attempt: Attempt


class CollectGarbage(Instruction, frozen=True):
    """Delete every object but these."""

    keep: frozenset[str]


class Log(Instruction, frozen=True):
    """Log a line: ``event`` and its fields."""

    event: str
    fields: dict[str, object] = {}
