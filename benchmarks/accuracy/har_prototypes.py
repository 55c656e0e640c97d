"""Thirty people as devices, every third without a gyroscope: what single-sensor inference is worth.

The shipped run file har.yaml on har_hapt (EDGEFL_DATA): 30 agents, a coordinator and a broker as separate
processes. The same global model is tested with both sensors and with each alone, the other filled in by zeros and
by prototypes; with --plain once more trained without prototypes (zeros stand in for what is missing).

    python -m benchmarks.accuracy.har_prototypes --seeds 3 --plain [--write docs/results/har.md]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from pathlib import Path

from benchmarks.common.fleet import accuracy, largest, run, total
from edgefl.run_records import RunReport

PLAIN = ("slots.missing=zero", "slots.prototypes=none", "slots.objective=cross_entropy")
#: Accuracy with both sensors, the accelerometer alone, the gyroscope alone, the mean of these two; all in percent.
Row = tuple[float, ...]


def row(report: RunReport, mask: str) -> Row:
    """The accuracies of one run under one mask."""
    both = accuracy(report, ("acc", "gyro"), "none")
    alone = [accuracy(report, (m,), mask) for m in ("acc", "gyro")]
    return tuple(100 * value for value in (both, *alone, statistics.mean(alone)))


def bill(name: str, report: RunReport) -> str:
    """What the run cost, in one line."""
    payload = total(report, "payload_up_bytes") + total(report, "payload_down_bytes")
    return (
        f"* {name}: {len(report.devices)} devices, highest step memory "
        f"{largest(report, 'step_peak_bytes') / 2**20:.1f} MiB, {total(report, 'flops') / 1e9:.0f} GFLOP, "
        f"{payload / 2**20:.0f} MiB of payload in all"
    )


def table(rows: dict[tuple[str, str], list[Row]]) -> list[str]:
    """Markdown: each seed, then mean and deviation of each kind, then what prototypes give over zeros."""
    columns = "both sensors | accelerometer alone | gyroscope alone | one sensor, mean"
    lines = [f"| trained with | what is missing filled in by | {columns} |", "|---|---|---|---|---|---|"]
    for (training, mask), values in rows.items():
        for seed, value in enumerate(values, start=1):
            lines.append(f"| {training}, seed {seed} | {mask} | " + " | ".join(f"{v:.1f}" for v in value) + " |")
    for (training, mask), values in rows.items():
        lines.append(f"| **{training}**, mean of {len(values)} | **{mask}** | " + _means(values) + " |")
    zero, prototype = rows["prototypes", "zeros"], rows["prototypes", "prototypes"]
    gains = [tuple(p - z for p, z in zip(one, other, strict=True)) for one, other in zip(prototype, zero, strict=True)]
    lines.append("| prototypes | prototypes minus zeros | " + _means(gains, "+") + " |")
    return lines


def _means(values: list[Row], sign: str = "") -> str:
    cells = []
    for column in zip(*values, strict=True):
        spread = f" ± {statistics.stdev(column):.1f}" if len(column) > 1 else ""
        cells.append(f"{statistics.mean(column):{sign}.1f}{spread}")
    return " | ".join(cells)


def main() -> None:
    """Train both ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--plain", action="store_true", help="also train without prototypes")
    parser.add_argument("--set", action="append", default=[], help="override of the run file, for both")
    parser.add_argument("--write", type=Path, help="also write the page here")
    options = parser.parse_args()
    rows: dict[tuple[str, str], list[Row]] = {}
    bills = []
    for seed in range(1, options.seeds + 1):
        shared = [*options.set, f"seed={seed}"]
        ours = run("har", *shared, label=f"prototypes, seed {seed}")
        rows.setdefault(("prototypes", "zeros"), []).append(row(ours, "zero"))
        rows.setdefault(("prototypes", "prototypes"), []).append(row(ours, "prototype"))
        bills.append(bill(f"prototypes, seed {seed}", ours))
        if options.plain:
            plain = run("har", *shared, *PLAIN, label=f"zeros, seed {seed}")
            rows.setdefault(("zeros", "zeros"), []).append(row(plain, "zero"))
            bills.append(bill(f"zeros, seed {seed}", plain))
        print("\n".join(table(rows)), flush=True)
    text = "\n".join([*table(rows), "", *bills])
    print(text)
    if options.write:
        machine = (
            f"{os.cpu_count()} cores ({platform.machine()}, {platform.system()}, Python {platform.python_version()})"
        )
        flags = f"--seeds {options.seeds}" + " --plain" * options.plain
        page = PAGE.format(table=text, machine=machine, flags=flags, date=time.strftime("%Y-%m"))
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(page, encoding="utf-8")


PAGE = """# Thirty people, every third without a gyroscope

`python -m benchmarks.accuracy.har_prototypes {flags}` on {machine}, {date}; run file `profiles/runs/har.yaml`.
Accuracy in percent of the test windows, mean ± deviation over seeds.

har_hapt: smartphone at the waist, six activities; each person is a device. Of each recording's windows of each
activity the last 30 % in time are the test; training windows that overlap them are left out. Devices with both
sensors also lose each sensor in a fifth of their samples. One model, layer-wise, through a real broker. What the
figures say is in [decision 0005](../decisions/0005-each-modality-matches-its-prototypes.md).

{table}
"""

if __name__ == "__main__":
    main()
