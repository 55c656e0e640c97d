"""A small fleet through every broker that is installed here, each on loopback with a folder of its own.

Three agents with trainers that echo, eight rounds of a model of 1 MB. In the middle the broker is killed (by its
process id) and started again three seconds later. A broker that is not installed (``benchmarks.network.broker_kinds``)
is said to be so. ``--write`` replaces the rows of the brokers that have run and leaves the others as they are.

    python -m benchmarks.network.brokers [--only WORD] [--write docs/networks.md]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec
import yaml

from benchmarks.network.broker_kinds import KINDS, Kind
from benchmarks.network.echo import Case, agents, run_file, test_set
from edgefl.process.parent_death import leashed
from edgefl.run_records import EventRow
from edgefl.transport.broker import free_port

CASE = Case("brokers", 96, 2, agents=3, rounds=7)
#: The broker is killed when this round begins, and is away so long.
KILLED_IN, AWAY_S = 4, 3.0
#: Longest that a broker may take to listen, and that a run may take.
START_S, PATIENCE_S = 60.0, 180.0
#: Restarts the broker.
Start = Callable[[], Awaitable["subprocess.Popen[bytes]"]]
BEGIN, END = "<!-- brokers: begin -->", "<!-- brokers: end -->"


class Row(msgspec.Struct, frozen=True):
    """What came of it. Seconds: of the whole run, of a round (median), of the round in which the broker was killed."""

    name: str
    mqtt: str = ""
    chunk_bytes: int = 0
    ended: str = "not installed"
    run_s: float = 0.0
    round_s: float = 0.0
    killed_s: float = 0.0


async def measured(kind: Kind, folder: Path) -> Row:
    """One run through it."""
    port = free_port("127.0.0.1")
    command = kind.command(folder, port)
    if command is None:
        return Row(kind.name)
    test = folder / "test.npz"
    test_set().save_npz(test)
    settings = run_file(CASE, test)
    settings["round"] |= {"deadline_s": 60}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    url = f"mqtt://{kind.user}127.0.0.1:{port}{kind.query}"
    environment = {**os.environ, "EDGEFL_BROKER": url, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("ab"))
        broker = [await _started(command, port, log)]
        stack.callback(lambda: _kill(broker[-1]))
        stack.enter_context(agents(CASE, folder, environment))
        events = await _run(folder, environment, broker, lambda: _started(command, port, log), log)
    return _row(kind, events)


async def _run(
    folder: Path, environment: dict[str, str], broker: list[subprocess.Popen[bytes]], again: Start, log: IO[bytes]
) -> list[EventRow]:
    """The coordinator's events; the broker is killed once meanwhile."""
    command = [sys.executable, "-m", "coordinator.cli", "run", str(folder / "run.yaml"), "--events", "--run", "r1"]
    command += ["--directory", str(folder / "runs")]
    pipe = asyncio.subprocess.PIPE
    coordinator = await asyncio.create_subprocess_exec(*leashed(command), env=environment, stdout=pipe, stderr=log)
    events: list[EventRow] = []

    async def follow() -> None:
        assert coordinator.stdout is not None
        async for line in coordinator.stdout:
            events.append(msgspec.json.decode(line, type=EventRow))
            if len(broker) == 1 and events[-1].kind == "round_started" and events[-1].round == KILLED_IN:
                _kill(broker[0])
                await asyncio.sleep(AWAY_S)
                broker.append(await again())
        await coordinator.wait()

    try:
        await asyncio.wait_for(follow(), PATIENCE_S)
    except asyncio.TimeoutError:
        coordinator.terminate()
        await coordinator.communicate()
    return events


def _row(kind: Kind, events: Sequence[EventRow]) -> Row:
    started = next((event for event in events if event.kind == "run_started"), None)
    if started is None:
        return Row(kind.name, ended=f"no: {events[-1].data.get('text', '')}" if events else "no")
    begun = {event.round: event.at for event in events if event.kind == "round_started"}
    closed = {event.round: event.at for event in events if event.kind == "round_closed"}
    seconds = {number: closed[number] - at for number, at in begun.items() if number in closed}
    killed = max((seconds.pop(number, 0.0) for number in (KILLED_IN, KILLED_IN + 1)), default=0.0)
    last = events[-1]
    ended = "yes" if last.kind == "run_finished" else f"no: {last.data.get('text', f'not within {PATIENCE_S:.0f} s')}"
    whole, usual = last.at - started.at, statistics.median(seconds.values()) if seconds else 0.0
    return Row(kind.name, started.data["mqtt"], started.data["chunk_bytes"], ended, whole, usual, killed)


async def _started(command: list[str], port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(leashed(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    until = asyncio.get_running_loop().time() + START_S
    while asyncio.get_running_loop().time() < until and process.poll() is None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return process
        await asyncio.sleep(0.05)
    _kill(process)
    raise SystemExit(f"{command[0]} does not listen on port {port}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def page(rows: Sequence[Row], before: str = "") -> str:
    """A table. Of ``before``, such a table, the rows stay whose broker has not run now."""
    words = ["broker", "MQTT", "chunks, bytes", "run ends", "run, s", "a round, s", "the killed round, s"]
    lines = {line.split(" | ")[0]: line for line in before.strip().splitlines()[2:]}
    for row in rows:
        figures = [f"{row.run_s:.1f}", f"{row.round_s:.2f}", f"{row.killed_s:.1f}"] if row.mqtt else ["", "", ""]
        cells = [f"| {row.name}", row.mqtt, f"{row.chunk_bytes:,}" if row.mqtt else "", row.ended, *figures]
        if row.ended != "not installed" or cells[0] not in lines:
            lines[cells[0]] = f"{' | '.join(cells)} |"
    return "\n".join([f"| {' | '.join(words)} |", f"|{'---|' * len(words)}", *lines.values()]) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="brokers whose names hold this")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args()
    rows = []
    for kind in (one for one in KINDS if options.only in one.name):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(asyncio.run(measured(kind, Path(folder))))
        sys.stderr.write(f"{rows[-1]}\n")
    text = page(rows)
    if options.write is not None:
        before, _, rest = options.write.read_text(encoding="utf-8").partition(BEGIN)
        table, _, after = rest.partition(END)
        options.write.write_text(f"{before}{BEGIN}\n{page(rows, table)}{END}{after}", encoding="utf-8")
    sys.stdout.write(text)
    if any(row.ended.startswith("no:") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
