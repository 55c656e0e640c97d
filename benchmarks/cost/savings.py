"""What each saving costs in accuracy: layer-wise training with none, with each alone, with all; and end to end.

Tasks, encoders and settings are those of ``benchmarks.accuracy.one_regime`` (pretrained start, missing rate 50 %):
har_hapt by classification, emoji_pairs by retrieval, its RSum divided by 6; three seeds or more. Rates are those that
were tuned for plain layer-wise training; Adafactor's, which are relative, are 0.02. Pooled tokens alone and early
updates are the same training and always on; micro-batches and blocks computed anew are the same to rounding and have no
row, so that
*fast* and *small* (as in resources.md) are one here. One line of JSON a run is kept, and the same command goes on where
it stopped.

    python -m benchmarks.cost.savings [--seeds 3] [--task har] [--saving fast] [--device cuda] [--write docs/results]
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.accuracy.one_regime import RESULTS, best, pretrain_for
from benchmarks.accuracy.table import measures
from benchmarks.accuracy.table.collect import Outcome, Results, digest, run_cell
from benchmarks.accuracy.table.grid import Cell, Grid, Settings
from benchmarks.common.exclusive import claimed
from benchmarks.common.plotting import COLOURS, plot
from benchmarks.cost.device_pages import UNTESTED

#: A cell, the settings it was tuned to, its run file.
Run = tuple[Cell, Settings, dict[str, Any]]
#: Fields of the run file that differ from plain layer-wise training, by what is saved.
NONE: dict[str, Any] = {"training": {"cache": "none"}}
#: Relative rates; for encoders 0.005 was no better in retrieval, 0.01 and 0.005 for both were worse (seeds 11 to 14).
ADAFACTOR = {"encoder": 0.02, "head": 0.02}
SAVINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "stored prefix, f32": {"training": {"cache": "f32"}},
    "stored prefix, f16": {"training": {"cache": "f16"}},
    "Adafactor": {"training": {"optimizer": "adafactor", "lr": ADAFACTOR}},
    "f16 both ways": {"transfer": {"up": "f16", "down": "f16"}},
    "int8 both ways": {"transfer": {"up": "int8", "down": "int8"}},
    "delta+int8 both ways": {"transfer": {"up": "delta+int8", "down": "delta+int8"}},
    "delta+int4 both ways": {"transfer": {"up": "delta+int4", "down": "delta+int4"}},
    "delta+top 10 % up, delta+int8 down": {"transfer": {"up": "delta+top", "down": "delta+int8"}},
    "delta+top 10 % both ways": {"transfer": {"up": "delta+top", "down": "delta+top"}},
    "fast and small: f16 prefix, delta+int4 both ways": {
        "training": {"cache": "f16"},
        "transfer": {"up": "delta+int4", "down": "delta+int4"},
    },
    "smallest: the same with Adafactor": {
        "training": {"cache": "f16", "optimizer": "adafactor", "lr": ADAFACTOR},
        "transfer": {"up": "delta+int4", "down": "delta+int4"},
    },
}
#: task -> (layer-wise, end to end, what is compared, its name)
TASKS = {
    "har": ("lw-fedmml", "fedavg", measures.complete, "accuracy, %"),
    "emoji_retrieval": ("clip-lw", "clip-fedavg", measures.known_rsum, "RSum / 6, known concepts"),
}
END = "end to end, no saving"
NOISE = (
    "How to read it: the difference to training without savings, mean and deviation over the seeds. Any change of the",
    "last bits, such as f16 on the way, leads training elsewhere; a difference that is no larger than its deviation is",
    "not one. Retrieval on these few pairs varies by some points between seeds and after any rounding: three seeds can",
    "not tell half a point there, so the settings that users choose have more. Stages have four rounds, and a stage's",
    "first download and last upload are whole: over many rounds bytes fall further ([resources](resources.md)).",
)
ON_GPU = (
    "Trained on a GPU: step memory is what tensors add to those of the idle trainer (torch.cuda.max_memory_allocated), "
    "and beside it stands what torch's allocator held for all of them (max_memory_reserved)."
)
RATE = 0.5
PARALLEL = 2


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with fields replaced, field by field in nested mappings."""
    found = copy.deepcopy(dict(values))
    for name, value in changes.items():
        found[name] = merged(found.get(name, {}), value) if isinstance(value, Mapping) else value
    return found


def plan(grid: Grid, tried: Results, seeds: Sequence[int], device: str = "cpu") -> list[Run]:
    """Every run: its cell (the method is the saving's name), the settings it was tuned to, its run file."""
    profile = {} if device == "cpu" else {"profile": device}
    runs = []
    for task, (layerwise, whole, _, _) in TASKS.items():
        for saving in (END, *SAVINGS):
            for seed in seeds:
                cell = Cell(task, whole if saving == END else layerwise, "pretrained", RATE, seed)
                settings = best(grid, tried, grid.tuned_as(cell)) or grid.default(cell)
                values = merged(merged(grid.run_file(cell, settings), NONE), SAVINGS.get(saving, {}))
                values["fleet"] = [{**one, **profile} for one in values["fleet"]]
                runs.append((cell._replace(method=saving), settings, values))
    return runs


def chosen(runs: Sequence[Run], tasks: Sequence[str], savings: Sequence[str]) -> list[Run]:
    """The runs of these tasks and of savings whose names begin so; all of them where nothing is named."""
    return [
        run
        for run in runs
        if (not tasks or run[0].task in tasks)
        and (not savings or any(run[0].method.startswith(name) for name in savings))
    ]


def fill(runs: Sequence[Run], results: Results) -> None:
    """Run what has no line yet."""

    def one(job: Run) -> None:
        cell, settings, values = job
        row = run_cell(cell, settings, values)
        results.add(row)
        sys.stderr.write(f"{cell.key}: {headline(row):.2f} ({row.wall_s:.0f} s)\n")

    due = [run for run in runs if not any(not row.error for row in results.tries(run[0], run[2]))]
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(one, due))


def headline(row: Outcome) -> float:
    """What the row's task is judged by."""
    value = TASKS[row.task][2](row)
    if value is None:
        return float("nan")
    return value / 6 if TASKS[row.task][2] is measures.known_rsum else value


def page(runs: Sequence[Run], results: Results, device: str = "cpu") -> str:
    """Markdown: a table a task, differences to plain layer-wise training seed by seed."""
    wanted = {(cell, digest(values)) for cell, _, values in runs}
    rows = [row for row in results.rows if not row.error and (row.cell, row.file) in wanted]
    lines = ["# What each saving costs", "", *(__doc__ or "").split("\n\n")[1].splitlines(), "", *NOISE, ""]
    lines += [UNTESTED if device == "cpu" else ON_GPU, ""]
    held = device != "cpu"
    for task, (_, _, _, name) in TASKS.items():
        columns = ["saving", name, "against none, seed by seed", "payload, MiB", "GFLOP", "step memory, MiB"]
        columns += ["allocator, MiB"] * held + ["seeds"]
        lines += [
            f"## {task}",
            "",
            "| " + " | ".join(columns) + " |",
            "|---" * len(columns) + "|",
        ]
        plain = {row.seed: headline(row) for row in rows if (row.task, row.method) == (task, "none")}
        for saving in (END, *SAVINGS):
            own = [row for row in rows if (row.task, row.method) == (task, saving)]
            if not own:
                continue
            apart = [headline(row) - plain[row.seed] for row in own if row.seed in plain]
            values = [
                _spread([headline(row) for row in own]),
                "" if saving == "none" else _spread(apart, signed=True),
                *(f"{statistics.mean(figures):,.1f}" for figures in _figures(own)),
                *([f"{statistics.mean(row.reserved_peak_bytes for row in own) / 2**20:,.1f}"] * held),
                str(len(own)),
            ]
            lines.append(f"| {saving} | " + " | ".join(values) + " |")
        lines.append("")
    return "\n".join(lines)


def plots(runs: Sequence[Run], results: Results, folder: Path) -> list[str]:
    """One SVG a task: what it is judged by against payload, every packing a point. The files' names."""
    wanted = {(cell, digest(values)) for cell, _, values in runs}
    rows = [row for row in results.rows if not row.error and (row.cell, row.file) in wanted]
    names = []
    for task, (_, _, _, name) in TASKS.items():
        shown = (END, *(one for one in SAVINGS if one == "none" or "transfer" in SAVINGS[one]))
        names.append(f"savings-{task}.svg")
        with plot(folder / names[-1], "payload of the whole run, MiB", name, height=4.8) as axes:
            for saving, colour in zip(shown, COLOURS, strict=False):
                own = [row for row in rows if (row.task, row.method) == (task, saving)]
                if not own:
                    continue
                payload, values = _figures(own)[0], [headline(row) for row in own]
                error = statistics.stdev(values) if len(values) > 1 else 0.0
                place = (statistics.mean(payload), statistics.mean(values))
                marks = {"color": colour, "marker": "o", "capsize": 3, "linestyle": "none"}
                axes.errorbar(*place, yerr=error, label="no saving" if saving == "none" else saving, **marks)
            axes.set_xlim(left=0)
            axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return names


def _figures(rows: Sequence[Outcome]) -> list[list[float]]:
    found: list[list[float]] = [[], [], []]
    for row in rows:
        for figures, value in zip(
            found, (measures.payload_mib(row), measures.gflop(row), measures.step_mib(row)), strict=True
        ):
            figures.append(value or 0.0)
    return found


def _spread(values: Sequence[float], *, signed: bool = False) -> str:
    if not values:
        return "–"
    mean = statistics.mean(values)
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean:{'+' if signed else ''}.2f}{deviation}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", choices=sorted(TASKS), action="append", default=[], help="run this task only")
    parser.add_argument("--saving", action="append", default=[], help="run savings whose names begin so only")
    parser.add_argument("--results", type=Path, default=Path("docs/results/savings"))
    parser.add_argument("--write", type=Path, help="folder for savings.md")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the trainers compute")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the fleets, too: a run file leaves it to what there is
    grid, tried = Grid(), Results(RESULTS / "tuning.jsonl")
    runs = plan(grid, tried, range(1, options.seeds + 1), options.device)
    file = options.results / "runs.jsonl"
    with claimed(file):
        results = Results(file)
        pretrain_for(grid, [Cell(task, TASKS[task][0], "pretrained", RATE, 1) for task in TASKS])
        fill(chosen(runs, options.task, options.saving), results)
    text = page(runs, results, options.device)
    if options.write is not None:
        text += "".join(f"\n![{name}]({name})\n" for name in plots(runs, results, options.write))
        (options.write / "savings.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
