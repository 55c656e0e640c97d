"""paho's client with what EdgeFL needs beside: bytes counted, TLS alerts kept, refusals for size, an orderly end."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from dataclasses import dataclass
from typing import Any, Literal

from paho.mqtt.client import Client, MQTTMessageInfo
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion

#: How long to wait for the broker to close its side after DISCONNECT: a round trip, generously.
HANG_UP_S = 0.5
#: Silence after which a ping goes out while messages come and go: in a run a lost link is noticed in twice that.
BUSY_KEEPALIVE_S = 30
#: Without a message for as long, a connection is idle, and its own keep-alive holds. Heartbeats come every 10 s.
IDLE_AFTER_S = 60.0
#: Reasons of MQTT 5. paho admits the second one in a PUBACK, and not the first.
_PACKET_TOO_LARGE, _QUOTA_EXCEEDED = 0x95, 0x97


#: Fields of Linux' tcp_info: bytes received, and segments either way; bytes sent, retransmitted ones included.
_RECEIVED, _SEGMENTS, _SENT = struct.Struct("=128xQ"), struct.Struct("=136xII"), struct.Struct("=200xQ")
#: Headers of IPv4 and of TCP with time stamps.
HEADER_BYTES = 52


@dataclass
class Meter:
    """Bytes through the socket, and on the link, over all connections of a transport."""

    sent: int = 0
    received: int = 0
    opened: socket.socket | None = None
    closed_bytes: int = 0  # on the link, of connections before

    def close(self) -> None:
        """Count the connection that ends."""
        self.closed_bytes, self.opened = self.closed_bytes + (link_bytes(self.opened) or 0), None

    @property
    def on_link(self) -> int | None:
        """Bytes both ways by the kernel's count, with TLS and headers; None where it tells none."""
        here = link_bytes(self.opened)
        return None if here is None else self.closed_bytes + here


def link_bytes(opened: socket.socket | None) -> int | None:
    """Bytes of a connection on the link both ways; None where the kernel does not tell, or it is closed."""
    if opened is None or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT.size)
    except OSError:
        return None
    if len(info) < _SENT.size:  # before Linux 4.19
        return None
    payload = _SENT.unpack(info)[0] + _RECEIVED.unpack_from(info)[0]
    return int(payload + HEADER_BYTES * sum(_SEGMENTS.unpack_from(info)))


class MeteredClient(Client):
    """paho's client, counting at the two calls that touch its socket.

    Exact for plain TCP: a test compares it with a proxy that counts. Under TLS it counts what enters and leaves the
    TLS session, so without handshake and record headers (about 0.2 % for chunks).
    """

    def __init__(self, meter: Meter, **options: Any) -> None:
        super().__init__(CallbackAPIVersion.VERSION2, **options)
        self._meter = meter
        self.alert: ssl.SSLError | None = None  # the peer's last TLS alert; paho only logs it
        self._aimed: dict[str, Any] = {}
        self.oversize: set[int] = set()  # ids of messages that the broker refused for their size
        self._moved_at = time.monotonic()  # the last message, either way

    def aim(self, host: str, port: int, **options: Any) -> None:
        """Have the next ``reconnect`` dial this address. ``options``: as of ``connect_async``; default, as before."""
        self._aimed = options or self._aimed
        self.connect_async(host, port, **self._aimed)

    def _sock_send(self, buf: bytes | bytearray) -> int:
        try:
            count = super()._sock_send(buf)
        except ssl.SSLError as error:
            self.alert = error
            raise
        self._meter.sent += count
        return count

    def _sock_recv(self, bufsize: int) -> bytes:
        try:
            data = super()._sock_recv(bufsize)
        except ssl.SSLError as error:
            self.alert = error
            raise
        self._meter.received += len(data)
        return data

    def _call_socket_open(self, sock: Any) -> None:
        self._meter.opened = sock
        super()._call_socket_open(sock)

    def _call_socket_close(self, sock: Any) -> None:
        self._meter.close()
        super()._call_socket_close(sock)

    def publish(self, *arguments: Any, **named: Any) -> MQTTMessageInfo:
        """Publish as paho does, and note the time."""
        self._moved_at = time.monotonic()
        return super().publish(*arguments, **named)

    def _handle_publish(self) -> MQTTErrorCode:
        self._moved_at = time.monotonic()
        return super()._handle_publish()

    def loop_misc(self) -> MQTTErrorCode:
        """Run paho's housekeeping, with more frequent pings while messages flow."""
        agreed = self._keepalive
        if time.monotonic() - self._moved_at < IDLE_AFTER_S:
            self._keepalive = min(agreed, BUSY_KEEPALIVE_S)
        try:
            return super().loop_misc()
        finally:
            self._keepalive = agreed

    def _ssl_wrap_socket(self, tcp_sock: socket.socket) -> ssl.SSLSocket:
        """Wrap the socket in TLS, and close it when the handshake fails: paho leaks it."""
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
        """Handle an acknowledgement, keeping the connection on "packet too large".

        mosquitto refuses so what exceeds its message_size_limit; paho does not know that reason here, and disconnects.
        """
        packet = self._in_packet["packet"]
        if self.protocol == MQTTProtocolVersion.MQTTv5 and len(packet) > 2 and packet[2] == _PACKET_TOO_LARGE:
            self.oversize.add(int.from_bytes(packet[:2], "big"))
            packet[2] = _QUOTA_EXCEEDED
        return super()._handle_pubackcomp(cmd)

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
