"""The worker without a process: answers by value, errors as from a process, notes that do not flood the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from edgefl.errors import DataError
from edgefl.process.inline_worker import NOTE_S, ComputeThread, InlineWorker
from edgefl.process.worker import Note, WorkerFailedError

T = TypeVar("T")
GIVEN = {"a": [1]}


def count(body: object, note: Note) -> int:
    assert isinstance(body, int)
    for number in range(1, body + 1):
        note({"step": number})
    return body


def slow(body: object, note: Note) -> None:
    note({"step": 1})
    time.sleep(1.5 * NOTE_S)
    note({"step": 2})
    note({"step": 3})


def refuse(body: object, note: Note) -> None:
    raise DataError("no data")


def same(body: object, note: Note) -> object:
    return body, threading.current_thread().name


def answer_of(tmp_path: Path, work: Callable[[InlineWorker], T]) -> T:
    handlers = {"count": count, "slow": slow, "refuse": refuse, "same": same}

    async def scene() -> T:
        with ComputeThread("torch") as thread:
            worker = InlineWorker(lambda: handlers, thread, tmp_path / "log")
            return await work(worker)  # type: ignore[misc]

    return asyncio.run(scene())


@pytest.mark.parametrize(
    ("method", "body", "steps"), [("count", 100, [1, 100]), ("count", 1, [1]), ("slow", 0, [1, 2, 3])]
)
def test_of_many_notes_the_first_the_last_and_a_few_a_second_are_passed_on(
    tmp_path: Path, method: str, body: int, steps: list[int]
) -> None:
    notes: list[object] = []
    answer_of(tmp_path, lambda worker: worker.call(method, body, notes.append))
    assert notes == [{"step": step} for step in steps]


def test_many_requests_are_one_visit_to_the_thread_and_errors_are_among_the_answers(tmp_path: Path) -> None:
    async def ask(worker: InlineWorker) -> list[object]:
        return await worker.calls([("same", GIVEN), ("refuse", None), ("count", 2)])

    first, error, last = answer_of(tmp_path, ask)
    assert isinstance(first, tuple)
    assert first[0] is GIVEN, "handed over, not copied"
    assert first[1].startswith("torch")
    assert isinstance(error, WorkerFailedError)
    assert (error.message, error.kind, error.on_purpose) == ("no data", "DataError", True)
    assert last == 2


def test_a_method_whose_last_request_was_quick_is_answered_in_the_loops_thread(tmp_path: Path) -> None:
    async def ask(worker: InlineWorker) -> list[object]:
        first, second = await worker.call("same", 1), await worker.call("same", 2)
        return [first, second, threading.current_thread().name]

    first, second, loops = answer_of(tmp_path, ask)
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    assert first[1].startswith("torch")
    assert second == (2, loops)


def test_no_request_is_answered_beside_another_or_after_a_slow_one_of_its_method(tmp_path: Path) -> None:
    async def ask(worker: InlineWorker) -> list[object]:
        await worker.call("same", 0)
        slow = asyncio.create_task(worker.call("slow", 0))
        await asyncio.sleep(0)
        beside = await worker.call("same", 1)  # the thread has the slow one
        await slow
        noted: list[str] = []
        await worker.call("slow", 0, lambda _: noted.append(threading.current_thread().name))
        return [beside, *noted]

    beside, *noted = answer_of(tmp_path, ask)
    assert isinstance(beside, tuple)
    assert beside[1].startswith("torch")
    assert len(noted) == 3, "notes came while it ran, so it was in the thread"
