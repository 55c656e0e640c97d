"""The largest message a broker takes, inferred from refusals and lost connections: many announce no limit."""

from __future__ import annotations

#: A broker that closes the connection on a large message does so each time; a network that cuts it off at the same
#: message twice, without a larger one ever having passed, is better served by smaller messages, too.
LOSSES = 2
#: Smaller messages are sent again after every loss: no broker's limit is below this.
LEAST_BYTES = 4096


class Sizes:
    """Sizes of one client's messages, to find one that the broker closes the connection for.

    Messages are known by their packet ids and acknowledged in their order.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, int] = {}
        self._largest = 0  # that was acknowledged
        self._suspect = (0, 0)  # packet id, connections in a row that ended while it was next to be acknowledged

    def sent(self, mid: int, size: int) -> None:
        """A message of ``size`` bytes is on its way."""
        self._waiting[mid] = size

    def taken(self, mid: int) -> None:
        """The broker has it."""
        self._largest = max(self._largest, self._waiting.pop(mid, 0))

    def refused(self, mid: int) -> int:
        """The broker does not take it; its size."""
        return self._waiting.pop(mid, 0)

    def lost(self) -> int | None:
        """The connection ended: the packet id of the message that the broker seems to close it for, if there is one."""
        mid, size = next(iter(self._waiting.items()), (0, 0))
        if size < LEAST_BYTES or size <= self._largest:
            self._suspect = (0, 0)
            return None
        times = self._suspect[1] + 1 if self._suspect[0] == mid else 1
        self._suspect = (mid, times)
        return mid if times >= LOSSES else None
