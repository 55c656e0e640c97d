"""What each saving costs in accuracy: layer-wise training with none, with each alone, with all; and end to end.

Tasks, encoders and settings are those of [one regime](one_regime.md) (pretrained start, missing rate 50 %): har_hapt by
classification, emoji_pairs by retrieval, its RSum divided by 6; three seeds or more. Rates are those that were tuned
for plain layer-wise training; Adafactor's, which are relative, are 0.02. Pooled tokens alone and early updates are the
same training and always on; micro-batches and blocks computed anew are the same to rounding and have no row, so that
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

import yaml

from benchmarks.common.exclusive import claimed
from benchmarks.common.plotting import COLOURS, plot
from benchmarks.common.result_lines import add_row, rows_in
from benchmarks.common.spread import spread
from benchmarks.cost.device_pages import UNTESTED
from benchmarks.cost.savings_runs import Outcome, Run, Values, done, made

#: Relative rates; for encoders 0.005 was no better in retrieval, 0.01 and 0.005 for both were worse (seeds 11 to 14).
ADAFACTOR = {"encoder": 0.02, "head": 0.02}
#: Fields of the run file that differ from plain layer-wise training, by what is saved.
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
GIVEN: dict[str, Values] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
#: task -> what it is judged by
TASKS = {"har": "accuracy, %", "emoji_retrieval": "RSum / 6, known concepts"}
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
#: Of the training part that encoders are pretrained on.
SHARE = 0.1
PARALLEL = 2


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with fields replaced, field by field in nested mappings."""
    found = copy.deepcopy(dict(values))
    for name, value in changes.items():
        found[name] = merged(found.get(name, {}), value) if isinstance(value, Mapping) else value
    return found


def plan(seeds: Sequence[int], device: str = "cpu") -> list[Run]:
    """Every run of every saving."""
    profile = {} if device == "cpu" else {"profile": device}
    runs = []
    for task, given in GIVEN.items():
        for saving in (END, *SAVINGS):
            values = merged(given["run"], given["whole" if saving == END else "layerwise"])
            values = merged(values, SAVINGS.get(saving, {}))
            values["fleet"] = [{**one, **profile} for one in values["fleet"]]
            for encoder in values["model"]["encoders"].values():
                encoder["pretrained"] = str(Path(encoder["pretrained"]).resolve())
            runs += [Run(task, saving, seed, {**values, "seed": seed}) for seed in seeds]
    return runs


def pretrain_missing() -> None:
    """Make the encoders that are not there yet."""
    from benchmarks.accuracy import pretrain

    for given in GIVEN.values():
        for m, fields in given["run"]["model"]["encoders"].items():
            path = Path(fields["pretrained"])
            if not path.is_file():
                plain = {name: value for name, value in fields.items() if name != "pretrained"}
                found = pretrain.make(given["run"]["data"]["source"], {m: plain}, path, share=SHARE)
                sys.stderr.write(f"{path}: alone on the test part: {found[m]:.1%}\n")


def chosen(runs: Sequence[Run], tasks: Sequence[str], savings: Sequence[str]) -> list[Run]:
    """The runs of these tasks and of savings whose names begin so; all of them where nothing is named."""
    return [
        run
        for run in runs
        if (not tasks or run.task in tasks) and (not savings or run.saving.startswith(tuple(savings)))
    ]


def fill(runs: Sequence[Run], path: Path) -> None:
    """Run what has no line yet."""

    def one(run: Run) -> None:
        row = made(run)
        add_row(path, row)
        told = row.error or f"{headline(row):.2f}"
        sys.stderr.write(f"{run.task}, {run.saving}, {run.seed}: {told} ({row.wall_s:.0f} s)\n")

    rows = rows_in(path, Outcome)
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(one, (run for run in runs if not done([run], rows))))


def headline(row: Outcome) -> float:
    """What the row's task is judged by."""
    if row.task == "har":
        found = [100 * value for name, value in row.metrics.items() if name.endswith("|none|accuracy")]
    else:
        found = [row.own["received|rsum"] / 6] if row.own else []
    return found[0] if found else float("nan")


def page(runs: Sequence[Run], results: Sequence[Outcome], device: str = "cpu") -> str:
    """Markdown: a table a task, differences to plain layer-wise training seed by seed."""
    rows = done(runs, results)
    lines = ["# What each saving costs", "", *(__doc__ or "").split("\n\n")[1].splitlines(), "", *NOISE, ""]
    lines += [UNTESTED if device == "cpu" else ON_GPU, ""]
    held = device != "cpu"
    for task, name in TASKS.items():
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
                spread([headline(row) for row in own], digits=2),
                "" if saving == "none" else spread(apart, signed=True, digits=2) if apart else "–",
                *(f"{statistics.mean(figures):,.1f}" for figures in _figures(own)),
                *([f"{statistics.mean(row.reserved_peak_bytes for row in own) / 2**20:,.1f}"] * held),
                str(len(own)),
            ]
            lines.append(f"| {saving} | " + " | ".join(values) + " |")
        lines.append("")
    return "\n".join(lines)


def plots(runs: Sequence[Run], results: Sequence[Outcome], folder: Path) -> list[str]:
    """One SVG a task: what it is judged by against payload, every packing a point. The files' names."""
    rows = done(runs, results)
    names = []
    for task, name in TASKS.items():
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
    """Payload and step memory in MiB, and GFLOP, in the page's order."""
    units = {"payload_bytes": 2**20, "flops": 1e9, "step_peak_bytes": 2**20}
    return [[getattr(row, figure) / unit for row in rows] for figure, unit in units.items()]


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
    runs = plan(range(1, options.seeds + 1), options.device)
    file = options.results / "runs.jsonl"
    with claimed(file):
        pretrain_missing()
        fill(chosen(runs, options.task, options.saving), file)
    results = rows_in(file, Outcome)
    text = page(runs, results, options.device)
    if options.write is not None:
        text += "".join(f"\n![{name}]({name})\n" for name in plots(runs, results, options.write))
        (options.write / "savings.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
