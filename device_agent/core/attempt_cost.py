"""Cost of one attempt at this device, as far as the supervisor sees it: time, payload, bytes on the wire."""

from __future__ import annotations

from typing import NamedTuple

from edgefl.protocol.chunks import bundled_bytes
from edgefl.records import Attempt, Figure, Figures, Manifest

#: An MQTT PUBLISH besides topic and payload: fixed header 1 + 4, topic length 2, packet id 2, MQTT 5 properties 1.
_PUBLISH_BYTES = 10


class Counters(NamedTuple):
    """Counters at one moment."""

    at: float
    sent: int
    received: int


class AttemptCost:
    """Counts from the acceptance of an offer to the announcement of its update."""

    def __init__(self, attempt: Attempt, counters: Counters) -> None:
        self.attempt = attempt
        self.fetched_bytes = 0
        self._begin = counters

    def figures(self, counters: Counters, manifest: Manifest, topic: str, chunk_bytes: int) -> Figures:
        """``topic``: where the upload's chunks will go. The upload is still ahead, so it is counted, not measured."""
        objects = {ref.id: ref.size for ref in manifest.values()}
        payload = sum(objects.values())
        messages, upload = bundled_bytes(objects.values(), chunk_bytes) if chunk_bytes > 0 else (0, payload)
        upload += messages * (len(topic.encode()) + _PUBLISH_BYTES)
        return {
            "wall_s": Figure(counters.at - self._begin.at, "measured", "monotonic clock, acceptance to announcement"),
            "payload_down_bytes": Figure(float(self.fetched_bytes), "counted", "chunks of objects this device lacked"),
            "payload_up_bytes": Figure(float(payload), "counted", "objects of the update"),
            "wire_down_bytes": Figure(
                float(counters.received - self._begin.received), "measured", "socket, acceptance to announcement"
            ),
            "wire_up_bytes": Figure(
                float(counters.sent - self._begin.sent + upload),
                "counted",
                "socket, acceptance to announcement + the upload's chunks with their framing",
            ),
        }


def unknown_cost() -> Figures:
    """The figures without values, of an attempt that an earlier process of this agent accepted."""
    names = ("wall_s", "payload_down_bytes", "wire_down_bytes", "wire_up_bytes")
    return {name: Figure(reason="the agent was restarted during the round") for name in names}
