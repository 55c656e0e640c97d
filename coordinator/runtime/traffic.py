"""Payload bytes of each device and attempt, by the coordinator's own count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from coordinator.core.moves import Spending
from edgefl.records import Attempt, Figure, Figures
from edgefl.transfer.sender import Sent

K = TypeVar("K")
V = TypeVar("V")

SENT, RECEIVED = "chunks the coordinator sent", "chunks the coordinator received"
#: The counts of an attempt as figures, and the source of each.
_SOURCES = {
    "payload_down_bytes": SENT,
    "resent_down_bytes": f"{SENT} more than once",
    "payload_up_bytes": RECEIVED,
    "resent_up_bytes": f"{RECEIVED} more than once",
}
#: Attempts and uploads of a device that are remembered: what is under way when a round closes arrives within the next
#: one or two.
MOST_KEPT = 4


class Traffic:
    """Bytes of each device's newest attempts, over restarts of the coordinator too."""

    def __init__(self) -> None:
        self._moved: dict[str, dict[Attempt, list[int]]] = {}  # device -> attempt -> counts, as in ``_SOURCES``
        self._changed: dict[str, dict[Attempt, list[int]]] = {}  # those that were not taken yet
        self._uploads: dict[str, dict[str, Attempt]] = {}  # device -> transfer -> the attempt of that upload

    def go_on(self, attempt: Attempt, before: Mapping[str, Mapping[str, float]]) -> None:
        """Continue the counts of this attempt from an earlier process' record."""
        for device, figures in before.items():
            _newest(self._moved.setdefault(device, {}), attempt, [int(figures.get(name, 0)) for name in _SOURCES])

    def sent(self, device: str, attempt: Attempt, sent: Sent) -> None:
        """The device was sent chunks."""
        self._add(device, attempt, (*sent, 0, 0))

    def name_upload(self, device: str, attempt: Attempt, transfer: str) -> None:
        """Register a transfer as an upload of this attempt."""
        _newest(self._uploads.setdefault(device, {}), transfer, attempt)
        self._add(device, attempt, (0, 0, 0, 0))

    def received(self, device: str, transfer: str, first: int, again: int) -> None:
        """Chunks came; those of an unknown transfer or attempt count nowhere."""
        attempt = self._uploads.get(device, {}).get(transfer)
        if attempt is not None and attempt in self._moved[device]:
            self._add(device, attempt, (0, 0, first, again))

    def figures(self, device: str, attempt: Attempt) -> Figures:
        """Figures of all bytes moved in a device's attempt."""
        return _figures(self._moved.get(device, {}).get(attempt, [0] * len(_SOURCES)))

    def settle(self, device: str, stage: int, number: int, attempt: int) -> None:
        """Drop pending counts of an attempt whose update counts: its figures include them."""
        own = self._changed.get(device, {})
        for key in [one for one in own if (one.stage, one.round, one.attempt) == (stage, number, attempt)]:
            del own[key]

    def take(self) -> list[Spending]:
        """Counts changed since the last call, for the ledger."""
        every = [(device, one) for device, own in self._changed.items() for one in own.items()]
        self._changed.clear()
        return [Spending(device, attempt, _figures(counts)) for device, (attempt, counts) in every]

    def _add(self, device: str, attempt: Attempt, more: Sequence[int]) -> None:
        own = self._moved.setdefault(device, {})
        if (counts := own.get(attempt)) is None:
            counts = [0] * len(_SOURCES)
            _newest(own, attempt, counts)
        for place, new in enumerate(more):
            counts[place] += new
        self._changed.setdefault(device, {})[attempt] = counts


def counted(size: float, source: str) -> Figure:
    """A figure of bytes that the coordinator counted itself."""
    return Figure(float(size), "counted", source)


def _figures(counts: Sequence[int]) -> Figures:
    return {name: counted(count, source) for count, (name, source) in zip(counts, _SOURCES.items(), strict=True)}


def _newest(of: dict[K, V], key: K, value: V) -> None:
    """Set the newest entry; drop the oldest beyond MOST_KEPT."""
    of.pop(key, None)
    of[key] = value
    if len(of) > MOST_KEPT:
        del of[next(iter(of))]
