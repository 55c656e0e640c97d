"""Runs whose large objects go past the broker: real agents, a real endpoint, and a network between them that fails."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import coordinator_fixture
import numpy as np
import pytest
from coordinator_fixture import FLEET, FakeDevice, FakeWorker, a_plan
from faulty_broker import FaultyBroker
from msgspec.structs import replace

from coordinator.core.timeouts import Timeouts
from coordinator.runtime import object_urls
from coordinator.runtime.environment import Environment
from coordinator.runtime.object_endpoint import ObjectEndpoint
from coordinator.runtime.runner import run
from device_agent.core import state as v
from device_agent.runtime import by_url
from device_agent.runtime.agent import Agent, last_will
from device_agent.runtime.by_url import Trust
from device_agent.runtime.store import AgentStore, Owner
from device_agent.runtime.trainer_process import Ended
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.run_records import RunReport
from edgefl.storage.objects import ObjectStore
from edgefl.transport.link import TlsFiles
from edgefl.transport.memory_broker import MemoryTransport

FAST = Timeouts(tick_s=0.02, grace_s=0.1, retry_pause_s=0.05, introduce_s=0.05, drain_s=1.0)
FACTS = v.DataFacts(
    modalities={"acc": (8, 3)},
    samples={"": 10, "acc": 10},
    class_counts=(5, 5),
    label_names=("a", "b"),
    base_bytes=1,
    runtime="test",
    torch_device="cpu",
)
#: 80 KB a part, in chunks of 1 KiB.
VALUES, PART_BYTES = 20_000, 80_000


class Adding:
    """A trainer that adds a constant, as ``FakeDevice`` does."""

    def __init__(self, objects: ObjectStore, add: float) -> None:
        self._objects, self._add = objects, np.float32(add)

    async def warm(self, preparation: Any) -> v.DataFacts:
        return FACTS

    async def train(self, work: v.Train, on_progress: Any) -> Ended:
        manifest = {}
        for part in work.offer.job.stage.trained:
            values = decode_part(self._objects.read(work.offer.manifest[part].id))["w"] + self._add
            manifest[part] = self._objects.put(encode_part({"w": values}))
        return Ended(v.Result(manifest, dict.fromkeys(manifest, 10), {"loss": 1.0}), alive=True)

    def interrupt(self) -> None:
        return None

    async def stop(self) -> None:
        return None


class Between:
    """The network in front of the endpoint. ``up``, ``down``: bytes so far; ``away``: nobody gets through.

    ``cut_at``: bytes both ways at which all connections end, and ``away_s`` begin; ``spoil``: a byte of every download
    is another.
    """

    def __init__(self, cut_at: int = 0, away_s: float = 0.0, *, spoil: bool = False) -> None:
        self.cut_at, self.away_s, self.spoil = cut_at, away_s, spoil
        self.up = self.down = self.refused = 0
        self.away = False
        self.port = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self.away:
                self.refused += 1
                writer.transport.abort()
                return
            there, back = await asyncio.open_connection("127.0.0.1", port)
            self._open |= {writer, back}
            await asyncio.gather(self._pass(reader, back, "up"), self._pass(there, writer, "down"))

        self._server = await asyncio.start_server(serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                if way == "down" and self.spoil and len(data) == 4096:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                setattr(self, way, getattr(self, way) + len(data))
                if self.cut_at and self.up + self.down >= self.cut_at:
                    self.cut_at, self.away = 0, self.away_s > 0
                    self.cut()
                    self._tasks.add(asyncio.ensure_future(self._return()))
                    return
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _return(self) -> None:
        await asyncio.sleep(self.away_s)
        self.away = False


class Scene:
    """Two agents, an older device that knows no URLs, and a coordinator."""

    def __init__(self, directory: Path, between: Between | None) -> None:
        self.directory, self.between = directory, between
        self.broker, self.worker = FaultyBroker(), FakeWorker()
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.report = RunReport()

    def agent(self, name: str, add: float) -> Agent:
        store = AgentStore(self.directory / name, Owner(name, FLEET), fingerprint="data")
        blank = v.State(fleet=FLEET, device=name, session=secrets.token_hex(8), profile="cpu")

        def emit(event: str, **fields: Any) -> None:
            self.lines.append((event, fields))

        def dial() -> MemoryTransport:
            return MemoryTransport(self.broker, name, last_will(blank))

        trust = Trust(TlsFiles(), tls=False, host="127.0.0.1")
        agent = Agent(blank, dial, Adding(store.objects, add), store, emit, None, trust)
        agent.tick_s = 0.05
        return agent

    async def play(self, script: Callable[[Scene], Awaitable[None]] | None = None) -> RunReport:
        old = FakeDevice(self.broker, "old", self.directory / "devices", add=7.0)
        agents = [self.agent("a", 1.0), self.agent("b", 4.0)]
        running = [asyncio.ensure_future(agent.run()) for agent in agents]
        await old.start()
        beside = asyncio.ensure_future(script(self)) if script else None
        try:
            return await self._coordinated()
        finally:
            if beside is not None:
                await beside
            for agent in agents:
                agent.stop()
            await asyncio.gather(*running)
            await old.stop()

    async def _coordinated(self) -> RunReport:
        with contextlib.ExitStack() as stack:
            endpoint = None
            if self.between is not None:
                listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                await self.between.start(listener.getsockname()[1])
                endpoint = ObjectEndpoint(listener, f"http://127.0.0.1:{self.between.port}")
            transport = MemoryTransport(self.broker, "coordinator")
            place = self.directory / "run"
            environment = Environment(
                place, transport, FLEET, lambda _: None, worker=self.worker, timeouts=FAST, endpoint=endpoint
            )
            plan = a_plan(policy=replace(a_plan().policy, devices=3, quorum=1.0, deadline_s=90.0))
            report = await run(plan, environment, resume=False)
            if self.between is not None:
                await self.between.stop()
            return report

    def moved(self, field: str) -> int:
        return sum(fields.get(field, 0) for event, fields in self.lines if event == "by-url")

    @property
    def states(self) -> list[Any]:
        return [sorted((part, ref.id) for part, ref in manifest.items()) for manifest in self.worker.evaluated]


def played(directory: Path, between: Between | None, script: Any = None) -> tuple[Scene, RunReport]:
    async def play() -> tuple[Scene, RunReport]:
        scene = Scene(directory, between)
        return scene, await asyncio.wait_for(scene.play(script), 100)

    return asyncio.run(play())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A run whose objects all go through the broker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator_fixture, "SIZE", VALUES)
        scene, scene.report = played(tmp_path_factory.mktemp("plain"), None)
    assert scene.moved("fetched_bytes") == scene.moved("put_bytes") == 0
    return scene


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_fixture, "SIZE", VALUES)
    monkeypatch.setattr(object_urls, "LEAST_BYTES", 50_000)
    monkeypatch.setattr(by_url, "RETRY_S", 0.05)


def sums(report: RunReport, figure: str, *devices: str) -> float:
    return sum(row.measured[figure].value or 0 for row in report.assignments if row.device in devices)


def test_objects_pass_by_the_broker_and_states_and_bill_are_the_same(tmp_path: Path, plain: Scene) -> None:
    between = Between()
    scene, report = played(tmp_path, between)
    assert scene.states == plain.states
    # Both agents fetch the first stage's parts, then what was trained; and put two parts in each of three rounds.
    assert scene.moved("put_bytes") > 2 * 3 * 2 * PART_BYTES
    assert between.up > scene.moved("put_bytes")
    assert between.down > scene.moved("fetched_bytes") > 2 * 4 * PART_BYTES
    for figure in ("payload_down_bytes", "payload_up_bytes", "resent_down_bytes"):
        for device in ("a", "b", "old"):
            assert (figure, sums(report, figure, device)) == (figure, sums(plain.report, figure, device))
    assert sums(report, "resent_up_bytes", "a", "b") == 0


@pytest.mark.parametrize("cut_at", [150_000, 900_000])
def test_a_cut_is_resumed_where_it_was(tmp_path: Path, plain: Scene, cut_at: int) -> None:
    between = Between(cut_at)
    scene, report = played(tmp_path, between)
    assert scene.states == plain.states
    assert between.cut_at == 0
    again = sums(report, "resent_up_bytes", "a", "b") + sums(report, "resent_down_bytes", "a", "b")
    assert again < 4 * PART_BYTES  # what was in buffers, not all of it
    assert not [fields for event, fields in scene.lines if event == "warning"]


def test_an_endpoint_that_stays_away_leaves_all_to_the_broker(tmp_path: Path, plain: Scene) -> None:
    between = Between(200_000, away_s=99.0)

    async def back(scene: Scene) -> None:
        while not between.refused:
            await asyncio.sleep(0.05)

    scene, report = played(tmp_path, between, back)
    assert scene.states == plain.states
    assert report.status == "done"
    warnings = [fields["text"] for event, fields in scene.lines if event == "warning"]
    assert warnings
    assert all(f"127.0.0.1:{between.port} fails, so large objects go through the broker" in one for one in warnings)
    assert between.up + between.down < 400_000


def test_wrong_bytes_of_an_endpoint_are_refused_and_come_through_the_broker(tmp_path: Path, plain: Scene) -> None:
    scene, report = played(tmp_path, Between(spoil=True))
    assert scene.states == plain.states
    assert {row.status for row in report.assignments} == {"done"}


@pytest.mark.slow  # 30 s: the length of a real outage
def test_half_a_minute_without_the_endpoint_costs_time_alone(
    tmp_path: Path, plain: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_url, "RETRY_S", 5.0)  # 5, 10 and 20 s: it is there again at the last try
    for cut_at in (150_000, 900_000):
        between = Between(cut_at, away_s=30.0)
        scene, _ = played(tmp_path / str(cut_at), between)
        assert scene.states == plain.states
        assert between.refused
