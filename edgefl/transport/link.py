"""The network thread of one MQTT connection: CONNECT, serve, and reconnect after a loss.

A thread of its own, so that pings go out and presence holds while the event loop's thread is busy (aggregating, say).
It drives paho by its public single-step calls and reports to a ``Listener``.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgefl.errors import BrokerError
from edgefl.transport import failures
from edgefl.transport.address import Address
from edgefl.transport.client import Meter, MeteredClient, Settings, make_client

_LOG = logging.getLogger(__name__)

#: Full jitter: the n-th wait is uniform in 0 … min(cap, base · 2^n). A broker restarts within a second, so the first
#: wait is short; at the cap 200 devices knock about 13 times a second altogether, and each is back within half a
#: minute.
BACKOFF_BASE_S = 0.25
BACKOFF_CAP_S = 30.0
#: A connection that held this long resets the back-off. A shorter one does not: two clients with one id chase each
#: other.
STABLE_S = 10.0
#: A network that fails seldom accepts a connection only to drop it, this many times in a row; a rival client does it.
TAKEN_OVER = 3
#: Reasons for which a broker refuses a message: its size, or a full queue.
TOO_LARGE, QUOTA = "Packet too large", "Quota exceeded"
_SAME_ID = "another client uses the same id, give each device its own name"
#: How long the broker may take to answer the greeting. The first, MQTT 5, gets less, since 3.1.1 is tried after it.
ANSWER_TIMEOUT_S = 5.0
FIRST_ANSWER_TIMEOUT_S = 2.0
#: How long DISCONNECT may take before the socket is closed without it.
GOODBYE_S = 2.0


@dataclass(frozen=True)
class Listener:
    """Callbacks of a link, all called in its thread."""

    #: The broker accepted the connection; the client may now publish and subscribe. True: it still knew the session.
    opened: Callable[[MeteredClient, Properties | None, bool], None]
    #: The connection ended without ``stop``; with a reason to read.
    lost: Callable[[str], None]
    #: An attempt failed; True: it was the first, and the link gives up.
    failed: Callable[[BrokerError, bool], None]
    #: A message arrived: topic, payload.
    message: Callable[[str, bytes], None]
    #: The broker acknowledged the message with this id, or refused it for the reason named.
    published: Callable[[int, str | None], None]
    #: The broker answered the subscription with this id; per pattern None or the reason of a refusal.
    subscribed: Callable[[int, list[str | None]], None]


class _Answer(NamedTuple):
    """The broker's answer to CONNECT: its CONNACK."""

    reason: ReasonCode
    properties: Properties | None
    session_kept: bool


class Link:
    """Keeps the connection of ``settings`` open from ``start`` to ``stop``, reporting to ``listener``."""

    def __init__(self, settings: Settings, listener: Listener, meter: Meter) -> None:
        self._settings = settings
        self._listener = listener
        self._meter = meter
        self._client: MeteredClient | None = None
        self._stopping = threading.Event()
        self._deadline = 0.0
        self._answer: _Answer | None = None
        self._reason = ""
        self._short_lived = 0  # connections in a row that the broker accepted and that soon ended
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{settings.client_id}", daemon=True)

    def start(self) -> None:
        """Begin connecting. Call once."""
        self._thread.start()

    def stop(self) -> None:
        """Disconnect and end the thread; blocks for GOODBYE_S and a little at most. Callable from any thread."""
        self._deadline = time.monotonic() + GOODBYE_S
        self._stopping.set()
        if self._client is not None:
            with contextlib.suppress(OSError):  # the thread has just ended and closed what would wake it
                self._client.disconnect()
        if self._thread.is_alive():
            self._thread.join(GOODBYE_S + 0.5)

    def _run(self) -> None:
        attempt, ever = 0, False
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                client = self._open()
                ever = True
                self._serve(client)
            except BrokerError as error:
                self._report(error, not ever)
            except Exception as error:  # paho raises freely on malformed packets; the link must survive it
                _LOG.debug("malformed packet", exc_info=error)
                self._report(BrokerError(f"the broker {self._settings.address} sent a malformed packet"), not ever)
            if not ever:
                break
            attempt = 0 if time.monotonic() - began >= STABLE_S else attempt
            self._stopping.wait(backoff_s(attempt, random.random()))
            attempt += 1
        if self._client is not None:
            self._client.release()

    def _report(self, error: BrokerError, final: bool) -> None:
        if not self._stopping.is_set():
            self._listener.failed(error, final)

    def _open(self) -> MeteredClient:
        """The client once the broker has accepted it. The first call finds the MQTT version. Raises BrokerError."""
        if self._client is not None:
            self._greet(self._client, ANSWER_TIMEOUT_S)
            return self._client
        for version, timeout_s in _versions(self._settings.address):
            client = make_client(self._settings, version, self._meter)
            self._listen(client)
            try:
                self._greet(client, timeout_s)
            except BrokerError as error:
                client.release()
                if isinstance(error, _NoAnswerError):
                    continue
                raise
            self._client = client
            return client
        raise failures.silent(self._settings.address)

    def _listen(self, client: MeteredClient) -> None:
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        client.on_socket_close = self._on_socket_close

    def _greet(self, client: MeteredClient, timeout_s: float) -> None:
        """Connect and wait for the answer. Raises BrokerError, as _NoAnswerError when this version gets none."""
        address = self._settings.address
        try:
            answer = self._exchange(client, timeout_s)
            if answer is None and client.alert is not None:
                raise client.alert
            if answer is None or answer.reason.getName() == "Unsupported protocol version":
                raise _NoAnswerError(f"the broker {address} does not answer")
            if answer.reason.is_failure:
                raise failures.refused(address, self._settings.client_id, answer.reason.getName())
        except OSError as error:
            client.drop()
            raise failures.unreachable(address, error) from error
        except Exception:
            client.drop()
            raise
        self._listener.opened(client, answer.properties, answer.session_kept)

    def _exchange(self, client: MeteredClient, timeout_s: float) -> _Answer | None:
        """The broker's CONNACK, None if none came in time."""
        self._answer = None
        client.alert = None
        client.reconnect()
        deadline = time.monotonic() + timeout_s
        while self._answer is None and not self._stopping.is_set():
            remaining = deadline - time.monotonic()
            if remaining <= 0 or client.loop(min(remaining, 0.1)) != MQTTErrorCode.MQTT_ERR_SUCCESS:
                break
        return self._answer

    def _serve(self, client: MeteredClient) -> None:
        """Move packets until the connection ends."""
        self._reason, began = "the connection was closed", time.monotonic()
        try:
            if self._stopping.is_set():
                client.disconnect()
            while client.loop(1.0) == MQTTErrorCode.MQTT_ERR_SUCCESS:
                if self._stopping.is_set() and time.monotonic() > self._deadline:
                    break
        finally:
            self._short_lived = self._short_lived + 1 if time.monotonic() - began < STABLE_S else 0
            if self._short_lived >= TAKEN_OVER and _SAME_ID not in self._reason:  # mosquitto 2.0.11 gives no reason
                self._reason += f" {self._short_lived} times in a row; perhaps {_SAME_ID}"
            if not self._stopping.is_set():
                self._listener.lost(self._reason)

    def _on_connect(
        self, client: Client, data: object, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        self._answer = _Answer(reason, properties, bool(flags.session_present))

    def _on_disconnect(
        self, client: Client, data: object, flags: DisconnectFlags, reason: ReasonCode, properties: object
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self._reason = f"the broker closed the connection: {reason.getName()}"
            if reason.getName() == "Session taken over":
                self._reason += f"; {_SAME_ID}"
        elif reason.getName() not in {"Success", "Unspecified error"}:
            self._reason = f"the connection was given up: {reason.getName()}"

    def _on_socket_close(self, client: Client, data: object, closing: object) -> None:
        if self._stopping.is_set() and isinstance(client, MeteredClient) and isinstance(closing, socket.socket):
            client.hang_up(closing)

    def _on_message(self, client: Client, data: object, message: MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            return  # a peer's malformed topic: none of ours
        self._listener.message(topic, bytes(message.payload))

    def _on_publish(self, client: Client, data: object, mid: int, reason: ReasonCode, properties: object) -> None:
        large = isinstance(client, MeteredClient) and client.refused_as_too_large(mid)
        self._listener.published(mid, TOO_LARGE if large else reason.getName() if reason.is_failure else None)

    def _on_subscribe(
        self, client: Client, data: object, mid: int, reasons: list[ReasonCode], properties: object
    ) -> None:
        self._listener.subscribed(mid, [reason.getName() if reason.is_failure else None for reason in reasons])


class _NoAnswerError(BrokerError):
    """The peer does not answer a greeting in this version of MQTT."""


def backoff_s(attempt: int, draw: float) -> float:
    """How long to wait before trying again after ``attempt`` (from 0) failures in a row; ``draw`` uniform in 0 … 1."""
    return draw * min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** min(attempt, 16))


def _versions(address: Address) -> Iterator[tuple[MQTTProtocolVersion, float]]:
    """MQTT 5 first: only it names the broker's limits and refusals. amqtt never answers it, see Address.legacy."""
    if not address.legacy:
        yield MQTTProtocolVersion.MQTTv5, FIRST_ANSWER_TIMEOUT_S
    yield MQTTProtocolVersion.MQTTv311, ANSWER_TIMEOUT_S
