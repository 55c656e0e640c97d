"""Thirty people as devices, every third without a gyroscope: what single-sensor inference is worth.

The shipped run file har.yaml on har_hapt (EDGEFL_DATA): 30 agents, a coordinator and a broker as separate
processes. The same global model is tested with both sensors and with each alone, the other filled in by zeros and
by prototypes; with --plain once more trained without prototypes (zeros stand in for what is missing).

    python -m benchmarks.har_prototypes [--write docs/results/har.md]
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

from benchmarks.fleet import accuracy, largest, run, total
from edgefl.report.rows import RunReport

PLAIN = ("slots.missing=zero", "slots.prototypes=none", "slots.objective=cross_entropy")


def row(name: str, report: RunReport, mask: str) -> str:
    """One Markdown row: accuracy with both sensors, accelerometer alone, gyroscope alone."""
    both = accuracy(report, ("acc", "gyro"), "none")
    alone = [accuracy(report, (m,), mask) for m in ("acc", "gyro")]
    return f"| {name} | {mask} mask | {both:.1%} | {alone[0]:.1%} | {alone[1]:.1%} |"


def main() -> None:
    """Train both ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--plain", action="store_true", help="also train without prototypes")
    parser.add_argument("--set", action="append", default=[], help="override of the run file, for both")
    parser.add_argument("--write", type=Path, help="also write the page here")
    options = parser.parse_args()
    lines = [
        "| training | inference with one sensor | both sensors | accelerometer alone | gyroscope alone |",
        "|---|---|---|---|---|",
    ]
    bills = []
    for seed in range(1, options.seeds + 1):
        shared = [*options.set, f"seed={seed}"]
        ours = run("har", *shared, label=f"prototypes, seed {seed}")
        lines.append(row(f"prototypes, seed {seed}", ours, "zero"))
        lines.append(row(f"prototypes, seed {seed}", ours, "prototype"))
        trained = [("prototypes", ours)]
        if options.plain:
            plain = run("har", *shared, *PLAIN, label=f"zeros, seed {seed}")
            lines.append(row(f"zeros, seed {seed}", plain, "zero"))
            trained.append(("zeros", plain))
        for name, report in trained:
            payload = total(report, "payload_up_bytes") + total(report, "payload_down_bytes")
            bills.append(
                f"* {name}, seed {seed}: {len(report.devices)} devices, highest step memory "
                f"{largest(report, 'step_peak_bytes') / 2**20:.1f} MiB, {total(report, 'flops') / 1e9:.0f} GFLOP, "
                f"{payload / 2**20:.0f} MiB of payload in all"
            )
    text = "\n".join([*lines, "", *bills])
    print(text)
    if options.write:
        machine = (
            f"{os.cpu_count()} cores ({platform.machine()}, {platform.system()}, Python {platform.python_version()})"
        )
        page = PAGE.format(table=text, machine=machine, seeds=options.seeds, date=time.strftime("%Y-%m"))
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(page, encoding="utf-8")


PAGE = """# Thirty people, every third without a gyroscope

`python -m benchmarks.har_prototypes --seeds {seeds}` on {machine}, {date}; run file
`profiles/runs/har.yaml`.

har_hapt: smartphone at the waist, six activities; each person is a device. Of each recording's windows of each
activity the last 30 % in time are the test; training windows that overlap them are left out. Devices with both
sensors also lose each sensor in a fifth of their samples. One model, layer-wise, through a real broker.

{table}
"""

if __name__ == "__main__":
    main()
