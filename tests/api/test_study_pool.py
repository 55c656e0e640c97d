"""The pool of a study's workers: which cells run at once, and who takes one whose worker waits, is gone, or fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from edgefl.api.study_cells import Work
from edgefl.api.study_pool import AGAIN, STOP_S, Ended, Engine, Estimate, Room, Told, carry_out_all, fitting
from edgefl.errors import BudgetError, RunError
from edgefl.process.worker import WorkerFailedError

MIB = 2**20


class Workers:
    """Workers without processes. ``what``: run -> the error that it fails by, or how often its process is lost.

    ``sizes``: run -> MiB by which it is priced; without them every run, by 100. ``roomless``: numbers of workers that
    wait for room without end; ``broken``: of those that cannot start.
    """

    def __init__(self, what: dict[str, str | int] | None = None, **more: Any) -> None:
        self.what = what or {}
        self.sizes: dict[str, int] | None = more.get("sizes")
        self.roomless, self.broken = more.get("roomless", set()), more.get("broken", set())
        self.tries: list[str] = []
        self.priced: list[str] = []
        self.busy = self.most = 0
        self.made: list[Played] = []
        self.ended = 0

    def engine(self) -> Engine:
        def make(number: int) -> Played:
            self.made.append(Played(number, self))
            return self.made[-1]

        def end() -> None:
            assert all(one.stopped for one in self.made)
            self.ended += 1

        return Engine(make, Room(3, 620 * MIB), end)


class Played:
    def __init__(self, number: int, of: Workers) -> None:
        self.number, self.of = number, of
        self.did: list[str] = []
        self.stopped = 0

    async def start(self) -> None:
        if self.number in self.of.roomless:
            await asyncio.Event().wait()
        if self.number in self.of.broken:
            raise RunError("no room at all")

    async def call(self, method: str, body: Any) -> object:
        if method == "estimate":
            self.of.priced += [work.run for work in body]
            sizes = {work.run: 100 for work in body} if self.of.sizes is None else self.of.sizes
            return [
                {"process": sizes[work.run] * MIB, "steps": 10 * MIB, "others": 0} for work in body if work.run in sizes
            ]
        self.did.append(body.run)
        self.of.tries.append(body.run)
        self.of.busy += 1
        self.of.most = max(self.of.most, self.of.busy)
        await asyncio.sleep(0.001)
        self.of.busy -= 1
        what = self.of.what.get(body.run, "")
        if what == "odd":
            return 7
        if isinstance(what, int) and self.of.tries.count(body.run) <= what:
            raise WorkerFailedError("killed", status=-9)
        if isinstance(what, str) and what:
            raise WorkerFailedError(what, kind=what, remedy="Mend it.")
        return ""

    async def stop(self, grace_s: float) -> None:
        assert grace_s == STOP_S
        self.stopped += 1


def bounded(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 10))


def works(tmp_path: Path, *names: str, **overrides: list[object]) -> list[Work]:
    return [
        Work(overrides={field: values[n] for field, values in overrides.items()}, run=name, directory=str(tmp_path))
        for n, name in enumerate(names)
    ]


def test_a_lost_cell_is_taken_up_again_twice_and_then_told_as_failed_while_others_go_on(tmp_path: Path) -> None:
    workers = Workers({"unlucky": AGAIN, "doomed": 99, "wrong": "no such column", "odd": "odd"})
    said: list[str] = []
    ended: list[Ended] = []
    cells = works(tmp_path, "doomed", "wrong", "fine", "unlucky", "odd")
    errors = bounded(carry_out_all(workers.engine(), cells, 2, Told(said.append, ended.append)))
    assert errors["fine"] == errors["unlucky"] == ""
    assert errors["wrong"] == "no such column (Mend it.)"
    assert "something else than" in errors["odd"]
    assert "the process of doomed ended (killed), 3 times" in errors["doomed"]
    assert {name: workers.tries.count(name) for name in errors} == {
        "doomed": 3,
        "wrong": 1,
        "fine": 1,
        "unlucky": 3,
        "odd": 1,
    }
    assert {(one.run, one.error) for one in ended} == set(errors.items())
    assert len([text for text in said if "taken up again" in text]) == 2 * AGAIN
    assert workers.most == len(workers.made) == 2


def test_one_worker_prices_and_does_all_cells_one_after_the_other(tmp_path: Path) -> None:
    workers, cells = Workers(), works(tmp_path, "a", "b", "c")
    engine = workers.engine()

    async def body() -> None:
        assert await engine.estimate(cells[:1]) == [Estimate(100 * MIB, 10 * MIB)]
        assert await carry_out_all(engine, cells, 1, Told()) == dict.fromkeys("abc", "")
        await engine.close()

    bounded(body())
    assert [(one.did, one.stopped) for one in workers.made] == [(["a", "b", "c"], 1)]
    assert workers.ended == 1


def test_a_cell_does_not_wait_for_a_worker_without_room_while_another_is_free(tmp_path: Path) -> None:
    workers = Workers(roomless={2, 3})
    engine = workers.engine()

    async def body() -> None:
        for names in ("abc", "def"):
            assert await carry_out_all(engine, works(tmp_path, *names), 3, Told()) == dict.fromkeys(names, "")
        await engine.close()

    bounded(body())
    assert [one.did for one in workers.made] == [list("abcdef"), [], []]


def test_a_worker_that_cannot_start_leaves_the_cells_to_the_others(tmp_path: Path) -> None:
    workers, said = Workers(broken={1, 3}), list[str]()
    cells = works(tmp_path, "a", "b", "c")
    assert bounded(carry_out_all(workers.engine(), cells, 3, Told(said.append))) == dict.fromkeys("abc", "")
    assert [one.did for one in workers.made] == [[], ["a", "b", "c"], []]
    assert said == ["no room at all; the other workers go on"] * 2
    with pytest.raises(RunError, match="no room at all"):
        bounded(carry_out_all(Workers(broken={1, 2}).engine(), cells, 2, Told()))


def test_a_package_that_lacks_ends_the_study(tmp_path: Path) -> None:
    workers = Workers({"a": "MissingDependencyError"})
    with pytest.raises(WorkerFailedError, match="MissingDependencyError"):
        bounded(carry_out_all(workers.engine(), works(tmp_path, "a", "b"), 1, Told()))
    assert workers.tries == ["a"]


def test_as_many_workers_as_fit_and_one_price_whatever_the_seed(tmp_path: Path) -> None:
    cells = works(tmp_path, "a1", "a2", "b1", seed=[1, 2, 1], width=[8, 8, 16])
    workers, said = Workers(sizes={"a1": 100, "a2": 100, "b1": 290}), list[str]()
    engine = workers.engine()

    def count(memory: int, wanted: int = 4) -> int:
        return bounded(fitting(engine, cells, wanted, memory * MIB, Told(said.append)))

    assert count(700) == 2  # 290 measured and 10 predicted, of the larger kind
    assert (
        "2 of 4 workers: a cell takes about 300 MiB (290 MiB measured when it was priced, 10 MiB predicted" in said[-1]
    )
    assert workers.priced == ["a2", "b1"]
    assert count(10_000) == 3  # no more than cells
    assert count(10_000, wanted=1) == 1
    assert count(0, wanted=0) == 2  # by what the engine has: three cores, and memory for two
    with pytest.raises(BudgetError, match=r"about 300 MiB, of 299 MiB"):
        count(299)


def test_run_files_that_differ_are_priced_each_whatever_the_seed(tmp_path: Path) -> None:
    files = [{"seed": seed, "recipe": recipe} for recipe in ("lw-fedmml", "pmcmfl") for seed in (1, 2)]
    cells = [Work(file, {}, str(i), str(tmp_path)) for i, file in enumerate(files)]
    workers = Workers(sizes={"1": 300, "3": 100})
    assert bounded(fitting(workers.engine(), cells, 4, 620 * MIB, Told())) == 2
    assert workers.priced == ["1", "3"]


def test_cells_that_cannot_be_priced_are_left_to_say_why(tmp_path: Path) -> None:
    said = list[str]()
    unpriced, told = Workers(sizes={}).engine(), Told(said.append)
    assert bounded(fitting(unpriced, works(tmp_path, "a", "b", width=[8, 16]), 4, 0, told)) == 2
    assert said == ["no cell can be priced; each says why"]
    cells = works(tmp_path, *[f"c{n}" for n in range(10)], width=list(range(10)))
    assert bounded(fitting(Workers(sizes={"c9": 290}).engine(), cells, 4, 700 * MIB, told)) == 2
    assert "the largest of the 1 of 10 kinds of cell that were priced" in said[-1]
