"""Rounds over bad networks: every device in a network namespace, with a link of its own to broker and coordinator.

Three agents with trainers that echo; otherwise the real processes. One run goes through all conditions, a few rounds
each: delay, loss, reordering, duplicates, 256 kbit/s, and 30 seconds without network in the middle of one device's
upload and download. It must end with the very weights of a run over clean links, each round in its first attempt with
everybody, and tell that a device left only when it was silent for as long as that takes. In a second run one supervisor
is stopped (SIGSTOP) for longer than several deadlines: the others' rounds go on without it, and it takes part again.

    python -m benchmarks.networks [--only cut]     as root; needs `ip` and /dev/net/tun
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks import echo, sections
from benchmarks.network_links import CLEAN, Conditions, Counters, Link, Namespace, unavailable
from coordinator.ledger import Ledger
from coordinator.timeouts import Timeouts
from device_agent.start import Options
from edgefl.leash import leashed
from edgefl.records import Manifest
from edgefl.report.rows import EventRow, RunReport
from edgefl.transport.broker import start_broker

DEVICES = ("far", "left", "right")
#: Its link is cut, or it is stopped; it is the first in every order that there is.
VICTIM = DEVICES[0]
CUT_S = 30.0
PATIENCE_S = 400.0
SILENCE_S = Timeouts().silence_s
#: What telling takes besides: a tick, and a machine that is busy.
TELLING_S = 3.0
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
#: About 400 KB: 4 s at 1 Mbit/s, 13 s at 256 kbit/s, each way.
MODEL = echo.Case("networks", 48, 3, agents=len(DEVICES))


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


class Mark(msgspec.Struct, frozen=True):
    """The counters when a round began."""

    at: float
    links: tuple[tuple[Counters, Counters], ...]
    segments: int


class Network:
    """The namespaces and their links; this thread is in that of broker and coordinator while it is open."""

    def __init__(self, seed: int = 1) -> None:
        self._stack = contextlib.ExitStack()
        self.server = self._stack.enter_context(Namespace())
        self.devices = {name: self._stack.enter_context(Namespace()) for name in DEVICES}
        self.links = {
            name: self._stack.enter_context(Link(self.server, namespace, number, seed + number))
            for number, (name, namespace) in enumerate(self.devices.items(), 1)
        }
        self._stack.enter_context(self.server.entered())

    def set(self, conditions: Conditions) -> None:
        """Of every link."""
        for link in self.links.values():
            link.conditions = conditions

    def mark(self) -> Mark:
        """All counters now."""
        links = tuple((link.to_near, link.to_far) for link in self.links.values())
        spaces = (self.server, *self.devices.values())
        return Mark(time.time(), links, sum(space.tcp()["RetransSegs"] for space in spaces))

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Fleet:
    """Coordinator and agents of one run, each where it belongs. ``heard``: what the coordinator has told."""

    def __init__(self, folder: Path, network: Network, url: str, rounds: int, policy: dict[str, Any]) -> None:
        self.folder = folder
        self.events: list[EventRow] = []
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.on_event: Callable[[EventRow], None] = lambda row: None
        test = folder / "test.npz"
        echo.test_set().save_npz(test)
        settings = echo.run_file(msgspec.structs.replace(MODEL, rounds=rounds - 1), test)
        settings["round"] = settings["round"] | policy
        (folder / "run.yaml").write_text(yaml.safe_dump(settings))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for name, namespace in network.devices.items():
            options = Options(device=name, data=str(test), state=str(folder / name), insecure=True)
            file = folder / f"{name}.json"
            file.write_bytes(msgspec.json.encode([options]))
            there = {**environment, "EDGEFL_BROKER": url.replace("127.0.0.1", network.links[name].near_address)}
            with namespace.entered(), (folder / f"{name}.out").open("wb") as log:
                command = leashed([sys.executable, "-m", "benchmarks.echo_agents", str(file)])
                self.agents[name] = subprocess.Popen(command, env=there, stdout=log, stderr=log)
        command = [sys.executable, "-m", "coordinator.cli", "run", str(folder / "run.yaml"), "--events", "--insecure"]
        command += ["--run", "echo", "--directory", str(folder / "runs"), "--broker", url]
        with (folder / "coordinator.out").open("wb") as log:
            self._coordinator = subprocess.Popen(leashed(command), env=environment, stdout=subprocess.PIPE, stderr=log)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._coordinator.stdout or ():
            row = msgspec.json.decode(line, type=EventRow)
            self.events.append(row)
            self.on_event(row)

    async def finish(self) -> str:
        """Wait for the end; what went wrong, "" for nothing."""
        until = time.monotonic() + PATIENCE_S
        while self._coordinator.poll() is None:
            if time.monotonic() > until:
                return f"not finished after {PATIENCE_S:.0f} s"
            await asyncio.sleep(0.05)
        self._reader.join()
        if self._coordinator.returncode:
            last = self.events[-1].data.get("text", "") if self.events else ""
            return f"the coordinator ended with {self._coordinator.returncode}: {last}"
        ended = [name for name, agent in self.agents.items() if agent.poll() is not None]
        return f"these agents ended by themselves: {', '.join(ended)}; see {self.folder}" if ended else ""

    def stop(self) -> None:
        """End what still runs."""
        for process in (self._coordinator, *self.agents.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        for process in (self._coordinator, *self.agents.values()):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._reader.join()
        if self._coordinator.stdout is not None:
            self._coordinator.stdout.close()

    def result(self) -> tuple[RunReport, Manifest]:
        """What the ledger holds, and the last state."""
        with Ledger(self.folder / "runs" / "echo" / "ledger.sqlite", create=False) as ledger:
            return ledger.report("echo"), ledger.position("echo").manifest


@contextlib.asynccontextmanager
async def fleet_over(network: Network, folder: Path, rounds: int, **policy: Any) -> AsyncIterator[Fleet]:
    """A broker, and a fleet on it, ended in order."""
    folder.mkdir(parents=True)
    async with start_broker(folder / "broker", "mosquitto", host="0.0.0.0") as broker:  # noqa: S104 - a namespace's own
        fleet = Fleet(folder, network, broker.url, rounds, policy)
        try:
            yield fleet
        finally:
            await asyncio.to_thread(fleet.stop)


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
    if back is None or back - cut[1] > RETURN_S:
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


#: The stopped device misses several deadlines, and is silent for longer than SILENCE_S.
DEADLINE_S = 8.0
STOPPED_ROUNDS = 16
SLOW = Conditions(delay_s=0.02, rate=4_000_000)


async def beside_a_stalled_device(folder: Path) -> tuple[list[str], list[str]]:
    """What was seen, and what is wrong."""
    with Network() as network:
        network.set(SLOW)
        async with fleet_over(network, folder, STOPPED_ROUNDS, quorum=0.5, deadline_s=DEADLINE_S) as fleet:
            state: dict[str, float] = {}

            def hear(row: EventRow) -> None:
                victim = fleet.agents[VICTIM]
                if row.kind == "round_started" and row.round == 3:
                    state["stopped"] = row.at
                    victim.send_signal(signal.SIGSTOP)
                elif row.kind == "device_left" and row.device == VICTIM:
                    state["left"] = row.at
                elif row.kind == "round_closed" and "left" in state and "going" not in state:
                    state["going"] = row.at  # a round after it was told away
                    victim.send_signal(signal.SIGCONT)

            fleet.on_event = hear
            if trouble := await fleet.finish():
                return [], [trouble]
            report, _ = fleet.result()
    return stalled_words(fleet.events, report, state)


def stalled_words(
    events: Sequence[EventRow], report: RunReport, state: dict[str, float]
) -> tuple[list[str], list[str]]:
    """What was seen of the run beside a stalled device, and what is wrong."""
    begun = {row.round: row.at for row in events if row.kind == "round_started"}
    own = [row for row in events if row.kind == "update" and row.device != VICTIM]
    healthy = {n: max(row.at - begun[n] for row in own if row.round == n) for n in begun}
    stalled = [row.round for row in report.rounds if VICTIM not in row.participants]
    free = [number for number in begun if number not in stalled and number > 1]
    wrong = []
    if {tuple(row.participants) for row in report.rounds} != {DEVICES, DEVICES[1:]}:
        wrong.append("a round was closed without a healthy device")
    if "left" not in state or abs(state["left"] - state["stopped"] - SILENCE_S) > TELLING_S + Timeouts().heartbeat_s:
        wrong.append(f"{VICTIM} was not told away in time")
    if VICTIM not in report.rounds[-1].participants:
        wrong.append(f"{VICTIM} did not take part again")
    slowest = max(healthy[number] for number in stalled) if stalled else 0.0
    if slowest > DEADLINE_S / 2:
        wrong.append(f"a healthy device took {slowest:.1f} s beside the stalled one")
    rounds = {row.round: (row.ended_at or 0) - row.started_at for row in report.rounds}
    words = [
        f"rounds with everybody: median {statistics.median(rounds[n] for n in free):.1f} s",
        f"updates of the healthy in them: after {statistics.median(healthy[n] for n in free):.1f} s",
        f"rounds without the stopped device: {len(stalled)}, of {', '.join(f'{rounds[n]:.1f}' for n in stalled)} s",
        f"updates of the healthy in them: after {slowest:.1f} s at most; the deadline is {DEADLINE_S:.0f} s",
        f"told away {state.get('left', 0) - state.get('stopped', 0):.0f} s after it was stopped",
        f"took part in the last round: {'yes' if VICTIM in report.rounds[-1].participants else 'no'}",
    ]
    return words, wrong


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
        sections.transport(options.write, "Bad networks", "python -m benchmarks.networks", text)
    sys.stdout.write(text)
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
