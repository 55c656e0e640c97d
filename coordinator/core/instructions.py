"""Instructions of the machine to its runner. ``Save…`` are committed, in one transaction, before the rest is done."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from edgefl.plan.job import Candidate, Placement
from edgefl.protocol.messages import Hello, Update
from edgefl.records import Attempt, EvaluationRow, Manifest, Refusal
from edgefl.run_records import AssignmentRow


class SaveDevice(msgspec.Struct, frozen=True):
    """Ledger: a device as it introduced itself."""

    hello: Hello


class SaveRound(msgspec.Struct, frozen=True):
    """Ledger: a round began, or ended as done or failed."""

    attempt: Attempt
    status: Literal["running", "done", "failed"] = "running"
    participants: tuple[str, ...] = ()
    metrics: dict[str, float] = {}
    record: dict[str, Any] = {}
    manifest: Manifest | None = None


class SaveAssignment(msgspec.Struct, frozen=True):
    """Ledger: how one device's part stands. Figures on record are left as they were where ``row`` has none."""

    row: AssignmentRow


class SaveEvaluation(msgspec.Struct, frozen=True):
    """Ledger: figures of the global model."""

    rows: tuple[EvaluationRow, ...]


class SaveEnd(msgspec.Struct, frozen=True):
    """Ledger: the run is over."""

    status: Literal["done", "failed"]


class SendWelcome(msgspec.Struct, frozen=True):
    """Send a welcome."""

    device: str


class Plan(msgspec.Struct, frozen=True):
    """Ask the planner what these devices can do in this stage."""

    ticket: int
    stage: int
    candidates: tuple[Candidate, ...]


class SendOffer(msgspec.Struct, frozen=True):
    """Offer a device its part."""

    device: str
    attempt: Attempt
    placement: Placement
    deadline_s: float


class SendAbort(msgspec.Struct, frozen=True):
    """Abort an attempt on a device."""

    device: str
    attempt: Attempt
    reason: str


class SendAck(msgspec.Struct, frozen=True):
    """Acknowledge a device's update, or refuse it."""

    device: str
    attempt: Attempt
    accepted: bool = True
    refusal: Refusal = Refusal()


class SendDrain(msgspec.Struct, frozen=True):
    """Drain one device: there is nothing for it here, and why."""

    device: str
    reason: str


class Fetch(msgspec.Struct, frozen=True):
    """Get the objects of an update; asked again, it goes on where it stopped."""

    update: Update


class EndTransfers(msgspec.Struct, frozen=True):
    """The attempt is closed: end its transfers."""

    attempt: Attempt


class Aggregate(msgspec.Struct, frozen=True):
    """Make the new model state of these updates."""

    attempt: Attempt
    updates: tuple[Update, ...]


class Evaluate(msgspec.Struct, frozen=True):
    """Try the global model on the test set."""

    attempt: Attempt


class CollectGarbage(msgspec.Struct, frozen=True):
    """Delete objects nothing points to. Still needed: ``updates``, and the states that ``attempts`` started from."""

    updates: tuple[Update, ...] = ()
    attempts: frozenset[Attempt] = frozenset()


class DrainAll(msgspec.Struct, frozen=True):
    """Drain all devices: the run is over."""

    reason: str = ""


class EmitEvent(msgspec.Struct, frozen=True):
    """An event of the run: becomes an EventRow."""

    kind: str
    stage: int = 0
    round: int = 0
    device: str = ""
    data: dict[str, Any] = {}


class Fail(msgspec.Struct, frozen=True):
    """End the run with this error; what was finished is kept. ``kind`` names a class of :mod:`edgefl.errors`.

    ``remedy``: what to do, where the class's own remedy does not fit.
    """

    kind: Literal["RunError", "BudgetError", "DataError"]
    message: str
    remedy: str = ""


Save = SaveDevice | SaveRound | SaveAssignment | SaveEvaluation | SaveEnd
Send = SendWelcome | SendOffer | SendAbort | SendAck | SendDrain | DrainAll
Instruction = Save | Send | Plan | Fetch | EndTransfers | Aggregate | Evaluate | CollectGarbage | EmitEvent | Fail
