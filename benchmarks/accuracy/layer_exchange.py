"""One layer between whole exchanges: what it gains over exchanging nothing, and costs against exchanging everything.

The data and model of MMiC's claims at mm50-mc50 (benchmarks/accuracy/claims/mmic.yaml): 30 devices, six of them a
round, half of them with samples of which half lose one modality; 24 rounds of three epochs, at the rate that was tuned
for averaging everything in every round. *Whole*: everything travels in every round. *One layer*: periods of k rounds,
in which one poverty layer a device travels between whole exchanges. *Nothing*: the same periods, in which nothing does.
Where periods are longer, fewer devices are drawn in all: six for each period. *emoji*: groups of drawings with their
names, of the same devices, from random weights; its rate is the best of four for *whole*, with seed 100.

    python -m benchmarks.accuracy.layer_exchange [--seeds 3] [--minutes 30] [--write docs/results]   # resumes
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.accuracy.claims.study import Cell, Study, set_field
from benchmarks.common.inprocess import run_values
from benchmarks.common.plotting import COLOURS, plot
from benchmarks.common.result_lines import add_row, rows_in
from benchmarks.common.spread import interval, spread
from edgefl.report.repairs import repaired
from edgefl.run_records import AssignmentRow, RunReport

PAGE, PLOT = "layer_exchange.md", "layer_exchange.svg"
LINES = Path("docs/results/layer_exchange/runs.jsonl")
#: task -> the rate tuned for averaging (docs/results/systems.md; emoji: of 0.5e-3, 1e-3, 2e-3 and 4e-3).
RATES = {"har": 2.5e-4, "av": 5e-4, "emoji": 4e-3}
#: What emoji_pairs has in place of har's: groups of drawings with their names, from random weights.
EMOJI: dict[str, Any] = {
    "name": "emoji",
    "data.source": {
        "emoji_pairs": {
            "vendors": ["openmoji", "twemoji", "noto", "fxemoji", "openmoji_black"], "length": 16, "vocabulary": 4096,
        }
    },
    "model.encoders": {
        "image": {"kind": "vision", "width": 64, "depth": 3, "heads": 4, "patch": 16, "pool": "mean"},
        "text": {"kind": "text", "width": 32, "depth": 3, "heads": 2, "vocabulary": 4096},
    },
    "training.batch_size": 32,
}  # fmt: skip
ROUNDS = 24
WHOLE = "whole"
PERIODS = (2, 4, 8)
#: Rounds of a period of recipe mmic-layer.
SHIPPED = 4
#: way -> the options of repair: poverty.
WAYS: dict[str, dict[str, Any]] = {WHOLE: {"exchange": "whole"}} | {
    f"{name}, k = {k}": {"exchange": "layer", "whole_every": k, "layers": layers}
    for k in PERIODS
    for name, layers in (("one layer", 1), ("nothing", 0))
}
MIB = 2**20


class Row(msgspec.Struct, frozen=True):
    """One run. ``curve``: round -> accuracy with both modalities; bytes: of a device's round, mean of all rounds.

    ``lent``: layers that devices trained on from; ``inside``: device rounds that a layer could be received in.
    """

    task: str
    way: str
    seed: int
    curve: dict[int, float]
    up_bytes: float
    down_bytes: float
    lent: int
    inside: int


def run_file(task: str, way: str, seed: int) -> dict[str, Any]:
    """The run file of a task of MMiC's claims, with another repair."""
    study = Study("mmic")
    own = EMOJI if task == "emoji" else {}
    base = "har" if own else task
    values = study.run_file(Cell("mmic", base, "mm50-mc50", "fedavg", seed), {"lr": RATES[task]})
    for name, value in own.items():
        set_field(values, name, value)
    values["slots"] = {**values.get("slots", {}), "repair": {"poverty": WAYS[way]}}
    values["training"] |= {"rounds": [ROUNDS, 0, 0], "holdout": 0.0}
    return {**values, "evaluate": "round"}


def measured(task: str, way: str, seed: int) -> Row:
    """One run, from the data on."""
    with tempfile.TemporaryDirectory(prefix="edgefl-layers-") as name:
        plan, report = run_values(Path(name), run_file(task, way, seed))
    curve = {
        row.round: row.value
        for row in report.evaluations
        if row.metric == "accuracy" and row.missing == "none" and row.available == tuple(plan.model.encoders)
    }
    done = [row for row in report.assignments if row.status == "done"]
    up, down = (_mean(done, f"payload_{way}_bytes") for way in ("up", "down"))
    return Row(task, way, seed, curve, up, down, _lent(report), sum(row.round > 1 for row in done))


def _mean(rows: Sequence[AssignmentRow], name: str) -> float:
    return statistics.mean(row.measured[name].value or 0.0 for row in rows)


def _lent(report: RunReport) -> int:
    return sum("lent" in one for row in report.rounds if row.status == "done" for one in repaired(row).values())


def due(rows: Sequence[Row], seeds: int) -> Iterator[tuple[str, str, int]]:
    """The runs that are not there yet, one seed of everything before the next."""
    known = {(row.task, row.way, row.seed) for row in rows}
    wanted = ((task, way, seed) for seed in range(1, seeds + 1) for task in RATES for way in WAYS)
    return (one for one in wanted if one not in known)


def page(rows: Sequence[Row]) -> str:
    """Markdown: a row a task and way, means over the seeds, and the paired difference to whole exchange and nothing."""
    lines = [
        "# One layer between whole exchanges",
        "",
        *(sentence(rows, task) for task in RATES),
        "",
        f"![Accuracy by how many rounds lie between whole exchanges]({PLOT})",
        "",
        *(__doc__ or "").split("\n\n")[1].splitlines(),
        "",
        "Accuracy of the global model with both modalities after the last round, in percent: mean and deviation over",
        "the seeds; differences seed by seed. Bytes: of one device's round, mean of all rounds.",
        "",
        "| task | way | accuracy | against whole | against nothing | up | down | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in RATES:
        for way in WAYS:
            found = _of(rows, task, way)
            if not found:
                continue
            last = [100 * row.curve[ROUNDS] for row in found]
            whole = _paired(found, _of(rows, task, WHOLE)) if way != WHOLE else ""
            other = way.replace("one layer", "nothing")
            nothing = _paired(found, _of(rows, task, other)) if other != way else ""
            traffic = [
                f"{statistics.mean(getattr(r, name) for r in found) / MIB:.3f} MiB"
                for name in ("up_bytes", "down_bytes")
            ]
            cells = [task, way, spread(last), whole, nothing, *traffic, str(len(found))]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "By round, those that end a period of eight:", ""]
    for row in sorted(rows, key=lambda one: (one.task, one.seed, list(WAYS).index(one.way))):
        told = " ".join(f"{100 * row.curve[n]:.1f}" for n in (8, 16, 24))
        lent = f"; a layer lent in {row.lent} of {row.inside} device rounds" if "layer" in row.way else ""
        lines.append(f"* {row.task}, seed {row.seed}, {row.way}: {told}{lent}")
    return "\n".join(lines) + "\n"


def sentence(rows: Sequence[Row], task: str) -> str:
    """Gains on a task: of one layer over nothing, mean over k, and of the recipe's periods over whole exchanges."""
    over_nothing = _told(_gains(rows, task, PERIODS, lambda k: f"nothing, k = {k}"))
    over_whole = _told(_gains(rows, task, (SHIPPED,), lambda k: WHOLE))
    if not over_nothing or not over_whole:
        return ""
    return (
        f"* **{task}**: one layer between whole exchanges is {over_nothing} beside exchanging nothing between; "
        f"in periods of {SHIPPED} rounds, at a quarter of the bytes, {over_whole} beside whole exchanges every round."
    )


def _told(gains: Sequence[float]) -> str:
    one = interval(gains)
    if one is None:
        return ""
    seeds = f"{one.low:+.1f} to {one.high:+.1f}, {one.seeds} seeds" if one.seeds > 1 else "one seed"
    return f"{round(one.mean, 1) + 0.0:+.1f} points ({seeds})"


def _gains(rows: Sequence[Row], task: str, periods: Sequence[int], other: Callable[[int], str]) -> list[float]:
    """In points, of each seed, mean over the periods."""
    known = {(row.way, row.seed): 100 * row.curve[ROUNDS] for row in rows if row.task == task}
    found = []
    for seed in sorted({seed for _, seed in known}):
        pairs = [((f"one layer, k = {k}", seed), (other(k), seed)) for k in periods]
        if all(one in known and rival in known for one, rival in pairs):
            found.append(statistics.mean(known[one] - known[rival] for one, rival in pairs))
    return found


def draw(rows: Sequence[Row], path: Path) -> None:
    """Accuracy by the length of the periods, each way and task."""
    with plot(path, "rounds from one whole exchange to the next", "accuracy, %") as axes:
        for task, line in zip(RATES, ("-", "--", ":"), strict=True):
            for name, colour in (("one layer", COLOURS[0]), ("nothing", COLOURS[1])):
                means = [_mean_of(rows, task, WHOLE), *(_mean_of(rows, task, f"{name}, k = {k}") for k in PERIODS)]
                points = [(k, mean) for k, mean in zip((1, *PERIODS), means, strict=True) if mean is not None]
                label = f"{task}, {name} between"
                axes.plot(*zip(*points, strict=True), line, color=colour, marker="o", linewidth=1, label=label)
        axes.set_xticks((1, *PERIODS))
        axes.legend()


def _mean_of(rows: Sequence[Row], task: str, way: str) -> float | None:
    found = _of(rows, task, way)
    return statistics.mean(100 * row.curve[ROUNDS] for row in found) if found else None


def _of(rows: Sequence[Row], task: str, way: str) -> list[Row]:
    return sorted((row for row in rows if (row.task, row.way) == (task, way)), key=lambda row: row.seed)


def _paired(rows: Sequence[Row], others: Sequence[Row]) -> str:
    before = {row.seed: row.curve[ROUNDS] for row in others}
    gains = [100 * (row.curve[ROUNDS] - before[row.seed]) for row in rows if row.seed in before]
    return spread(gains, signed=True) if gains else ""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after this")
    parser.add_argument("--jsonl", type=Path, default=LINES, help=f"file of the results (default: {LINES})")
    parser.add_argument("--write", type=Path, help=f"folder for {PAGE}")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    for task, way, seed in due(rows_in(options.jsonl, Row), options.seeds):
        if time.monotonic() >= until:
            break
        row = measured(task, way, seed)
        add_row(options.jsonl, row)
        sys.stderr.write(f"{task}, seed {seed}, {way}: {100 * row.curve[ROUNDS]:.1f}\n")
    text = page(rows_in(options.jsonl, Row))
    if options.write:
        (options.write / PAGE).write_text(text, encoding="utf-8")
        draw(rows_in(options.jsonl, Row), options.write / PLOT)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
