"""Dynamic micro-batches: requests for the same model with the same modalities are computed together.

While one batch is computed the next gathers. Clients that ask again when they have their answers come back one by one,
and the first of them would be computed alone: so a batch of the same kind as the last one waits until as many requests
are there as that one had, no longer than a delay. Who asks alone does not wait (but once after others), however many
samples a request has. One queue, first come first served, of bounded length.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgefl.export.runtime import Matched, Prediction
from edgefl.serve.limits import Limits, busy

Array = npt.NDArray[Any]


class Predictor(Protocol):
    """The part of a bundle used for batches."""

    def predict(self, inputs: Mapping[str, npt.ArrayLike], *, mask: str | None = None) -> Prediction:
        """Answers for the samples in ``inputs``."""
        ...


@dataclass(frozen=True, eq=False)
class Work:
    """Samples of one request. ``inputs``: [rows, *shape] by modality, as the bundle takes them."""

    bundle: Predictor
    inputs: Mapping[str, Array]
    mask: str | None = None

    @property
    def rows(self) -> int:
        """Number of its samples."""
        return len(next(iter(self.inputs.values())))

    @property
    def key(self) -> Hashable:
        """Batching key: bundle, mask and modalities with their shapes."""
        return (id(self.bundle), self.mask, *((m, a.shape[1:], a.dtype) for m, a in sorted(self.inputs.items())))


@dataclass(frozen=True, eq=False)
class _Waiting:
    work: Work
    key: Hashable
    answer: asyncio.Future[Prediction]


#: rows, requests and seconds of a batch.
Done = Callable[[int, int, float], None]


class Batcher:
    """Queue of requests, computed in one batch at a time: onnxruntime uses all cores. ``done``: called per batch."""

    def __init__(self, limits: Limits, done: Done = lambda rows, requests, seconds: None) -> None:
        self._limits, self._done = limits, done
        self._queue: deque[_Waiting] = deque()
        self._last: tuple[Hashable, int] = (None, 0)  # kind and number of requests of the last batch
        self._news = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, "edgefl-compute")
        self._runner = asyncio.ensure_future(self._run())

    def __len__(self) -> int:
        return len(self._queue)

    async def answer(self, work: Work) -> Prediction:
        """The prediction for these samples. Raises Refused when too many wait, and what ``predict`` raises."""
        if len(self._queue) >= self._limits.waiting:
            raise busy(f"{len(self._queue)} requests wait already")
        waiting = _Waiting(work, work.key, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._news.set()
        return await waiting.answer

    async def close(self) -> None:
        """Stop; waiting requests are cancelled."""
        self._runner.cancel()
        await asyncio.gather(self._runner, return_exceptions=True)
        for waiting in self._queue:
            waiting.answer.cancel()
        await asyncio.to_thread(self._pool.shutdown)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._gather()
            begun = time.perf_counter()
            try:
                parts = await loop.run_in_executor(self._pool, compute, [one.work for one in batch])
            except Exception as error:  # each of them is told
                for one in batch:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            self._last = batch[0].key, len(batch)
            self._done(sum(one.work.rows for one in batch), len(batch), time.perf_counter() - begun)
            for one, part in zip(batch, parts, strict=True):
                if not one.answer.done():
                    one.answer.set_result(part)

    async def _gather(self) -> list[_Waiting]:
        """The next batch: the oldest request and others with its key, up to the batch size."""
        while True:
            while not self._queue:
                self._news.clear()
                await self._news.wait()
            await self._linger(self._queue[0])
            if batch := self._take():
                return batch

    async def _linger(self, first: _Waiting) -> None:
        """Wait for as many requests as the last batch had if it was of this kind, a full batch, or the delay's end."""
        until = time.monotonic() + self._limits.delay_s
        kind, usual = self._last
        enough = usual if kind == first.key else 1
        while self._lacks(first.key, enough) and (left := until - time.monotonic()) > 0:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except asyncio.TimeoutError:
                return

    def _lacks(self, key: Hashable, requests: int) -> bool:
        rows = [one.work.rows for one in self._queue if one.key == key]
        return len(rows) < requests and sum(rows) < self._limits.batch_rows

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        kept: deque[_Waiting] = deque()
        rows, key, full = 0, None, False
        for one in self._queue:
            if one.answer.done():  # its client has gone
                continue
            key = one.key if key is None else key
            full = full or (one.key == key and bool(batch) and rows + one.work.rows > self._limits.batch_rows)
            if one.key != key or full:
                kept.append(one)
                continue
            batch.append(one)
            rows += one.work.rows
        self._queue = kept
        return batch


def compute(works: list[Work]) -> list[Prediction]:
    """Predictions for works with one key, from a single call."""
    first = works[0]
    if len(works) == 1:
        return [first.bundle.predict(first.inputs, mask=first.mask)]
    inputs = {m: np.concatenate([work.inputs[m] for work in works]) for m in first.inputs}
    whole = first.bundle.predict(inputs, mask=first.mask)
    ends = np.cumsum([work.rows for work in works]).tolist()
    return [rows_of(whole, end - work.rows, end) for work, end in zip(works, ends, strict=True)]


def rows_of(whole: Prediction, start: int, stop: int) -> Prediction:
    """The answers of the samples from ``start`` to ``stop``."""
    cut = slice(start, stop)
    return Prediction(
        whole.labels[cut],
        whole.classes[cut],
        whole.probabilities[cut],
        whole.logits[cut],
        {m: Matched(one.rows[cut], one.weights[cut]) for m, one in whole.matched.items()},
        {m: vectors[cut] for m, vectors in whole.embeddings.items()},
        None if whole.values is None else whole.values[cut],
    )
