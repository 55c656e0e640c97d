"""Rows of a run: the ledger's tables follow from these structs, and reports are written from them."""

from __future__ import annotations

from typing import Any

import msgspec

from edgefl.records import Budget, Capabilities, EvaluationRow, Figures, Refusal

__all__ = [
    "AssignmentRow",
    "BundleRow",
    "DeviceRow",
    "EndToEnd",
    "EvaluationRow",
    "EventRow",
    "RoundRow",
    "RunReport",
    "SightingRow",
]


class DeviceRow(msgspec.Struct, frozen=True):
    """One device of the run, as it introduced itself."""

    device: str = ""
    profile: str = ""
    capabilities: Capabilities = Capabilities()
    budget: Budget = Budget()
    samples: dict[str, int] = {}  # modality -> samples that have it; "" -> all
    class_counts: tuple[int, ...] = ()
    agent_version: str = ""


class SightingRow(msgspec.Struct, frozen=True):
    """A device's last sign of life. ``source``: the kind of message, or silence, or the last will."""

    device: str = ""
    at: float = 0.0  # seconds since the epoch
    source: str = ""
    online: bool = True


class RoundRow(msgspec.Struct, frozen=True):
    """One round (last attempt). ``record``: what each slot of the recipe did, role -> {choice, detail…}."""

    stage: int = 0
    round: int = 0
    attempt: int = 0
    status: str = "running"  # running, done, failed
    started_at: float = 0.0  # seconds since the epoch
    ended_at: float | None = None
    participants: tuple[str, ...] = ()
    metrics: dict[str, float] = {}
    record: dict[str, Any] = {}


#: Statuses of an assignment that can still become "done".
OPEN = frozenset({"offered", "accepted", "replanning", "updated"})


class AssignmentRow(msgspec.Struct, frozen=True):
    """One device in one attempt of one round: its status, and its predicted and measured figures."""

    device: str = ""
    stage: int = 0
    round: int = 0
    attempt: int = 0
    status: str = ""  # as in coordinator.core.state.Status
    refusal: Refusal | None = None
    batch_size: int = 0
    micro_batch: int = 0
    trained: tuple[str, ...] = ()
    samples: dict[str, int] = {}
    metrics: dict[str, float] = {}
    predicted: Figures = {}
    measured: Figures = {}


class EventRow(msgspec.Struct, frozen=True):
    """An event of a run, in order: in the ledger, in the live display, and as a JSON line of its own."""

    at: float = 0.0
    kind: str = ""
    stage: int = 0
    round: int = 0
    device: str = ""
    data: dict[str, Any] = {}


class BundleRow(msgspec.Struct, frozen=True):
    """One exported ONNX file. In a lower ``precision``: accuracy lost against f32, at most what was allowed."""

    name: str = ""
    path: str = ""
    modalities: tuple[str, ...] = ()
    size_bytes: int = 0
    max_difference: float = 0.0
    tolerance: float = 0.0
    precision: str = "f32"
    lost_points: float = 0.0
    max_loss: float = 0.0


class EndToEnd(msgspec.Struct, frozen=True):
    """Predicted cost of training end to end for a device of the run: its largest step, and a mean round.

    ``refusal``: the first limit of its budget that this exceeds: the whole model in whole batches, without fallbacks.
    """

    step_peak_bytes: float = 0.0
    flops: float = 0.0
    payload_bytes: float = 0.0  # down and up
    refusal: Refusal | None = None
    compute_s: float = 0.0  # of a round, 0 where the device's speed is not known
    energy_j: float = 0.0  # of a round, 0 where its power is not known


class Reference(msgspec.Struct, frozen=True):
    """Scores of simple models on the run's own samples, all in one place. ``scores``: name -> score on the test set."""

    metric: str = "accuracy"
    scores: dict[str, float] = {}
    samples: int = 0  # fitted on


class RunReport(msgspec.Struct, frozen=True):
    """Everything known about one run."""

    run: str = ""
    name: str = ""
    recipe: str = ""
    status: str = ""  # running, done, failed, stopped; interrupted: on record as running, and no coordinator holds it
    started_at: float = 0.0
    finished_at: float | None = None
    config: dict[str, Any] = {}
    part_bytes: dict[str, int] = {}  # part -> bytes of its parameters and buffers
    stages: tuple[dict[str, Any], ...] = ()
    groups: dict[str, tuple[str, ...]] = {}  # group -> devices, as they were when the run was made
    names: dict[str, str] = {}  # name that a device enrolled with -> the one that the rows have, of renamed ones
    devices: tuple[DeviceRow, ...] = ()
    sightings: tuple[SightingRow, ...] = ()
    rounds: tuple[RoundRow, ...] = ()
    assignments: tuple[AssignmentRow, ...] = ()
    evaluations: tuple[EvaluationRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    bundles: tuple[BundleRow, ...] = ()
    reference: Reference = Reference()  # no scores: not made
    end_to_end: dict[str, EndToEnd] = {}  # device -> its price; empty: not priced, or the run is end to end itself
