"""The coordinator's session with devices that have no certificate yet, apart from the one with its fleet.

Whoever enrols may be anybody: what strangers send must not fill the queue in which enrolled devices' messages wait, and
a broker for newcomers that is full or down must not stop a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from edgefl.errors import BrokerError, ProtocolError
from edgefl.identity.fleet import Fleet
from edgefl.protocol import topics
from edgefl.transport.mqtt import MqttTransport

#: Pause before the broker for newcomers is dialled again: strangers who hold all of its connections are cut by
#: mosquitto after a minute and a half without a greeting.
DIAL_S = 5.0


class Newcomers:
    """``hear`` gets client id and payload of every request; ``say`` what a person must know. All in one loop."""

    def __init__(self, fleet: Fleet, hear: Callable[[str, bytes], None], say: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._hear = hear
        self._say = say
        self._transport: MqttTransport | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.connected = asyncio.Event()

    def start(self, url: str) -> None:
        """Dial until it answers. ``url``: of the fleet's broker as this machine dials it."""
        self._spawn(self._dial(url))

    def publish(self, client: str, answer: bytes) -> None:
        """Answer a newcomer; nothing is waited for."""
        if self._transport is not None:
            self._spawn(self._publish(self._transport, topics.enroll_down(self._fleet.record.fleet, client), answer))

    async def published(self) -> None:
        """Wait until every answer has left."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Drop what could not leave."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._transport is not None:
            await self._transport.close()

    async def _dial(self, url: str) -> None:
        told = ""
        while not self.connected.is_set():
            transport = self._fleet.newcomers(url)
            transport.on_message = self._on_message
            try:
                await transport.connect()
                await transport.subscribe([topics.enroll_up(self._fleet.record.fleet, "+")])
            except BrokerError as error:
                await transport.close()
                if error.message != told:
                    told = error.message
                    self._say(f"devices can not enrol now: {told}")
                await asyncio.sleep(DIAL_S)
                continue
            except asyncio.CancelledError:
                await transport.close()
                raise
            self._transport = transport
            self.connected.set()

    def _on_message(self, name: str, payload: bytes) -> None:
        try:
            topic = topics.parse(name)
        except ProtocolError:
            return  # a client id that is no name: no device of ours
        if topic.channel == "enroll-up":
            self._hear(topic.device, payload)

    async def _publish(self, transport: MqttTransport, topic: str, answer: bytes) -> None:
        try:
            await transport.publish(topic, answer)
        except BrokerError as error:
            self._say(f"an answer could not be sent: {error.message}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
