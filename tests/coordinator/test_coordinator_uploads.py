"""Updates on their way: who sends equal objects at once, in whatever chunks its link suggests."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.moves import UpdateInvalid, UpdateStored
from coordinator.runtime import uploads as uploads_module
from coordinator.runtime.chunk_size import ChunkSizer
from coordinator.runtime.traffic import Traffic
from coordinator.runtime.uploads import MOST_UPLOADS, Uploads
from coordinator.runtime.validate_update import Rules
from edgefl.protocol.chunks import Chunk, encode_chunk
from edgefl.protocol.messages import Grant, Update
from edgefl.protocol.tensors import encode_part
from edgefl.records import Attempt, ObjectRef
from edgefl.storage import objects as objects_module
from edgefl.storage.objects import ObjectStore, object_id

ATTEMPT = Attempt("r", 1, 1, 1, 1)


def part(seed: int) -> bytes:
    return encode_part({"w": np.random.default_rng(seed).normal(size=300_000).astype(np.float32)})


class Devices:
    """Devices that announce parts which are equal bytes, and send what they are asked for."""

    def __init__(self, root: Path, fast: tuple[str, ...] = ()) -> None:
        self.store, self.sizer = ObjectStore(root), ChunkSizer(0, 32)
        for name in fast:
            self.sizer.note(name, 10**9, 1.0)
        self.data: dict[str, bytes] = {}
        self.grants: dict[str, Grant] = {}
        self.todo: dict[str, list[tuple[str, int]]] = {}
        self.reports: list[Any] = []
        self.sizes: dict[str, set[int]] = {}
        self.traffic = Traffic()
        self.uploads = Uploads(
            self.store,
            self.sizer,
            Rules(),
            self.traffic,
            clock=lambda: 0.0,
            grant=self._granted,
            report=self.reports.append,
        )
        self._before = self.store.put(part(0))

    def _granted(self, device: str, grant: Grant) -> None:
        assert type(grant) is Grant
        self.grants[device] = grant
        if grant.missing:  # of a new epoch; else what has come is told
            self.todo[device] = [
                (name, index)
                for name, bitmap in grant.missing.items()
                for index in range(8 * len(bitmap))
                if bitmap[index >> 3] >> (index & 7) & 1
            ]
        self.sizes.setdefault(device, set()).add(grant.chunk_bytes)

    def announce(self, device: str, *, again: bool = True, **seeds: int | bytes) -> None:
        manifest = {}
        for name, seed in seeds.items():
            data = seed if isinstance(seed, bytes) else part(seed)
            manifest[name] = ObjectRef(object_id(data), len(data))
            self.data[manifest[name].id] = data
        before = dict.fromkeys(manifest, self._before)
        update = Update(device, ATTEMPT, manifest, dict.fromkeys(manifest, 8))
        self.uploads.fetch(update, before, f"u-{device}", again=again)

    def send(self, device: str, draw: random.Random) -> None:
        """One chunk of what it was asked for."""
        if not self.todo[device]:
            return
        name, index = self.todo[device].pop(draw.randrange(len(self.todo[device])))
        size = self.grants[device].chunk_bytes
        chunk = Chunk(name, index, self.data[name][index * size : (index + 1) * size])
        self.uploads.on_chunk(device, f"u-{device}", encode_chunk(chunk))

    async def all_received(self, names: tuple[str, ...], seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(2000):
            if len(self.reports) == len(names):
                break
            self.send(draw.choice(names), draw)
            await asyncio.sleep(0)
        for _ in range(500):
            if len(self.reports) == len(names):
                break
            await asyncio.sleep(0.01)
        assert sorted((type(one).__name__, one.device) for one in self.reports) == [
            (UpdateStored.__name__, name) for name in sorted(names)
        ]
        assert all(self.store.read(name) == data for name, data in self.data.items())
        await self.uploads.close()


def test_equal_objects_of_two_devices_arrive_in_equal_chunks(tmp_path) -> None:
    async def play() -> None:
        devices = Devices(tmp_path / "objects", fast=("fast",))
        for name in ("slow", "fast"):
            devices.announce(name, task=1)
        assert devices.sizes["slow"] == devices.sizes["fast"] != {devices.sizer.of(["fast"])[0]}
        assert devices.grants["fast"].credit == devices.grants["slow"].credit
        await devices.all_received(("slow", "fast"), 0)

    asyncio.run(play())


@pytest.mark.parametrize("again", [False, True])
def test_an_upload_in_progress_is_asked_for_again_only_where_the_device_may_have_forgotten(
    tmp_path, again: bool
) -> None:
    async def scenario() -> None:
        devices = Devices(tmp_path)
        devices.announce("a", head=1)
        first, draw = list(devices.todo["a"]), random.Random(0)
        devices.announce("a", again=again, head=1)
        devices.todo["a"] += first if again else []  # what was under way when it was asked again
        await devices.all_received(("a",), seed=0)
        (report,) = devices.reports
        while devices.todo["a"]:
            devices.send("a", draw)
        assert report.figures["payload_up_bytes"].value == len(part(1))
        assert (report.figures["resent_up_bytes"].value > 0) == again

    asyncio.run(scenario())


def test_chunks_that_come_again_while_the_update_is_checked_are_counted(tmp_path) -> None:
    async def scenario() -> None:
        devices = Devices(tmp_path)
        devices.announce("a", head=1)
        first, draw = list(devices.todo["a"]), random.Random(0)
        while devices.todo["a"]:
            devices.send("a", draw)
        devices.todo["a"] = first  # all of it once more: no verdict can come before this coroutine waits
        while devices.todo["a"]:
            devices.send("a", draw)
        await devices.all_received(("a",), seed=0)
        assert devices.reports[0].figures["resent_up_bytes"].value == len(part(1))

    asyncio.run(scenario())


def test_what_arrives_in_chunks_of_two_sizes_goes_on_in_the_smaller(tmp_path) -> None:
    async def play(seed: int) -> None:
        devices = Devices(tmp_path / f"objects-{seed}", fast=("fast", "third"))
        devices.announce("slow", task=1)
        devices.announce("fast", head=2)
        assert devices.sizes["slow"] != devices.sizes["fast"]
        devices.send("fast", random.Random(seed))
        devices.announce("third", task=1, head=2)
        await devices.all_received(("slow", "fast", "third"), seed)

    for seed in range(8):
        asyncio.run(play(seed))


def test_an_upload_that_is_cancelled_gives_its_place_to_the_next(tmp_path) -> None:
    async def play() -> None:
        devices = Devices(tmp_path / "objects")
        names = [f"d{n:02}" for n in range(MOST_UPLOADS + 1)]
        for name in names:
            devices.announce(name, task=1)
        assert names[-1] not in devices.grants
        devices.uploads.cancel(names[0])
        assert names[-1] in devices.grants
        del devices.grants[names[0]]
        devices.uploads.cancel(names[1])
        devices.announce(names[0], task=1)
        assert names[0] in devices.grants, "it was cancelled, and may ask for a place like any other"
        await devices.uploads.close()

    asyncio.run(play())


def test_uploads_are_admitted_in_order_of_asking(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads_module, "MOST_UPLOADS", 2)

    async def play() -> None:
        devices = Devices(tmp_path / "objects")
        for name in "abcd":
            devices.announce(name, task=1)
        devices.announce("c", task=1)  # asking again changes nothing
        assert list(devices.grants) == ["a", "b"]
        devices.uploads.cancel("b")
        assert list(devices.grants) == ["a", "b", "c"]
        devices.uploads.cancel("unknown")
        for stalled, next_one in (("a", "d"), ("d", "a")):
            devices.grants.clear()
            devices.uploads._uploads[stalled].receiver._receiver.stalls = 2
            devices.uploads.on_tick()
            assert list(devices.grants) == [next_one], f"{stalled} lets the one that waits pass"
        devices.uploads.cancel("d")
        devices.uploads._uploads["c"].receiver._receiver.stalls = 2
        devices.uploads.on_tick()
        assert devices.uploads._admitted == {"a", "c"}, "nothing else waits"
        await devices.uploads.close()

    asyncio.run(play())


@given(st.lists(st.tuples(st.sampled_from(["announce", "cancel", "stall"]), st.sampled_from("abcdef"))))
def test_never_too_many_uploads_are_admitted_and_no_place_is_left_empty(calls: list[tuple[str, str]]) -> None:
    async def play(folder: str) -> None:
        devices = Devices(Path(folder))
        uploads = devices.uploads
        for call, name in calls:
            if call == "announce":
                devices.announce(name, task=1)
            elif call == "cancel":
                uploads.cancel(name)
            elif name in uploads._admitted:
                uploads._uploads[name].receiver._receiver.stalls = 2
                uploads.on_tick()
            assert uploads._admitted <= uploads._uploads.keys()
            assert len(uploads._admitted) == min(2, len(uploads._uploads))
            for device, upload in uploads._uploads.items():
                assert upload.receiver.running == (device in uploads._admitted)
        await uploads.close()

    with TemporaryDirectory() as folder, mock.patch.object(uploads_module, "MOST_UPLOADS", 2):
        asyncio.run(play(folder))


def _send_all(devices: Devices) -> None:
    """All chunks of all devices, before a check can begin."""
    draw = random.Random(0)
    for name in devices.todo:
        while devices.todo[name]:
            devices.send(name, draw)


def test_updates_that_are_whole_together_are_synced_as_one_and_checked_by_threads(tmp_path, monkeypatch) -> None:
    """With one sync of the directory, and a bad one among them that takes nothing from the others."""
    synced: list[Any] = []
    threads: set[str] = set()
    sync_directory, check_update = objects_module.sync_directory, uploads_module.check_update
    monkeypatch.setattr(objects_module, "sync_directory", lambda path: (synced.append(path), sync_directory(path)))

    def check(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name.split("_")[0])
        return check_update(*arguments)

    monkeypatch.setattr(uploads_module, "check_update", check)

    async def play() -> None:
        devices = Devices(tmp_path)
        synced.clear()
        bad = encode_part({"w": np.full(300_000, np.nan, np.float32)})
        for number in range(5):
            devices.announce(f"d{number}", task=bad if number == 2 else number + 1)
        _send_all(devices)
        await devices.uploads.checked()
        found = {one.device: type(one) for one in devices.reports}
        assert found == {f"d{number}": UpdateInvalid if number == 2 else UpdateStored for number in range(5)}
        assert threads == {"checks"}
        assert synced == [str(tmp_path)]
        await devices.uploads.close()

    asyncio.run(play())


def test_uploads_that_are_closed_during_a_check_report_nothing(tmp_path, monkeypatch) -> None:
    begun, release = threading.Event(), threading.Event()
    checks: list[Any] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})

    def check(*arguments: Any) -> Any:
        checks.append(arguments)
        begun.set()
        release.wait(60)
        raise RuntimeError

    monkeypatch.setattr(uploads_module, "check_update", check)

    async def play() -> None:
        devices = Devices(tmp_path)
        for number in range(8):
            devices.announce(f"d{number}", task=number + 1)
        _send_all(devices)
        assert await asyncio.to_thread(begun.wait, 60)
        await devices.uploads.close()
        release.set()
        await asyncio.to_thread(devices.uploads._threads.shutdown)
        assert (devices.reports, len(checks)) == ([], 1)

    asyncio.run(play())
