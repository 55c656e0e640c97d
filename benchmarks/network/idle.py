"""IP bytes that a waiting agent moves in an hour.

A fleet with an identity (mutual TLS, mosquitto) and one enrolled agent in two network namespaces; no run. Every packet
on their link is counted by the link, outside of both. Needs root, `ip` and mosquitto.

    python -m benchmarks.network.idle                     # an hour, docs/results/idle.md
    python -m benchmarks.network.idle --minutes 5 --no-page
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.network import echo
from benchmarks.network.network_links import Link, Namespace, unavailable
from edgefl.process.parent_death import leashed

PAGE = Path("docs/results/idle.md")
#: Goal of a waiting agent's link.
GOAL_MIB = 20.0
MONTH_MINUTES = 30 * 24 * 60
MIB = 2**20
#: For the agent to import, connect and say hello.
PATIENCE_S = 60.0
SETTLE_S = 30.0


class Minute(NamedTuple):
    """IP bytes and packets of one minute, from and to the device."""

    up: int
    down: int
    packets: int


def command(*words: str, module: str, folder: Path) -> subprocess.Popen[str]:
    """A command line of the product, in this thread's namespace."""
    named = leashed([sys.executable, "-m", f"{module}.cli", *words])
    here = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(named, cwd=folder, env=here, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def done(*words: str, module: str, folder: Path) -> str:
    """Output of a command line that ends by itself."""
    process = command(*words, module=module, folder=folder)
    out, _ = process.communicate(timeout=PATIENCE_S)
    if process.returncode:
        raise RuntimeError(f"{words[0]} ended with {process.returncode}: {out}")
    return out


def enroll(folder: Path) -> None:
    """Enrol the device, once the broker is up."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            done("enroll", "--file", "token", "--state", "state", module="device_agent", folder=folder)
        except RuntimeError:
            if time.monotonic() > until:
                raise
        else:
            return


@contextlib.contextmanager
def waiting(folder: Path, server: Namespace, device: Namespace, address: str) -> Iterator[None]:
    """An enrolled agent that is connected to its fleet's broker, without a run."""
    share = folder / "share.npz"
    echo.test_set().save_npz(share)
    running: list[subprocess.Popen[str]] = []
    try:
        with server.entered():
            done("init", "--host", address, module="coordinator", folder=folder)
            said = done("enroll", "--name", "cam", module="coordinator", folder=folder)
            token = next(word for word in said.split() if word.startswith("edgefl-"))
            running.append(command("enrollments", module="coordinator", folder=folder))
        with device.entered():
            (folder / "token").write_text(token)
            enroll(folder)
            agent = ("run", "--data", str(share), "--state", "state", "--log-format", "json")
            running.append(command(*agent, module="device_agent", folder=folder))
        for line in running[-1].stdout or ():
            if line.startswith("{") and json.loads(line).get("event") == "connected":
                break
        else:
            raise RuntimeError("the agent ended before it was connected")
        time.sleep(SETTLE_S)
        yield
        for process in running:
            if process.poll() is not None and process.stdout:
                raise RuntimeError(f"a program ended while it was measured: {process.stdout.read()[-2000:]}")
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()


def minutes(link: Link, number: int) -> list[Minute]:
    """So many minutes, one after another."""
    found = []
    for _ in range(number):
        before = (link.to_near, link.to_far)
        time.sleep(60)
        up, down = (now.since(then) for now, then in zip((link.to_near, link.to_far), before, strict=True))
        found.append(Minute(up.offered_bytes, down.offered_bytes, up.offered_packets + down.offered_packets))
    return found


def month_mib(found: Sequence[Minute]) -> float:
    """A month of waiting at the mean rate, MiB both ways."""
    return statistics.fmean(one.up + one.down for one in found) * MONTH_MINUTES / MIB


def page(found: Sequence[Minute]) -> str:
    """The results as Markdown."""
    both = [one.up + one.down for one in found]
    month = month_mib(found)
    columns = {
        "bytes up": [one.up for one in found],
        "bytes down": [one.down for one in found],
        "both": both,
        "packets": [one.packets for one in found],
    }
    rows = (f"| {name} | {statistics.fmean(of):.0f} | {min(of)} | {max(of)} |" for name, of in columns.items())
    verdict = "within" if month <= GOAL_MIB else "above"
    moved = f"A waiting agent moved {sum(both) / 1000:.1f} kB in {len(found)} minutes"
    return "\n".join(
        (
            "# What waiting costs",
            "",
            f"{moved}: **{month:.1f} MiB a month**, {verdict} the goal of {GOAL_MIB:.0f}.",
            "",
            f"`python -m benchmarks.network.idle --minutes {len(found)}`: mosquitto with mutual TLS and an enrolled",
            "agent without a run, a network namespace each; every IP packet on their link is counted by the link.",
            "A wired network's ARP comes on top (7 MiB a month were measured between two namespaces).",
            "",
            "| a minute | mean | least | most |",
            "|---|---|---|---|",
            *rows,
            "",
        )
    )


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--no-page", action="store_true", help="print it only")
    asked = parser.parse_args()
    if why := unavailable():
        raise SystemExit(why)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place,
        Namespace() as server,
        Namespace() as device,
        Link(server, device) as link,
        waiting(Path(place), server, device, link.near_address),
    ):
        found = minutes(link, asked.minutes)
    text = page(found)
    sys.stdout.write(text)
    if not asked.no_page:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
