"""Parts on their way to devices: chunks are cut as the sender in force says, and only what is served is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator_fixture import a_plan
from faulty_broker import FaultyBroker
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.state import State
from coordinator.core.timeouts import Timeouts
from coordinator.runtime.environment import Environment
from coordinator.runtime.publisher import Publisher
from edgefl.protocol.chunks import Chunk, decode_chunks
from edgefl.protocol.messages import Need
from edgefl.storage.objects import ObjectStore
from edgefl.storage.partials import chunk_count, chunk_span
from edgefl.transfer.disk_driver import DiskSender, lacking_bytes
from edgefl.transport.memory_broker import MemoryTransport

DATA = bytes(range(250)) * 10  # 2500 bytes: 3 chunks of 1000, or 5 of 512


class Scene:
    def __init__(self, directory: Path) -> None:
        self.store = ObjectStore(directory)
        self.ref = self.store.put(DATA)
        self.sent: list[tuple[str | None, Chunk]] = []
        self.downloads = DiskSender(
            "t1",
            {self.ref.id: self.ref.size},
            self.store,
            lambda device, payload: self.sent.extend((device, one) for one in decode_chunks(payload)),
        )

    def need(self, device: str, chunk_bytes: int, bitmap: bytes, received: int = 0) -> None:
        missing = {self.ref.id: bitmap} if bitmap else {}
        need = Need(device, "t1", epoch=1, chunk_bytes=chunk_bytes, credit=1, received=received, missing=missing)
        self.downloads.on_need(device, need, 0.0)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_need_of_another_chunk_size_does_not_change_what_the_others_are_sent(scene: Scene) -> None:
    scene.need("d1", 1000, b"\x07")
    scene.need("d2", 512, b"\x1f")  # refused while d1 is served
    scene.need("d1", 1000, b"", received=1)
    scene.need("d1", 1000, b"", received=2)
    assert [(chunk.index, len(chunk.data)) for _, chunk in scene.sent] == [(0, 1000), (1, 1000), (2, 500)]
    assert b"".join(chunk.data for _, chunk in scene.sent) == DATA
    assert (scene.downloads.payload_bytes("d1"), scene.downloads.payload_bytes("d2")) == (2500, 0)


def test_only_what_a_device_lacked_is_counted(scene: Scene) -> None:
    scene.need("d1", 1000, b"\x04")
    assert [(chunk.index, len(chunk.data)) for _, chunk in scene.sent] == [(2, 500)]
    assert scene.downloads.payload_bytes("d1") == 500
    assert lacking_bytes(b"\xff", 2500, 1000) == 2500  # bits behind the last chunk count nothing


@pytest.mark.parametrize("chunk_bytes", [0, -1, 1])
def test_a_done_that_lists_objects_counts_nothing_whatever_its_chunks(scene: Scene, chunk_bytes: int) -> None:
    done = Need("d1", "t1", 1, chunk_bytes, credit=1, missing={scene.ref.id: b"\x01"}, done=True)
    assert scene.downloads.on_need("d1", done, 0.0) == []
    assert (scene.sent, scene.downloads.payload_bytes("d1")) == ([], 0)


def test_a_device_that_asks_for_what_is_not_offered_is_logged(
    scene: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan, transport = a_plan(), MemoryTransport(FaultyBroker(), "c")
    environment = Environment(tmp_path, transport, "f", lambda row: None)
    publisher = Publisher(plan, environment, scene.store, lambda event: None, lambda: 0.0)
    publisher._downloads["t1"] = scene.downloads
    need = Need("d1", "t1", epoch=1, chunk_bytes=1000, credit=1, missing={"0" * 64: b"\x01"})
    publisher.on_need("d1", need, lambda attempt: {}, State(plan, Timeouts()))
    assert scene.sent == []
    assert [record.getMessage()[:35] for record in caplog.records] == ["d1 asked for what is not offered: o"]


@given(st.integers(1, 2000), st.integers(1, 300), st.binary(max_size=40))
def test_what_a_device_lacks_is_counted_to_the_byte(size: int, chunk_bytes: int, bitmap: bytes) -> None:
    spans = [chunk_span(size, chunk_bytes, index)[1] for index in range(chunk_count(size, chunk_bytes))]
    bits = int.from_bytes(bitmap, "little")
    assert lacking_bytes(bitmap, size, chunk_bytes) == sum(n for i, n in enumerate(spans) if bits >> i & 1)
