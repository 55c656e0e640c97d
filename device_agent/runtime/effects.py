"""Callbacks of the agent's shell: tasks, events, messages, log lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from device_agent.core.state import Event
from device_agent.runtime.log import Emit
from edgefl.protocol.messages import UpMessage


class Spawn(Protocol):
    """Runs a coroutine as a task whose failure ends the agent."""

    def __call__(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class Effects(NamedTuple):
    """``spawn`` starts a task, ``post`` gives the machine an event, ``send`` queues a message, ``emit`` logs a line."""

    spawn: Spawn
    post: Callable[[Event], None]
    send: Callable[[UpMessage], None]
    emit: Emit
