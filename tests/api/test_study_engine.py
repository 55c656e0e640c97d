"""The pool of a study's workers: who gets the next cell when one waits for room, is gone, or cannot start."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from edgefl.api.study_engine import STOP_S, CellLostError, Estimate, Room, Work, Workers
from edgefl.errors import RunError
from edgefl.process.worker import WorkerFailedError


class Played:
    """A worker without a process. ``room``: set when there is room for it; cells end by what their run is called."""

    def __init__(self, number: int, room: asyncio.Event) -> None:
        self.number, self.room = number, room
        self.did: list[str] = []
        self.stopped = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self) -> None:
        await self.room.wait()
        if self.number == 13:
            raise RunError("no room at all")

    async def call(self, method: str, body: object) -> object:
        works = body if isinstance(body, list) else [body]
        self.did += [work.run for work in works]
        await self.gate.wait()
        run = works[0].run
        if run == "gone":
            raise WorkerFailedError("killed", status=-9)
        if run == "wrong":
            raise WorkerFailedError("no such column", remedy="Mend it.")
        if run == "odd":
            return 7
        return [{"process": 5}] if method == "estimate" else ""

    async def stop(self, grace_s: float) -> None:
        assert grace_s == STOP_S
        self.stopped += 1


def pool(numbers: dict[int, int] | None = None) -> tuple[Workers, list[Played], asyncio.Event]:
    """The engine, its workers as they are made, and the event by which all but the first get room."""
    made: list[Played] = []
    there, room = asyncio.Event(), asyncio.Event()
    there.set()

    def make(number: int) -> Played:
        made.append(Played((numbers or {}).get(number, number), there if number == 1 else room))
        return made[-1]

    return Workers(make, Room(2, 100)), made, room


def bounded(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def test_one_worker_does_all_cells_one_after_the_other() -> None:
    async def body() -> None:
        engine, made, _ = pool()
        assert await engine.estimate([Work(run="a")]) == [Estimate(5)]
        assert [await engine.carry_out(Work(run=name)) for name in "abc"] == [""] * 3
        await engine.close()
        assert [(one.did, one.stopped) for one in made] == [(["a", "a", "b", "c"], 1)]

    bounded(body())


def test_a_cell_does_not_wait_for_a_worker_without_room_while_another_is_free() -> None:
    async def body() -> None:
        engine, made, room = pool()
        made_calls = [asyncio.ensure_future(engine.carry_out(Work(run=name))) for name in "abc"]
        assert await asyncio.gather(*made_calls) == [""] * 3
        assert [one.did for one in made] == [["a", "b", "c"], [], []]
        room.set()
        await asyncio.sleep(0)
        calls = [asyncio.ensure_future(engine.carry_out(Work(run=name))) for name in "def"]
        assert await asyncio.gather(*calls) == [""] * 3
        assert len(made) == 3  # no more than there were calls at once
        await engine.close()

    bounded(body())


def test_cells_at_once_have_a_worker_each() -> None:
    async def body() -> None:
        engine, made, room = pool()
        room.set()
        await engine.carry_out(Work(run="first"))
        made[0].gate.clear()
        first = asyncio.ensure_future(engine.carry_out(Work(run="a")))
        await asyncio.sleep(0)
        assert await engine.carry_out(Work(run="b")) == ""  # while the first is at a
        assert [one.did for one in made] == [["first", "a"], ["b"]]
        made[0].gate.set()
        assert await first == ""
        await engine.close()

    bounded(body())


def test_a_worker_that_is_gone_loses_its_cell_and_one_with_an_error_tells_it() -> None:
    async def body() -> None:
        engine, made, _ = pool()
        with pytest.raises(CellLostError, match=r"the process of gone ended \(killed\)"):
            await engine.carry_out(Work(run="gone"))
        assert await engine.carry_out(Work(run="wrong")) == "no such column (Mend it.)"
        with pytest.raises(WorkerFailedError, match="no such column"):
            await engine.estimate([Work(run="wrong")])
        assert "something else than" in await engine.carry_out(Work(run="odd"))
        assert await engine.carry_out(Work(run="fine")) == ""
        assert len(made) == 1
        await engine.close()

    bounded(body())


def test_an_error_of_starting_reaches_a_cell_that_waits() -> None:
    async def body() -> None:
        engine, _, _ = pool({1: 13})
        with pytest.raises(RunError, match="no room at all"):
            await engine.carry_out(Work(run="a"))
        await engine.close()

    bounded(body())


def test_an_error_of_starting_that_nobody_waits_for_is_charged_to_no_cell() -> None:
    async def body() -> None:
        engine, made, room = pool({2: 13})
        assert await engine.carry_out(Work(run="first")) == ""
        made[0].gate.clear()
        both = [asyncio.ensure_future(engine.carry_out(Work(run=name))) for name in "ab"]
        await asyncio.sleep(0.01)
        made[0].gate.set()
        assert await asyncio.gather(*both) == ["", ""]  # by the one that has room
        room.set()
        await asyncio.sleep(0.01)
        assert [await engine.carry_out(Work(run=name)) for name in "cd"] == ["", ""]
        await engine.close()

    bounded(body())


def test_closing_ends_workers_that_still_wait_for_room_and_then_the_engine() -> None:
    async def body() -> None:
        ended: list[bool] = []
        made: list[Played] = []

        def make(number: int) -> Played:
            made.append(Played(number, asyncio.Event()))
            return made[-1]

        engine = Workers(make, Room(1, 1), lambda: ended.append(all(one.stopped for one in made)))
        call = asyncio.ensure_future(engine.carry_out(Work(run="a")))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await engine.close()
        assert ended == [True]
        assert len(made) == 1

    bounded(body())
