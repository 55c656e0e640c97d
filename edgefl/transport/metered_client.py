"""paho's client with what EdgeFL needs beside: bytes counted, TLS alerts kept, refusals for size, an orderly end."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from paho.mqtt.client import Client, MQTTMessageInfo
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

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


#: Interval of looks at a connection whose answer is overdue; all others sleep until their next ping is due.
LOOK_S = 1.0
#: Bytes read from the socket at once, and of packets written at once.
READ_BYTES = 64 * 1024
#: From so many messages within so many seconds on, several are read at once: to wake another thread for each costs as
#: much as the message. A pause is short beside a round of the dozens of devices that send so many.
MANY, COUNTED_S, PAUSE_S = 25, 0.1, 0.005
#: Reads of packets before what waits is written: a peer's flood of QoS 0 messages, which awaits no answer, holds up
#: neither answers nor pings.
MOST_READS = 1024
#: The first byte's upper half, of packets after which paho does more than send the next.
_PUBLISH, _DISCONNECT = 0x30, 0xE0
_QOS, _QOS_1 = 0x06, 0x02
_SUCCESS, _NO_PROPERTIES = ReasonCode(PacketTypes.PUBACK), Properties(PacketTypes.PUBACK)  # type: ignore[no-untyped-call]


def _joins(packet: Any) -> bool:
    """Whether a queued packet may be written in one piece with others: paho awaits no end of it."""
    kind = packet["command"] & 0xF0
    return bool(kind != _DISCONNECT and (kind != _PUBLISH or packet["qos"] > 0))


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
        #: Takes topic and payload of a message without properties, in place of ``on_message``.
        self.on_plain: Callable[[bytes, bytes], None] | None = None
        self.oversize: set[int] = set()  # ids of messages that the broker refused for their size
        self._moved_at = time.monotonic()  # the last message, either way
        self._sent_at = self._heard_at = self._moved_at  # the last bytes
        self._ahead, self._taken = b"", 0  # read from the socket; how much of it paho has
        self._waits = False  # who serves it waits for the socket, or is about to
        #: Called, in place of a byte to the waiting thread, where an event loop serves it, in that loop's thread.
        self.on_wake: Callable[[], None] | None = None
        self._messages, self._counted_at, self._busy = 0, 0.0, False

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
        self._sent_at = time.monotonic()
        return count

    def _sock_recv(self, bufsize: int) -> bytes:
        """Bytes of what was read ahead: paho asks for a packet's first bytes one by one."""
        if not self._ahead:
            try:
                self._ahead = super()._sock_recv(max(bufsize, READ_BYTES))
            except ssl.SSLError as error:
                self.alert = error
                raise
            self._meter.received += len(self._ahead)
            self._heard_at = time.monotonic()
        begin, self._taken = self._taken, self._taken + bufsize
        data = self._ahead[begin : self._taken]
        if self._taken >= len(self._ahead):
            self._ahead, self._taken = b"", 0
        return data

    def _loop(self, timeout: float = 1.0) -> MQTTErrorCode:
        """Run a step, then read packets that were read ahead, then write the answers."""
        if self._is_busy(time.monotonic()):
            time.sleep(PAUSE_S)
        self._waits = True  # before a look at what waits to be written: what comes later wakes this thread
        code = self._step(0.0 if self._ahead else timeout)
        self._waits = False
        return self._finished(code)

    def pump(self) -> MQTTErrorCode:
        """Read what has come and write the answers, without waiting; for an event loop."""
        code = self._finished(self.loop_read())
        self._waits = True
        return code

    def flush(self) -> MQTTErrorCode:
        """Write what waits, without waiting for room; for an event loop."""
        self._waits = True
        return self.loop_write()

    @property
    def reads_ahead(self) -> bool:
        """True if received bytes wait to be parsed."""
        return bool(self._ahead)

    def _finished(self, code: MQTTErrorCode) -> MQTTErrorCode:
        for _ in range(MOST_READS):
            if not self._ahead or code != MQTTErrorCode.MQTT_ERR_SUCCESS:
                break
            code = self.loop_read()
        if self._out_packet and code == MQTTErrorCode.MQTT_ERR_SUCCESS:
            code = self.loop_write()
        return code

    def _step(self, timeout: float) -> MQTTErrorCode:
        """Wait once, then read, write and ping: paho's step, which waits by select() for descriptors below 1,024."""
        sock, waker = self._sock, self._sockpairR
        if sock is None or waker is None:
            return MQTTErrorCode.MQTT_ERR_NO_CONN
        read_by_tls = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
        waiting = select.poll()
        waiting.register(sock, select.POLLIN | (select.POLLOUT if self.want_write() else 0))
        waiting.register(waker, select.POLLIN)
        ready = dict(waiting.poll(0 if read_by_tls else math.ceil(1000 * timeout)))
        state, woken = ready.get(sock.fileno(), 0), waker.fileno() in ready
        if read_by_tls or state & ~select.POLLOUT:
            code = self.loop_read()
            if code != MQTTErrorCode.MQTT_ERR_SUCCESS or self._sock is None:
                return code
        if woken:
            with contextlib.suppress(BlockingIOError):
                waker.recv(10_000)
        if woken or state & select.POLLOUT:
            code = self.loop_write()
            if code != MQTTErrorCode.MQTT_ERR_SUCCESS or self._sock is None:
                return code
        return self.loop_misc()

    def patience_s(self) -> float:
        """Seconds that ``loop`` may wait: until a ping is due."""
        silent_s = time.monotonic() - min(self._sent_at, self._heard_at)
        return max(LOOK_S, (self._pace_s() or IDLE_AFTER_S) - silent_s)

    def wake(self) -> None:
        """Have ``loop`` return. Callable from any thread."""
        self._waits = False
        if self.on_wake is not None:
            self.on_wake()
            return
        waker = self._sockpairW
        if waker is not None:
            with contextlib.suppress(OSError):  # as many bytes wait already as there is room for, or it has been closed
                waker.send(b"0")

    def _pace_s(self) -> int:
        """Silence after which a ping goes out: shorter while messages flow; 0 for no pings."""
        idle = time.monotonic() - self._moved_at >= IDLE_AFTER_S
        return self._keepalive if idle else min(self._keepalive, BUSY_KEEPALIVE_S)

    def _is_busy(self, now: float) -> bool:
        """True while so many messages arrive that to read several at once is worth a pause."""
        if now - self._counted_at >= COUNTED_S:
            self._busy = self._messages >= MANY
            self._counted_at, self._messages = now, 0
        return self._busy

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Read as paho does; answers are written afterwards, without waking this thread for each."""
        self._waits = False
        return super().loop_read(max_packets)

    def _packet_queue(
        self, command: int, packet: bytes | bytearray, mid: int, qos: int, info: MQTTMessageInfo | None = None
    ) -> MQTTErrorCode:
        """Queue a packet, and wake the thread that writes if it waits: paho writes a byte to it for each."""
        entry: Any = {"command": command, "mid": mid, "qos": qos, "pos": 0, "packet": packet, "info": info}
        self._out_packet.append(entry | {"to_process": len(packet)})
        if self._waits:
            self.wake()
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _packet_write(self) -> MQTTErrorCode:
        """Write what waits, small packets together: a call for each is most of what they cost."""
        together: list[Any] = []
        size = 0
        while len(self._out_packet) > bool(not together) and _joins(self._out_packet[0]) and size < READ_BYTES:
            together.append(self._out_packet.popleft())
            size += together[-1]["to_process"]
        if together:
            packet = b"".join(one["packet"] for one in together)
            self._out_packet.appendleft(together[0] | {"packet": packet, "to_process": size})
        return super()._packet_write()

    def _call_socket_open(self, sock: Any) -> None:
        self._meter.opened = sock
        self._ahead, self._taken = b"", 0
        self._sent_at = self._heard_at = time.monotonic()
        super()._call_socket_open(sock)

    def _call_socket_close(self, sock: Any) -> None:
        self._meter.close()
        super()._call_socket_close(sock)

    def publish(self, *arguments: Any, **named: Any) -> MQTTMessageInfo:
        """Publish as paho does, and note the time."""
        self._moved_at = time.monotonic()
        return super().publish(*arguments, **named)

    def _handle_publish(self) -> MQTTErrorCode:
        """Hand over a message as it comes from a device: QoS 1, without properties. Others go paho's way."""
        self._moved_at = time.monotonic()
        self._messages += 1
        command, packet = self._in_packet["command"], self._in_packet["packet"]
        end = 2 + int.from_bytes(packet[:2], "big")  # of the topic; then the packet's id, the properties' length
        modern = self.protocol == MQTTProtocolVersion.MQTTv5
        body = end + 2 + modern
        if command & _QOS != _QOS_1 or self.on_plain is None or len(packet) < body or (modern and packet[body - 1]):
            return super()._handle_publish()
        self.on_plain(bytes(packet[2:end]), bytes(memoryview(packet)[body:]))
        return self._send_puback(int.from_bytes(packet[end : end + 2], "big"))

    def loop_misc(self) -> MQTTErrorCode:
        """Run paho's housekeeping, with more frequent pings while messages flow."""
        agreed, self._keepalive = self._keepalive, self._pace_s()
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
        if cmd == "PUBACK" and len(packet) == 2:  # as nearly all are
            mid = int.from_bytes(packet, "big")
            with self._out_message_mutex:
                if mid in self._out_messages:
                    return self._do_on_publish(mid, _SUCCESS, _NO_PROPERTIES)
            return MQTTErrorCode.MQTT_ERR_SUCCESS
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
