"""One process of the crash matrix, which kills itself with -9 at a named point of a round, or meets another trouble.

    EDGEFL_CRASH="coordinator/commit/before/1" EDGEFL_CRASH_MARK=FILE \\
        python -m benchmarks.crash.crash_child MODULE ARGUMENTS…

Runs MODULE as ``python -m`` would, with the functions behind the point's name wrapped: armed when the round begins that
is to be disturbed, the process ends before or after the given call. Nothing of this is in the product.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

#: The round in which processes end; the one before it is undisturbed.
DISTURBED = 2
VARIABLE = "EDGEFL_CRASH"
#: A file that is there once the process has ended at its point.
MARK = "EDGEFL_CRASH_MARK"
#: The directory that is filled where the disk is to be full, and the file that fills it.
PLACE, BALLAST = "EDGEFL_CRASH_PLACE", "ballast"
#: What can happen to a process at its point.
KILLED, FULL, AHEAD, BEHIND = "killed", "disk full", "clock ahead", "clock behind"
#: It is killed, and then …
TORN, READ_ONLY = "half written", "read-only"
WHATS = (KILLED, FULL, AHEAD, BEHIND, TORN, READ_ONLY)
DAY_S = 86_400.0
#: Role -> its points: what is written, sent, acknowledged or begun.
POINTS = {
    "coordinator": (
        "commit",
        "journal",
        "send offer",
        "send chunk",
        "send grant",
        "send ack",
        "store update",
        "check update",
        "aggregate",
        "store state",
        "drop objects",
        "delete objects",
    ),
    "agent": (
        "save",
        "send accept",
        "send need",
        "send update",
        "send chunk",
        "store parts",
        "drop objects",
    ),
    "trainer": ("read part", "store part"),
}


class Point(NamedTuple):
    """``call``: which of the disturbed round, from 1. ``what`` happens then."""

    role: str
    name: str
    when: str  # before, after
    call: int = 1
    what: str = KILLED

    def __str__(self) -> str:
        return "/".join((self.role, self.name, self.when, str(self.call), self.what)).removesuffix(f"/{KILLED}")


def point(text: str) -> Point:
    """The point that ``str`` wrote. Raises ValueError for anything else."""
    role, name, when, count, *what = text.split("/")
    found = Point(role, name, when, int(count), *what)
    if found.what not in WHATS or when not in {"before", "after"}:
        raise ValueError(f"no such point: {text}; what happens is one of {', '.join(WHATS)}")
    return found


class Crash:
    """Ends the process at a point, once it is armed."""

    def __init__(self, at: Point) -> None:
        self.at = at
        self.armed = False
        self.calls = 0

    def wrap(self, owner: Any, method: str, name: str | Callable[..., str]) -> None:
        """Make calls of ``owner.method`` count as the point ``name`` (of its arguments)."""
        plain = getattr(owner, method)

        @functools.wraps(plain)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            due = self._due(name if isinstance(name, str) else name(*arguments, **options))
            if due and self.at.when == "before":
                self._happen()
            result = plain(*arguments, **options)
            if due and self.at.when == "after":
                self._happen()
            return result

        setattr(owner, method, wrapped)

    def wrap_sending(self, owner: Any, name: Callable[[str, bytes], str]) -> None:
        """The same of ``owner.publish``, which is over when the broker has the message."""
        plain = owner.publish

        async def publish(transport: Any, topic: str, payload: bytes, **options: Any) -> None:
            due = self._due(name(topic, payload))
            if due and self.at.when == "before":
                self._happen()
            await plain(transport, topic, payload, **options)
            if due and self.at.when == "after":
                self._happen()

        owner.publish = publish

    def _due(self, name: str) -> bool:
        if not self.armed or name != self.at.name:
            return False
        self.calls += 1
        return self.calls == self.at.call

    def _happen(self) -> None:
        """Once: whoever is started in place of this process finds the mark."""
        Path(os.environ[MARK]).touch()
        if self.at.what == FULL:
            _fill(Path(os.environ[PLACE]) / BALLAST)
        elif self.at.what in {AHEAD, BEHIND}:
            _set_clock(DAY_S if self.at.what == AHEAD else -DAY_S)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def _fill(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as ballast:
        size = 2**20
        while size:
            try:
                ballast.write(bytes(size))
            except OSError:
                size //= 2


def _set_clock(by_s: float) -> None:
    plain = time.time
    time.time = lambda: plain() + by_s


def sending(topic: str, payload: bytes) -> str:
    """The point that a message is, by its topic."""
    from edgefl.protocol import messages, topics

    channel = topics.parse(topic).channel
    if channel == "presence":
        return "send presence"
    decode = {"up": messages.decode_up, "down": messages.decode_down}.get(channel)
    return f"send {type(decode(payload)).__name__.lower()}" if decode is not None else "send chunk"


def coordinator(crash: Crash) -> None:
    """Armed when the disturbed round is told to have started."""
    import coordinator.runtime.model_tasks
    import coordinator.runtime.uploads
    from coordinator.ledger.ledger import Ledger
    from coordinator.runtime.record import Journal
    from edgefl.storage.objects import ObjectStore
    from edgefl.transport.mqtt import MqttTransport

    def arming(journal: Any, row: Any) -> str:
        crash.armed = crash.armed or (row.kind == "round_started" and row.round == DISTURBED)
        return "journal"

    crash.wrap(Journal, "append", arming)
    crash.wrap(Ledger, "commit", "commit")
    crash.wrap_sending(MqttTransport, sending)
    crash.wrap(ObjectStore, "publish", "store update")
    crash.wrap(ObjectStore, "put", "store state")
    crash.wrap(ObjectStore, "mark_garbage", "drop objects")
    crash.wrap(ObjectStore, "sweep", "delete objects")
    crash.wrap(coordinator.runtime.uploads, "check_update", "check update")
    crash.wrap(coordinator.runtime.model_tasks, "aggregate_round", "aggregate")


def agent(crash: Crash) -> None:
    """Armed when the offer of the disturbed round is here."""
    from device_agent.runtime.agent import Agent
    from device_agent.runtime.store import AgentStore
    from edgefl.protocol import messages
    from edgefl.storage.objects import ObjectStore
    from edgefl.transport.mqtt import MqttTransport

    def arming(agent: Any, message: Any) -> str:
        crash.armed = crash.armed or (isinstance(message, messages.Offer) and message.attempt.round == DISTURBED)
        return "receive"

    crash.wrap(Agent, "_received", arming)
    crash.wrap(AgentStore, "save", "save")
    crash.wrap_sending(MqttTransport, sending)
    crash.wrap(ObjectStore, "publish", "store parts")
    crash.wrap(ObjectStore, "mark_garbage", "drop objects")


def trainer(crash: Crash) -> None:
    """Armed when it is asked to train in the disturbed round."""
    from benchmarks.network import echo_agents
    from edgefl.storage.objects import ObjectStore

    def arming(request: Any, store: Any) -> str:
        crash.armed = crash.armed or request.offer.attempt.round == DISTURBED
        return "train"

    crash.wrap(echo_agents, "echo", arming)
    crash.wrap(ObjectStore, "read", "read part")
    crash.wrap(ObjectStore, "put", "store part")


ROLES = {"coordinator": coordinator, "agent": agent, "trainer": trainer}


def main() -> None:
    """Wrap what the point is about, then become the module."""
    text = os.environ.get(VARIABLE, "")
    module, *arguments = sys.argv[1:]
    if module.startswith("--"):  # the trainer of an agent, which knows of no modules
        module, arguments = "benchmarks.network.echo_agents", sys.argv[1:]
        role = "trainer"
    else:
        role = "coordinator" if module.startswith("coordinator") else "agent"
    if text and point(text).role == role and not Path(os.environ[MARK]).exists():
        ROLES[role](Crash(point(text)))
    sys.argv = [module, *arguments]
    if module == "benchmarks.network.echo_agents":  # wrapped functions are those of the imported module
        from benchmarks.network import echo_agents

        echo_agents.main()
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
