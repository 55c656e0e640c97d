"""Fast and slow devices: rounds in lockstep and without (FedBuff), side by side.

har_hapt in small (accelerometer and gyroscope, six people, one a device), end-to-end training by real processes. Two of
the six hand over their updates some seconds later, every time. Both ways take the same number of updates: in lockstep a
round has six, without it the server steps after three. Seconds are from the first offer to the last round's close.

    python -m benchmarks.network.async_rounds [--updates 48] [--rest 2]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import sections
from benchmarks.common.field import played, table
from benchmarks.common.fleet import accuracy
from device_agent.runtime.connect import Options
from edgefl.api.run_inputs import shares_of
from edgefl.config.profiles import load_run
from edgefl.records import Budget
from edgefl.report.rounds import stale
from edgefl.run_records import RunReport

NAMES = tuple(f"person-{n:02d}" for n in range(1, 7))
SLOW = NAMES[4:]
BUFFER = 3


class Result(msgspec.Struct, frozen=True):
    """One way. ``slow``: updates of the slow devices in the model; ``oldest``: the highest staleness, in rounds."""

    way: str
    seconds: float
    rounds: int
    updates: int
    slow: int
    late: int
    oldest: int
    accuracy: float


def run_file(way: str, updates: int) -> dict[str, Any]:
    """The same training for each way, in as many rounds as take that many updates."""
    encoder = {"kind": "sensor", "size": "tiny", "patch": 16}
    per_round = {"lockstep": len(NAMES), "async": BUFFER}[way]
    rounds = {"devices": len(NAMES), "join_s": 120, "quorum": 1.0, "buffer": BUFFER, "max_staleness": 20}
    return {
        "name": "late",
        "seed": 1,
        "recipe": "end_to_end",
        "rounds": way,
        "data": {"source": {"har_hapt": {"mini": True, "clients": len(NAMES)}}, "partition": "natural"},
        "model": {
            "stages": 1,
            "encoders": {"acc": encoder, "gyro": encoder},
            "head": {"width": 64, "out": 32, "dropout": 0.0},
            "fusion_width": 32,
        },
        "training": {
            "rounds": [updates // per_round],
            "batch_size": 16,
            "lr": {"encoder": 2e-3, "head": 2e-3},
        },
        "round": rounds,
        "evaluate": "stage",
    }


def measured(folder: Path, way: str, updates: int, rest_s: float) -> Result:
    """One run."""
    folder.mkdir(parents=True)
    file, path = run_file(way, updates), folder / "shares.yaml"
    path.write_bytes(msgspec.yaml.encode(file))
    config, _ = load_run(str(path))
    file["data"]["test"] = str(Path(shares_of(config, NAMES, folder / "shares").test).resolve())
    every = [
        Options(device=name, data=str(folder / "shares" / f"{name}.npz"), state=str(folder / name), budget=Budget())
        for name in NAMES
    ]
    report = asyncio.run(played(folder, file, "benchmarks.network.slow_agents", every, str(rest_s), *SLOW))
    return result_of(way, report)


def result_of(way: str, report: RunReport) -> Result:
    """What a report says of one way."""
    begun = min(event.at for event in report.events if event.kind == "round_started")
    over = max(event.at for event in report.events if event.kind == "round_closed")
    late = [one for row in report.rounds for one in stale(row)]
    counted = [name.partition("~")[0] for row in report.rounds for name in row.record["parts"]["task"]["devices"]]
    return Result(
        way,
        over - begun,
        len(report.rounds),
        len(counted),
        sum(name in SLOW for name in counted),
        len(late),
        max((one["staleness"] for one in late), default=0),
        accuracy(report, ("acc", "gyro"), "none"),
    )


def page(found: list[Result]) -> str:
    """The table."""
    columns = (
        "rounds",
        "s",
        "server steps",
        "updates",
        "of slow devices",
        "late",
        "oldest, rounds",
        "accuracy, %",
        "speed",
    )
    first = found[0].seconds
    rows = [
        [
            one.way,
            f"{one.seconds:.1f}",
            str(one.rounds),
            str(one.updates),
            str(one.slow),
            str(one.late),
            str(one.oldest),
            f"{100 * one.accuracy:.1f}",
            f"× {first / one.seconds:.1f}",
        ]
        for one in found
    ]
    return table(columns, rows)


def markdown(updates: int = 48, rest_s: float = 2.0) -> str:
    """Measures, and gives the page."""
    found = []
    with tempfile.TemporaryDirectory(prefix="edgefl-async-") as folder:
        for way in ("lockstep", "async"):
            found.append(measured(Path(folder) / way, way, updates, rest_s))
            sys.stderr.write(f"{way}: {found[-1].seconds:.1f} s\n")
    return page(found)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=48)
    parser.add_argument("--rest", type=float, default=2.0, help="seconds by which slow devices are slower")
    parser.add_argument("--write", type=Path, help="folder of transport.md")
    options = parser.parse_args()
    text = markdown(options.updates, options.rest)
    if options.write is not None:
        sections.transport(options.write, "Rounds beyond lockstep", "python -m benchmarks.network.async_rounds", text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
