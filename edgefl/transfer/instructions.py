"""Instructions that sender and receiver give to their driver, and the numbers both share."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.protocol.messages import Need

#: Largest credit a sender grants, whatever the receiver asks: 256 x 96 KiB = 24 MiB in flight, a quarter of mosquitto's
#: default queue.
MAX_CREDIT = 256

#: An epoch is incarnation << 32 | step: the receiver's incarnation is random, new after a restart; the step counts up.
STEP_BITS = 32


@dataclass(frozen=True)
class SendNeed:
    """Publish this message to the sender of the transfer."""

    need: Need


@dataclass(frozen=True)
class SendChunk:
    """Read a chunk and publish it: to ``device``, or on the shared topic when that is None."""

    device: str | None
    object_id: str
    index: int


@dataclass(frozen=True)
class StoreChunk:
    """Write the chunk that has just arrived: it is wanted. Comes before the Need that acknowledges it."""

    object_id: str
    index: int


@dataclass(frozen=True)
class VerifyObject:
    """All chunks of the object are stored: check its sha256 and call ``on_verified``."""

    object_id: str


@dataclass(frozen=True)
class Completed:
    """Everything is at the receiver, verified. ``device`` is the device's id in both directions."""

    device: str


@dataclass(frozen=True)
class Failed:
    """The transfer can't be finished for this device: the sender lacks the object, or holds a damaged one."""

    device: str
    object_id: str
    reason: str


Instruction = SendNeed | SendChunk | StoreChunk | VerifyObject | Completed | Failed
