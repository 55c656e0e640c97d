"""What takes long to read: its time counts, and not more wait for it than may."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from serve_fixture import bundles, windowed

from edgefl.export.runtime import Bundle
from edgefl.serve import engine as module
from edgefl.serve.catalogue import load_catalogue
from edgefl.serve.engine import Engine
from edgefl.serve.limits import Limits, Refused
from edgefl.serve.metrics import Metrics

LIMITS = Limits(answer_s=1.0, waiting=3, batch_rows=2)


class Reading:
    """Reads files, each when ``go`` is set, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.count, self._read = threading.Event(), 0, module.raw_samples
        monkeypatch.setattr(module, "raw_samples", self)

    def __call__(self, files: Any, encoders: Any) -> Any:
        self.count += 1
        self.go.wait(10)
        return self._read(files, encoders)


def scenario(what: Callable[[Engine], Coroutine[Any, Any, None]], folder: Path | None = None) -> None:
    async def body() -> None:
        engine = Engine(load_catalogue(folder or bundles(), device="cpu", threads=1), LIMITS, Metrics())
        try:
            await what(engine)
        finally:
            await engine.close()

    asyncio.run(body())


async def status(engine: Engine, file: Path) -> int:
    try:
        await engine.predict({"acc": file}, None)
    except Refused as error:
        return error.status
    return 200


@pytest.fixture
def walk(tmp_path: Path) -> Path:
    file = tmp_path / "walk.csv"
    file.write_text("1,2,3\n" * 4)
    return file


def test_time_to_read_counts_and_what_is_given_up_is_not_read(walk: Path, monkeypatch: pytest.MonkeyPatch):
    reading = Reading(monkeypatch)

    async def what(engine: Engine) -> None:
        begun = time.monotonic()
        tasks = [asyncio.ensure_future(status(engine, walk)) for _ in range(5)]
        await asyncio.sleep(0.1)
        assert engine.waiting == 3
        assert sorted(await asyncio.gather(*tasks)) == [503, 503, 504, 504, 504]
        assert time.monotonic() - begun < 5
        assert engine.waiting == 0
        reading.go.set()
        assert await status(engine, walk) == 200
        assert reading.count == 2  # of the three that ran out of time, one had begun

    try:
        scenario(what)
    finally:
        reading.go.set()


def test_time_counts_for_the_whole_of_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "long.csv"
    file.write_text("1,2,3\n" * 4 * 40)  # 40 windows, two at a time
    computed = Bundle.predict

    def slowly(self: Bundle, *given: Any, **how: Any) -> Any:
        time.sleep(0.1)
        return computed(self, *given, **how)

    async def what(engine: Engine) -> None:
        monkeypatch.setattr(Bundle, "predict", slowly)
        assert await status(engine, file) == 504

    scenario(what, windowed(tmp_path))
