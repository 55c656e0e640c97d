"""Rounds over bad networks: every device in a network namespace, with a link of its own to broker and coordinator.

Three agents with trainers that echo; otherwise the real processes. One run goes through all conditions, a few rounds
each: delay, loss, reordering, duplicates, 256 kbit/s, and 30 seconds without network in the middle of one device's
upload and download. It must end with the very weights of a run over clean links, each round in its first attempt with
everybody, and tell that a device left only when it was silent for as long as that takes. In a second run one supervisor
is stopped (SIGSTOP) for longer than several deadlines: the others' rounds go on without it, and it takes part again.

    python -m benchmarks.network.networks [--only cut]     as root; needs `ip` and /dev/net/tun
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import sections
from benchmarks.network.network_fleet import DEVICES, SILENCE_S, TELLING_S, VICTIM, Fleet, Mark, Network, fleet_over
from benchmarks.network.network_links import CLEAN, Conditions, unavailable
from benchmarks.network.network_stalled import beside_a_stalled_device
from edgefl.records import Manifest
from edgefl.run_records import EventRow, RunReport

CUT_S = 30.0
#: A cut device says hello again within: the pause of its back-off, opening the connection, and another try after those
#: that fell into the cut.
RETURN_S = 45.0


class Case(msgspec.Struct, frozen=True):
    """``cut``: the way whose transfer is cut in its middle, up or down; "": none. The cut is of one device alone."""

    name: str
    link: Conditions
    rounds: int = 3
    cut: str = ""


CASES = (
    Case("clean", CLEAN),
    Case("100 ms each way", Conditions(delay_s=0.1)),
    Case("5 % loss, 20 ms", Conditions(delay_s=0.02, loss=0.05)),
    Case("25 % reordered, 20 ms", Conditions(delay_s=0.02, reorder=0.25)),
    Case("5 % duplicates, 20 ms", Conditions(delay_s=0.02, duplicate=0.05)),
    Case("256 kbit/s", Conditions(delay_s=0.02, rate=256_000), rounds=1),
    Case("30 s cut in an upload, 1 Mbit/s", Conditions(delay_s=0.02, rate=1_000_000), rounds=1, cut="up"),
    Case("30 s cut in a download, 1 Mbit/s", Conditions(delay_s=0.02, rate=1_000_000), rounds=1, cut="down"),
)


class Row(msgspec.Struct, frozen=True):
    """What a case cost. Bytes are of all devices and both ways, a round."""

    name: str
    rounds: int
    round_s: float
    link_bytes: int
    needed_bytes: int
    resent_bytes: int
    segments_resent: int
    presence: str
    faults: tuple[str, ...] = ()


class Course:
    """Changes the links as the rounds of a run begin."""

    def __init__(self, network: Network, cases: Sequence[Case]) -> None:
        self.network = network
        self.marks: list[Mark] = []
        self.cuts: list[tuple[float, float]] = []  # when it began and ended, seconds since the epoch
        # The first round is nobody's: processes get warm in it.
        self.plan = [None, *(case for case in cases for _ in range(case.rounds))]
        self._cut: tuple[Case, Mark] | None = None

    def hear(self, row: EventRow) -> None:
        """An event of the coordinator."""
        if row.kind == "round_started":
            case = self.plan[len(self.marks)] if len(self.marks) < len(self.plan) else None
            self.network.set(case.link if case is not None else CLEAN)
            self.marks.append(self.network.mark())
            self._cut = (case, self.marks[-1]) if case is not None and case.cut else None
        elif row.kind == "run_finished":
            self.marks.append(self.network.mark())

    async def cutting(self, model_bytes: Callable[[], int]) -> None:
        """Cut the link of the victim when half of the transfer has passed, for CUT_S."""
        link = self.network.links[VICTIM]
        while True:
            await asyncio.sleep(0.01)
            if self._cut is None or not model_bytes():
                continue
            case, begun = self._cut
            way = 0 if case.cut == "up" else 1
            carried = (link.to_near, link.to_far)[way].since(begun.links[0][way]).offered_bytes
            if carried > model_bytes() / 2:
                self._cut = None
                link.up, at = False, time.time()
                await asyncio.sleep(CUT_S)
                link.up = True
                self.cuts.append((at, time.time()))


def rows_of(cases: Sequence[Case], course: Course, fleet: Fleet, report: RunReport) -> list[Row]:
    """A row a case, from the counters at the beginnings of its rounds and the ledger's figures."""
    rows, number = [], 1
    for case in cases:
        marks = course.marks[number : number + case.rounds + 1]
        seconds = [after.at - before.at for before, after in itertools.pairwise(marks)]
        link = sum(
            way.since(was).offered_bytes
            for now, then in zip(marks[-1].links, marks[0].links, strict=True)
            for way, was in zip(now, then, strict=True)
        )
        mine = range(number + 1, number + 1 + case.rounds)
        found = [row for row in report.assignments if row.round in mine]
        told = [row for row in report.rounds if row.round in mine]
        presence, wrong = presence_of(case, course, fleet.events, marks[0].at, marks[-1].at)
        wrong += [
            f"round {row.round}: attempt {row.attempt}, {', '.join(row.participants) or 'nobody'}"
            for row in told
            if (row.attempt, row.status, tuple(row.participants)) != (1, "done", DEVICES)
        ]
        rows.append(
            Row(
                case.name,
                sum(row.status == "done" for row in told),
                statistics.median(seconds),
                link // case.rounds,
                _sum(found, "payload") // case.rounds,
                _sum(found, "resent") // case.rounds,
                (marks[-1].segments - marks[0].segments) // case.rounds,
                presence,
                tuple(wrong),
            )
        )
        number += case.rounds
    return rows


def _sum(found: Sequence[Any], kind: str) -> int:
    names = (f"{kind}_up_bytes", f"{kind}_down_bytes")
    return round(sum(row.measured[name].value or 0 for row in found for name in names if name in row.measured))


def presence_of(
    case: Case, course: Course, events: Sequence[EventRow], begin: float, end: float
) -> tuple[str, list[str]]:
    """What was told of who is there, in words, and what of it is wrong."""
    told = [row for row in events if row.kind in {"device_left", "device_joined"} and begin <= row.at < end]
    cut = next(((at, until) for at, until in course.cuts if begin <= at < end), None)
    wrong = [
        f"{row.device}: {row.kind} although its link was up" for row in told if cut is None or row.device != VICTIM
    ]
    if cut is None:
        return "as it is" if not wrong else "wrong", wrong
    left = next((row.at for row in told if row.kind == "device_left"), None)
    back = next((row.at for row in told if row.kind == "device_joined" and row.at > cut[1]), None)
    if left is not None and (back is None or back - cut[1] > RETURN_S):
        wrong.append(f"{VICTIM} is not told to be back within {RETURN_S:.0f} s after the cut")
    if left is not None and not SILENCE_S - TELLING_S <= left - cut[0] <= SILENCE_S + TELLING_S:
        wrong.append(f"{VICTIM} is told to have left {left - cut[0]:.0f} s after the cut began")
    words = "not told away" if left is None else f"away after {left - cut[0]:.0f} s"
    return words + (f", back {back - cut[1]:.0f} s after the cut" if back is not None else ""), wrong


async def over_bad_links(folder: Path, cases: Sequence[Case]) -> tuple[list[Row], Manifest, str]:
    """The run through all cases: its rows, its last state, and what went wrong."""
    with Network() as network:
        course = Course(network, cases)
        async with fleet_over(network, folder, len(course.plan), quorum=1.0) as fleet:
            fleet.on_event = course.hear

            def size() -> int:
                return next((row.data["bytes"] for row in fleet.events if row.kind == "run_started"), 0)

            cutting = asyncio.create_task(course.cutting(size))
            try:
                trouble = await fleet.finish()
            finally:
                cutting.cancel()
            if trouble:
                return [], {}, trouble
            report, manifest = fleet.result()
            return rows_of(cases, course, fleet, report), manifest, ""


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    columns = [
        "link",
        "rounds done",
        "a round, s",
        "KB on the links",
        "KB needed",
        "×",
        "KB sent again",
        "TCP segments again",
    ]
    columns += ["presence", ""]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [row.name, str(row.rounds), f"{row.round_s:.1f}", f"{row.link_bytes / 1e3:,.0f}"]
        cells += [f"{row.needed_bytes / 1e3:,.0f}", f"{row.link_bytes / max(1, row.needed_bytes):.2f}"]
        cells += [f"{row.resent_bytes / 1e3:,.0f}", str(row.segments_resent), row.presence]
        cells += ["**" + "; ".join(row.faults) + "**" if row.faults else "holds"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(folder: Path, cases: Sequence[Case] = CASES, *, stalled: bool = True) -> tuple[str, bool]:
    """Everything as Markdown, and whether all of it holds."""
    rows, manifest, trouble = asyncio.run(over_bad_links(folder / "bad", cases))
    if trouble:
        return f"the run over bad links failed: {trouble}\n", False
    rounds = sum(case.rounds for case in cases)
    _, reference, trouble = asyncio.run(over_bad_links(folder / "clean", [Case("clean", CLEAN, rounds)]))
    same = manifest == reference and not trouble
    told = "yes" if same else "**no**"
    lines = [table(rows), f"Weights at the end as after {rounds + 1} rounds over clean links: {told}."]
    good = same and not any(row.faults for row in rows)
    if stalled:
        words, wrong = asyncio.run(beside_a_stalled_device(folder / "stalled"))
        lines += ["", "One supervisor stopped beside two healthy ones:", "", *(f"* {one}" for one in words)]
        lines += [f"* **{one}**" for one in wrong]
        good = good and not wrong
    return "\n".join(lines) + "\n", good


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a shared disk is no part of this
    with tempfile.TemporaryDirectory(prefix="edgefl-networks-", dir=memory) as name:
        yield Path(name)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="cases whose names hold this; 'stalled' for the stopped device alone"
    )
    parser.add_argument("--keep", type=Path, help="folder to keep everything in")
    parser.add_argument("--write", type=Path, help="folder of transport.md")
    options = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(f"no bad networks here: {reason}")
    with _folder(options.keep) as folder:
        if options.only == "stalled":
            words, wrong = asyncio.run(beside_a_stalled_device(folder / "stalled"))
            sys.stdout.write("\n".join([*words, *(f"wrong: {one}" for one in wrong)]) + "\n")
            raise SystemExit(bool(wrong))
        cases = [case for case in CASES if options.only in case.name]
        text, good = page(folder, cases, stalled=not options.only)
    if options.write is not None:
        sections.transport(options.write, "Bad networks", "python -m benchmarks.network.networks", text)
    sys.stdout.write(text)
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
