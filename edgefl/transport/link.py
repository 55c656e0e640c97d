"""One MQTT connection: a paho client set up as EdgeFL needs it, and the thread that keeps it connected.

The client is measured, without Nagle's delay, with a persistent session. A thread of its own does CONNECT, serves, and
reconnects after a loss, so that pings go out and presence holds while the event loop's thread is busy (aggregating,
say); of an agent, whose loop never is for long, the thread dials and the loop serves (``in_loop``). It drives paho by
its public single-step calls (paho's own loop has no jitter, dies on a malformed packet and tries one version of MQTT
alone) and reports to a ``Listener``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, ParamSpec, Protocol

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgefl.errors import BrokerError
from edgefl.transport import failures, port_probe
from edgefl.transport.address import Address
from edgefl.transport.in_loop import InLoop
from edgefl.transport.interface import NO_REPLY, ReplyTo, Will
from edgefl.transport.metered_client import Meter, MeteredClient

_LOG = logging.getLogger(__name__)
P = ParamSpec("P")

#: Silence after which a ping goes out; the broker ends the connection after half as long again. Over TLS a ping and its
#: answer take 246 bytes on the link, headers included: 10.1 MiB a month of a device that waits.
KEEPALIVE_S = 60
#: How long opening the socket, TLS included, may take: several round trips of a bad mobile link.
CONNECT_TIMEOUT_S = 5.0
#: How long the broker keeps an absent client's session: a device switched off overnight finds its messages, one that
#: was scrapped does not hold a queue for ever.
SESSION_EXPIRY_S = 24 * 3600
#: Largest packet a broker may send us. MQTT 5 brokers drop larger ones; with 3.1.1 only the broker's own limit
#: protects. Equal to mosquitto's default since 2.1 and to what the generated configuration admits.
MAX_PACKET_BYTES = 2 * 2**20
#: Full jitter: the n-th wait is uniform in 0 … min(cap, base · 2^n). A broker restarts within a second, so the first
#: wait is short; at the cap 200 devices knock about 13 times a second altogether, and each is back within half a
#: minute.
BACKOFF_BASE_S = 0.25
BACKOFF_CAP_S = 30.0
#: A revoked certificate is for good, so its device knocks seldom. It does not end: a TLS alert before TLS 1.3 can be
#: forged on the way, and a device that has ended has to be visited.
REVOKED_S = 600.0
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


class TlsFiles(NamedTuple):
    """Paths of PEM files: the authority's certificate (None: the system's authorities), this client's own and its key.

    ``key``: None where ``cert`` holds it as well.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class Settings:
    """How to connect; the same for every attempt."""

    address: Address
    client_id: str
    will: Will | None = None
    tls: ssl.SSLContext | None = None
    clean_session: bool = False


def tls_context(address: Address, files: TlsFiles) -> ssl.SSLContext | None:
    """TLS that checks the broker's certificate, None for plain TCP.

    Raises BrokerError naming the file that does not load.
    """
    if not address.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=files.ca)
    except OSError as error:
        raise failures.unreadable(f"the authority's certificate {files.ca}", error) from error
    load_own(context, files)
    return context


def load_own(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Present the client's certificate in later handshakes. Raises BrokerError naming the file that does not load."""
    if files.cert is None:
        return
    try:
        context.load_cert_chain(files.cert, files.key)
    except OSError as error:
        own = f"the client's certificate {files.cert} with key {files.key or files.cert}"
        raise failures.unreadable(own, error) from error


def _make_client(settings: Settings, version: MQTTProtocolVersion, meter: Meter) -> MeteredClient:
    """A client ready for ``reconnect()``, without callbacks for packets yet."""
    session, properties = {"clean_session": settings.clean_session}, None
    if version == MQTTProtocolVersion.MQTTv5:
        session = {}
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call] # paho leaves this class untyped
        properties.MaximumPacketSize = MAX_PACKET_BYTES
        if not settings.clean_session:
            properties.SessionExpiryInterval = SESSION_EXPIRY_S
    client = MeteredClient(meter, client_id=settings.client_id, protocol=version, reconnect_on_failure=False, **session)
    client.connect_timeout = CONNECT_TIMEOUT_S
    if settings.address.username:
        client.username_pw_set(settings.address.username, settings.address.password)
    if settings.will is not None:
        client.will_set(settings.will.topic, settings.will.payload, qos=1, retain=settings.will.retain)
    if settings.tls is not None:
        client.tls_set_context(settings.tls)
    client.on_socket_open = _set_no_delay
    # With this set, paho leaves all writing to the thread that calls loop(), whichever thread publishes.
    client.on_socket_register_write = lambda client, data, opened: None
    client.aim(
        settings.address.host,
        settings.address.port,
        keepalive=KEEPALIVE_S,
        clean_start=settings.clean_session,
        properties=properties,
    )
    return client


def _set_no_delay(client: Client, data: object, opened: object) -> None:
    """paho leaves Nagle's algorithm on, which costs a windowed transfer about ten times its speed."""
    if isinstance(opened, socket.socket):
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Listener(Protocol):
    """Receiver of a link's reports, each handed to ``post``."""

    def post(self, report: Callable[[], None]) -> None:
        """Call ``report`` soon, in another thread. Called in the link's own."""

    def opened(self, client: MeteredClient, properties: Properties | None, session_kept: bool) -> None:
        """The broker accepted the connection: the client may publish and subscribe. It may still know the session."""

    def lost(self, reason: str) -> None:
        """The connection ended without ``stop``; with a reason to read."""

    def failed(self, error: BrokerError, final: bool) -> None:
        """An attempt failed. ``final``: it was the first, and the link gives up."""

    def message(self, topic: str, payload: bytes, reply: ReplyTo = NO_REPLY) -> None:
        """A message arrived."""

    def published(self, mid: int, refusal: str | None) -> None:
        """The broker acknowledged the message with this id, or refused it for the reason named."""

    def subscribed(self, mid: int, refusals: list[str | None]) -> None:
        """The broker answered the subscription with this id; per pattern None or the reason of a refusal."""


#: The broker's answer to CONNECT, its CONNACK: reason, properties, and whether it still has the session.
_Answer = tuple[ReasonCode, Properties | None, bool]


class Link:
    """Keeps the connection of ``settings`` open from ``start`` to ``stop``, reporting to ``listener``.

    ``loop``: moves the packets, None: the link's thread does. ``others``: further addresses of the same broker. Where
    one fails the next is dialled; may be set at any time.
    """

    def __init__(
        self, settings: Settings, listener: Listener, meter: Meter, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._loop = loop
        self._in_loop: InLoop | None = None
        self.others: tuple[Address, ...] = ()
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
        if self._in_loop is not None:
            self._in_loop.end()  # the thread says goodbye
        elif self._client is not None:
            with contextlib.suppress(OSError):  # the thread has just ended and closed what would wake it
                self._client.disconnect()
                self._client.wake()  # it may be about to wait without the deadline, for a broker that reads nothing
        if self._thread.is_alive():
            self._thread.join(GOODBYE_S + 0.5)

    @property
    def address(self) -> Address:
        """The address dialled last."""
        return self._settings.address

    def _turn(self) -> None:
        """Go on to the next address."""
        known = (*self.others, self.address)
        place = known.index(self.address) + 1
        self._settings = replace(self._settings, address=known[place % len(known)])

    def _run(self) -> None:
        attempt, tried, ever = 0, 0, False
        while not self._stopping.is_set():
            began, seldom = time.monotonic(), 0.0
            try:
                client = self._open()
                ever = True
                self._serve(client)
            except Exception as error:  # paho raises freely on malformed packets; the link must survive it
                if not isinstance(error, BrokerError):
                    _LOG.debug("malformed packet", exc_info=error)
                    error = BrokerError(f"the broker {self._settings.address} sent a malformed packet")
                seldom = least_wait_s(error)
                last, tried = not ever and tried >= len(self.others), tried + 1
                if not self._stopping.is_set():
                    self._post(self._listener.failed, error, last)
                self._turn()
                if last:
                    break
            attempt = 0 if time.monotonic() - began >= STABLE_S else attempt
            turns = attempt // (1 + len(self.others))  # an address that is gone does not make the others wait longer
            self._stopping.wait(max(seldom, backoff_s(turns, random.random())))
            attempt += 1
        if self._client is not None:
            self._client.release()

    def _post(self, report: Callable[P, None], *arguments: P.args, **named: P.kwargs) -> None:
        self._listener.post(partial(report, *arguments, **named))

    def _open(self) -> MeteredClient:
        """The client once the broker has accepted it. The first call finds the MQTT version. Raises BrokerError."""
        if self._client is not None:
            self._greet(self._client, ANSWER_TIMEOUT_S)
            return self._client
        # MQTT 5 first: only it names the broker's limits and refusals. amqtt never answers it, see Address.legacy.
        modern = (MQTTProtocolVersion.MQTTv5, FIRST_ANSWER_TIMEOUT_S)
        versions = [(MQTTProtocolVersion.MQTTv311, ANSWER_TIMEOUT_S)]
        for version, timeout_s in versions if self._settings.address.legacy else [modern, *versions]:
            client = _make_client(self._settings, version, self._meter)
            client.on_connect = self._on_connect
            client.on_disconnect = self._on_disconnect
            client.on_message = self._on_message
            client.on_plain = self._on_plain
            client.on_publish = self._on_publish
            client.on_subscribe = self._on_subscribe
            client.on_socket_close = self._on_socket_close
            try:
                self._greet(client, timeout_s)
            except BrokerError as error:
                client.release()
                if isinstance(error, _NoAnswerError):
                    continue
                raise
            self._client = client
            return client
        raise failures.silent(self._settings.address, self._spoken)

    def _greet(self, client: MeteredClient, timeout_s: float) -> None:
        """Connect and wait for the answer. Raises BrokerError, as _NoAnswerError when this version gets none."""
        address = self._settings.address
        self._answer, client.alert = None, None
        client.aim(address.host, address.port)
        try:
            client.reconnect()
            deadline = time.monotonic() + timeout_s
            while self._answer is None and not self._stopping.is_set() and (left := deadline - time.monotonic()) > 0:
                if client.loop(min(left, 0.1)) != MQTTErrorCode.MQTT_ERR_SUCCESS:
                    break
            answer: _Answer | None = self._answer
            if answer is None and client.alert is not None:
                raise client.alert
            if answer is None or answer[0].getName() == "Unsupported protocol version":
                raise _NoAnswerError(f"the broker {address} does not answer")
            reason, properties, session_kept = answer
            if reason.is_failure:
                raise failures.refused(address, self._settings.client_id, reason.getName())
        except OSError as error:
            client.drop()
            raise failures.unreachable(address, error, spoken=self._spoken) from error
        except Exception:
            client.drop()
            raise
        self._post(self._listener.opened, client, properties, session_kept)

    def _spoken(self, address: Address) -> str:
        """``port_probe.speaks``, unless its caller has given up meanwhile: it may take seconds."""
        return "" if self._stopping.is_set() else port_probe.speaks(address)

    def _serve(self, client: MeteredClient) -> None:
        """Move packets until the connection ends."""
        self._reason, began = "the connection was closed", time.monotonic()
        try:
            if self._loop is not None:
                self._in_loop = InLoop(client, self._loop)
                if not self._stopping.is_set():
                    self._in_loop.serve()
            if self._stopping.is_set():
                client.disconnect()
            while client.loop(self._patience_s(client)) == MQTTErrorCode.MQTT_ERR_SUCCESS:
                if self._stopping.is_set() and time.monotonic() > self._deadline:
                    break
        finally:
            self._short_lived = self._short_lived + 1 if time.monotonic() - began < STABLE_S else 0
            if self._short_lived >= TAKEN_OVER and _SAME_ID not in self._reason:  # mosquitto 2.0.11 gives no reason
                self._reason += f" {self._short_lived} times in a row; perhaps {_SAME_ID}"
            if not self._stopping.is_set():
                self._post(self._listener.lost, self._reason)

    def _patience_s(self, client: MeteredClient) -> float:
        left_s = self._deadline - time.monotonic() if self._stopping.is_set() else math.inf
        return max(0.0, min(client.patience_s(), left_s))

    def _on_connect(
        self, client: Client, data: object, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        self._answer = reason, properties, bool(flags.session_present)

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
        has = message.properties  # of MQTT 5
        reply = ReplyTo(getattr(has, "ResponseTopic", ""), getattr(has, "CorrelationData", b""))
        self._post(self._listener.message, topic, bytes(message.payload), reply)

    def _on_plain(self, topic: bytes, payload: bytes) -> None:
        with contextlib.suppress(UnicodeDecodeError):  # a peer's malformed topic: none of ours
            self._post(self._listener.message, topic.decode(), payload)

    def _on_publish(self, client: Client, data: object, mid: int, reason: ReasonCode, properties: object) -> None:
        refusal = _refusal(reason)
        if isinstance(client, MeteredClient) and mid in client.oversize:
            client.oversize.discard(mid)
            refusal = TOO_LARGE
        self._post(self._listener.published, mid, refusal)

    def _on_subscribe(
        self, client: Client, data: object, mid: int, reasons: list[ReasonCode], properties: object
    ) -> None:
        self._post(self._listener.subscribed, mid, [_refusal(reason) for reason in reasons])


def correlated(data: bytes) -> Properties:
    """The properties of an MQTT 5 message that answers another."""
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    properties.CorrelationData = data
    return properties


class _NoAnswerError(BrokerError):
    """The peer does not answer a greeting in this version of MQTT."""


def backoff_s(attempt: int, draw: float) -> float:
    """How long to wait before trying again after ``attempt`` (from 0) failures in a row; ``draw`` uniform in 0 … 1."""
    return draw * min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** min(attempt, 16))


def least_wait_s(error: BrokerError) -> float:
    """How long to wait at least before trying again after this failure: minutes where the device was revoked."""
    return random.uniform(REVOKED_S / 2, REVOKED_S) if error.finding == "identity-revoked" else 0.0


def _refusal(reason: ReasonCode) -> str | None:
    return reason.getName() if reason.is_failure else None
