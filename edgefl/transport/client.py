"""A paho client set up the way EdgeFL needs it: measured, without Nagle's delay, with a persistent session."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from edgefl.transport import failures
from edgefl.transport.address import Address
from edgefl.transport.base import Will

#: How long opening the socket, TLS included, may take: several round trips of a bad mobile link.
CONNECT_TIMEOUT_S = 5.0
#: How long to wait for the broker to close its side after DISCONNECT: a round trip, generously.
HANG_UP_S = 0.5
#: How long the broker keeps an absent client's session: a device switched off overnight finds its messages, one that
#: was scrapped does not hold a queue for ever.
SESSION_EXPIRY_S = 24 * 3600
#: Largest packet a broker may send us. MQTT 5 brokers drop larger ones; with 3.1.1 only the broker's own limit
#: protects. Equal to mosquitto's default since 2.1 and to what the generated configuration admits.
MAX_PACKET_BYTES = 2 * 2**20
#: Reasons of MQTT 5. paho admits the second one in a PUBACK, and not the first.
_PACKET_TOO_LARGE, _QUOTA_EXCEEDED = 0x95, 0x97


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
    keepalive_s: int = 30
    clean_session: bool = False


@dataclass
class Meter:
    """Bytes through the socket, over all connections of a transport."""

    sent: int = 0
    received: int = 0


class MeteredClient(Client):
    """paho's client, counting at the two calls that touch its socket.

    Exact for plain TCP: a test compares it with a proxy that counts. Under TLS it counts what enters and leaves the
    TLS session, so without handshake and record headers (about 0.2 % for chunks).
    """

    def __init__(self, meter: Meter, **options: Any) -> None:
        super().__init__(CallbackAPIVersion.VERSION2, **options)
        self._meter = meter
        self.alert: ssl.SSLError | None = None  # the peer's last TLS alert; paho only logs it
        self._oversize: set[int] = set()

    def _sock_send(self, buf: bytes | bytearray) -> int:
        with self._heeding():
            count = super()._sock_send(buf)
        self._meter.sent += count
        return count

    def _sock_recv(self, bufsize: int) -> bytes:
        with self._heeding():
            data = super()._sock_recv(bufsize)
        self._meter.received += len(data)
        return data

    @contextlib.contextmanager
    def _heeding(self) -> Iterator[None]:
        try:
            yield
        except ssl.SSLError as error:
            self.alert = error
            raise

    def _ssl_wrap_socket(self, tcp_sock: socket.socket) -> ssl.SSLSocket:
        """As paho's, which leaks the socket when the handshake fails."""
        if self._ssl_context is None:
            raise ssl.SSLError("no TLS context")
        wrapped = self._ssl_context.wrap_socket(tcp_sock, server_hostname=self.host, do_handshake_on_connect=False)
        try:
            wrapped.settimeout(self.connect_timeout)
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        return wrapped

    def _handle_pubackcomp(self, cmd: Literal["PUBACK", "PUBCOMP"]) -> MQTTErrorCode:
        """As paho's, which ends the connection on a reason that it does not know for this packet.

        mosquitto refuses what exceeds its message_size_limit so.
        """
        packet = self._in_packet["packet"]
        if self.protocol == MQTTProtocolVersion.MQTTv5 and len(packet) > 2 and packet[2] == _PACKET_TOO_LARGE:
            self._oversize.add(int.from_bytes(packet[:2], "big"))
            packet[2] = _QUOTA_EXCEEDED
        return super()._handle_pubackcomp(cmd)

    def refused_as_too_large(self, mid: int) -> bool:
        """Whether the broker has just refused this message for its size."""
        known = mid in self._oversize
        self._oversize.discard(mid)
        return known

    def withdraw(self, mid: int) -> None:
        """Do not send this message again when the connection is back."""
        with self._out_message_mutex:
            if self._out_messages.pop(mid, None) is not None:
                self._inflight_messages -= 1

    def drop(self) -> None:
        """Close the connection without DISCONNECT. It may connect again, and other threads may go on publishing."""
        self._sock_close()

    def release(self) -> None:
        """Close everything, the pair of sockets that wakes the loop included. No call may follow."""
        self._reset_sockets()

    def hang_up(self, opened: socket.socket) -> None:
        """Close our direction and read until the broker has closed its own, or HANG_UP_S have passed.

        Closing a socket with unread data resets it, and a broker may then miss the DISCONNECT and send the will.
        """
        try:
            opened.settimeout(HANG_UP_S)
            if isinstance(opened, ssl.SSLSocket):
                opened.unwrap()
                return
            opened.shutdown(socket.SHUT_WR)
            while data := opened.recv(65536):
                self._meter.received += len(data)
        except (OSError, ValueError):
            pass  # gone already, or deaf


def make_client(settings: Settings, version: MQTTProtocolVersion, meter: Meter) -> MeteredClient:
    """A client ready for ``reconnect()``, without callbacks for packets yet."""
    modern = version == MQTTProtocolVersion.MQTTv5
    session = {} if modern else {"clean_session": settings.clean_session}
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
    client.on_socket_register_write = _leave_writing_to_loop
    client.connect_async(
        settings.address.host,
        settings.address.port,
        settings.keepalive_s,
        clean_start=settings.clean_session,
        properties=_connect_properties(settings.clean_session) if modern else None,
    )
    return client


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


def _connect_properties(clean_session: bool) -> Properties:
    properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call] # paho leaves this class untyped
    properties.MaximumPacketSize = MAX_PACKET_BYTES
    if not clean_session:
        properties.SessionExpiryInterval = SESSION_EXPIRY_S
    return properties


def _set_no_delay(client: Client, data: object, opened: object) -> None:
    """paho leaves Nagle's algorithm on, which costs a windowed transfer about ten times its speed."""
    if isinstance(opened, socket.socket):
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _leave_writing_to_loop(client: Client, data: object, opened: object) -> None:
    pass
