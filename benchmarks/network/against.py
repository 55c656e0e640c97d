"""Rounds of an older commit and of this tree, run by turns in one go: medians and their ratio.

Each turn runs the echo benchmark's case in a work tree of that commit and then in this one, with the same Python and
its packages; the order changes from turn to turn, so that a machine that slows down meets both alike. *Now / then*:
the ratio of the medians, with the smallest and the largest ratio of one turn.

    python -m benchmarks.network.against COMMIT [--case 40KB] [--turns 5] [--write docs/results]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import sections
from benchmarks.common.trees import ROOT, work_tree

#: What a turn compares: columns of the echo benchmark's table.
COLUMNS = ("a round, s", "CPU s: coordinator", "agents", "coordinator's peak, MiB")
#: Where the echo benchmark is, newest first.
MODULES = ("benchmarks.network.echo", "benchmarks.echo")


def turn(tree: Path, case: str) -> dict[str, float]:
    """column -> figure of one run of ``case`` with the code of ``tree``."""
    module = next(name for name in MODULES if tree.joinpath(*name.split(".")).with_suffix(".py").exists())
    command = [sys.executable, "-m", module, "--case", case, "--broker", "mosquitto"]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, text=True, check=True
    )
    head, _, row = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if "|" in line][:3]
    return {name: float(row[head.index(name)]) for name in COLUMNS}


def rows(case: str, then: Sequence[Mapping[str, float]], now: Sequence[Mapping[str, float]]) -> list[str]:
    """The table's lines of one case."""
    lines = []
    for name in COLUMNS:
        before, after = ([one[name] for one in runs] for runs in (then, now))
        medians = statistics.median(before), statistics.median(after)
        single = [b / a for a, b in zip(before, after, strict=True)]
        ratio = f"{medians[1] / medians[0]:.2f} ({min(single):.2f} to {max(single):.2f})"
        lines.append(f"| {case} | {name} | {medians[0]:g} | {medians[1]:g} | {ratio} |")
    return lines


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--case", action="append", help="of the echo benchmark; 40KB and 28MB unless given")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--write", type=Path, help="folder of transport.md")
    asked = parser.parse_args()
    lines = ["| case | figure | then | now | now / then |", "|---|---|---|---|---|"]
    with work_tree(asked.commit) as old:
        for case in asked.case or ("40KB", "28MB"):
            then, now = list[dict[str, float]](), list[dict[str, float]]()
            for number in range(asked.turns):
                for tree, found in ((old, then), (ROOT, now))[:: 1 if number % 2 == 0 else -1]:
                    found.append(turn(tree, case))
            lines += rows(case, then, now)
            sys.stderr.write("\n".join(lines[-len(COLUMNS) :]) + "\n")
    text = f"Medians of {asked.turns} turns; then: {asked.commit}.\n\n" + "\n".join(lines) + "\n"
    if asked.write is not None:
        sections.transport(
            asked.write, "Beside an older commit", f"python -m benchmarks.network.against {asked.commit}", text
        )
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
