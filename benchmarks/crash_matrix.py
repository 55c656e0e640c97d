"""Kill -9 and worse at every named point of a round, start again, and compare with the undisturbed run.

Two agents with trainers that echo, three rounds, real broker, coordinator, ledger and supervisors. In the second round
one process ends before or after a write, a send or an acknowledgement (``benchmarks.crash_child``), or the broker is
killed when something has been told; whoever died is started again with the same command (the coordinator with
--resume). Where it is told, the process is not killed, but finds its disk full (and must end with the exit code of
that, and go on when there is room again), or its clock a day ahead or behind; or it is killed and finds its files half
written, or its disk read-only (the same). A point holds when the run finishes, each round was made in its first attempt
with both devices, the weights are bit for bit those of the undisturbed run, the ledger has nothing open, and no file is
left that nothing points to.

    python -m benchmarks.crash_matrix [--only coordinator] [--ledger postgresql://…] [--write docs/results]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import yaml
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from benchmarks import echo, echo_agents
from benchmarks.crash_child import MARK, PLACE, POINTS, VARIABLE, Point, point
from benchmarks.crash_faults import Trouble, own_disk
from coordinator.ledger import Ledger
from device_agent.start import Options
from edgefl.records import Manifest
from edgefl.report.rows import EventRow
from edgefl.transport.broker import Broker, start_broker

AGENTS = ("left", "right")
ROUNDS = 3
#: Longest that a run may take: ten times an undisturbed one.
PATIENCE_S = 120.0
#: The broker ends when one of these has been told of the disturbed round.
TOLD = ("round_started", "update", "round_closed")
#: What happens where beside being killed.
FAULTS = (
    *(Point("coordinator", name, "before", 1, "disk full") for name in ("commit", "store update", "aggregate")),
    *(Point("agent", name, "after", 1, "disk full") for name in ("send accept", "send update")),
    *(
        Point(*at, 1, f"clock {way}")
        for at in (("coordinator", "commit", "before"), ("agent", "send accept", "after"))
        for way in ("ahead", "behind")
    ),
    *(Point("coordinator", name, "after", 1, "half written") for name in ("send grant", "store update", "aggregate")),
    *(Point("agent", name, "after", 1, "half written") for name in ("send need", "store parts", "send update")),
    Point("coordinator", "aggregate", "before", 1, "read-only"),
    Point("agent", "send need", "after", 1, "read-only"),
)
CASE = echo.Case("crash", 96, 2, agents=len(AGENTS), rounds=ROUNDS - 1)


class Verdict(msgspec.Struct, frozen=True):
    """``faults``: what does not hold; none: the point holds. ``reached``: whether anything was killed at all."""

    at: Point
    reached: bool
    seconds: float
    faults: tuple[str, ...] = ()


def points(only: str = "") -> list[Point]:
    """Every point, before and after; sends and object files also at a later call."""
    found = []
    for role, names in POINTS.items():
        for name in names:
            counts = (1, 3) if name in {"commit", "send chunk", "journal", "save"} else (1,)
            found += [Point(role, name, when, count) for count in counts for when in ("before", "after")]
    found += [*(Point("broker", told, "after") for told in TOLD), *FAULTS]
    return [one for one in found if only in str(one)]


class Fleet:
    """The processes of one run, started again when they were killed."""

    def __init__(self, folder: Path, broker: Broker, at: Point | None, ledger: str) -> None:
        self.folder = folder
        self.broker = broker
        self.ledger = ledger  # URL of a database of this run's own, "": a file
        self.mark = folder / "killed"
        self._environment = {
            **os.environ,
            "EDGEFL_BROKER": broker.url,
            "OMP_NUM_THREADS": "1",
            VARIABLE: str(at or ""),
            MARK: str(self.mark),
            PLACE: str(place_of(folder, at)),
            echo_agents.TRAINER: "benchmarks.crash_child",
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._trouble = Trouble(at, place_of(folder, at)) if at is not None else None
        self._disturbed = disturbed(at)

    def start(self) -> None:
        """Everybody, for the first time."""
        echo.test_set().save_npz(self.folder / "test.npz")
        run_file = self.folder / "run.yaml"
        run_file.write_text(yaml.safe_dump(echo.run_file(CASE, self.folder / "test.npz")))
        for name in AGENTS:
            options = Options(device=name, data=str(self.folder / "test.npz"), state=str(self.folder / name))
            (self.folder / f"{name}.json").write_bytes(msgspec.json.encode([options]))
            self._start(name)
        self._start("coordinator")

    def _start(self, name: str, *, again: bool = False) -> None:
        environment = dict(self._environment)
        if name == AGENTS[1]:
            environment[VARIABLE] = ""  # one device is disturbed, the other is not
        if name == "coordinator":
            command = ["coordinator.cli", "run", "--events", "--directory", str(self.folder / "runs")]
            command += ["--ledger", self.ledger] if self.ledger else []
            command += ["--resume", "echo"] if again else [str(self.folder / "run.yaml"), "--run", "echo"]
        else:
            command = ["benchmarks.echo_agents", str(self.folder / f"{name}.json")]
        log = (self.folder / f"{name}.out").open("ab")
        whole = [sys.executable, "-m", "benchmarks.crash_child", *command]
        self._processes[name] = subprocess.Popen(whole, env=environment, stdout=log, stderr=log)
        log.close()

    async def run(self, at: Point | None) -> None:
        """Until the coordinator has finished. Raises TimeoutError, or RuntimeError when a process fails."""
        until, broken = time.monotonic() + PATIENCE_S, False
        while True:
            await asyncio.sleep(0.02)
            if time.monotonic() > until:
                raise TimeoutError(f"not finished after {PATIENCE_S:.0f} s")
            if at is not None and at.role == "broker" and not broken and self._told(at.name):
                broken = True
                self.mark.touch()
                await self.broker.kill()
                await self.broker.start()
            for name, process in list(self._processes.items()):
                code = process.poll()
                if code is None:
                    continue
                mine = self._trouble if name == self._disturbed and self.mark.exists() else None
                if mine is not None and code != 0 and mine.ended(code, code == -signal.SIGKILL):
                    self._start(name, again=True)
                elif code == 0 and name == "coordinator":
                    if self._trouble is not None and (left := self._trouble.left):
                        raise RuntimeError(left)
                    return
                else:
                    raise RuntimeError(f"{name} ended with {code}")

    def _told(self, kind: str) -> bool:
        file = self.folder / "runs" / "echo" / "events.jsonl"
        if not file.exists():
            return False
        for line in file.read_bytes().splitlines():
            row = msgspec.json.decode(line, type=EventRow)
            if (row.kind, row.round) == (kind, 2):
                return True
        return False

    def stop(self) -> None:
        """End what still runs, the agents in order."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def disturbed(at: Point | None) -> str:
    """The process that a point is about; "" for the broker."""
    if at is None or at.role == "broker":
        return ""
    return "coordinator" if at.role == "coordinator" else AGENTS[0]


def place_of(folder: Path, at: Point | None) -> Path:
    """The directory of the process that a point is about."""
    name = disturbed(at)
    return folder / ("runs" if name == "coordinator" else name)


async def play(folder: Path, at: Point | None, ledger: str = "") -> tuple[Fleet, str]:
    """One run; what went wrong, "" for nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    async with start_broker(folder / "broker", "mosquitto") as broker:
        fleet = Fleet(folder, broker, at, ledger)
        try:
            fleet.start()
            await fleet.run(at)
            await asyncio.sleep(0.5)  # the agents hear that it is over
        except (TimeoutError, RuntimeError) as error:
            return fleet, str(error)
        finally:
            fleet.stop()
    return fleet, ""


@contextlib.contextmanager
def own_database(server: str) -> Iterator[str]:
    """The URL of an empty database on ``server`` (the URL of one there), dropped afterwards; "" without a server."""
    if not server:
        yield ""
        return
    url = make_url(server).set(drivername="postgresql+psycopg")
    name = f"edgefl_crash_{secrets.token_hex(6)}"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE template0"))
        try:
            yield make_url(server).set(database=name).render_as_string(hide_password=False)
        finally:
            with engine.connect() as connection:
                connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    finally:
        engine.dispose()


def final_weights(fleet: Fleet) -> Manifest:
    """The state of the last round."""
    with Ledger(fleet.ledger or fleet.folder / "runs" / "echo" / "ledger.sqlite", create=False) as opened:
        return opened.position("echo").manifest


def faults(fleet: Fleet, reference: Manifest) -> list[str]:
    """What of a finished run is not as it was without a fault."""
    found = []
    with Ledger(fleet.ledger or fleet.folder / "runs" / "echo" / "ledger.sqlite", create=False) as opened:
        report, position, states = opened.report("echo"), opened.position("echo"), opened.states("echo")
    if report.status != "done":
        found.append(f"the run is {report.status}")
    rounds = [(row.round, row.attempt, row.status, tuple(row.participants)) for row in report.rounds]
    wanted = [(n, 1, "done", AGENTS) for n in range(1, ROUNDS + 1)]
    if rounds != wanted:
        found.append(f"rounds {rounds}")
    attempts = sorted((a.round, a.attempt, a.device, a.status) for a in report.assignments)
    if attempts != sorted((n, 1, name, "done") for n in range(1, ROUNDS + 1) for name in AGENTS):
        found.append(f"assignments {attempts}")
    if position.manifest != reference:
        differing = sorted(part for part in reference if position.manifest.get(part) != reference[part])
        found.append(f"weights differ: {', '.join(differing) or 'more parts'}")
    last = max(states)
    alive = {ref.id for ref in states[last].values()}
    stores = {"coordinator": (fleet.folder / "runs" / "echo" / "objects", alive)}
    stores |= {name: (fleet.folder / name / "objects", set[str]()) for name in AGENTS}
    for name, (root, keep) in stores.items():
        files = {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file() and file.name != "boot"}
        if files - keep:
            found.append(f"{name} is left with {len(files - keep)} files, such as {min(files - keep)}")
        if keep - files:
            found.append(f"{name} lacks {len(keep - files)} objects")
    return found


def judged(at: Point, folder: Path, reference: Manifest, server: str = "") -> Verdict:
    """One point. ``server``: where its ledger is to be, "" for a file."""
    with own_database(server) as ledger, own_disk(place_of(folder, at), at):
        started = time.monotonic()
        fleet, trouble = asyncio.run(play(folder, at, ledger))
        seconds = time.monotonic() - started
        reached = fleet.mark.exists()
        if trouble:
            return Verdict(at, reached, seconds, (trouble,))
        return Verdict(at, reached, seconds, tuple(faults(fleet, reference)))


def page(verdicts: Sequence[Verdict], seconds: float, ledger: str = "SQLite") -> str:
    """Markdown: a row a point."""
    good = sum(one.reached and not one.faults for one in verdicts)
    lines = ["# Crash matrix", "", *(__doc__ or "").split("\n\n")[1].splitlines(), ""]
    lines += [
        f"Ledger in {ledger}: {good} of {len(verdicts)} points hold. The undisturbed run takes {seconds:.1f} s.",
        "",
    ]
    lines += ["| process | is | when | at | call | the same round goes on | run, s |", "|---|---|---|---|---|---|---|"]
    for one in verdicts:
        told = "yes" if not one.faults else "**no**: " + "; ".join(one.faults)
        told = told if one.reached else "not reached" + (f": {'; '.join(one.faults)}" if one.faults else "")
        at = (one.at.role, one.at.what, one.at.when, one.at.name, str(one.at.count))
        lines.append(f"| {' | '.join(at)} | {told} | {one.seconds:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="points whose names hold this")
    parser.add_argument("--at", help="one point, as the table names it: coordinator/commit/before/1")
    parser.add_argument("--ledger", default="", metavar="URL", help="a PostgreSQL server to make a database a run on")
    parser.add_argument("--keep", type=Path, help="folder to keep every run in")
    parser.add_argument("--write", type=Path, help="folder for crash_matrix.md, or crash_matrix_postgresql.md")
    options = parser.parse_args()
    wanted = [point(options.at)] if options.at else points(options.only)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="edgefl-crash-") as temporary:
        place = options.keep or Path(temporary)
        with own_database(options.ledger) as ledger:
            started = time.monotonic()
            fleet, trouble = asyncio.run(play(place / "undisturbed", None, ledger))
            seconds = time.monotonic() - started
            if trouble:
                raise SystemExit(f"the undisturbed run failed: {trouble}")
            reference = final_weights(fleet)
            if wrong := faults(fleet, reference):
                raise SystemExit(f"the undisturbed run is not clean: {'; '.join(wrong)}")
        for at in wanted:
            verdicts.append(judged(at, place / str(at).replace("/", "-").replace(" ", "_"), reference, options.ledger))
            one = verdicts[-1]
            told = "; ".join(one.faults) or ("holds" if one.reached else "not reached")
            sys.stderr.write(f"{at}: {told} ({one.seconds:.1f} s)\n")
    table = page(verdicts, seconds, "PostgreSQL" if options.ledger else "SQLite")
    if options.write is not None:
        name = "crash_matrix_postgresql.md" if options.ledger else "crash_matrix.md"
        (options.write / name).write_text(table)
    sys.stdout.write(table)
    if any(one.faults or not one.reached for one in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
