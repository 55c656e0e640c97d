"""Payload that moved for each device in each attempt, whatever becomes of it, by the coordinator's own count."""

from __future__ import annotations

from collections import defaultdict

from coordinator.core.moves import Spending
from edgefl.records import Attempt, Figure, Figures
from edgefl.transfer.sender import Sent

SENT, RECEIVED = "chunks the coordinator sent", "chunks the coordinator received"
#: Uploads of a device whose late chunks are still known by the name of their transfer: what is under way when a round
#: closes arrives within the next one or two.
MOST_NAMED = 4


class Traffic:
    """Bytes since they were taken before. Those of an attempt that is done are in the figures of its update."""

    def __init__(self) -> None:
        # device -> attempt -> bytes sent, sent again, received, received again
        self._moved: dict[str, dict[Attempt, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0, 0]))
        self._uploads: dict[str, dict[str, Attempt]] = {}  # device -> transfer -> the attempt of that upload

    def sent(self, device: str, attempt: Attempt, sent: Sent) -> None:
        """The device was sent chunks."""
        moved = self._moved[device][attempt]
        moved[0] += sent.first
        moved[1] += sent.again

    def name_upload(self, device: str, attempt: Attempt, transfer: str) -> None:
        """From now on this transfer is an upload of that attempt."""
        names = self._uploads.setdefault(device, {})
        names.pop(transfer, None)
        names[transfer] = attempt
        if len(names) > MOST_NAMED:
            del names[next(iter(names))]

    def received(self, device: str, transfer: str, first: int, again: int) -> None:
        """Chunks of the device came; those of an unknown transfer count nowhere."""
        if (attempt := self._uploads.get(device, {}).get(transfer)) is not None:
            moved = self._moved[device][attempt]
            moved[2] += first
            moved[3] += again

    def settle(self, device: str, stage: int, number: int, attempt: int) -> None:
        """The device's update counts: its figures have all of it."""
        own = self._moved.get(device, {})
        for key in [one for one in own if (one.stage, one.round, one.attempt) == (stage, number, attempt)]:
            del own[key]

    def take(self) -> list[Spending]:
        """Bytes since the last call, to be added to the ledger's."""
        every = [(device, one) for device, own in self._moved.items() for one in own.items()]
        self._moved.clear()
        return [Spending(device, attempt, _figures(counts)) for device, (attempt, counts) in every]


def figures_sent(first: int, again: int) -> Figures:
    """Bytes of a download as figures."""
    return {
        "payload_down_bytes": counted(first, SENT),
        "resent_down_bytes": counted(again, f"{SENT} more than once"),
    }


def figures_received(first: int, again: int) -> Figures:
    """Bytes of an upload as figures."""
    return {
        "payload_up_bytes": counted(first, RECEIVED),
        "resent_up_bytes": counted(again, f"{RECEIVED} more than once"),
    }


def counted(size: int, source: str) -> Figure:
    """A figure of bytes that the coordinator counted itself."""
    return Figure(float(size), "counted", source)


def _figures(counts: list[int]) -> Figures:
    sent, sent_again, received, received_again = counts
    return figures_sent(sent, sent_again) | figures_received(received, received_again)
