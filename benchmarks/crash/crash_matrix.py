"""Kill -9 and worse at every named point of a round, start again, and compare with the undisturbed run.

Two agents with trainers that echo, three rounds, real broker, coordinator, ledger and supervisors. In the second round
one process ends before or after a write, a send or an acknowledgement (``benchmarks.crash.crash_child``), or the broker
is killed when something has been told; whoever died is started again with the same command (the coordinator with
--resume). Where it is told, the process is not killed, but finds its disk full (and must end with the exit code of
that, and go on when there is room again), or its clock a day ahead or behind; or it is killed and finds its files half
written, or its disk read-only (the same). A point holds when the run finishes, each round was made in its first attempt
with both devices, the weights are bit for bit those of the undisturbed run, the ledger has nothing open, and no file is
left that nothing points to.

    python -m benchmarks.crash.crash_matrix [--only coordinator] [--ledger postgresql://…] [--write DIR]  # root
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from benchmarks.crash.crash_child import AHEAD, BEHIND, FULL, POINTS, READ_ONLY, TORN, Point, point
from benchmarks.crash.crash_faults import own_disk, unavailable
from benchmarks.crash.crash_fleet import AGENTS, PATIENCE_S, ROUNDS, Fleet, place_of, play
from coordinator.ledger.ledger import Ledger
from edgefl.records import Manifest
from edgefl.run_records import EventRow

#: The broker ends when one of these has been told of the disturbed round.
TOLD = ("round_started", "update", "round_closed")
#: Where something else happens than being killed. An agent whose disk is full does not end, but declines.
FAULTS = (
    *(Point("coordinator", name, "before", 1, FULL) for name in ("commit", "store update", "aggregate")),
    *(
        Point(*at, 1, way)
        for at in (("coordinator", "commit", "before"), ("agent", "send accept", "after"))
        for way in (AHEAD, BEHIND)
    ),
    *(Point("coordinator", name, "after", 1, TORN) for name in ("send grant", "store update", "aggregate")),
    *(Point("agent", name, "after", 1, TORN) for name in ("send need", "store parts", "send update")),
    Point("coordinator", "aggregate", "before", 1, READ_ONLY),
    Point("agent", "send need", "after", 1, READ_ONLY),
)


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
    try:
        lines = (fleet.folder / "runs" / "echo" / "events.jsonl").read_bytes().splitlines()
        rows = [msgspec.json.decode(line, type=EventRow) for line in lines]
        seconds = [row.data["seconds"] for row in rows if row.kind == "round_closed"]
        if not all(0 <= one <= PATIENCE_S for one in seconds):
            found.append(f"rounds are told to have taken {seconds} s")
    except msgspec.DecodeError as error:
        found.append(f"events.jsonl: {error}")
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
    folder.mkdir(parents=True)
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
        at = (one.at.role, one.at.what, one.at.when, one.at.name, str(one.at.call))
        lines.append(f"| {' | '.join(at)} | {told} | {one.seconds:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="points whose names hold this")
    parser.add_argument("--at", help="one point, as the table names it: coordinator/commit/before/1")
    parser.add_argument("--ledger", default="", metavar="URL", help="a PostgreSQL server to make a database a run on")
    parser.add_argument("--keep", type=Path, help="new folder to keep every run in, but for disks that were mounted")
    parser.add_argument("--write", type=Path, help="folder for crash_matrix.md, or crash_matrix_postgresql.md")
    options = parser.parse_args()
    wanted = [point(options.at)] if options.at else points(options.only)
    if reason := unavailable(wanted):
        raise SystemExit(reason)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="edgefl-crash-") as temporary:
        place = options.keep or Path(temporary)
        (place / "undisturbed").mkdir(parents=True)
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
            folder = place / str(at).replace("/", "-").replace(" ", "_")
            try:
                one = judged(at, folder, reference, options.ledger)
            except RuntimeError as error:  # of the harness
                one = Verdict(at, False, 0.0, (str(error),))
            verdicts.append(one)
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
