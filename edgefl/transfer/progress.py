"""What a sender knows of its receivers: how far each is, what it was sent, which of its lives speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgefl.transfer.steps import STEP_BITS

#: Earlier lives of a device that are remembered: no device restarts more often within one transfer.
MAX_LIVES = 64


@dataclass
class Given:
    """What a device has been sent in all epochs: a set of chunks, and the bytes of those sent more than once."""

    chunks: int = 0
    again_bytes: int = 0

    def count(self, number: int, size: int) -> None:
        """A chunk of ``size`` bytes is sent."""
        bit = 1 << number
        self.again_bytes += size if self.chunks & bit else 0
        self.chunks |= bit


@dataclass
class Peer:
    """What a sender knows of one receiver that has asked and does not have everything yet."""

    credit: int
    todo: int  # set of chunks it asked for in this epoch and was not yet sent
    heard: float
    since: float  # when it asked
    in_step: bool
    given: Given
    sent: int = 0  # in this epoch
    received: int = 0  # acknowledged in this epoch
    blocked_at: float | None = None  # since when it holds up the shared topic
    blocked_received: int = 0
    least: tuple[int, int] = (0, 0)  # (bytes, number) of the smallest chunk it was sent in this epoch
    probes: int = 0

    @property
    def has_room(self) -> bool:
        """Whether its window admits another chunk."""
        return self.sent - self.received < self.credit

    def take(self, number: int, size: int) -> None:
        """Count a chunk of ``size`` bytes as sent to it."""
        self.given.count(number, size)
        self.todo ^= 1 << number
        self.least = min(self.least, (size, number)) if self.sent else (size, number)
        self.sent += 1


class Epochs:
    """Tells a new epoch of a device from the present one and from stale ones, through restarts of the device.

    Lives are random, so nothing says which of two is the later one; a receiver that lives opens ever new epochs, which
    is what counts. A message that was overtaken by one of a later life costs one stall, no more.
    """

    def __init__(self) -> None:
        self._present: dict[str, int] = {}
        self._last_steps: dict[str, dict[int, int]] = {}  # device -> life -> last step

    def judge(self, device: str, epoch: int) -> Literal["new", "present", "replaced", "stale"]:
        """``replaced``: the last epoch of a life, after another life has taken over."""
        life, step = divmod(epoch, 1 << STEP_BITS)
        last = self._last_steps.get(device, {}).get(life, -1)
        if step != last:
            return "new" if step > last else "stale"
        return "present" if self._present.get(device) == epoch else "replaced"

    def enter(self, device: str, epoch: int) -> None:
        """From now on this is the device's present epoch."""
        life, step = divmod(epoch, 1 << STEP_BITS)
        lives = self._last_steps.setdefault(device, {})
        lives[life] = step
        if len(lives) > MAX_LIVES:
            del lives[next(iter(lives))]
        self._present[device] = epoch
