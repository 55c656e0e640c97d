"""The queue of a study's cells: as many at once as fit the memory; a cell whose process died is tried again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from edgefl.api.study_engine import CellLostError, Engine, Estimate, Work
from edgefl.errors import BudgetError
from edgefl.storage.disk import is_held

#: A cell whose process was killed is taken up again so often; one that dies three times will not live the fourth.
AGAIN = 2
#: Different cells that are priced for their memory, seeds apart: a second or two each.
MOST_PRICED = 8
#: The processes of a cell that was killed end within the coordinator's grace.
FREE_S = 20.0
_MIB = 2**20


class Ended(NamedTuple):
    """One cell has ended: its run's id, and the error that it failed by, "": none. ``kept``: it was done before."""

    run: str
    error: str = ""
    kept: bool = False


class Told(NamedTuple):
    """Where a study's progress goes: ``say`` takes sentences, ``ended`` each cell that has ended."""

    say: Callable[[str], None] = lambda _: None
    ended: Callable[[Ended], None] = lambda _: None


async def fitting(engine: Engine, works: Sequence[Work], workers: int, memory_bytes: int, told: Told) -> int:
    """How many of ``workers`` may run these cells at once within ``memory_bytes``; 0: of what the engine has room for.

    Raises BudgetError, with both numbers, where not even one cell fits.
    """
    workers, allowed = workers or engine.room.cores, memory_bytes or engine.room.memory_bytes
    kinds = list({repr((_seedless(work.file), _seedless(work.overrides))): work for work in works}.values())
    for start in range(0, len(kinds), MOST_PRICED):
        if estimates := await engine.estimate(kinds[start : start + MOST_PRICED]):
            break  # where none of those can be priced, the next are
    else:
        told.say("no cell can be priced; each says why")
        return min(workers, len(works))
    largest = max(estimates, key=lambda one: one.total)
    if largest.total > allowed:
        text = f"a cell takes about {_mib(largest.total)}, of {_mib(allowed)}: {_words(largest)}"
        raise BudgetError(text, remedy="Allow more by --memory-mib, or make batches or the model smaller.")
    count = min(workers, len(works), allowed // largest.total)
    some = f"; the largest of the {len(estimates)} of {len(kinds)} kinds of cell that were priced"
    told.say(
        f"{count} of {workers} workers: a cell takes about {_mib(largest.total)} ({_words(largest)}"
        f"{some if len(estimates) < len(kinds) else ''}), of {_mib(allowed)}"
    )
    return count


def _seedless(values: object) -> object:
    return {**values, "seed": None} if isinstance(values, Mapping) else values


def _words(one: Estimate) -> str:
    others = f", {_mib(one.others)} other idle processes" if one.others else ""
    return f"{_mib(one.process)} measured when it was priced, {_mib(one.steps)} predicted for a step{others}"


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f} MiB"


async def carry_out_all(engine: Engine, works: Sequence[Work], workers: int, told: Told) -> dict[str, str]:
    """Carry every cell out; run -> the error that its cell failed by, "": none. Raises what concerns every cell."""
    waiting = deque((work, 0) for work in works)
    errors: dict[str, str] = {}

    async def take() -> None:
        while waiting:
            work, lost = waiting.popleft()
            try:
                error = await engine.carry_out(work)
            except CellLostError as gone:
                if lost < AGAIN:
                    told.say(f"{gone.message}: it is taken up again, {AGAIN - lost} times at most")
                    await _let_go(Path(work.directory) / work.run)
                    waiting.append((work, lost + 1))
                    continue
                error = f"{gone.message}, {lost + 1} times ({gone.remedy})"
            errors[work.run] = error
            told.ended(Ended(work.run, error))

    tasks = [asyncio.ensure_future(take()) for _ in range(workers)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return errors


async def _let_go(directory: Path) -> None:
    """Wait until no process of a lost cell holds its directory, no longer than FREE_S."""
    loop = asyncio.get_running_loop()
    until = loop.time() + FREE_S
    while is_held(directory) and loop.time() < until:
        await asyncio.sleep(0.1)
