"""Micro-batches: who is computed together, who is refused, and that each gets its own answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from edgefl.export.runtime import Prediction
from edgefl.serve.batching import Batcher, Work
from edgefl.serve.limits import Limits, Refused


class Doubles:
    """Answers twice the input, and notes each call; the first call waits until ``go``."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[str, ...], int]] = []
        self.go = threading.Event()

    def predict(self, inputs: Any, *, mask: str | None = None) -> Prediction:
        self.go.wait(10)
        (a,) = inputs.values()
        self.calls.append((tuple(inputs), len(a)))
        if np.isnan(a).any():
            raise ValueError("not a number")
        return Prediction(tuple(f"{x:g}" for x in a[:, 0]), a[:, 0].astype(np.int64), a * 2, a, {}, {})


def work(bundle: Doubles, value: float, rows: int = 1, name: str = "acc") -> Work:
    return Work(bundle, {name: np.full((rows, 1), value, np.float32)})


def scenario(limits: Limits, what: Callable[[Batcher, Doubles], Coroutine[Any, Any, None]]) -> Doubles:
    bundle = Doubles()

    async def body() -> None:
        batcher = Batcher(limits)
        try:
            await asyncio.wait_for(what(batcher, bundle), 10)
        finally:
            bundle.go.set()
            await batcher.close()

    asyncio.run(body())
    return bundle


async def queued(batcher: Batcher, works: list[Work]) -> list[asyncio.Future[Prediction]]:
    tasks = [asyncio.ensure_future(batcher.answer(one)) for one in works]
    await asyncio.sleep(0.05)
    return tasks


def test_what_waits_while_a_batch_is_computed_is_the_next_batch():
    async def what(batcher: Batcher, bundle: Doubles) -> None:
        tasks = await queued(batcher, [work(bundle, 0)])
        tasks += await queued(batcher, [work(bundle, i, rows=1 + i % 2) for i in range(1, 9)])
        bundle.go.set()
        for i, task in enumerate(tasks):
            found = await task
            assert found.probabilities.tolist() == [[2.0 * i]] * (1 + i % 2)
            assert found.labels == (str(i),) * (1 + i % 2)

    assert scenario(Limits(delay_s=0), what).calls == [(("acc",), 1), (("acc",), 12)]


def test_kinds_are_not_mixed_and_a_batch_is_no_larger_than_it_may_be():
    async def what(batcher: Batcher, bundle: Doubles) -> None:
        works = [work(bundle, 0), *(work(bundle, i, name="ab"[i % 2]) for i in range(10)), work(bundle, 5, 7, "a")]
        tasks = await queued(batcher, works)
        bundle.go.set()
        assert [(await task).probabilities[0, 0] for task in tasks] == [0, *(2 * i for i in range(10)), 10]

    calls = scenario(Limits(delay_s=0, batch_rows=4), what).calls
    assert calls == [(("acc",), 1), (("a",), 4), (("b",), 4), (("a",), 1), (("b",), 1), (("a",), 7)]


def test_more_than_may_wait_are_refused():
    async def what(batcher: Batcher, bundle: Doubles) -> None:
        await queued(batcher, [work(bundle, 0)])
        await queued(batcher, [work(bundle, i) for i in range(3)])
        with pytest.raises(Refused, match="3 requests wait already") as raised:
            await batcher.answer(work(bundle, 9))
        assert raised.value.status == 503

    scenario(Limits(waiting=3), what)


def test_an_error_reaches_all_of_its_batch_and_no_other():
    async def what(batcher: Batcher, bundle: Doubles) -> None:
        bundle.go.set()
        with pytest.raises(ValueError, match="not a number"):
            await batcher.answer(work(bundle, float("nan")))
        assert (await batcher.answer(work(bundle, 3))).labels == ("3",)

    scenario(Limits(), what)


def test_who_has_gone_is_not_computed():
    async def what(batcher: Batcher, bundle: Doubles) -> None:
        (first,) = await queued(batcher, [work(bundle, 0)])
        gone, kept = await queued(batcher, [work(bundle, i) for i in (1, 2)])
        gone.cancel()
        await asyncio.sleep(0)
        bundle.go.set()
        await asyncio.gather(first, kept)

    assert scenario(Limits(), what).calls == [(("acc",), 1), (("acc",), 1)]


async def took(batcher: Batcher, works: list[Work]) -> float:
    """Seconds until all are answered that come one after the other, with time for a batch between them."""
    begun = time.monotonic()
    tasks = []
    for one in works:
        tasks += await queued(batcher, [one])
    await asyncio.gather(*tasks)
    return time.monotonic() - begun


def test_a_batch_waits_for_as_many_requests_as_the_last_one_had():
    async def what(batcher: Batcher, bundle: Doubles) -> None:
        bundle.go.set()
        await asyncio.gather(*(batcher.answer(work(bundle, i)) for i in range(3)))
        assert await took(batcher, [work(bundle, i) for i in range(3)]) < 2  # the delay is 4 s

    assert [rows for _, rows in scenario(Limits(delay_s=4), what).calls] == [3, 3]


def test_who_asks_alone_never_waits_however_many_samples_a_request_has():
    async def what(batcher: Batcher, bundle: Doubles) -> None:
        bundle.go.set()
        assert await took(batcher, [work(bundle, 1, rows) for rows in (1, 32, 1, 64, 2)]) < 2  # the delay is 4 s

    assert [rows for _, rows in scenario(Limits(delay_s=4), what).calls] == [1, 32, 1, 64, 2]


def test_a_batch_does_not_wait_for_as_many_as_one_of_another_kind_had():
    async def what(batcher: Batcher, bundle: Doubles) -> None:
        bundle.go.set()
        await asyncio.gather(*(batcher.answer(work(bundle, i, name="a")) for i in range(3)))
        assert await took(batcher, [work(bundle, 1, name="b")]) < 2  # the delay is 4 s

    assert scenario(Limits(delay_s=4), what).calls == [(("a",), 3), (("b",), 1)]


def test_a_full_batch_does_not_wait():
    async def what(batcher: Batcher, bundle: Doubles) -> None:
        bundle.go.set()
        await asyncio.gather(*(batcher.answer(work(bundle, i)) for i in range(3)))
        assert await took(batcher, [work(bundle, 1, rows=8)]) < 2  # the delay is 4 s

    assert [rows for _, rows in scenario(Limits(delay_s=4, batch_rows=8), what).calls] == [3, 8]
