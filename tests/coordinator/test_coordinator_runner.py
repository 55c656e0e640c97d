"""The coordinator's runner over the in-memory broker, with devices that speak the real protocol."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from coordinator_fixture import FLEET, STEP_BYTES, FakeDevice, FakeWorker, a_plan
from faulty_broker import FaultyBroker
from ledger_fixture import ledger_at

from coordinator.core import moves as do
from coordinator.core.timeouts import Timeouts
from coordinator.ledger.ledger import Ledger
from coordinator.runtime import uploads
from coordinator.runtime.environment import Environment, Watch
from coordinator.runtime.evaluator import Request
from coordinator.runtime.model_tasks import ModelTasks
from coordinator.runtime.publisher import Publisher
from coordinator.runtime.runner import run
from edgefl.errors import BrokerError, BudgetError, RunError, StoreError
from edgefl.plan.job import Placement, RoundPolicy, RunPlan
from edgefl.protocol.tensors import decode_part
from edgefl.records import Budget, Manifest, ObjectRef, Refusal
from edgefl.run_records import AssignmentRow, EventRow, RunReport
from edgefl.storage.disk import store_errors
from edgefl.storage.objects import ObjectStore
from edgefl.transport.memory_broker import MemoryTransport

FAST = Timeouts(tick_s=0.02, grace_s=0.1, retry_pause_s=0.05, introduce_s=0.05, drain_s=1.0)


class Scene:
    """A broker, a coordinator and its events."""

    def __init__(self, directory: Path, **faults: Any) -> None:
        self.directory = directory
        self.broker = FaultyBroker(**faults)
        self.worker = FakeWorker()
        self.events: list[EventRow] = []
        self.devices: dict[str, FakeDevice] = {}

    async def device(self, name: str, **options: Any) -> FakeDevice:
        device = FakeDevice(self.broker, name, self.directory / "devices", **options)
        self.devices[name] = device
        await device.start()
        return device

    def coordinator(
        self, plan: RunPlan, *, resume: bool = False, watch: Watch | None = None, **changes: Any
    ) -> Coroutine[Any, Any, RunReport]:
        return run(
            plan,
            Environment(
                directory=self.directory / "run",
                transport=MemoryTransport(self.broker, "coordinator"),
                fleet=FLEET,
                emit=self.events.append,
                ledger_url=str(ledger_at(self.directory / "run" / "ledger.sqlite")),
                worker=self.worker,
                timeouts=FAST._replace(**changes),
                broker="mqtt://user:secret@localhost:1883",
                watch=watch,
            ),
            resume=resume,
        )

    async def both(self, run: Coroutine[Any, Any, RunReport], script: Coroutine[Any, Any, None]) -> tuple[Any, ...]:
        """The run's report, while the script goes on beside it."""
        return await asyncio.gather(run, script)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    async def until(self, what: Callable[[], object]) -> None:
        for _ in range(1000):
            if what():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"it did not come to that; events: {self.kinds()}")

    async def received(self, stage: int) -> None:
        """Wait until every device holds an offer of this stage with all of its parts."""

        def whole(device: FakeDevice) -> bool:
            offer, receiver = device.offer, device.receiver
            return bool(offer and receiver and offer.attempt.stage == stage and receiver.finished)

        await self.until(lambda: all(whole(device) for device in self.devices.values()))

    async def close(self) -> None:
        for device in self.devices.values():
            await device.stop()


def played(directory: Path, script: Callable[[Scene], Awaitable[None]], **faults: Any) -> Scene:
    async def play() -> Scene:
        scene = Scene(directory, **faults)
        try:
            await asyncio.wait_for(script(scene), 60)
        finally:
            await scene.close()
        return scene

    return asyncio.run(play())


def values(scene: Scene, part: str) -> np.ndarray:
    store = ObjectStore(scene.directory / "run" / "objects")
    manifest = scene.worker.evaluated[-1]
    return decode_part(store.read(manifest[part].id))["w"]


def test_a_full_run_averages_by_samples_and_tells_every_figure(tmp_path: Path) -> None:
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        await scene.device("a", add=1.0, samples=10)
        await scene.device("b", add=4.0, samples=20)
        report = await scene.coordinator(a_plan())
        await scene.until(lambda: all(d.drained.is_set() for d in scene.devices.values()))

    scene = played(tmp_path, script)
    # (10 x 1 + 20 x 4) / 30 = 3 a round; "acc/stage1" (part 1) is trained in one round, "acc/stage2" (part 2) in two.
    assert np.allclose(values(scene, "acc/stage1"), 10 + 3)
    assert np.allclose(values(scene, "acc/stage2"), 20 + 2 * 3)
    assert np.allclose(values(scene, "acc/embed"), 0)
    assert report.status == "done"
    assert [(r.stage, r.round, r.attempt, r.status) for r in report.rounds] == [
        (1, 1, 1, "done"),
        (2, 1, 1, "done"),
        (2, 2, 1, "done"),
    ]
    assert report.rounds[0].metrics["loss"] == pytest.approx(3.0)
    assert report.rounds[0].record["parts"]["task"]["devices"] == {"a": pytest.approx(1 / 3), "b": pytest.approx(2 / 3)}
    first = next(a for a in report.assignments if a.device == "a")
    assert first.predicted["step_peak_bytes"].value == STEP_BYTES
    assert first.measured["step_peak_bytes"].value == 900
    assert first.measured["energy_j"].value is None
    sizes = {part: ref.size for part, ref in scene.worker.evaluated[0].items()}
    assert first.measured["payload_up_bytes"].value == sizes["acc/stage1"] + sizes["task"]
    assert first.measured["payload_up_bytes"].kind == "counted"
    down = sum(size for part, size in sizes.items() if part != "acc/stage2")
    assert first.measured["payload_down_bytes"].value == down
    assert report.part_bytes["task"] == 1600
    assert len(report.evaluations) == 3
    assert scene.worker.stopped
    told = scene.kinds()
    assert told[0] == "run_started"
    assert told[-1] == "run_finished"
    assert "secret" not in str(scene.events)
    lines = (tmp_path / "run" / "events.jsonl").read_bytes().splitlines()
    assert lines == [msgspec.json.encode(event) for event in scene.events]


def test_frozen_parts_are_sent_once_and_shared_parts_are_published_once(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        for name in ("a", "b"):
            await scene.device(name)
        await scene.coordinator(a_plan())

    scene = played(tmp_path, script)
    for device in scene.devices.values():
        assert len(device.downloaded) == len(set(device.downloaded))  # nothing came twice, though both asked
    sender_bytes = scene.devices["a"].transport.bytes_received
    assert sender_bytes < 60_000


def test_a_decline_is_planned_again_smaller_in_the_same_round(tmp_path: Path) -> None:
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        await scene.device("a", decline=[Refusal("ceiling", 2000.0, 1500.0, "B")])
        await scene.device("b")
        report = await scene.coordinator(a_plan())

    scene = played(tmp_path, script)
    offers = scene.devices["a"].offers
    sizes = [offer.job.hyper.micro_batch for offer in offers if offer.attempt == offers[0].attempt]
    assert list(dict.fromkeys(sizes)) == [0, 2]  # on a busy machine an offer is repeated before the decline has come
    assert scene.worker.planned[-3].declined or any(c.declined for c in scene.worker.planned)
    assert "replanned" in scene.kinds()
    assert next(a for a in report.assignments if a.device == "a").status == "done"


def test_a_device_that_fits_nowhere_is_excluded_with_both_numbers(tmp_path: Path) -> None:
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        await scene.device("a", budget=Budget(step_memory_bytes=100))
        await scene.device("b")
        report = await scene.coordinator(a_plan())

    played(tmp_path, script)
    refused = next(a for a in report.assignments if a.device == "a")
    assert (refused.status, refused.refusal) == ("refused", Refusal("step_memory", 500.0, 100.0, "B"))


def test_nobody_fits_names_the_nearest_device_and_both_numbers(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        await scene.device("a", budget=Budget(step_memory_bytes=100))
        await scene.device("b", budget=Budget(step_memory_bytes=400))
        with pytest.raises(BudgetError, match=r"'b', needs 500 B|'b', needs .* and is allowed"):
            await scene.coordinator(a_plan())
        # Told as after a good end: nobody keeps a trainer warm for a run that is over.
        await asyncio.gather(*(device.drained.wait() for device in scene.devices.values()))

    scene = played(tmp_path, script)
    assert scene.kinds()[-1] == "run_failed"
    with Ledger(ledger_at(tmp_path / "run" / "ledger.sqlite")) as ledger:
        assert ledger.runs()[0].status == "failed"


def test_an_update_with_nan_is_refused_and_the_round_goes_on(tmp_path: Path) -> None:
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        await scene.device("a", spoil=True)
        await scene.device("b")
        report = await scene.coordinator(a_plan())

    scene = played(tmp_path, script)
    assert [a.status for a in report.assignments if a.device == "a"] == ["rejected", "rejected", "quarantined"]
    assert not any(ack.accepted for ack in scene.devices["a"].acks)
    assert np.isfinite(values(scene, "task")).all()


def test_a_lost_device_is_not_waited_for_and_takes_part_again(tmp_path: Path) -> None:
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        lost = await scene.device("a", hold=True)
        other = await scene.device("b", hold=True)  # it trains when the test lets it, so no round closes meanwhile
        task = asyncio.ensure_future(scene.coordinator(a_plan()))
        await scene.until(lambda: lost.offer is not None)
        await scene.until(lambda: other.offer and other.receiver and other.receiver.finished)
        link = lost.transport
        scene.broker.cut("a", seconds=3600)
        lost.hold = False
        await scene.until(lambda: "device_left" in scene.kinds())
        other.train()
        await scene.until(lambda: "round_closed" in scene.kinds())
        link.come_back()
        await scene.until(lambda: scene.kinds().count("device_joined") == 3)
        await scene.until(lambda: other.offer and other.receiver and other.receiver.finished)
        other.hold = False
        other.train()
        report = await task

    played(tmp_path, script)
    status = {(a.stage, a.round): a.status for a in report.assignments if a.device == "a"}
    assert (status[1, 1], status[2, 2]) == ("lost", "done")


def test_a_device_that_returns_in_time_goes_on_with_its_attempt(tmp_path: Path) -> None:
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        lost = await scene.device("a", hold=True)
        await scene.device("b")
        task = asyncio.ensure_future(scene.coordinator(a_plan(), grace_s=5.0))
        await scene.until(lambda: lost.receiver is not None and lost.receiver.finished)
        scene.broker.cut("a", seconds=0.05)
        await scene.until(lambda: scene.kinds().count("device_joined") == 3)
        lost.hold = False
        lost.train()
        report = await task
        assert len([o for o in lost.offers if o.attempt.stage == 1]) == 1

    played(tmp_path, script)
    assert {a.status for a in report.assignments} == {"done"}


def test_without_quorum_at_the_deadline_the_round_is_tried_again_then_fails(tmp_path: Path) -> None:
    policy = RoundPolicy(devices=1, join_s=2.0, quorum=1.0, deadline_s=0.15, max_attempts=2)

    async def script(scene: Scene) -> None:
        device = await scene.device("a", hold=True)
        with pytest.raises(RunError, match=r"0 of 1 updates .*a late.*tried 2 times"):
            await scene.coordinator(a_plan(policy=policy))
        assert [offer.attempt.attempt for offer in device.offers] == [1, 2]
        await scene.until(lambda: len(device.aborts) == 2)

    played(tmp_path, script)


def test_a_stopped_coordinator_goes_on_with_the_same_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device's update is here, the other still trains, and is neither offered nor asked for anything again."""

    def damaged(*_: Any) -> Any:
        raise StoreError("the directory is not whole")

    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        devices = [await scene.device(name, hold=True) for name in ("a", "b")]
        task = asyncio.ensure_future(scene.coordinator(a_plan()))
        await scene.received(stage=1)
        for device in devices:
            device.train()
        await scene.received(stage=2)
        devices[0].train()
        await scene.until(lambda: len(devices[0].acks) == 2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        with Ledger(ledger_at(tmp_path / "run" / "ledger.sqlite")) as ledger:
            assert ledger.report().status == "running"
        with monkeypatch.context() as patch:  # one that cannot even begin changes nothing of it
            patch.setattr("coordinator.runtime.runner.load_memory", damaged)
            with pytest.raises(StoreError, match="not whole"):
                await scene.coordinator(a_plan(), resume=True)
        for device in devices:
            device.hold = False
        going_on = asyncio.ensure_future(scene.coordinator(a_plan(), resume=True))
        devices[1].train()
        report = await going_on
        for device in devices:
            assert [(o.attempt.stage, o.attempt.round) for o in device.offers].count((2, 1)) == 1

    scene = played(tmp_path, script)
    assert [(r.stage, r.round, r.attempt, r.status) for r in report.rounds] == [
        (1, 1, 1, "done"),
        (2, 1, 1, "done"),
        (2, 2, 1, "done"),
    ]
    assert np.allclose(values(scene, "acc/stage1"), 10 + 1)
    assert np.allclose(values(scene, "acc/stage2"), 20 + 2)
    assert scene.worker.calls.count("initial_parts") == 1


def test_a_run_survives_lost_doubled_and_reordered_messages(tmp_path: Path) -> None:
    report = RunReport()

    async def beats(scene: Scene) -> None:
        while True:
            await asyncio.sleep(0.05)
            for device in scene.devices.values():
                device.beat()
                if device.update is not None:
                    device.say(device.update)
                if device.receiver is not None and not device.receiver.finished:
                    device._perform(device.receiver.on_stall(0.0))

    async def script(scene: Scene) -> None:
        nonlocal report
        await scene.device("a")
        await scene.device("b")
        beating = asyncio.ensure_future(beats(scene))
        try:
            report = await scene.coordinator(a_plan())
        finally:
            beating.cancel()

    scene = played(tmp_path, script, seed=3, loss=0.05, duplicate=0.1, reorder=0.1)
    assert report.status == "done"
    counted = [(a.device, a.stage, a.round, a.attempt) for a in report.assignments if a.status == "done"]
    assert len(counted) == len(set(counted))
    assert np.isfinite(values(scene, "task")).all()


def test_the_store_keeps_current_and_final_states_only(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        await scene.device("a", add=1.0)
        await scene.device("b", add=2.0)
        await scene.coordinator(a_plan())

    played(tmp_path, script)
    with Ledger(ledger_at(tmp_path / "run" / "ledger.sqlite")) as ledger:
        states = ledger.states("r1")
    keep = {ref.id for key in ((1, 1), (2, 2)) for ref in states[key].values()}
    store = tmp_path / "run" / "objects"
    assert {file.name for file in store.iterdir() if len(file.name) == 64} == keep


def test_the_planner_is_sent_the_parts_that_are_everyones(tmp_path: Path) -> None:
    """Of a fleet with personal parts all of them would not fit into a request."""
    sent, ref = list[Manifest](), ObjectRef("0" * 64, 10)

    class Noting(FakeWorker):
        def plan_stage(self, request: Request) -> list[Placement]:
            sent.append(request.manifest)
            return super().plan_stage(request)

    async def plan_one() -> None:
        models = ModelTasks(a_plan(), ObjectStore(tmp_path), Noting(), lambda event: None, lambda: 0.0)
        models.begin({"task": ref, "@a/task": ref, "#0/task": ref, "server/lost/task": ref}, {})
        models.start(do.Plan(1, 1, ()))
        await models._tasks.wait()

    asyncio.run(plan_one())
    assert sent == [{"task": ref}]


def test_what_was_planned_is_of_the_time_at_which_it_was_planned(tmp_path: Path) -> None:
    """A round's deadline begins when it is offered, however long the planning took."""
    clock = [10.0]

    class Slow(FakeWorker):
        def plan_stage(self, request: Request) -> list[Placement]:
            clock[0] += 500.0
            return super().plan_stage(request)

    async def plan_one() -> list[Any]:
        events: list[Any] = []
        models = ModelTasks(a_plan(), ObjectStore(tmp_path), Slow(), events.append, lambda: clock[0])
        models.begin({}, {})
        models.start(do.Plan(1, 1, ()))
        await models._tasks.wait()
        return events

    assert [event.at for event in asyncio.run(plan_one())] == [510.0]


def test_the_next_offers_do_not_wait_for_what_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, send, tidy = list[str](), Publisher.send, ModelTasks.collect

    def sending(publisher: Publisher, one: Any, *rest: Any) -> None:
        if isinstance(one, do.SendOffer):
            done.append(f"offer {one.attempt.round}")
        send(publisher, one, *rest)

    def tidying(work: ModelTasks, *rest: Any) -> None:
        done.append("collected")
        tidy(work, *rest)

    async def script(scene: Scene) -> None:
        await scene.device("a")
        await scene.coordinator(one_stage(RoundPolicy(devices=1, join_s=2.0), 2))

    monkeypatch.setattr(Publisher, "send", sending)
    monkeypatch.setattr(ModelTasks, "collect", tidying)
    played(tmp_path, script)
    assert list(dict.fromkeys(done)) == ["offer 1", "offer 2", "collected"]  # an offer may be repeated
    assert done[-1] == "collected"


def test_an_update_that_is_being_checked_as_the_run_ends_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, finished, check = list[FakeDevice](), threading.Event(), uploads.check_update

    def slow(store: ObjectStore, manifest: Any, *rest: Any) -> Any:
        update = late[0].update if late else None
        if update is not None and manifest == update.manifest:
            assert finished.wait(10)
        return check(store, manifest, *rest)

    async def script(scene: Scene) -> None:
        a, b = await scene.device("a", hold=True), await scene.device("b", add=5.0, hold=True)
        late.append(b)
        policy = RoundPolicy(devices=2, join_s=2.0, quorum=0.5, deadline_s=1.5)
        running = asyncio.create_task(scene.coordinator(one_stage(policy, 1)))
        await scene.until(lambda: ready(a, 1) and ready(b, 1))
        a.train()
        await scene.until(lambda: a.acks)
        b.train()
        await scene.until(lambda: "run_finished" in scene.kinds())
        finished.set()
        await running

    monkeypatch.setattr(uploads, "check_update", slow)
    played(tmp_path, script)
    with Ledger(ledger_at(tmp_path / "run" / "ledger.sqlite")) as ledger:
        keep = {ref.id for ref in ledger.states("r1")[1, 1].values()}
    store = tmp_path / "run" / "objects"
    assert {file.name for file in store.iterdir() if file.is_file()} == keep
    assert not [*(store / "dropped").iterdir(), *(store / "partial").iterdir()]


def test_a_full_disk_ends_the_run_with_its_reason_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        with store_errors("write", "objects/x", 1704):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        await scene.device("a")
        await scene.device("b")
        with monkeypatch.context() as patch:
            patch.setattr("coordinator.runtime.model_tasks.aggregate_round", full)
            with pytest.raises(StoreError, match="No space left"):
                await scene.coordinator(a_plan())
        assert scene.events[-1].kind == "run_failed"
        assert "Free space" in scene.events[-1].data["remedy"]
        report = await scene.coordinator(a_plan(), resume=True)

    played(tmp_path, script)
    assert report.status == "done"
    assert report.rounds[0].attempt == 1  # what the devices had sent is not asked for again


def test_what_is_not_committed_is_not_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Ledger.commit

    def failing(ledger: Ledger, run: str, saves: list[Any], events: list[EventRow], at: float, *more: Any) -> None:
        if any(isinstance(save, AssignmentRow) and save.status == "done" for save in saves):
            raise StoreError("the ledger cannot be used: database or disk is full")
        commit(ledger, run, saves, events, at, *more)

    async def script(scene: Scene) -> None:
        await scene.device("a")
        await scene.device("b")
        monkeypatch.setattr(Ledger, "commit", failing)
        with pytest.raises(StoreError, match="disk is full"):
            await scene.coordinator(a_plan())
        assert not any(device.acks for device in scene.devices.values())
        assert "update" not in scene.kinds()

    played(tmp_path, script)


def test_a_broker_that_refuses_is_an_error_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(_: MemoryTransport) -> None:
        raise BrokerError("mqtt://localhost:1883 refuses: bad user name or password")

    async def script(scene: Scene) -> None:
        monkeypatch.setattr(MemoryTransport, "connect", refused)
        with pytest.raises(BrokerError, match="bad user name"):
            await scene.coordinator(a_plan())
        assert scene.kinds() == ["run_failed"]

    played(tmp_path, script)


def test_a_silent_device_is_given_up_and_taken_back_when_it_beats(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        silent = await scene.device("a", hold=True)
        steady = await scene.device("b", hold=True)
        task = asyncio.ensure_future(scene.coordinator(a_plan(), silence_s=3.0, grace_s=15.0))
        await scene.until(lambda: silent.offer and steady.offer)
        while "device_left" not in scene.kinds():
            steady.beat()
            await asyncio.sleep(0.05)
        assert [event.device for event in scene.events if event.kind == "device_left"] == ["a"]
        silent.beat()
        await scene.until(lambda: scene.kinds().count("device_joined") == 3)
        silent.hold = steady.hold = False
        for device in (silent, steady):
            await scene.until(lambda device=device: device.receiver is not None and device.receiver.finished)
            device.train()
        await task

    played(tmp_path, script)


def test_two_coordinators_in_one_directory_are_refused(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        await scene.device("a", hold=True)
        task = asyncio.ensure_future(scene.coordinator(a_plan()))
        await scene.until(lambda: "run_started" in scene.kinds())
        with pytest.raises(StoreError, match="another coordinator"):
            await scene.coordinator(a_plan())
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    played(tmp_path, script)


def one_stage(policy: RoundPolicy, rounds: int) -> RunPlan:
    """The tiny run with that many rounds of its first stage, and none of the second."""
    plan = a_plan(policy=policy)
    first, second = plan.stages
    replace = msgspec.structs.replace
    return replace(plan, stages=(replace(first, rounds=rounds), replace(second, rounds=0)))


def ready(device: FakeDevice, number: int) -> bool:
    """Whether it has all it needs to train for round ``number``."""
    offer = device.offer
    if offer is None or offer.attempt.round != number:
        return False
    return all(device.store.has(ref.id) for ref in offer.manifest.values())


def test_without_lockstep_nobody_waits_and_late_updates_count_damped(tmp_path: Path) -> None:
    report = RunReport()
    policy = RoundPolicy(devices=3, join_s=2.0, deadline_s=20.0, mode="async", buffer=2, alpha=1.0)

    async def script(scene: Scene) -> None:
        nonlocal report
        a, b = [await scene.device(name, add=1.0, hold=True) for name in ("a", "b")]
        c = await scene.device("c", add=8.0, hold=True)
        running = asyncio.create_task(scene.coordinator(one_stage(policy, 4)))
        await scene.until(lambda: all(ready(device, 1) for device in (a, b, c)))
        a.train()
        b.train()
        await scene.until(lambda: ready(a, 2) and ready(b, 2))  # nobody has waited for c
        c.train()
        await scene.until(lambda: ready(c, 2))  # nor does c wait for anybody
        a.train()
        await scene.until(lambda: ready(a, 3))
        b.train()
        c.train()
        await scene.until(lambda: ready(c, 4) and ready(b, 3))  # b had delivered before the buffer was full
        a.train()
        c.train()
        report = await running

    scene = played(tmp_path, script)
    # "task" is part 6, and begins at 60; an update one round late counts half:
    means = [np.mean([1, 1]), np.mean([1, 8 / 2]), np.mean([1 / 2, 8 / 2]), np.mean([1 / 2, 8])]
    assert np.allclose(values(scene, "task"), 60 + sum(means))
    told = [{one["device"]: one["factor"] for one in r.record.get("stale", {}).values()} for r in report.rounds]
    assert told == [{}, {"c": 0.5}, {"b": 0.5, "c": 0.5}, {"a": 0.5}]
    assert [r.participants for r in report.rounds] == [("a", "b"), ("a", "c"), ("b", "c"), ("a", "c")]
    closed = [event.data for event in scene.events if event.kind == "round_closed"]
    assert [one["staleness"] for one in closed] == [{}, {"c": 1}, {"b": 1, "c": 1}, {"a": 1}]
    assert closed[0]["behind"] == ["c"]


def test_a_late_update_is_kept_over_a_restart_with_the_state_it_was_made_from(tmp_path: Path) -> None:
    report = RunReport()
    plan = one_stage(RoundPolicy(devices=2, join_s=2.0, deadline_s=1.5, late="keep", alpha=1.0), 3)

    async def script(scene: Scene) -> None:
        nonlocal report
        a, b = await scene.device("a", add=2.0, hold=True), await scene.device("b", add=8.0, hold=True)
        running = asyncio.create_task(scene.coordinator(plan))
        await scene.until(lambda: ready(a, 1) and ready(b, 1))
        a.train()
        await scene.until(lambda: ready(a, 2))  # the deadline has closed the first round without b
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        before = len(scene.events)
        running = asyncio.create_task(scene.coordinator(plan, resume=True))
        await scene.until(lambda: [event.kind for event in scene.events[before:]].count("device_joined") == 2)
        b.train()
        await scene.until(lambda: b.acks)
        a.train()
        a.hold = b.hold = False
        report = await running

    scene = played(tmp_path, script)
    # 60 at first; a alone; a, and b's of the first round at half its weight; both.
    assert np.allclose(values(scene, "task"), 60 + 2 + (2 + 8 / 2) / 2 + (2 + 8) / 2)
    assert [r.attempt for r in report.rounds] == [1, 1, 1]
    assert [list(r.record.get("stale", {})) for r in report.rounds] == [[], ["b~1"], []]


def test_devices_are_called_when_the_broker_has_forgotten_the_coordinator(tmp_path: Path) -> None:
    """And only then: what they said is kept otherwise. At 8515bcb a lost update came again after 15 s (ANNOUNCE_S)."""

    async def script(scene: Scene) -> None:
        device = await scene.device("a", hold=True)
        going = asyncio.ensure_future(scene.coordinator(one_stage(RoundPolicy(devices=1, join_s=2.0), 1)))
        await scene.until(lambda: device.receiver is not None and device.receiver.finished)
        said: list[bool] = []
        device.hello = lambda: said.append(transport.session_kept)  # type: ignore[method-assign]
        transport = scene.broker._sessions["coordinator"].transport
        assert isinstance(transport, MemoryTransport)
        for kept in (True, False):
            transport.session_kept = kept
            scene.broker.cut("coordinator")
            await scene.until(lambda: not transport._up.is_set())
            await scene.until(transport._up.is_set)
        await scene.until(lambda: said)
        device.train()
        await going
        assert said == [False]

    played(tmp_path, script)
