"""The programs of a local fleet as processes: start and end them, read their events and the ends of their logs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from edgefl.process.parent_death import leashed
from edgefl.run_records import EventRow
from edgefl.storage.disk import store_errors


async def start(arguments: list[str], url: str, log: Path, *, stdout: int | None) -> asyncio.subprocess.Process:
    """``python -m …``, logging to ``log``, which ends with this process, however that ends.

    The broker's URL goes by environment, where no process list shows it.
    """
    with store_errors("create", log.parent):
        log.parent.mkdir(parents=True, exist_ok=True)
    # Many trainers share this machine's cores: one thread each, unless the user says otherwise.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "EDGEFL_BROKER": url}
    environment.pop("EDGEFL_IDENTITY", None)  # of the user's own fleet; this one is a fleet of its own
    with log.open("ab") as out:
        return await asyncio.create_subprocess_exec(
            *leashed([sys.executable, "-m", *arguments]), env=environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=out if stdout is None else stdout, stderr=out, limit=2**24,
        )  # fmt: skip


async def end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """SIGTERM, and SIGKILL when that has not helped within ``grace_s`` seconds."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), grace_s)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()


def event_of(line: bytes) -> EventRow:
    """An event that the coordinator wrote; any other line, such as a library's own output, becomes a warning."""
    try:
        return msgspec.json.decode(line, type=EventRow)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return EventRow(time.time(), "warning", data={"text": line.decode("utf-8", "replace")[:500]})


async def lines_of(process: asyncio.subprocess.Process) -> AsyncIterator[bytes]:
    """Lines of a process' standard output, as they come."""
    if process.stdout is not None:
        async for line in process.stdout:
            yield line


def last_words(log: Path) -> str:
    """The last error in a program's log, else its last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    error = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "")
    return error.removeprefix("error: ")
