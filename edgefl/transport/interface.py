"""The transport interface and its delivery guarantees, the same for MQTT and memory; a probe of its largest message.

Delivery is at least once to every session the broker still knows, never exactly once: duplicates happen after a
reconnect, and a broker drops silently when a queue is full or it is killed. So callers make effects idempotent,
acknowledge end to end, and send again what was not.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from edgefl.errors import BrokerError, MessageSizeError

#: Largest payload when the broker names no limit of its own. 1 KiB below 256 KiB leaves room for header and topic.
#: Hosted brokers allow more (EMQX 1 MB, Event Grid 512 KB), except AWS IoT Core (128 KiB), which names its limit in
#: MQTT 5.
DEFAULT_MAX_PAYLOAD = 255 * 1024
#: How long a probe's small message may take back to us: 100 KiB before it need 3 s at 256 kbit/s.
ECHO_S = 10.0
_MARK_BYTES = 16


class Will(NamedTuple):
    """Last will: published by the broker when a client's connection ends without DISCONNECT."""

    topic: str
    payload: bytes
    retain: bool


class Limits(NamedTuple):
    """Limits of a connection. ``packet_bytes``: the broker's own largest packet, 0 when it announces none.

    ``certain``: whether nothing but ``max_payload`` limits a message.
    """

    version: str = ""
    receive_maximum: int = 0
    packet_bytes: int = 0
    certain: bool = False


class ReplyTo(NamedTuple):
    """Response topic and correlation data of an MQTT 5 request; empty for any other message."""

    topic: str = ""
    correlation: bytes = b""


NO_REPLY = ReplyTo()


class Transport(Protocol):
    """One client's session with a broker. Callbacks run in the event loop's thread and must return soon.

    The session is persistent: messages published to its subscriptions while it is away are queued and delivered on
    return, within the broker's limits.
    """

    #: Set before ``connect``. Called with topic and payload.
    on_message: Callable[[str, bytes], None]
    #: Set before ``connect``. True after each (re)connection once the subscriptions are renewed; False when it is lost.
    on_connection: Callable[[bool], None]
    #: Largest payload the broker admits, bytes. Known after ``connect``.
    max_payload: int
    #: Whether the broker still had this session at the last connection; if not, messages queued for it are lost.
    session_kept: bool
    #: Known after ``connect``.
    limits: Limits
    #: Whether bytes are counted at a socket: else nothing of them is known on a wire.
    wired: bool

    @property
    def bytes_sent(self) -> int:
        """Bytes written so far: at the socket (mqtt), or topic + payload (memory)."""
        ...

    @property
    def bytes_received(self) -> int:
        """Bytes read so far, measured at the same place."""
        ...

    @property
    def bytes_on_link(self) -> int | None:
        """Bytes both ways with TLS and headers; None where they are not known, and while it is not connected."""
        ...

    async def connect(self) -> None:
        """Connect once; afterwards the transport reconnects by itself until closed. Raises BrokerError."""
        ...

    async def subscribe(self, patterns: list[str]) -> None:
        """Listen to topic patterns, now and after every reconnection. Raises BrokerError when the broker denies one."""
        ...

    def unsubscribe(self, patterns: list[str]) -> None:
        """Listen to these no longer: unsubscribed at once, or at the next connection."""
        ...

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> Awaitable[None]:
        """Ends once the broker has the message; waits for the connection. Raises BrokerError if it is refused.

        It may be a future that has ended already, which needs no task.
        """
        ...

    def admit(self, payload_bytes: int) -> None:
        """Take payloads of this size as well, unless the broker announced a limit or refused one."""
        ...

    async def close(self) -> None:
        """Disconnect in order: the will is not sent, the session stays with the broker. Safe to call twice."""
        ...


def check_payload(topic: str, payload: bytes, limit: int) -> None:
    """Raise MessageSizeError for a payload over the limit, which a broker would answer by dropping the connection."""
    if len(payload) > limit:
        error = MessageSizeError(
            f"a message of {len(payload)} bytes on {topic} is larger than the {limit} bytes the broker admits",
            remedy="Lower the chunk size (--set transfer.chunk_bytes=16384), or raise the broker's packet limit"
            " (mosquitto: max_packet_size, message_size_limit).",
        )
        error.size, error.reason = len(payload), f"its limit is {limit:,} bytes"
        raise error


def closed_error(client_id: str) -> BrokerError:
    """For a call on a transport that is not connected yet, or already closed."""
    return BrokerError(
        f"the connection of {client_id!r} is not open", remedy="Connect before sending, and send before closing."
    )


class Probe:
    """The largest message a broker passes on, by messages on ``topic`` that this client sends to itself.

    A broker that takes no such message answers with a reason, closes the connection, or (with MQTT 3.1.1, or where it
    does not care) acknowledges the message and drops it. So a small one follows on the same topic, which MQTT keeps in
    order: when that has come and the large one has not, it was dropped. Feed ``heard`` with the messages on ``topic``.
    """

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
            await asyncio.wait_for(self._until(small), ECHO_S)
        except MessageSizeError as error:
            self.reason = error.reason
            return False
        except BrokerError as error:
            self.reason = error.message
            return None
        except asyncio.TimeoutError:
            self.reason = f"what is sent on {self.topic} does not come back"
            return None
        self.reason = "" if large in self._heard else "it acknowledges and drops it"
        return large in self._heard

    async def largest(self, size: int, least: int, beside: int = 0) -> int | None:
        """The first of ``size``, its half, its quarter … that passes with ``beside`` bytes more; 0: not even ``least``.

        None: this client may not try.
        """
        while not (passes := await self.passes(size + beside)):
            if passes is None or size <= least:
                return None if passes is None else 0
            size = max(least, size // 2)
        return size

    async def _until(self, small: bytes) -> None:
        while small not in self._heard:
            self._news.clear()
            await self._news.wait()
