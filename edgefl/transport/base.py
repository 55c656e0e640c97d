"""The transport interface and its delivery guarantees, the same for MQTT and memory.

Delivery is at least once to every session the broker still knows, never exactly once: duplicates happen after a
reconnect, and a broker drops silently when a queue is full or it is killed. So callers make effects idempotent,
acknowledge end to end, and send again what was not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from edgefl.errors import BrokerError, MessageSizeError

#: Largest payload when the broker names no limit of its own. 1 KiB below 256 KiB leaves room for header and topic.
#: Hosted brokers allow more (EMQX 1 MB, Event Grid 512 KB), except AWS IoT Core (128 KiB), which names its limit in
#: MQTT 5.
DEFAULT_MAX_PAYLOAD = 255 * 1024

OnMessage = Callable[[str, bytes], None]
OnConnection = Callable[[bool], None]


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


class Transport(Protocol):
    """One client's session with a broker. Callbacks run in the event loop's thread and must return soon.

    The session is persistent: messages published to its subscriptions while it is away are queued and delivered on
    return, within the broker's limits.
    """

    #: Set before ``connect``. Called with topic and payload.
    on_message: OnMessage
    #: Set before ``connect``. True after each (re)connection once the subscriptions are renewed; False when it is lost.
    on_connection: OnConnection
    #: Largest payload the broker admits, bytes. Known after ``connect``.
    max_payload: int
    #: Whether the broker still had this session at the last connection; if not, messages queued for it are lost.
    session_kept: bool
    #: Known after ``connect``.
    limits: Limits

    @property
    def bytes_sent(self) -> int:
        """Bytes written so far: at the socket (mqtt), or topic + payload (memory)."""
        ...

    @property
    def bytes_received(self) -> int:
        """Bytes read so far, measured at the same place."""
        ...

    async def connect(self) -> None:
        """Connect once; afterwards the transport reconnects by itself until closed. Raises BrokerError."""
        ...

    async def subscribe(self, patterns: list[str]) -> None:
        """Listen to topic patterns, now and after every reconnection. Raises BrokerError when the broker denies one."""
        ...

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Return once the broker has the message; waits for the connection. Raises BrokerError if it is refused."""
        ...

    async def close(self) -> None:
        """Disconnect in order: the will is not sent, the session stays with the broker. Safe to call twice."""
        ...


def ignore_message(topic: str, payload: bytes) -> None:
    """Default ``on_message``: drops the message."""


def ignore_connection(connected: bool) -> None:
    """Default ``on_connection``: does nothing."""


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
