"""Memory and round time of a coordinator with its live page off, on, and on with a browser that follows it, by turns.

Each turn runs a case of the echo benchmark (`benchmarks.network.echo`) three times: without a page, with one that
nobody opens, and with one client that reads the stream as a browser does. Resident memory is the coordinator's at its
highest. The order changes from turn to turn, so that a machine that slows down meets all three alike; "÷ off" is the
median over turns of a turn's own ratio.

    python -m benchmarks.cost.web [--turns 3] [--case 40KB] [--write docs/results]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from benchmarks.common import sections
from benchmarks.cost.resource_table import MIB
from benchmarks.network import echo

#: Most that the page may add to the coordinator's resident memory.
LIMIT_MIB = 25
MODES = ("off", "on", "followed")
#: Longer than the page is ever silent: it pings every 15 s.
PATIENCE_S = 30.0


def follow(url: str, over: threading.Event, read: list[int]) -> None:
    """Open the page, then read its stream until the run is done; ``read`` takes the bytes of each piece.

    Hangs up then, as a page that is closed does: the coordinator stays for those who still look.
    """
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as browser:
        while not over.is_set():
            try:
                browser.get("/")
                with browser.stream("GET", "/live") as stream:
                    for chunk in stream.iter_bytes():
                        read.append(len(chunk))
                        if b"The run is " in chunk or over.is_set():
                            return
            except httpx.TransportError:  # not there yet
                time.sleep(0.2)


def turn(case: echo.Case, mode: str) -> tuple[echo.Outcome, int]:
    """One run of the case; and the bytes that the client read."""
    port = 18_480
    options = [] if mode == "off" else ["--web-at", f"127.0.0.1:{port}"]
    over, read = threading.Event(), list[int]()
    client = threading.Thread(target=follow, args=(f"http://127.0.0.1:{port}", over, read), daemon=True)
    if mode == "followed":
        client.start()
    with tempfile.TemporaryDirectory(prefix="edgefl-web-") as folder:
        found = asyncio.run(echo.measured(case, "mosquitto", Path(folder), options))
    over.set()
    if mode == "followed":
        client.join(2 * PATIENCE_S)
    if mode == "followed" and not read:
        raise SystemExit("the client read nothing of the page's stream")
    return found, sum(read)


def table(found: dict[str, list[tuple[echo.Outcome, int]]]) -> str:
    """Medians of each mode, and what it adds to a run without a page."""

    def median(mode: str, figure: Callable[[echo.Outcome], float]) -> float:
        return statistics.median(figure(outcome) for outcome, _ in found[mode])

    columns = ["page", "a round, s", "÷ off", "coordinator's CPU, s a round", "coordinator's peak, MiB", "more"]
    lines = ["| " + " | ".join([*columns, "stream, KB a run"]) + " |", "|---" * 7 + "|"]
    base = median("off", lambda one: one.coordinator_peak_bytes)
    for mode in MODES:
        peak, read = median(mode, lambda one: one.coordinator_peak_bytes), statistics.median(n for _, n in found[mode])
        pairs = zip(found[mode], found["off"], strict=True)
        cells = [
            mode,
            f"{median(mode, lambda one: one.round_s):.3f}",
            f"{statistics.median(one.round_s / off.round_s for (one, _), (off, _) in pairs):.2f}",
            f"{median(mode, lambda one: one.coordinator_cpu_s):.3f}",
            f"{peak / MIB:.1f}",
            f"{(peak - base) / MIB:+.1f}",
            f"{read / 1e3:,.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line; fails when the page takes more memory than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--case", choices=[case.name for case in echo.CASES], default="40KB")
    parser.add_argument("--write", type=Path, help="folder of transport.md")
    asked = parser.parse_args()
    case = next(case for case in echo.CASES if case.name == asked.case)
    found: dict[str, list[tuple[echo.Outcome, int]]] = {mode: [] for mode in MODES}
    for number in range(asked.turns):
        for mode in MODES[:: 1 if number % 2 == 0 else -1]:
            found[mode].append(turn(case, mode))
            sys.stderr.write(f"turn {number + 1}, {mode}: {found[mode][-1][0].round_s:.3f} s\n")
    text = table(found)
    sys.stdout.write(text)
    if asked.write is not None:
        explained = (__doc__ or "").split("\n\n")[1]
        command = f"python -m benchmarks.cost.web --case {case.name} --turns {asked.turns}"
        load = f"Load of the machine when it ended, over a quarter of an hour: {os.getloadavg()[2]:.1f}."
        sections.transport(asked.write, "The live page", command, f"{explained}\n\n{text}\n{load}\n")
    peaks = {mode: statistics.median(one.coordinator_peak_bytes for one, _ in found[mode]) for mode in MODES}
    if (peaks["followed"] - peaks["off"]) / MIB > LIMIT_MIB:
        raise SystemExit(f"the page takes more than {LIMIT_MIB} MiB")


if __name__ == "__main__":
    main()
