"""Callbacks of the agent's shell: tasks, events, messages, log lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import NamedTuple

from device_agent.core.state import Event
from edgefl.errors import BrokerError
from edgefl.protocol.messages import UpMessage

#: Writes a line of an event and its fields: ``emit(event, **fields)``.
Emit = Callable[..., None]
#: Runs a coroutine as a task whose failure ends the agent.
Spawn = Callable[[Coroutine[object, None, None]], asyncio.Task[None]]


class Effects(NamedTuple):
    """``spawn`` starts a task, ``post`` gives the machine an event, ``send`` queues a message, ``emit`` logs a line.

    ``transmit`` publishes bytes on a topic at once: errors of the kind are logged, others end the agent; then it calls.
    """

    spawn: Spawn
    post: Callable[[Event], None]
    send: Callable[[UpMessage], None]
    transmit: Callable[[str, bytes, type[BrokerError], Callable[[], None]], None]
    emit: Emit
