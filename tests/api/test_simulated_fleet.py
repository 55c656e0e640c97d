"""A large fleet in one process: only what was asked has an agent, and that changes nothing."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from memory_fleet import share

import edgefl
from coordinator.ledger.ledger import Ledger
from device_agent.core.state import DataFacts
from device_agent.runtime.connect import Options
from device_agent.runtime.memory_store import Pool
from device_agent.runtime.trainer_process import WarmRequest
from device_agent.simulated import READ_AT_ONCE, Devices, Surroundings
from device_agent.trainer.process import Trainers
from edgefl.api import in_process
from edgefl.plan.job import Preparation
from edgefl.process.inline_worker import InlineWorker
from edgefl.protocol import messages as m
from edgefl.protocol import topics
from edgefl.records import Capabilities
from edgefl.run_records import AssignmentRow
from edgefl.storage.disk import LEDGER
from edgefl.transport.memory_broker import MemoryBroker, MemoryTransport

DEVICES, ASKED = 200, 4
#: Of a device that was never asked: its state, connection, options and facts. Measured: 7 KiB.
MOST_BYTES = 16 * 1024


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("simulated")
    share(4 * DEVICES + 30, {"a": 1.0}, seed=5).save_npz(place / "all.npz")
    return place


@pytest.fixture
def fleets(monkeypatch: pytest.MonkeyPatch) -> list[Devices]:
    """Those that are made meanwhile."""
    made: list[Devices] = []
    begin = Devices.__init__

    def noted(self: Devices, *given: Any) -> None:
        made.append(self)
        begin(self, *given)

    monkeypatch.setattr(Devices, "__init__", noted)
    return made


#: Shares of one size; and of many, of which some are smaller than a batch.
EVEN: dict[str, Any] = {"uniform": {}}
UNEVEN: dict[str, Any] = {"dirichlet": {"alpha": 0.5}}


def run_in(place: Path, source: Path, partition: dict[str, Any] = EVEN, **more: Any) -> edgefl.Run:
    return edgefl.run(
        {
            "name": "large",
            "seed": 3,
            "recipe": "end_to_end",
            "slots": {"select": {"random": {"share": ASKED / DEVICES}}},
            "data": {"source": source / "all.npz", "partition": partition},
            "model": {
                "stages": 2,
                "encoders": {"a": {"kind": "sensor", "width": 8, "depth": 2, "heads": 2, "patch": 4}},
                "head": {"width": 12, "out": 8, "dropout": 0.1},
                "fusion_width": 8,
            },
            "training": {"rounds": [0, 2], "batch_size": 2 if partition is EVEN else 4},
            "round": {"join_s": 60},
            "fleet": [{"name": f"device-{n:03}"} for n in range(DEVICES)],
        },
        directory=place,
        in_process=True,
        export=False,
        page=False,
        **more,
    )


def told(run: edgefl.Run) -> tuple[Any, ...]:
    """States, evaluations, and of each attempt what was counted."""
    counted = ("flops", "payload_up_bytes", "payload_down_bytes", "resent_up_bytes", "resent_down_bytes")

    def bill(row: AssignmentRow) -> tuple[object, ...]:
        figures = {name: row.measured[name].value for name in counted if name in row.measured}
        return row.device, row.stage, row.round, row.attempt, row.status, figures

    report = run.report.record
    with Ledger(run.directory / LEDGER, create=False) as ledger:
        states = ledger.states(run.id)
    rows = [(row.stage, row.round, row.metric, row.value) for row in report.evaluations]
    asked = [row for row in report.assignments if row.status != "refused"]
    return states, rows, sorted(map(bill, asked), key=str)


@pytest.mark.timeout(180)
def test_uneven_shares_are_drawn_from_as_if_every_device_had_introduced_itself(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a share that is smaller than a batch a device is refused, which its kind's first device has said for it."""
    lazy = run_in(tmp_path / "lazy", source, UNEVEN)
    met = Counter(row.status == "refused" for row in lazy.report.record.assignments)[True]
    assert len(lazy.report.record.devices) < DEVICES / 3
    monkeypatch.setattr(in_process, "meets_all", lambda plan: True)
    eager = run_in(tmp_path / "eager", source, UNEVEN)
    refused = Counter(row.status == "refused" for row in eager.report.record.assignments)[True]
    assert 0 < met < refused, "one of each kind"
    assert told(eager) == told(lazy)


class Killed(BaseException):
    """The end of the process, for the run."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("at", ["round_started", "round_closed"])
def test_a_run_goes_on_with_devices_that_come_when_they_are_asked(source: Path, tmp_path: Path, at: str) -> None:
    whole = run_in(tmp_path / "whole", source)

    def kill(event: edgefl.EventRow) -> None:
        if (event.kind, event.round) == (at, 1):
            raise Killed

    with pytest.raises(Killed):
        run_in(tmp_path / "parts", source, on_event=kill)
    (begun,) = (path.name for path in (tmp_path / "parts").iterdir() if (path / "run.yaml").is_file())
    went_on = run_in(tmp_path / "parts", source, resume=begun)
    assert told(went_on)[:2] == told(whole)[:2]
    assert {row.status for row in went_on.report.record.assignments} == {"done"}


@pytest.mark.timeout(180)
def test_only_devices_that_were_asked_have_an_agent_and_nothing_else_differs(
    source: Path, tmp_path: Path, fleets: list[Devices], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers: list[Trainers] = []
    monkeypatch.setattr(in_process, "Trainers", lambda **given: trainers.append(Trainers(**given)) or trainers[-1])
    lazy = run_in(tmp_path / "lazy", source)
    asked = {row.device for row in lazy.report.record.assignments}
    assert ASKED <= len(asked) <= 2 * ASKED
    assert set(fleets[0].agents) == asked
    assert set(fleets[0]._around.pool.stores) == asked
    assert trainers[0]._trainers == {}, "every share was let go after its round"
    logs = {path.stem for path in (lazy.directory / "logs").iterdir()}
    assert {name for name in logs if name.startswith("device-")} == asked
    assert {path.name for path in (lazy.directory / "devices").glob("*")} <= asked

    heard = Devices._heard

    def at_once(self: Devices, device: Any, topic: str, payload: bytes) -> None:
        heard(self, device, topic, payload)
        if topic != topics.call(device.options.fleet) and isinstance(m.decode_down(payload), m.Welcome):
            self._promote(device)

    monkeypatch.setattr(Devices, "_heard", at_once)
    monkeypatch.setattr(in_process, "meets_all", lambda plan: True)
    eager = run_in(tmp_path / "eager", source)
    assert len(fleets[1].agents) == DEVICES
    assert told(eager) == told(lazy)
    assert eager.report.record.reference == lazy.report.record.reference
    on_record = {row.device for row in lazy.report.record.devices}
    assert asked <= on_record, "only who was asked introduces itself, and the first of each size of share"
    assert len(on_record - asked) <= 2
    assert len(eager.report.record.devices) == DEVICES
    assert len(told(lazy)[0]) == 3, "the first state, and one of each round"


class Facts(InlineWorker):
    """Answers with the facts of some data, as read by the preparation that is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def calls(self, requests: Any) -> list[object]:
        self.asked += [method for method, _ in requests]
        facts = {"modalities": {"a": (8, 2)}, "samples": {"": 4, "a": 4}, "class_counts": (2, 1, 1)}
        asked = [body.preparation.id if isinstance(body, WarmRequest) else "" for _, body in requests]
        return [DataFacts(**facts, label_names=("x", "y", "z"), prepared=prepared) for prepared in asked]


def surroundings(place: Path, broker: MemoryBroker, worker: InlineWorker) -> Surroundings:
    def lost(device: str, error: Exception) -> None:
        raise error

    return Surroundings(broker, worker, Pool(place / "objects"), Capabilities(), Preparation("p"), place, lost)


async def listening(broker: MemoryBroker, greeted: Callable[[m.Hello], None]) -> MemoryTransport:
    """A coordinator's connection that hears who introduces itself."""
    coordinator = MemoryTransport(broker, "coordinator")
    await coordinator.connect()
    await coordinator.subscribe(topics.coordinator_subscriptions("f"))

    def heard(topic: str, payload: bytes) -> None:
        if isinstance(message := m.decode_up(payload), m.Hello):
            greeted(message)

    coordinator.on_message = heard
    return coordinator


def test_a_device_that_is_never_asked_takes_a_few_kilobytes(tmp_path: Path) -> None:
    names = [f"device-{n:04}" for n in range(1000)]
    hellos: dict[str, m.Hello] = {}

    async def scene() -> int:
        broker, worker = MemoryBroker(), Facts()
        coordinator = await listening(broker, lambda hello: hellos.update({hello.device: hello}))
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        every = [Options(fleet="f", device=name, data="x.npz", state=str(tmp_path / name)) for name in names]
        devices = Devices(every, surroundings(tmp_path, broker, worker))
        running = asyncio.create_task(devices.run())
        while len(hellos) < len(names):
            await asyncio.sleep(0.01)
        assert devices.expects(), "nobody has been welcomed"
        welcome = m.encode(m.Welcome("c", run="r", preparation=Preparation("p")))
        for name in names:
            await coordinator.publish(topics.build("down", "f", name), welcome)
        while devices.expects():
            await asyncio.sleep(0.01)
        hellos.clear()
        await asyncio.sleep(0.01)
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert worker.asked == ["warm", "leave"] * len(names), "each device's data are read once"
        assert not hellos, "who said at once how its data are prepared need not say it again"
        assert not devices.agents
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await devices.stop()
        return taken

    assert asyncio.run(scene()) / len(names) < MOST_BYTES


def test_a_message_for_work_waits_until_the_data_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is the agent's first one then."""
    got: list[tuple[str, bytes]] = []

    class Agent:
        def __init__(self) -> None:
            self.state = None

        def on_message(self, topic: str, payload: bytes) -> None:
            got.append((topic, payload))

    async def scene() -> None:
        broker, worker = MemoryBroker(), Facts()
        devices = Devices([Options(fleet="f", device="d", state=str(tmp_path))], surroundings(tmp_path, broker, worker))
        monkeypatch.setattr(Devices, "_promote", lambda self, device: Agent())
        running = asyncio.create_task(devices.run())
        await asyncio.sleep(0)
        topic, body = topics.build("down", "f", "d"), m.encode(m.LogRequest(1, 5))
        devices._heard(devices._waiting["d"], topic, body)
        assert got == []
        await asyncio.sleep(0.01)
        assert got == [(topic, body)]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())


def test_an_agent_that_cannot_be_made_ends_its_device_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[tuple[str, str]] = []

    async def scene() -> None:
        broker, worker = MemoryBroker(), Facts()
        around = surroundings(tmp_path, broker, worker)._replace(
            lost=lambda name, error: lost.append((name, str(error)))
        )
        every = [Options(fleet="f", device=name, state=str(tmp_path / name)) for name in ("d", "e")]
        devices = Devices(every, around)
        running = asyncio.create_task(devices.run())
        await asyncio.sleep(0.01)
        topic, body = topics.build("down", "f", "d"), m.encode(m.LogRequest(1, 5))
        monkeypatch.setattr(Devices, "_promote", _full)
        devices._heard(devices._waiting["d"], topic, body)
        assert lost == [("d", "no room for another file")]
        assert set(devices._waiting) == {"e"}
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())


def test_a_message_that_cannot_be_understood_is_logged_and_ignored(tmp_path: Path) -> None:
    """As an agent does with one that only newer versions know."""

    async def scene() -> None:
        devices = Devices(
            [Options(fleet="f", device="d", state=str(tmp_path / "d"))],
            surroundings(tmp_path, MemoryBroker(), Facts()),
        )
        running = asyncio.create_task(devices.run())
        await asyncio.sleep(0.01)
        devices._heard(devices._waiting["d"], topics.build("down", "f", "d"), b"\xc1")
        assert set(devices._waiting) == {"d"}
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())
    assert "ignored" in (tmp_path / "d.log").read_text()


def test_a_device_that_ends_while_its_data_are_read_says_no_more_and_ends_alone(tmp_path: Path) -> None:
    hellos: list[str] = []

    async def scene() -> None:
        broker, worker = MemoryBroker(), Facts()
        await listening(broker, lambda hello: hellos.append(hello.device))
        names = [f"device-{n:02}" for n in range(READ_AT_ONCE + 1)]
        around = surroundings(tmp_path, broker, worker)._replace(lost=lambda name, error: None)
        devices = Devices([Options(fleet="f", device=name, state=str(tmp_path / name)) for name in names], around)
        read = worker.calls

        async def lost_meanwhile(requests: Any) -> list[object]:
            if not worker.asked:
                devices._lose(names[0], OSError("being read"))
                devices._lose(names[-1], OSError("not read yet"))
            return await read(requests)

        worker.calls = lost_meanwhile  # type: ignore[method-assign]
        running = asyncio.create_task(devices.run())
        await asyncio.sleep(0.05)
        assert not running.done()
        assert sorted(hellos) == names[1:-1]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())


def test_no_agent_is_made_once_the_fleet_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        broker = MemoryBroker()
        devices = Devices(
            [Options(fleet="f", device=name, state=str(tmp_path / name)) for name in ("d", "e")],
            surroundings(tmp_path, broker, Facts()),
        )
        running = asyncio.create_task(devices.run())
        await asyncio.sleep(0.01)
        ask = m.encode(m.LogRequest(1, 5))
        broker.publish(topics.build("down", "f", "d"), ask, retain=False)
        await asyncio.sleep(0.01)
        assert set(devices.agents) == {"d"}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        broker.publish(topics.build("down", "f", "e"), ask, retain=False)  # on its way when the run ends
        await devices.stop()
        assert set(devices.agents) == {"d"}

    asyncio.run(scene())


def _full(self: Devices, device: object) -> None:
    raise OSError("no room for another file")
