"""A fleet's identity inside the coordinator: signs what goes out, answers who enrols or renews, shuts out the revoked.

What touches the disk or a private key of the authority runs beside the loop; what every message passes is a look into
a set.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from coordinator.runtime.newcomers import Newcomers
from edgefl.errors import EdgeFLError
from edgefl.identity.enrolment import answer_request, is_expected, renew
from edgefl.identity.fleet import Fleet
from edgefl.protocol import topics
from edgefl.protocol.messages import DownMessage, Renew

_LOG = logging.getLogger(__name__)
#: Enrolments and renewals in hand at a time; more are dropped, and asked for again by their devices.
MOST_AT_ONCE = 32


class Guard:
    """One coordinator's: ``start`` it, then ``listen``. All calls come from the event loop's thread."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.seal = fleet.signer.seal
        self.dropped: Counter[str] = Counter()
        self._seen = self._stamp()  # before it is read: what changes in between is seen at the next tick
        self._revoked = fleet.revoked()
        self._newcomers: Newcomers | None = None
        self._post: Callable[[str, DownMessage], None] | None = None
        self._say: Callable[[str], None] = _LOG.warning
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self,
        post: Callable[[str, DownMessage], None],
        say: Callable[[str], None] = _LOG.warning,
    ) -> None:
        """``post`` a message to a device, signed; ``say`` something to a person."""
        self._post, self._say = post, say

    def listen(self, url: str) -> Newcomers:
        """Answer devices that enrol, from now on. ``url``: of the fleet's broker as this machine dials it."""
        self._newcomers = Newcomers(self.fleet, self._enroll, self._say)
        self._newcomers.start(url)
        return self._newcomers

    def newly_revoked(self) -> list[str]:
        """Devices shut out since the last call: to be called on the tick. One look at a file's date."""
        stamp = self._stamp()
        if stamp == self._seen:
            return []
        try:
            revoked = self.fleet.revoked()
        except EdgeFLError as error:
            self._seen = stamp
            self._say(f"who is revoked can not be read, so nobody more is: {error.message}")
            return []
        fresh = sorted(revoked - self._revoked)
        self._revoked, self._seen = revoked, stamp
        return fresh

    def takes(self, topic: topics.Topic) -> bool:
        """Whether a message ends here: it comes from a revoked device, or by the fleet's connection from a newcomer."""
        if topic.channel == "enroll-up":
            self.dropped["stranger"] += 1
            return True
        if topic.device in self._revoked:
            self.dropped["revoked"] += 1
            return True
        return False

    def renew(self, message: Renew) -> None:
        """A device, known by its topic, asks for a fresh certificate."""
        self._spawn(self._renewing(message))

    async def answered(self) -> None:
        """Wait until whoever has asked has an answer."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._newcomers is not None:
            await self._newcomers.published()

    async def close(self) -> None:
        """Drop what is in hand: devices ask again."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._newcomers is not None:
            await self._newcomers.close()

    def _enroll(self, client: str, payload: bytes) -> None:
        if not is_expected(self.fleet, client):
            self.dropped["stranger"] += 1
            return
        self._spawn(self._enrolling(client, payload))

    async def _enrolling(self, client: str, payload: bytes) -> None:
        before = set(self.fleet.devices())
        answer = await asyncio.to_thread(answer_request, self.fleet, client, payload, time.time())
        if answer is None:
            self.dropped["unproved"] += 1
            return
        if self._newcomers is not None:
            self._newcomers.publish(client, answer)
        for name in set(self.fleet.devices()) - before:
            self._say(f"device {name} has enrolled")

    async def _renewing(self, message: Renew) -> None:
        answer = await asyncio.to_thread(renew, self.fleet, message.device, message.request, time.time())
        if answer.refusal:
            self.dropped["renewal"] += 1
        if self._post is not None:
            self._post(message.device, answer)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if len(self._tasks) >= MOST_AT_ONCE:
            self.dropped["busy"] += 1
            work.close()
            return
        task = asyncio.ensure_future(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except EdgeFLError as error:  # a full disk, say: the run goes on, the device asks again
            self._say(f"a device could not be answered: {error.message}")

    def _stamp(self) -> tuple[int, int]:
        try:
            status = self.fleet.devices_file.stat()
        except OSError:
            return 0, 0
        return status.st_mtime_ns, status.st_ino
