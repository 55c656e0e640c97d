"""Log lines of devices, asked for one request at a time: what a device sends unasked is dropped."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable

from edgefl.errors import ControlError
from edgefl.protocol.messages import MOST_LOG_LINES, DownMessage, LogLines, LogRequest

#: A device that is in reach answers in a round trip of MQTT; a busy one in seconds.
ANSWER_S = 10.0
#: Between two requests to a device, which answers one a second.
PAUSE_S = 1.2


class DeviceLogs:
    """``post`` sends a device a message. All calls come from the event loop's thread."""

    def __init__(self, post: Callable[[str, DownMessage], None]) -> None:
        self._post = post
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: dict[tuple[str, int], asyncio.Future[LogLines]] = {}
        self._due: dict[str, float] = {}  # when a device may be asked again
        self._numbers = itertools.count(1)

    async def ask(self, device: str, lines: int, after: int) -> LogLines:
        """A device's last lines, beyond number ``after``. Raises ControlError when it refuses or does not answer."""
        loop = asyncio.get_running_loop()
        async with self._turns[device]:
            await asyncio.sleep(self._due.get(device, 0.0) - loop.time())
            answer: asyncio.Future[LogLines] = loop.create_future()
            key = (device, next(self._numbers))
            self._waiting[key] = answer
            self._post(device, LogRequest(key[1], max(1, min(lines, MOST_LOG_LINES)), max(0, after)))
            try:
                found = await asyncio.wait_for(answer, ANSWER_S)
            except asyncio.TimeoutError:
                text = f"{device} gave no log within {ANSWER_S:g} s"
                raise ControlError(text, remedy="Its agent is of a release without logs, or out of reach.") from None
            finally:
                del self._waiting[key]
                self._due[device] = loop.time() + PAUSE_S
        if found.refusal:
            raise ControlError(f"{device} refuses: {found.refusal}", remedy="Read its log on the device itself.")
        return found

    def received(self, message: LogLines) -> None:
        """Take an answer; one that was not asked for is dropped."""
        answer = self._waiting.get((message.device, message.request))
        if answer is not None and not answer.done():
            answer.set_result(message)
