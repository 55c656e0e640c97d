"""Rounds of simulated devices, gathered until no other is on its way: who goes together, and who ends alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from device_agent.core.state import Result
from device_agent.gathered_rounds import GatheredRounds
from device_agent.runtime.trainer_process import TrainerSettings, TrainRequest
from edgefl.errors import DivergedError
from edgefl.process.inline_worker import ComputeThread, InlineWorker
from edgefl.process.worker import WorkerFailedError
from edgefl.protocol.messages import Offer


def request(device: str) -> TrainRequest:
    return TrainRequest(TrainerSettings(device=device), Offer())


def answer(device: str) -> Result:
    if device == "diverging":
        raise DivergedError("the loss became nan at step 1")
    return Result(samples={device: 1})


class Rounds:
    """Gathered rounds over a real thread. ``groups``: the devices that it took at once."""

    def __init__(self, tmp_path, thread: ComputeThread, fails: bool = False) -> None:
        self.groups: list[list[str]] = []
        self.left: list[str] = []
        self.coming = True
        self.tasks: list[asyncio.Task[None]] = []
        self.fails = fails
        worker = InlineWorker(lambda: {"together": self.together}, thread, tmp_path / "log")
        self.rounds = GatheredRounds(
            worker,
            lambda: self.coming,
            lambda settings: self.left.append(settings.device),
            lambda work: self.tasks.append(asyncio.ensure_future(work)),
        )

    def together(self, requests, note) -> list[Callable[[], Result]]:
        if self.fails:
            raise OSError("no space")
        names = [one.settings.device for one in requests]
        self.groups.append(names)
        note({place: {"step": place} for place, _ in enumerate(names)})
        return [partial(answer, name) for name in names]

    def train(self, device: str, noted=None) -> asyncio.Task[object]:
        worker = self.rounds.member(request(device).settings)
        return asyncio.ensure_future(worker.call("train", request(device), noted))


@pytest.fixture
def made(tmp_path):
    with ComputeThread("torch") as thread:
        yield partial(Rounds, tmp_path, thread)


def test_devices_wait_for_those_on_their_way_and_go_by_name(made):
    async def go():
        one, notes = made(), []
        tasks = [one.train(name, notes.append) for name in ("c", "a")]
        await asyncio.sleep(0.02)
        assert one.groups == []
        tasks.append(one.train("b", notes.append))
        one.coming = False
        found = await asyncio.gather(*tasks)
        assert one.groups == [["a", "b", "c"]]
        assert [list(result.samples) for result in found] == [["c"], ["a"], ["b"]]
        assert sorted(said["step"] for said in notes) == [0, 1, 2]
        assert (await one.train("a")).samples == {"a": 1}  # the next round's
        assert one.groups[1:] == [["a"]]

    asyncio.run(go())


def test_a_device_that_is_left_off_before_its_turn_does_not_train(made):
    async def go():
        one = made()
        first, second, third = (one.train(name) for name in "abc")
        await asyncio.sleep(0.01)
        one.rounds.member(request("a").settings).interrupt()
        third.cancel()
        one.coming = False
        assert (await first).refusal.reason == "abandoned"
        assert (await second).refusal is None
        assert one.groups == [["b"]]
        one.rounds.member(request("b").settings).interrupt()  # of a round that is begun
        assert one.left == ["b"]

    asyncio.run(go())


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_is_its_devices_or_that_of_all(made, fails):
    async def go():
        one = made(fails=fails)
        one.coming = False
        found = await asyncio.gather(*(one.train(name) for name in ("diverging", "whole")), return_exceptions=True)
        assert isinstance(found[0], WorkerFailedError)
        assert found[0].kind == ("OSError" if fails else "DivergedError")
        assert isinstance(found[1], WorkerFailedError if fails else Result)
        assert all(task.done() for task in one.tasks)

    asyncio.run(go())
