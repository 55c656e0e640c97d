"""Probe of the largest message a broker passes on, by messages that this client sends to itself.

A broker that takes no such message answers with a reason, closes the connection, or (with MQTT 3.1.1, or where it does
not care) acknowledges the message and drops it. So a small one follows on the same topic, which MQTT keeps in order:
when that has come and the large one has not, it was dropped.
"""

from __future__ import annotations

import asyncio
import secrets

from edgefl.errors import BrokerError, MessageSizeError
from edgefl.transport.base import Transport

#: How long the small message may take back to us: 100 KiB before it need 3 s at 256 kbit/s.
ECHO_S = 10.0
_MARK_BYTES = 16


class Probe:
    """Feed ``heard`` with the messages on ``topic``, which this client may publish to and read."""

    def __init__(self, transport: Transport, topic: str) -> None:
        self.topic = topic
        self.reason = ""  # why the last size that was tried does not pass
        self._transport = transport
        self._heard: set[bytes] = set()
        self._news = asyncio.Event()
        self._subscribed = False

    def heard(self, payload: bytes) -> None:
        """A message came on the topic."""
        self._heard.add(payload[: _MARK_BYTES + 1])
        self._news.set()

    async def passes(self, size: int) -> bool | None:
        """Whether a payload of ``size`` bytes comes back. None: this client may not try."""
        mark = secrets.token_bytes(_MARK_BYTES)
        large, small = mark + b"l", mark + b"s"
        try:
            if not self._subscribed:
                await self._transport.subscribe([self.topic])
                self._subscribed = True
            await self._transport.publish(self.topic, large + bytes(max(0, size - len(large))))
            await self._transport.publish(self.topic, small)
        except MessageSizeError as error:
            self.reason = error.reason
            return False
        except BrokerError as error:
            self.reason = error.message
            return None
        try:
            await asyncio.wait_for(self._until(small), ECHO_S)
        except asyncio.TimeoutError:
            self.reason = f"what is sent on {self.topic} does not come back"
            return None
        self.reason = "" if large in self._heard else "it acknowledges and drops it"
        return large in self._heard

    async def largest(self, size: int, least: int, beside: int = 0) -> int | None:
        """The first of ``size``, its half, its quarter … that passes with ``beside`` bytes more; 0: not even ``least``.

        None: this client may not try.
        """
        while True:
            passes = await self.passes(size + beside)
            if passes or passes is None:
                return size if passes else None
            if size <= least:
                return 0
            size = max(least, size // 2)

    async def _until(self, small: bytes) -> None:
        while small not in self._heard:
            self._news.clear()
            await self._news.wait()
