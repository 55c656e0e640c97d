"""A broker inside the process, for runs in one process and tests: same promises as MQTT."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from paho.mqtt.client import topic_matches_sub

from edgefl.errors import BrokerError
from edgefl.transport.interface import DEFAULT_MAX_PAYLOAD, Limits, Will, check_payload, closed_error

S = TypeVar("S")
Message = tuple[str, bytes]  # topic, payload


@dataclass(eq=False)
class Session:
    """The broker's session of a client, connected or not. ``number``: in the order of their first connections."""

    client_id: str
    number: int
    transport: MemoryTransport | None = None
    patterns: set[str] = field(default_factory=set)
    queue: list[Message] = field(default_factory=list)

    def deliver(self, message: Message) -> None:
        """Hand a message to the client, or queue it while it is away."""
        if self.transport is None:
            self.queue.append(message)
        else:
            self.transport.arrive(*message)


@dataclass
class Subscriptions(Generic[S]):
    """Who wants which topics: a tree of the patterns' levels. A topic takes as many steps as it has levels.

    Of thousands of clients that subscribe to topics of their own, looking at each pattern of each would take longer
    than all the rest of a simulated fleet. ``here``: whose pattern ends at this level.
    """

    below: dict[str, Subscriptions[S]] = field(default_factory=dict)
    here: set[S] = field(default_factory=set)

    def add(self, pattern: str, who: S) -> None:
        """Subscribe to an MQTT pattern: + is one level, # at the end any number of them."""
        node = self
        for level in pattern.split("/"):
            node = node.below.setdefault(level, Subscriptions())
        node.here.add(who)

    def remove(self, pattern: str, who: S) -> None:
        """End a subscription, and forget levels that hold no other."""
        level, _, rest = pattern.partition("/")
        if (node := self.below.get(level)) is None:
            return
        if rest:
            node.remove(rest, who)
        else:
            node.here.discard(who)
        if not node.below and not node.here:
            del self.below[level]

    def of(self, topic: str) -> set[S]:
        """Who wants this topic. No wildcard stands for a first level that begins with $."""
        found: set[S] = set()
        nodes = [self]
        for place, level in enumerate(topic.split("/")):
            names = [level] if place == 0 and level.startswith("$") else [level, "+", "#"]
            steps = [(name, node.below[name]) for node in nodes for name in names if name in node.below]
            found.update(*(node.here for name, node in steps if name == "#"))
            nodes = [node for name, node in steps if name != "#"]
        for node in nodes:
            found |= node.here
            if "#" in node.below:
                found |= node.below["#"].here
        return found


class MemoryBroker:
    """Delivers between the MemoryTransports of one event loop, each message after ``delay_s`` seconds."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self._sessions: dict[str, Session] = {}
        self._retained: dict[str, bytes] = {}
        self._subscriptions = Subscriptions[Session]()

    def attach(self, client_id: str, transport: MemoryTransport) -> None:
        """Connect a client to its session; an older connection with the same id is cut off, as MQTT demands."""
        session = self._sessions.setdefault(client_id, Session(client_id, len(self._sessions)))
        if session.transport is not None and session.transport is not transport:
            session.transport.lost()
        session.transport = transport

    def resume(self, client_id: str) -> None:
        """Deliver the messages queued while the client was away."""
        session = self._sessions[client_id]
        waiting, session.queue = session.queue, []
        self._send(session, waiting)

    def detach(self, client_id: str, transport: MemoryTransport) -> None:
        """An orderly DISCONNECT: no will, the session stays."""
        session = self._sessions.get(client_id)
        if session is not None and session.transport is transport:
            session.transport = None

    def subscribe(self, client_id: str, patterns: list[str]) -> None:
        """Add patterns to a session and deliver the messages retained for them, at every call, as MQTT does."""
        session = self._sessions[client_id]
        for pattern in patterns:
            if pattern not in session.patterns:
                session.patterns.add(pattern)
                self._subscriptions.add(pattern, session)
            retained = [message for message in self._retained.items() if topic_matches_sub(pattern, message[0])]
            self._send(session, retained)

    def unsubscribe(self, client_id: str, patterns: list[str]) -> None:
        """Take patterns from a session."""
        session = self._sessions[client_id]
        for pattern in session.patterns.intersection(patterns):
            session.patterns.remove(pattern)
            self._subscriptions.remove(pattern, session)

    def publish(self, topic: str, payload: bytes, *, retain: bool) -> None:
        """Pass a message on to every session that wants it."""
        if retain and payload:
            self._retained[topic] = payload
        elif retain:
            self._retained.pop(topic, None)
        for session in sorted(self._subscriptions.of(topic), key=lambda one: one.number):
            self._pass_on(session, (topic, payload))

    def _pass_on(self, session: Session, message: Message) -> None:
        self._send(session, [message])

    def _send(self, session: Session, messages: list[Message]) -> None:
        for message in messages:
            later(self.delay_s, partial(session.deliver, message))


class MemoryTransport:
    """See ``Transport``. Counts topic and payload as its bytes, since nothing else travels."""

    def __init__(self, broker: MemoryBroker, client_id: str, will: Will | None = None) -> None:
        self.on_message: Callable[[str, bytes], None] = lambda topic, payload: None
        self.on_connection: Callable[[bool], None] = lambda connected: None
        self.max_payload = DEFAULT_MAX_PAYLOAD
        self.session_kept = True
        self.limits = Limits("memory", certain=True)
        self.wired = False
        self.will = will
        self.bytes_sent = 0
        self.bytes_received = 0
        self.bytes_on_link = None
        self._broker = broker
        self._client_id = client_id
        self._patterns: list[str] = []
        self._up = asyncio.Event()
        self._state = "new"

    async def connect(self) -> None:
        """See ``Transport.connect``."""
        self._state = "open"
        self.come_back()

    async def subscribe(self, patterns: list[str]) -> None:
        """See ``Transport.subscribe``; before ``connect`` it only remembers."""
        self._patterns.extend(patterns)
        if self._state != "new":
            await self._connected()
            self._broker.subscribe(self._client_id, patterns)

    def unsubscribe(self, patterns: list[str]) -> None:
        """See ``Transport.unsubscribe``."""
        self._patterns = [pattern for pattern in self._patterns if pattern not in patterns]
        if self._state != "new":
            self._broker.unsubscribe(self._client_id, patterns)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> Awaitable[None]:
        """See ``Transport.publish``; ended at once where the broker takes no time."""
        if self._broker.delay_s > 0 or not self._up.is_set():
            return self._publish_later(topic, payload, retain=retain)
        sent = asyncio.get_running_loop().create_future()
        try:
            self._publish(topic, payload, retain=retain)
        except BrokerError as error:
            sent.set_exception(error)
        else:
            sent.set_result(None)
        return sent

    def _publish(self, topic: str, payload: bytes, *, retain: bool) -> None:
        if self._state != "open":
            raise closed_error(self._client_id)
        check_payload(topic, payload, self.max_payload)
        self.bytes_sent += len(topic.encode()) + len(payload)
        self._broker.publish(topic, payload, retain=retain)

    async def _publish_later(self, topic: str, payload: bytes, *, retain: bool) -> None:
        if self._state != "open":
            raise closed_error(self._client_id)
        check_payload(topic, payload, self.max_payload)
        await self._connected()
        self._publish(topic, payload, retain=retain)
        await asyncio.sleep(self._broker.delay_s)

    def admit(self, payload_bytes: int) -> None:
        """See ``Transport.admit``; here the limit is certain."""

    async def close(self) -> None:
        """See ``Transport.close``."""
        self._state = "closed"
        self._up.set()
        self._broker.detach(self._client_id, self)

    async def _connected(self) -> None:
        await self._up.wait()
        if self._state != "open":
            raise closed_error(self._client_id)

    # Called by the broker.

    def arrive(self, topic: str, payload: bytes) -> None:
        """A message for this client."""
        self.bytes_received += len(topic.encode()) + len(payload)
        self.on_message(topic, payload)

    def lost(self) -> None:
        """Handle the loss of the connection."""
        if self._up.is_set():
            self._up.clear()
            self.on_connection(False)

    def come_back(self) -> None:
        """Connect to the broker (again), unless closed meanwhile."""
        if self._state != "open":
            return
        self._broker.attach(self._client_id, self)
        self._broker.subscribe(self._client_id, self._patterns)
        self._up.set()
        self.on_connection(True)
        self._broker.resume(self._client_id)


def later(seconds: float, action: Callable[[], None]) -> None:
    """Schedule ``action`` on the running event loop after ``seconds``.

    0: after the callbacks already queued.
    """
    loop = asyncio.get_running_loop()
    if seconds > 0:
        loop.call_later(seconds, action)
    else:
        loop.call_soon(action)
