"""End-to-end, progressive and layer-wise training of one model, measured side by side.

The demo's model on windows of five seconds, and two devices without budgets, so that every schedule can run; the same
rounds, epochs, batches and seed. Each schedule is a whole run through broker, coordinator and agents. Figures are those
of the ledger: memory by the kernel's high-water mark, FLOPs counted, bytes counted.

    python -m benchmarks.cost.schedules [--write docs/results/schedules.md]
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

from benchmarks.common.fleet import accuracy, largest, run, total
from edgefl.run_records import RunReport

SCHEDULES = ("end_to_end", "progressive", "layerwise")
FLEET = "fleet=[{name: left, profile: cpu}, {name: right, profile: cpu}]"


def measure(schedule: str, width: int, batch: int) -> RunReport:
    """One run of the demo under ``schedule``."""
    encoder = f"{{kind: sensor, size: small, width: {width}, patch: 5}}"
    return run(
        "demo",
        FLEET,
        "recipe=lw-zeros",
        "data.source={basic_motions: {window: 50, step: 10}}",
        f"slots.schedule={schedule}",
        f"model.encoders={{acc: {encoder}, gyro: {encoder}}}",
        f"training.batch_size={batch}",
        label=schedule,
    )


def table(reports: dict[str, RunReport]) -> str:
    """Markdown: one row a schedule, ratios against end to end."""
    lines = [
        "| schedule | step memory, MiB | FLOPs, GFLOP | payload down + up, MiB | test accuracy | against end-to-end |",
        "|---|---|---|---|---|---|",
    ]
    reference = figures(reports["end_to_end"])
    for name, report in reports.items():
        memory, flops, payload = figures(report)
        ratios = [was / now for was, now in zip(reference, (memory, flops, payload), strict=True)]
        less = "memory ÷ {:.1f}, FLOPs ÷ {:.1f}, bytes ÷ {:.1f}".format(*ratios) if name != "end_to_end" else ""
        correct = accuracy(report, ("acc", "gyro"), "none")
        lines.append(f"| {name} | {memory:.1f} | {flops:.1f} | {payload:.1f} | {correct:.1%} | {less} |")
    return "\n".join(lines)


def figures(report: RunReport) -> tuple[float, float, float]:
    """Highest step memory (MiB), FLOPs (GFLOP) and payload (MiB) of the whole run."""
    payload = total(report, "payload_down_bytes") + total(report, "payload_up_bytes")
    return largest(report, "step_peak_bytes") / 2**20, total(report, "flops") / 1e9, payload / 2**20


def main() -> None:
    """Run all three and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128, help="token width of the encoders")
    parser.add_argument("--batch", type=int, default=32, help="batch size")
    parser.add_argument("--write", type=Path, help="also write the page here")
    options = parser.parse_args()
    reports = {name: measure(name, options.width, options.batch) for name in SCHEDULES}
    text = table(reports)
    print(text)
    less = [a > b for a, b in zip(figures(reports["end_to_end"]), figures(reports["layerwise"]), strict=True)]
    print("\nlayer-wise is lower in step memory, FLOPs and bytes:", "yes" if all(less) else "NO")
    if options.write:
        machine = (
            f"{os.cpu_count()} cores ({platform.machine()}, {platform.system()}, Python {platform.python_version()})"
        )
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(PAGE.format(table=text, machine=machine, **vars(options)), encoding="utf-8")


PAGE = """# Schedules side by side

`python -m benchmarks.cost.schedules --width {width} --batch {batch}` on {machine}.

BasicMotions (accelerometer and gyroscope), two devices, six stages, twelve rounds, two epochs a round, the same
seed. Step memory is the highest of all rounds, above the idle trainer, by the kernel's high-water mark; FLOPs
(forward and backward, 2 per multiply-accumulate) and payload are sums over both devices and all rounds.

{table}

The savings grow with the depth and width of the encoders: heads, fusion and the prefix's weights are the same for every
schedule, and this model is small. Single runs; no spread is given.
"""

if __name__ == "__main__":
    main()
