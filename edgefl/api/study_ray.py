"""A study's workers as actors of a Ray cluster: of this machine, or of several that share the study's folder.

Ray places them and says when one is gone. What an actor does is what a worker process does, with the same handlers.
"""

from __future__ import annotations

import os
import platform
import secrets
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.exceptions

from edgefl import __version__
from edgefl.api.study_pool import MEMORY_SHARE, Engine, Estimate, Room, Worker, local_room
from edgefl.api.study_worker import HANDLERS
from edgefl.errors import BudgetError, RunError
from edgefl.process.parent_death import die_with_parent
from edgefl.process.worker import Answer, Request, WorkerFailedError, answered, reply_of, understood
from edgefl.storage.disk import store_errors

#: Nothing of a study passes Ray's store of objects; this is the least that Ray accepts (75 MiB), rounded up.
_OBJECT_STORE_BYTES = 80 * 2**20
#: A cluster's head answers at once or not at all.
CONNECT_S = 5.0
_ALIKE = (
    "Install the same EdgeFL on every node, and share the study's folder and the working directory with it, under the "
    "same paths; `ray status` shows the nodes."
)
#: Settings of this process that hold for a cell on any node, by the beginning of their names.
_PASSED_ON = ("EDGEFL_", "OMP_NUM_THREADS")


class Place(msgspec.Struct, frozen=True):
    """Paths shared by a Ray node and the study's machine. ``token``: a file in its folder, with ``secret``.

    ``here``: the working directory, from which relative paths go; ``log``: takes what libraries write.
    """

    here: str
    token: str
    secret: str
    log: str
    version: str = __version__


class StudyActor:
    """A study's worker in a process of Ray's, on whichever node has room."""

    def begin(self, place: Place) -> str:
        """Take up the study's working directory and log; what this node lacks for it, in words, "": nothing."""
        node = platform.node()
        if __version__ != place.version:
            return f"the node {node} has EdgeFL {__version__}, this machine {place.version}"
        token = Path(place.token)
        try:
            if token.read_text(encoding="utf-8") != place.secret:
                return f"the node {node} sees another folder as {token.parent}"
            os.chdir(place.here)
        except OSError as error:
            return f"the node {node} does not see {error.filename}: {error.strerror}"
        die_with_parent(0, signal.SIGKILL, "a study's actor")  # Ray's own end of it comes seconds after its node's
        with Path(place.log).open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        return ""

    def answer(self, method: str, body: object) -> Answer:
        """A worker's answer to a request."""
        return answered(HANDLERS, Request(method, body), lambda _: None, sys.stderr)


@dataclass
class Cells:
    """Paths and sizes that all actors of a study share. ``cell_bytes``: the largest estimate."""

    logs: Path
    token: Path
    secret: str
    cell_bytes: int = 0


class RayWorker:
    """``edgefl.api.study_pool.Worker``: an actor with a core and a cell's memory to itself."""

    def __init__(self, number: int, cells: Cells) -> None:
        self.log = cells.logs / f"ray-{number}.log"
        self._cells = cells
        self._actor: Any = None
        self._bytes = 0

    async def start(self) -> None:
        """Have an actor that has reserved what a cell takes, once a node has room. Raises EdgeFLError."""
        if self._actor is not None and self._bytes >= self._cells.cell_bytes:
            return
        await self.stop()
        self._bytes = _placeable(self._cells.cell_bytes)
        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        environment.setdefault("OMP_NUM_THREADS", "1")
        options = {"num_cpus": 1, "memory": self._bytes or None, "runtime_env": {"env_vars": environment}}
        self._actor = ray.remote(StudyActor).options(**options).remote()
        place = Place(str(Path.cwd()), str(self._cells.token), self._cells.secret, str(self.log))
        try:
            lacking = await self._actor.begin.remote(place)
        except ray.exceptions.RayError as error:  # its node may have died meanwhile
            await self.stop()
            text = f"a Ray node did not start a study's worker: {_first_line(error)}"
            raise RunError(text, remedy=_ALIKE) from error
        if lacking:
            await self.stop()
            raise RunError(lacking, remedy=_ALIKE)

    async def call(self, method: str, body: object) -> object:
        """See ``Worker.call``. A call that is cancelled ends the actor, as it does a process."""
        try:
            answer = await self._actor.answer.remote(method, msgspec.to_builtins(body))
        except ray.exceptions.RayTaskError as error:
            raise WorkerFailedError(_first_line(error), log=self.log) from error
        except ray.exceptions.RayError as error:  # the actor, its node, or Ray there
            await self.stop()
            raise WorkerFailedError(_first_line(error), log=self.log, status=1) from error
        except BaseException:
            await self.stop()
            raise
        body = reply_of(answer, self.log)
        if method == "estimate":
            self._cells.cell_bytes = max((one.total for one in understood(body, list[Estimate])), default=0)
        return body

    async def stop(self, grace_s: float = 0.0) -> None:
        """End the actor's process, and with it what it has started."""
        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor)


def ray_actors(directory: Path) -> Engine:
    """An engine on the Ray cluster that RAY_ADDRESS names or, if unset, on one started here and ended with the engine.

    ``directory``: the study's. A program that has joined a cluster before keeps to it. Raises RunError, StoreError.
    """
    joined = ray.is_initialized()
    own = not joined and not os.environ.get("RAY_ADDRESS")
    if not joined:
        _join(own)
    cells = Cells((directory / "logs").absolute(), directory.absolute() / f".ray-{secrets.token_hex(8)}", "")
    cells.secret = secrets.token_hex(16)

    def end() -> None:
        try:
            cells.token.unlink(missing_ok=True)
        finally:
            if not joined:
                ray.shutdown()

    try:
        with store_errors("write", cells.token):
            cells.logs.mkdir(parents=True, exist_ok=True)
            cells.token.write_text(cells.secret, encoding="utf-8")
    except BaseException:
        end()
        raise

    def make(number: int) -> Worker:
        return RayWorker(number, cells)

    return Engine(make, local_room() if own else _cluster_room(), end)


def _join(own: bool) -> None:
    """Join the cluster, or start one without statistics to its makers, page and prints."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    started: dict[str, object] = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    address = "local" if own else os.environ["RAY_ADDRESS"]
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR", **(started if own else {}))
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        text = f"no Ray at {address}: {_first_line(error)}"
        raise RunError(text, remedy="Check RAY_ADDRESS and `ray status`; unset it for Ray on this machine.") from error


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _cluster_room() -> Room:
    nodes = _nodes()
    memory = sum(node.get("memory", 0.0) for node in nodes)
    return Room(int(sum(node.get("CPU", 0.0) for node in nodes)), int(MEMORY_SHARE * memory))


def _placeable(size: int) -> int:
    """``size``, if any node has so much memory. Raises BudgetError: Ray would wait for such a node without end."""
    largest = int(max((node.get("memory", 0.0) for node in _nodes()), default=0.0))
    if size > largest:
        text = f"a cell takes about {size / 2**20:,.0f} MiB, the largest Ray node has {largest / 2**20:,.0f} MiB"
        raise BudgetError(text, remedy="Add a node with more memory, or make batches or the model smaller.")
    return size


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
