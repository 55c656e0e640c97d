"""What an agent hands to its transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from faulty_broker import FaultyBroker

from device_agent.core.state import State
from device_agent.runtime.effects import Effects
from device_agent.runtime.transfers import Transfers
from edgefl.errors import BrokerError
from edgefl.protocol.chunks import decode_chunks
from edgefl.protocol.messages import Grant, Update
from edgefl.records import Attempt
from edgefl.storage.objects import ObjectStore
from edgefl.transport.memory_broker import MemoryTransport

CHUNK = 1000


class Held(MemoryTransport):
    """A link that is cut or slow: a publication is over when ``through`` is set."""

    def __init__(self) -> None:
        super().__init__(FaultyBroker(), "a")
        self.taken: list[bytes] = []
        self.through = asyncio.Event()

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self.taken.append(payload)
        await self.through.wait()


def test_a_chunk_that_is_leaving_is_not_sent_again_and_one_that_has_left_is(tmp_path: Path) -> None:
    async def scene() -> None:
        store, transport = ObjectStore(tmp_path), Held()
        ref = store.put(bytes(range(200)) * 15)  # three chunks
        update = Update("a", Attempt("r", 1, 1, 1), {"task": ref})
        tasks: list[asyncio.Future[None]] = []

        def transmit(topic: str, payload: bytes, tolerated: type[BrokerError], ended: Callable[[], None]) -> None:
            tasks.append(asyncio.ensure_future(transport.publish(topic, payload)))
            tasks[-1].add_done_callback(lambda _: ended())

        transfers = Transfers(
            State(fleet="f", device="a"),
            store,
            Effects(
                asyncio.ensure_future,  # type: ignore[arg-type, return-value]
                lambda event: None,
                lambda need: None,
                transmit,
                lambda event, **fields: None,
            ),
            lambda: transport,
            unacknowledged=(),
        )

        async def ask(epoch: int, bitmap: bytes) -> None:
            grant = Grant(device="a", transfer="u", epoch=epoch, chunk_bytes=CHUNK, credit=8, missing={ref.id: bitmap})
            transfers.serve(update, grant)
            await asyncio.sleep(0.01)

        await ask(1, b"\x07")
        assert [decode_chunks(payload)[0].index for payload in transport.taken] == [0, 1, 2]
        await ask(2, b"\x07")
        assert len(transport.taken) == 3
        transport.through.set()
        await asyncio.gather(*tasks)
        await ask(3, b"\x06")
        assert [decode_chunks(payload)[0].index for payload in transport.taken[3:]] == [1, 2]
        await asyncio.gather(*tasks)

    asyncio.run(scene())
