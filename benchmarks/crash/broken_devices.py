"""Two devices of eight break in every way in turn: what they are refused with, and what that costs the others.

Real processes but for the training, which echoes (``benchmarks.network.echo``). In every other round two devices send
what cannot be used; a round is from its start to its close, evaluation apart. At the end both go on with it, and come
into quarantine.

    python -m benchmarks.crash.broken_devices
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.common import sections
from benchmarks.common.field import played, table
from benchmarks.crash.broken_agents import WARM, WAYS, way_of
from benchmarks.network.echo import Case, run_file, test_set
from device_agent.runtime.connect import Options
from edgefl.records import Budget
from edgefl.run_records import EventRow, RunReport

CASE = Case("40KB", 16, 2, agents=8, rounds=WARM + 2 * len(WAYS) + 4)
BROKEN = ("agent-006", "agent-007")


class Outcome(msgspec.Struct, frozen=True):
    """One way: the reason and detail both devices got, who was in the round, and how long it took."""

    way: str
    reason: str
    detail: str
    counted: int
    round_s: float


class Found(msgspec.Struct, frozen=True):
    """All ways, the rounds in which all is well, and what became of the two devices."""

    ways: tuple[Outcome, ...]
    without_s: float
    rounds: int
    wanted: int
    quarantined: tuple[str, ...]
    in_quarantine: int  # rounds closed without them


def measured(folder: Path) -> Found:
    """One run."""
    test = folder / "test.npz"
    test_set().save_npz(test)
    file = run_file(CASE, test)
    file["round"] |= {"quorum": 0.5, "quarantine_after": 2, "join_s": 60}
    file["training"]["rounds"] = [CASE.rounds]
    every = [
        Options(device=name, data=str(test), state=str(folder / name), budget=Budget())
        for name in (f"agent-{n:03d}" for n in range(CASE.agents))
    ]
    report = asyncio.run(played(folder, file, "benchmarks.crash.broken_agents", every, *BROKEN))
    return found_in(report)


def found_in(report: RunReport) -> Found:
    """What the run's events say."""
    closed = {event.round: event for event in report.events if event.kind == "round_closed"}
    rejected: dict[int, list[EventRow]] = {}
    for event in report.events:
        if event.kind == "rejected":
            rejected.setdefault(event.round, []).append(event)
    barred = [event for event in report.events if event.kind == "quarantined"]
    first_without = min((event.round for event in barred), default=CASE.rounds) + 1
    ways = []
    for number in range(WARM + 1, WARM + 2 * len(WAYS), 2):
        told = rejected.get(number, [])
        assert {event.device for event in told} == set(BROKEN), f"round {number} had {told}"
        data, round_ = told[0].data, closed[number].data
        taken = len(round_["participants"])
        ways.append(Outcome(way_of(number), data["reason"], data["detail"], taken, round_["seconds"]))
    good = [e.data["seconds"] for n, e in closed.items() if 1 < n < first_without and not way_of(n)]
    return Found(
        tuple(ways),
        statistics.median(good),
        sum(row.status == "done" for row in report.rounds),
        CASE.rounds,
        tuple(sorted(event.device for event in barred)),
        sum(number >= first_without for number in closed),
    )


def page(found: Found) -> str:
    """The table, and a sentence on quarantine."""
    rows = [
        [
            one.way,
            f"`{one.reason}`: {one.detail}",
            f"{one.counted} of {CASE.agents}",
            f"{one.round_s:.3f}",
            f"{one.round_s / found.without_s:.2f}",
        ]
        for one in found.ways
    ]
    columns = ("two of eight send", "refused with", "counted", "round, s", "÷ a round without")
    told = (
        f"\nA round in which all is well: {found.without_s:.3f} s (median). {found.rounds} of {found.wanted} rounds "
        f"finished. In quarantine at the end, after two bad updates in a row: "
        f"{', '.join(found.quarantined) or 'nobody'}; {found.in_quarantine} rounds went on without them.\n"
    )
    return table(columns, rows) + told


def markdown() -> str:
    """Measures, and gives the page."""
    with tempfile.TemporaryDirectory(prefix="edgefl-broken-") as folder:
        return page(measured(Path(folder)))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="folder of transport.md")
    options = parser.parse_args()
    text = markdown()
    if options.write is not None:
        sections.transport(options.write, "Broken devices", "python -m benchmarks.crash.broken_devices", text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
