"""Tasks beside an event loop's own."""

from __future__ import annotations

import asyncio

from edgefl.process.tasks import Tasks


def test_close_ends_what_a_cancelled_task_begins() -> None:
    async def scenario() -> tuple[list[str], int]:
        ended: list[str] = []
        tasks = Tasks(lambda error: None)

        async def work(left: int) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                if left:
                    tasks.spawn(work(left - 1))
                ended.append(f"work {left}")

        tasks.spawn(work(1))
        await asyncio.sleep(0)
        await tasks.close()
        return ended, len(tasks)

    ended, left = asyncio.run(scenario())
    assert ended[0] == "work 1"
    assert left == 0
