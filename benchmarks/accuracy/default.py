"""Which recipe is safe with one modality: on groups that devices hold, and on groups that no device holds.

Tasks: benchmarks/accuracy/unseen.py. Every run is the product's coordinator and agents in one process; the last
model is tested with each modality alone, the other filled in by zeros and by class prototypes. The bar is plain
layer-wise training, zeros for what is missing (lw-fedmml); class means made beside it change no weight. A device makes
one pass over its samples in a round, or four where the start says so. One line of JSON a run is kept, and the same
command goes on where it stopped.

    python -m benchmarks.accuracy.default [--seeds 5] [--start pretrained] [--training zeros contrast]
    python -m benchmarks.accuracy.default --page  # write docs/results/default.md and its picture
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import yaml

from benchmarks.accuracy import unseen
from benchmarks.common.inprocess import run_fleet, state_of
from benchmarks.common.result_lines import add_row, rows_in
from edgefl.api.run_inputs import shares_of
from edgefl.config.profiles import load_run
from edgefl.data.dataset import Dataset
from edgefl.models.spec import PROTOTYPES
from edgefl.plan.compile import compile_run
from edgefl.plan.job import RunPlan
from edgefl.protocol.tensors import decode_part
from edgefl.prototypes.mask import Matcher
from edgefl.training.evaluate import Criteria, evaluate, load_test_set

FOLDER = Path("docs/results/default")
ROWS = FOLDER / "rows.jsonl"
PAGE = FOLDER.with_suffix(".md")
ENCODERS = Path("build/pretrained/unseen")
STARTS = ("pretrained", "scratch", "scratch, four passes")
#: Passes over a device's samples in a round, where not one; all else is as with one.
EPOCHS = {"scratch, four passes": 4}

_TABLES = {"class_mean": {"weighting": "class"}}
_CONTRAST = {"cross_entropy": {}, "modality_contrast": {"weight": 1.0, "temperature": 0.1}}
_MATCHED = {"prototype": {"by": "match", "drop": 0.4}}
#: Training -> its slots.
TRAININGS: dict[str, dict[str, Any]] = {
    "zeros": {"prototypes": _TABLES},
    "zeros, dropout": {"missing": {"zero": {"drop": 0.4}}, "prototypes": _TABLES},
    "zeros, dropout 0.2": {"missing": {"zero": {"drop": 0.2}}, "prototypes": _TABLES},
    "contrast": {"prototypes": _TABLES, "objective": _CONTRAST},
    "contrast, dropout": {"missing": {"zero": {"drop": 0.4}}, "prototypes": _TABLES, "objective": _CONTRAST},
    "prototypes": {"missing": _MATCHED, "prototypes": _TABLES, "objective": _CONTRAST},
    "prototypes, no contrast": {"missing": _MATCHED, "prototypes": _TABLES, "objective": "cross_entropy"},
    "prototypes, no dropout": {
        "missing": {"prototype": {"by": "match"}},
        "prototypes": _TABLES,
        "objective": _CONTRAST,
    },
    "prototypes, by label": {
        "missing": {"prototype": {"by": "label", "drop": 0.4}},
        "prototypes": _TABLES,
        "objective": _CONTRAST,
    },
}
#: Served by -> how prototypes are found; "zero" and "none" need none.
MATCHERS = {
    "prototype": Matcher(),
    "prototype, T 0.1": Matcher(temperature=0.1),
    "prototype, all, T 0.3": Matcher(k=100, temperature=0.3),
}


class Row(msgspec.Struct, frozen=True):
    """One run. ``figures``: (test, modalities given, filled in by) joined by "/" -> accuracy in [0, 1]."""

    task: str
    start: str
    training: str
    seed: int
    figures: dict[str, float]
    seconds: float = 0.0

    @property
    def cell(self) -> tuple[str, str, str, int]:
        """What the run was of."""
        return self.task, self.start, self.training, self.seed


def measured(task: str, start: str, training: str, seed: int) -> Row:
    """One run, from the data to the last model's figures on both tests."""
    started = time.monotonic()
    given = unseen.split(task, seed)
    with tempfile.TemporaryDirectory(prefix="edgefl-default-") as name:
        folder = Path(name)
        for part, data in given._asdict().items():
            data.save_npz(folder / f"{part}.npz")
        values = unseen.run_file(task, TRAININGS[training], seed, given, folder)
        if start == "pretrained":
            for m, path in unseen.pretrained(task, seed, given.train, ENCODERS).items():
                values["model"]["encoders"][m]["pretrained"] = str(path.resolve())
        values["training"]["epochs"] = EPOCHS.get(start, 1)
        (folder / "run.yaml").write_text(yaml.safe_dump(values))
        config, recipe = load_run(str(folder / "run.yaml"))
        prepared = shares_of(config, [device.name for device in config.fleet], folder / "shares")
        plan = compile_run(
            config, recipe, run="run", shapes=prepared.signature, label_names=prepared.label_names, test=prepared.test
        )
        run_fleet(folder, plan, {share.device: Path(share.path) for share in prepared.shares}, seconds=3600)
        parts = _last(folder, plan)
        tests = {"known": prepared.test, "unseen": str(folder / "unseen.npz")}
        figures = {
            f"{test}/{key}": value
            for test, path in tests.items()
            for key, value in figures_of(plan, parts, load_test_set(path, plan.model)).items()
        }
    return Row(task, start, training, seed, figures, round(time.monotonic() - started, 1))


def _last(folder: Path, plan: RunPlan) -> dict[str, Any]:
    store, state = state_of(folder, "run")
    wanted = [*plan.stages[-1].present, *({PROTOTYPES} & set(state))]
    return {part: decode_part(store.read(state[part].id)) for part in wanted}


def figures_of(plan: RunPlan, parts: Mapping[str, Any], test: Dataset) -> dict[str, float]:
    """(modalities given / filled in by) -> accuracy of the model made of ``parts``."""
    found = {}
    for served, matcher in MATCHERS.items() if PROTOTYPES in parts else [("zero", Matcher())]:
        rows = evaluate(plan.model, plan.stages[-1], parts, test, Criteria(prototypes=True, matcher=matcher))
        for row in rows:
            if row.metric == "accuracy":
                by = served if row.missing == "prototype" else row.missing
                found["+".join(row.available) + "/" + by] = row.value
    return found


def kept(path: Path = ROWS) -> list[Row]:
    """The rows in a file, one JSON object a line; none where there is no file."""
    return rows_in(path, Row)


def run_all(cells: Sequence[tuple[str, str, str, int]]) -> None:
    """Run what the file lacks of ``cells``."""
    known = {row.cell for row in kept()}
    for cell in cells:
        if cell in known:
            continue
        row = measured(*cell)
        add_row(ROWS, row)
        sys.stderr.write(f"{row.cell}: {row.seconds} s\n")


def main() -> None:
    """Run what is lacking, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--task", choices=unseen.TASKS, nargs="+", default=list(unseen.TASKS))
    parser.add_argument("--start", choices=STARTS, nargs="+", default=list(STARTS))
    parser.add_argument("--training", choices=TRAININGS, nargs="+", default=list(TRAININGS))
    parser.add_argument("--page", action="store_true", help="write the page of the rows that are kept, and end")
    given = parser.parse_args()
    if given.page:
        from benchmarks.accuracy.default_page import write

        write(kept(), PAGE)
        return
    torch.set_num_threads(1)
    run_all(
        [
            (task, start, training, seed)
            for seed in range(1, given.seeds + 1)
            for start in given.start
            for task in given.task
            for training in given.training
        ]
    )


if __name__ == "__main__":
    main()
