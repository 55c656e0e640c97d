"""Status of a running agent: sent to systemd with signs of life, and kept in ``status.json`` for a person."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec

import edgefl
from device_agent.core.state import State, TaskPhase, TrainerPhase
from device_agent.runtime.agent import Agent
from edgefl.errors import EdgeFLError, StoreError, WorkerError
from edgefl.process.notify import Notify
from edgefl.records import Attempt
from edgefl.storage.disk import read_at_most, store_errors, write_new

FILE: Final = "status.json"
#: How often it is looked at, so how late a change is written at most; sooner where the watchdog is impatient. The
#: agent's own timers wake it twice as often.
LOOK_S: Final = 1.0
#: Signs of life within the watchdog's time: one that is late, on a busy device, must not end the agent.
SIGNS: Final = 3
#: The file is written when something changes, and as often as this: small writes wear out SD cards.
WRITE_S: Final = 300.0
_MAX_BYTES = 64 * 1024
_MAX_TEXT = 200


class Status(msgspec.Struct, frozen=True):
    """Status ``at`` a time (s since the epoch). ``since``: last change of ``connected``; ``heard_at`` 0: never.

    ``ended``: the last run that is finished, which was heard at ``ended_at``; 0: none.
    """

    at: float = 0.0
    text: str = ""
    connected: bool = False
    since: float = 0.0
    heard_at: float = 0.0
    version: str = ""
    protocol: int = 0
    broker: str = ""
    data: str = ""
    samples: dict[str, int] = {}  # modality -> samples that have it; "" -> all
    ended: Attempt = Attempt()
    ended_at: float = 0.0


def describe(state: State) -> str:
    """One line for a person: connection, work, and the run, stage and round that it is for."""
    if (task := state.task) is not None:
        doing = {TaskPhase.FETCHING: "fetching", TaskPhase.READY: "ready for", TaskPhase.TRAINING: "training"}
        text = f"{doing[task.phase]} {_named(task.attempt)}"
    elif state.update is not None:
        text = f"sending the update of {_named(state.update.attempt)}"
    elif state.trainer is TrainerPhase.WARMING or (state.trainer is TrainerPhase.DOWN and state.facts is None):
        text = "loading torch and the data"
    elif state.closed is not None and state.closed.same_run(state.current):
        text = f"waiting for work; the last was {_named(state.closed)}"
    else:
        text = f"waiting for work in run {state.run}" if state.run else "waiting for the next run"
    return _line(f"{'connected' if state.connected else 'broker away'}, {text}")


def _line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text[:_MAX_TEXT])  # a run names itself


def _named(attempt: Attempt) -> str:
    return f"run {attempt.run}, stage {attempt.stage}, round {attempt.round}, attempt {attempt.attempt}"


def read_status(directory: Path) -> Status | None:
    """Last status of the agent in a state directory.

    None for a missing or damaged file. Raises StoreError.
    """
    with store_errors("read", directory / FILE):
        try:
            return msgspec.json.decode(read_at_most(directory / FILE, _MAX_BYTES), type=Status)
        except (FileNotFoundError, ValueError):  # a loss of power may have torn it; the next one is whole
            return None


@contextlib.asynccontextmanager
async def reporting(agent: Agent, manager: Notify, broker: str, data: str) -> AsyncIterator[None]:
    """Report a running agent's signs of life from its own loop: a hung one gives none."""
    last = read_status(agent.store.directory) or Status()  # of an earlier start
    known = Status(
        ended=last.ended,
        ended_at=last.ended_at,
        version=edgefl.__version__,
        protocol=edgefl.PROTOCOL_VERSION,
        broker=broker,
        data=data,
    )
    noted = [known]
    work = asyncio.ensure_future(_report(agent, manager, noted))
    end = "stopped"
    try:
        yield
    except Exception as error:
        end = _ended(error, agent.store.directory)
        raise
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        manager.tell("STOPPING=1")
        with contextlib.suppress(StoreError):  # of a disk that is full, the agent's own error tells
            _write(agent, msgspec.structs.replace(_look(agent, noted[0]), text=end, connected=False))


def _ended(error: Exception, directory: Path) -> str:
    """One line for a person: the error that ended the agent, its exit code, and further sources."""
    text, code = f"{type(error).__name__}: {error}", EdgeFLError.exit_code
    if isinstance(error, EdgeFLError):
        text, code = error.message, error.exit_code
    where = f", see {directory.absolute() / 'trainer.log'}" if code == WorkerError.exit_code else ""
    return f"ended in error: {_line(' '.join(text.split()))} (exit code {code}){where}"


async def _report(agent: Agent, manager: Notify, noted: list[Status]) -> None:
    """Report the status to systemd and the file in a loop; ``noted[0]``: the status written last."""
    first, fault = "READY=1", ""
    pause_s = min(LOOK_S, manager.watchdog_s / SIGNS) if manager.watchdog_s else LOOK_S
    while True:
        known = noted[0]
        seen = _look(agent, known)
        try:
            manager.tell(first, f"STATUS={seen.text}")
            changed = (seen.text, seen.samples, seen.ended_at) != (known.text, known.samples, known.ended_at)
            if changed or seen.at - known.at >= WRITE_S:
                _write(agent, seen)
                noted[0] = seen
            first, fault = "WATCHDOG=1", ""
        except (OSError, StoreError) as error:  # a status that is not told is no reason to end
            if str(error) != fault:
                agent.emit("warning", text=f"the status was not told: {error}")
            fault = str(error)
        await asyncio.sleep(pause_s)


def _look(agent: Agent, known: Status) -> Status:
    now, state = time.time(), agent.state
    fresh = state.ended.run != "" and not state.ended.same_run(known.ended)
    return msgspec.structs.replace(
        known,
        at=now,
        text=describe(state),
        connected=state.connected,
        since=known.since if known.since and known.connected == state.connected else now,
        heard_at=agent.heard_at,
        samples=state.facts.samples if state.facts is not None else {},
        ended=state.ended if fresh else known.ended,
        ended_at=now if fresh else known.ended_at,
    )


def _write(agent: Agent, status: Status) -> None:
    with store_errors("write", agent.store.directory / FILE):
        write_new(agent.store.directory / FILE, msgspec.json.encode(status), durable=False)
