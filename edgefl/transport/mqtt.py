"""The MQTT transport: one persistent session with a broker, QoS 1, in asyncio's terms.

The network runs in a thread of its own (``link``) or, of agents, in the event loop; reports are handed over to the
event loop's thread, where all state of this file lives.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import Properties

from edgefl.errors import BrokerError
from edgefl.transport import failures
from edgefl.transport.address import Address, parse_url
from edgefl.transport.interface import DEFAULT_MAX_PAYLOAD, NO_REPLY, Limits, ReplyTo, Will, check_payload, closed_error
from edgefl.transport.link import QUOTA, TOO_LARGE, Link, Settings, TlsFiles, correlated, load_own, tls_context
from edgefl.transport.metered_client import Meter, MeteredClient

_LOG = logging.getLogger(__name__)
_Refusals = list[str | None]  # of a subscription, one a pattern

#: Interval of log lines with the reason why a lost broker is still unreachable: six an hour, so that the log of
#: the last minutes has one.
REMIND_S = 600.0
#: Messages sent and not yet acknowledged by the broker. The default of paho and mosquitto; at 20 ms round trip and 96
#: KiB that is 98 MB/s, and it bounds memory: window × payload.
WINDOW = 20
#: Bytes of a PUBLISH packet besides its payload: fixed header (5), topic (2 + up to 256), id (2), properties; rounded
#: up.
PACKET_OVERHEAD_BYTES = 1024

#: A call may meet a connection that is lost but not yet reported so; the report is on its way through the event loop.
_LOSS_NOTICE_S = 0.02
#: Reports that are run before others have their turn in the event loop: one in the loop's own way costs as much again.
AT_ONCE = 16
_KEPT = (MQTTErrorCode.MQTT_ERR_SUCCESS, MQTTErrorCode.MQTT_ERR_NO_CONN)
_LOST: _Refusals = []
#: In place of a refusal, for a message at which each connection ended.
CLOSES = "it closes the connection"
#: A broker that closes the connection on a large message does so each time; a network that cuts it off at the same
#: message twice, without a larger one ever having passed, is better served by smaller messages, too.
LOSSES = 2
#: Smaller messages are sent again after every loss: no broker's limit is below this.
LEAST_BYTES = 4096


class Sizes:
    """Sizes of one client's messages, to find one that the broker closes the connection for: many announce no limit.

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


class _Message(NamedTuple):
    """A message to send. ``sent``: ends once the broker has it."""

    topic: str
    payload: bytes
    retain: bool
    correlation: bytes
    sent: asyncio.Future[None]


class MqttTransport:
    """See ``Transport``. MQTT 5 where the broker speaks it, else 3.1.1 (``?version=3`` in the URL skips the first try).

    User and password come from the URL; ``mqtts://`` or any of the ``tls`` files means TLS. Raises BrokerError for a
    malformed URL. ``others``: further URLs of the same broker, for when one fails. ``in_loop``: the event loop moves
    packets, and must not be busy for long; else a thread does, and pings go out whatever the loop does.
    """

    def __init__(
        self,
        url: str,
        client_id: str,
        will: Will | None = None,
        *,
        tls: TlsFiles | None = None,
        clean_session: bool = False,
        others: Sequence[str] = (),
        in_loop: bool = False,
    ) -> None:
        self._in_loop, self._thread = in_loop, 0
        self.on_message: Callable[[str, bytes], None] = lambda topic, payload: None
        self.on_connection: Callable[[bool], None] = lambda connected: None
        #: In place of ``on_message``, for who answers requests of others.
        self.on_request: Callable[[str, bytes, ReplyTo], None] | None = None
        self.max_payload = DEFAULT_MAX_PAYLOAD
        self.session_kept = False
        self.limits = Limits()
        self.wired = True
        self._files = tls or TlsFiles()
        address = parse_url(url)
        address = dataclasses.replace(address, tls=address.tls or any(self._files))
        self._settings = Settings(address, client_id, will, clean_session=clean_session)
        self._others = tuple(parse_url(other) for other in others)
        self._meter = Meter()
        self._patterns: list[str] = []
        self._unwanted: list[str] = []  # to be unsubscribed
        self._waiting: deque[_Message] = deque()  # for the connection, or room in the window
        self._room = WINDOW
        self._pending: dict[int, _Message] = {}
        self._answers: dict[int, asyncio.Future[_Refusals]] = {}
        self._renewal: tuple[int, list[str]] | None = None
        self._link: Link | None = None
        self._client: MeteredClient | None = None
        self._closed = False
        self._reports: deque[Callable[[], None]] = deque()
        self._complaint, self._remind_at = "", 0.0
        self._sizes = Sizes()
        self._found: int | None = None  # the largest payload, where the broker has shown that it takes no larger one

    @property
    def address(self) -> Address:
        """The broker's address, as dialled last."""
        return self._settings.address if self._link is None else self._link.address

    def dial_also(self, urls: Sequence[str]) -> None:
        """Know the broker by these URLs as well, in place of those known beside the first. Raises BrokerError."""
        self._others = tuple(parse_url(url) for url in urls)
        if self._link is not None:
            self._link.others = self._others

    @property
    def bytes_sent(self) -> int:
        """Bytes written to the socket, all packets of all connections."""
        return self._meter.sent

    @property
    def bytes_received(self) -> int:
        """Bytes read from the socket."""
        return self._meter.received

    @property
    def bytes_on_link(self) -> int | None:
        """Bytes both ways by the kernel's count."""
        return self._meter.on_link

    async def connect(self) -> None:
        """See ``Transport.connect``; call once."""
        if self._link is not None or self._closed:
            raise BrokerError("a transport connects once", remedy="Make a new one with the same client id.")
        self._settings = dataclasses.replace(self._settings, tls=tls_context(self.address, self._files))
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._up = asyncio.Event()
        self._first: asyncio.Future[None] = self._loop.create_future()
        self._link = Link(self._settings, self, self._meter, self._loop if self._in_loop else None)
        self._link.others = self._others
        self._link.start()
        try:
            await self._first
        except BaseException:
            await self.close()
            raise

    def read_certificate_again(self) -> None:
        """The next connection shows the certificate that the files hold now. Raises BrokerError when it is unusable."""
        if self._settings.tls is not None:
            load_own(self._settings.tls, self._files)

    async def subscribe(self, patterns: list[str]) -> None:
        """See ``Transport.subscribe``; before ``connect`` it only remembers."""
        new = [pattern for pattern in dict.fromkeys(patterns) if pattern not in self._patterns]
        self._patterns.extend(new)
        self._unwanted = [pattern for pattern in self._unwanted if pattern not in new]
        if self._link is None or not new:
            return
        while True:
            client = await self._connected()
            code, mid = client.subscribe([(pattern, 1) for pattern in new])
            if code == MQTTErrorCode.MQTT_ERR_SUCCESS and mid is not None:
                break
            await asyncio.sleep(_LOSS_NOTICE_S)
        answer: asyncio.Future[_Refusals] = self._loop.create_future()
        self._answers[mid] = answer
        refusals = await answer
        if refusals is _LOST:
            await self._connected()  # the next connection has renewed every pattern by then
        else:
            try:
                self._check_refusals(new, refusals)
            except BrokerError:
                self._patterns = [pattern for pattern in self._patterns if pattern not in new]
                raise

    def unsubscribe(self, patterns: list[str]) -> None:
        """See ``Transport.unsubscribe``."""
        self._patterns = [pattern for pattern in self._patterns if pattern not in patterns]
        if self._link is None:
            return
        self._unwanted.extend(patterns)
        if self._up.is_set():
            self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        if self._unwanted and self._client is not None:
            code, _ = self._client.unsubscribe(self._unwanted)
            if code == MQTTErrorCode.MQTT_ERR_SUCCESS:  # else at the next connection
                self._unwanted = []

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, correlation: bytes = b"") -> Awaitable[None]:
        """See ``Transport.publish``. ``correlation``: of the MQTT 5 request that this answers.

        A task for each message cost more than the rest of this file.
        """
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            if self._link is None or self._closed:
                raise closed_error(self._settings.client_id)
            check_payload(topic, payload, self.max_payload)
        except BrokerError as error:
            sent.set_exception(error)
        else:
            self._waiting.append(_Message(topic, payload, retain, correlation, sent))
            self._send_waiting()
        return sent

    def _send_waiting(self) -> None:
        """Send what waits, as far as there are a connection and room in the window."""
        while self._waiting and self._room and self._client is not None and self._up.is_set():
            one = self._waiting.popleft()
            if one.sent.done():  # its caller has given up
                continue
            properties = correlated(one.correlation) if one.correlation else None
            information = self._client.publish(one.topic, one.payload, qos=1, retain=one.retain, properties=properties)
            if information.rc not in _KEPT:
                one.sent.set_exception(BrokerError(f"could not send on {one.topic}: {information.rc.name}"))
                continue
            self._room -= 1
            self._pending[information.mid] = one  # after a loss paho itself sends it again
            self._sizes.sent(information.mid, len(one.payload))

    def admit(self, payload_bytes: int) -> None:
        """See ``Transport.admit``. A size that was refused here is not tried again."""
        if not self.limits.packet_bytes and self._found is None:
            self.max_payload = max(self.max_payload, payload_bytes)

    async def close(self) -> None:
        """See ``Transport.close``. Pending calls raise BrokerError."""
        if self._closed or self._link is None:
            self._closed = True
            return
        self._closed = True
        self._up.set()
        messages = [one.sent for one in (*self._pending.values(), *self._waiting)]
        waiting: list[asyncio.Future[Any]] = [*messages, *self._answers.values(), self._first]
        for future in waiting:
            if not future.done():
                future.set_exception(closed_error(self._settings.client_id))
                future.exception()  # marks it as seen: there may be no waiter any more
        self._pending.clear()
        self._waiting.clear()
        self._answers.clear()
        await self._loop.run_in_executor(None, self._link.stop)

    async def _connected(self) -> MeteredClient:
        """The client, once the connection is there. Raises BrokerError after ``close``."""
        await self._up.wait()
        if self._closed or self._client is None:
            raise closed_error(self._settings.client_id)
        return self._client

    # See ``link.Listener``: ``post`` runs in the link's thread, all others in the event loop's.

    def post(self, report: Callable[[], None]) -> None:
        """Have the event loop's thread run ``report``, in their order, unless the transport is closed by then."""
        self._reports.append(report)
        if len(self._reports) > 1:  # an earlier one has woken the loop, which costs more than a small message
            return
        try:
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._run_reports)
            else:
                self._loop.call_soon_threadsafe(self._run_reports)
        except RuntimeError:  # the loop was closed and the transport was not
            self._reports.clear()

    def _run_reports(self) -> None:
        try:
            for _ in range(AT_ONCE):
                if not self._reports:
                    return
                self._run_report(self._reports.popleft())
        finally:
            if self._reports:
                self._loop.call_soon(self._run_reports)

    def _run_report(self, report: Callable[[], None]) -> None:
        if not self._closed:
            report()

    def opened(self, client: MeteredClient, properties: Properties | None, session_kept: bool) -> None:
        self._client = client
        self.session_kept = session_kept
        limit = getattr(properties, "MaximumPacketSize", None)
        in_flight = getattr(properties, "ReceiveMaximum", WINDOW)
        version = "5" if client.protocol == MQTTProtocolVersion.MQTTv5 else "3.1.1"
        self.limits = Limits(version, min(in_flight, WINDOW), limit or 0)
        if not self._first.done() and in_flight < WINDOW:
            self._room = in_flight
        if limit:
            self.max_payload = max(1, min(limit - PACKET_OVERHEAD_BYTES, 2**28 - PACKET_OVERHEAD_BYTES))
        if self._found is not None:
            self.max_payload = min(self.max_payload, self._found)
        if not self._patterns:
            self._ready()
            return
        patterns = list(self._patterns)
        code, mid = client.subscribe([(pattern, 1) for pattern in patterns])
        if code == MQTTErrorCode.MQTT_ERR_SUCCESS and mid is not None:
            self._renewal = (mid, patterns)  # else it is lost again already, and the next connection renews

    def _ready(self) -> None:
        self._complaint = ""
        self._drop_unwanted()
        self._up.set()
        self.on_connection(True)
        self._send_waiting()
        if not self._first.done():
            self._first.set_result(None)
        else:
            _LOG.warning("the broker %s answers again", self.address)

    def lost(self, reason: str) -> None:
        self._renewal = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(_LOST)
        self._answers.clear()
        if self._up.is_set():
            self._up.clear()
            self.on_connection(False)
        _LOG.warning("lost the broker %s: %s", self.address, reason)
        mid = self._sizes.lost()
        if mid is not None and self._client is not None:
            self._client.withdraw(mid)
            self.published(mid, CLOSES)

    def failed(self, error: BrokerError, final: bool) -> None:
        if not self._first.done():
            if final:
                self._first.set_exception(error)
        elif error.message != self._complaint or time.monotonic() >= self._remind_at:  # not at every attempt
            self._complaint, self._remind_at = error.message, time.monotonic() + REMIND_S
            _LOG.warning("%s; trying again. %s", error.message, error.remedy)

    def message(self, topic: str, payload: bytes, reply: ReplyTo = NO_REPLY) -> None:
        if self.on_request is not None:
            self.on_request(topic, payload, reply)
        else:
            self.on_message(topic, payload)

    def published(self, mid: int, refusal: str | None) -> None:
        if refusal is None:
            self._sizes.taken(mid)
        elif (size := self._sizes.refused(mid)) and refusal in {TOO_LARGE, CLOSES}:
            self._found = size - 1
            self.max_payload = min(self.max_payload, self._found)
        one = self._pending.pop(mid, None)
        if one is None:
            return
        self._room += 1
        if one.sent.done():
            pass  # its caller has given up
        elif refusal is None:
            one.sent.set_result(None)
        elif refusal in {TOO_LARGE, QUOTA, CLOSES}:
            one.sent.set_exception(failures.too_large(self.address, one.topic, len(one.payload), refusal))
        else:
            one.sent.set_exception(failures.denied(self.address, one.topic, "publish to", refusal))
        self._send_waiting()

    def subscribed(self, mid: int, refusals: _Refusals) -> None:
        if self._renewal is not None and mid == self._renewal[0]:
            patterns, self._renewal = self._renewal[1], None
            try:
                self._check_refusals(patterns, refusals)
            except BrokerError as error:
                if not self._first.done():
                    self._first.set_exception(error)
                    return
                _LOG.error("%s", error.message)
            self._ready()
        else:
            answer = self._answers.pop(mid, None)
            if answer is not None and not answer.done():
                answer.set_result(refusals)

    def _check_refusals(self, patterns: list[str], refusals: _Refusals) -> None:
        for pattern, refusal in zip(patterns, refusals, strict=False):  # as many as the broker cared to answer
            if refusal is not None:
                raise failures.denied(self.address, pattern, "subscribe to", refusal)
