"""Several devices' trainers in one process: the same results, each with its own data, and turns that stay apart."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from test_trainer_process import TOTAL, offer_of, place, settings  # noqa: F401 - place is a fixture

from device_agent.core.state import NOTHING_TRAINED, Train
from device_agent.many_agents import HostedTrainers, trainer_workers
from device_agent.runtime.trainer_process import TrainerProcess, TrainRequest
from device_agent.trainer import first_round, local_trainer
from device_agent.trainer.process import Trainers
from edgefl.errors import ConfigError
from edgefl.plan.job import Preparation
from edgefl.records import Budget, ObjectRef
from edgefl.storage.objects import ObjectStore


def two_in_one_process(place):  # noqa: F811 - the fixture's value
    shared = HostedTrainers(trainer_workers(1, place))
    return [shared.trainer(settings(place, device=name), TOTAL) for name in ("d1", "d2")]


def test_devices_that_share_a_process_train_as_alone(place):  # noqa: F811 - the fixture
    async def scene():
        offer = offer_of(ObjectStore(place / "objects"))
        alone = TrainerProcess(settings(place, device="d2"), TOTAL)
        first, second = two_in_one_process(place)
        try:
            facts = await asyncio.gather(first.warm(Preparation()), second.warm(Preparation()))
            assert facts[0].samples == facts[1].samples == {"": 20, "acc": 20}
            own, *both = [await one.train(Train(offer), lambda _: None) for one in (alone, first, second)]
            assert all(ended.alive and ended.result.refusal is None for ended in (own, *both))
            assert both[1].result.manifest == own.result.manifest  # batches are drawn by the device's name
            assert both[0].result.manifest != own.result.manifest
            figures = both[1].result.figures
            assert figures["flops"] == own.result.figures["flops"]
            assert figures["step_peak_bytes"].value > 0
            assert figures["process_peak_bytes"].value is None
            assert "other devices" in figures["process_peak_bytes"].reason
        finally:
            await asyncio.gather(alone.stop(), first.stop())
            pid = second._worker.process.pid
            await second.stop()
        assert pid is not None  # it lived as long as somebody needed it
        assert second._worker.process.pid is None

    asyncio.run(scene())


def rows_open(folder: Path) -> int:
    """How many files for rows, which have no name, this process has open below ``folder``."""
    held = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return sum(str(folder / "rows") in one for one in held)


def test_who_leaves_gives_its_data_back(place, monkeypatch):  # noqa: F811 - the fixture
    """Also after a round, from when on what is there by then is no longer searched for garbage."""
    monkeypatch.setattr(local_trainer, "SMALL_BYTES", 0)  # so that its samples are in a file, and show
    trainers, own = Trainers(), settings(place)
    request = TrainRequest(own, offer_of(ObjectStore(place / "objects")))
    first_round.freeze_once.cache_clear()
    try:
        result = trainers.train(msgspec.to_builtins(request), lambda _: None)
        assert result.refusal is None, result.refusal
        assert rows_open(place) > 0
        trainers.leave(msgspec.to_builtins(own), lambda _: None)
        gc.collect()
        assert rows_open(place) == 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("draw", ["", "random"])
def test_residuals_wait_for_later_rounds_of_the_stage_alone(place, draw):  # noqa: F811 - the fixture
    """Those of encoders that only an earlier stage trained would lie on the disk until the run ends."""
    trainers, offer = Trainers(), offer_of(ObjectStore(place / "objects"))
    after = tuple(part for part in offer.job.stage.present if part in {"head/acc", "fusion", "task"})
    stage = replace(offer.job.stage, trained=after, draw=draw)
    left = {"lost/acc/stage1": ObjectRef("0" * 64, 1)}
    request = TrainRequest(settings(place), replace(offer, job=replace(offer.job, stage=stage)), left)
    result = trainers.train(msgspec.to_builtins(request), lambda _: None)
    assert result.refusal is None, result.refusal
    assert result.retained == (left if draw else {})


class Queue:
    """A trainer's process that trains once it may, for a step, and notes who did and how often it was interrupted."""

    def __init__(self):
        self.pid, self.may, self.trained, self.interrupts = 1, asyncio.Event(), [], 0

    async def call(self, method, body, on_note=None):
        if method == "train":
            self.trained.append(body.settings.device)
            await self.may.wait()
            on_note({"epoch": 1, "step": 1, "steps": 9, "loss": 1.0})
        return {}

    def interrupt(self):
        self.interrupts += 1


def test_an_interrupt_counts_before_the_turn_and_while_the_request_waits(place):  # noqa: F811 - the fixture
    async def scene():
        queue, offer = Queue(), offer_of(ObjectStore(place / "objects"))
        shared = HostedTrainers([queue])
        first, second = (shared.trainer(settings(place, device=name), TOTAL) for name in ("d1", "d2"))
        both = [asyncio.create_task(one.train(Train(offer), lambda _: None)) for one in (first, second)]
        while not queue.trained:
            await asyncio.sleep(0)
        first.interrupt()  # the process has not read the request
        second.interrupt()
        assert queue.interrupts == 1
        queue.may.set()
        _, dropped = await asyncio.gather(*both)
        assert (queue.interrupts, queue.trained) == (2, ["d1"])
        assert (dropped.result.refusal.reason, dropped.result.figures) == ("abandoned", NOTHING_TRAINED)
        await second.train(Train(offer), lambda _: None)
        assert (queue.interrupts, queue.trained) == (2, ["d1", "d2"])

    asyncio.run(scene())


@pytest.mark.slow
def test_who_leaves_off_does_not_end_the_others_round(place):  # noqa: F811 - the fixture
    async def scene():
        offer = offer_of(ObjectStore(place / "objects"))
        first, second = two_in_one_process(place)

        def at_first_step(progress):
            second.interrupt()  # not its turn: the first goes on
            if progress.step == 3:
                first.interrupt()

        try:
            left, dropped = await asyncio.gather(
                first.train(Train(offer), at_first_step), second.train(Train(offer), lambda _: None)
            )
            assert "left off: the agent" in left.result.refusal.detail
            assert left.alive
            assert dropped.result.refusal.detail == "left off before its turn"
            trained = await second.train(Train(offer), lambda _: None)
            assert trained.result.refusal is None
        finally:
            await asyncio.gather(first.stop(), second.stop())

    asyncio.run(scene())


@pytest.mark.slow
def test_a_process_that_dies_is_told_and_started_again(place):  # noqa: F811 - the fixture
    async def scene():
        offer = offer_of(ObjectStore(place / "objects"))
        first, second = two_in_one_process(place)
        try:
            await second.warm(Preparation())
            ended = await first.train(Train(offer), lambda _: first._worker.process.kill())
            assert not ended.alive
            assert ended.result.refusal.reason == "error"
            again = await second.train(Train(offer), lambda _: None)
            assert again.result.refusal is None
        finally:
            await asyncio.gather(first.stop(), second.stop())

    asyncio.run(scene())


@pytest.mark.parametrize(
    "budget", [Budget(memory_bytes=2**30), Budget(step_memory_bytes=2**20), Budget(gpu_memory_bytes=2**30)]
)
def test_a_memory_budget_needs_a_process_of_its_own(place, budget):  # noqa: F811 - the fixture
    with pytest.raises(ConfigError, match=r"d1.*shares its trainer"):
        HostedTrainers(trainer_workers(2, place)).trainer(settings(place, budget=budget), TOTAL)
