"""Updates on their way: who sends equal objects at once, in whatever chunks its link suggests."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np

from coordinator.pace import Pace
from coordinator.uploads import Uploads
from coordinator.values import Received
from edgefl.objects import ObjectStore, object_id
from edgefl.protocol.chunks import Chunk, encode_chunk
from edgefl.protocol.messages import Grant, Update
from edgefl.protocol.parts import encode_part
from edgefl.records import Attempt, ObjectRef

ATTEMPT = Attempt("r", 1, 1, 1, 1)


def part(seed: int) -> bytes:
    return encode_part({"w": np.random.default_rng(seed).normal(size=300_000).astype(np.float32)})


def test_equal_objects_of_two_devices_arrive_in_equal_chunks(tmp_path) -> None:
    asyncio.run(equal_objects(tmp_path))


async def equal_objects(tmp_path) -> None:
    store, pace = ObjectStore(tmp_path / "objects"), Pace(0, 32)
    pace.note("fast", 10**9, 1.0)
    grants: list[tuple[str, Grant]] = []
    reports: list[Any] = []
    uploads = Uploads(
        store,
        pace,
        clock=lambda: 0.0,
        grant=lambda device, grant: grants.append((device, grant)),
        down=lambda update: {},
        report=reports.append,
    )
    before, data = store.put(part(0)), part(1)
    ref = ObjectRef(object_id(data), len(data))
    for device in ("slow", "fast"):
        uploads.fetch(Update(device, ATTEMPT, {"task": ref}, {"task": 8}), {"task": before}, f"u-{device}")
    sizes = {device: grant.chunk_bytes for device, grant in grants}
    assert sizes["slow"] == sizes["fast"] < pace.of(["fast"])[0]
    pieces = [data[at : at + sizes["slow"]] for at in range(0, len(data), sizes["slow"])]
    order = list(range(len(pieces)))
    random.Random(0).shuffle(order)
    for turn, index in enumerate(order):  # each brings a part of it
        device = ("slow", "fast")[turn % 2]
        uploads.on_chunk(device, f"u-{device}", encode_chunk(Chunk(ref.id, index, pieces[index])))
    for device in ("slow", "fast"):
        for index, piece in enumerate(pieces):
            uploads.on_chunk(device, f"u-{device}", encode_chunk(Chunk(ref.id, index, piece)))
    for _ in range(200):
        if len(reports) == 2:
            break
        await asyncio.sleep(0.01)
    assert sorted((type(one), one.device) for one in reports) == [(Received, "fast"), (Received, "slow")]
    assert store.read(ref.id) == data
    await uploads.close()
