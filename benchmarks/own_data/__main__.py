"""What ``edgefl init`` makes of own data, with its defaults, beside simple baselines on the same splits.

Each set goes through init, run, predict with its own test samples; the baselines are fitted on the samples that were
not held out. One line of JSON a run is kept in docs/results/own_data/rows.jsonl.

    python -m benchmarks.own_data [--only penguins wine] [--seeds 5] [--again]
    python -m benchmarks.own_data --page  # write docs/results/own_data.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.result_lines import add_row, rows_in
from benchmarks.own_data.baselines import baseline_accuracies
from benchmarks.own_data.page import page_text
from benchmarks.own_data.row import Row
from benchmarks.own_data.sets import SETS, MissingError, OwnData

FOLDER = Path("docs/results/own_data")
ROWS = FOLDER / "rows.jsonl"
_LIMIT_S = 1800


def main() -> None:
    """Run what is missing, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SETS), choices=list(SETS), metavar="SET")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--again", action="store_true", help="measure again what is there")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--init", nargs="*", default=[], metavar="OPTION", help="more options of edgefl init")
    parser.add_argument("--page", action="store_true", help="write the page of what is there")
    given = parser.parse_args()
    if given.page:
        FOLDER.with_suffix(".md").write_text(page_text(rows_in(given.rows, Row)), encoding="utf-8")
        return
    for name in given.only:
        for seed in range(1, given.seeds + 1):
            known = {(row.name, row.seed) for row in rows_in(given.rows, Row)}
            if (name, seed) in known and not given.again:
                continue
            row = measured(name, seed, given.init)
            add_row(given.rows, row)
            sys.stdout.write(f"{msgspec.json.encode(row).decode()}\n")
            sys.stdout.flush()


def measured(name: str, seed: int, more: list[str]) -> Row:
    """One set, one split."""
    with tempfile.TemporaryDirectory(prefix="own-data-") as folder:
        root = Path(folder)
        try:
            data = SETS[name](root)
        except (MissingError, ModuleNotFoundError) as error:
            return Row(name, seed, "", error=f"not installed: {error}")
        started = time.monotonic()
        init = _edgefl(root, "init", str(data.source), "--yes", "-o", "own.yaml", *data.options, *more)
        if init.returncode:
            return Row(name, seed, data.kind, len(data.labels), error=_last(init))
        run = _edgefl(root, "run", "own.yaml", "--set", f"seed={seed}", "--in-process", "--format", "json")
        if run.returncode:
            return Row(name, seed, data.kind, len(data.labels), error=_last(run))
        seconds = round(time.monotonic() - started, 1)
        directory = next(path for path in (root / "runs").iterdir() if path.is_dir() and not path.is_symlink())
        test = _test_samples(directory, data)
        train = sorted(set(range(len(data.labels))) - set(test))
        scores = baseline_accuracies(data.kind, data.values, data.labels, train, test)
        scores["edgefl"] = _accuracy(json.loads(run.stdout))
        same = _edgefl(root, "predict", str(directory / "bundles"), str(data.source))
        return Row(
            name, seed, data.kind, len(data.labels), len(test), seconds, scores,
            peak_mib=round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
            same_file="" if same.returncode == 0 else _last(same),
        )  # fmt: skip


def _edgefl(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgefl.cli.main", *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return " ".join(lines[-3:])[:300]


def _test_samples(directory: Path, data: OwnData) -> list[int]:
    """Numbers of the samples that were held out; windows of one recording count once."""
    with np.load(directory / "shares" / "test.npz", allow_pickle=False) as arrays:
        ids = arrays["ids"].tolist()
    found = {int(match[1]) - data.first for i in ids if (match := re.search(data.number, i.split("#")[0]))}
    if not found:
        raise ValueError(f"no numbers in the ids of the test set, such as {ids[:3]}")
    return sorted(found)


def _accuracy(report: Any) -> float:
    """Accuracy in percent, or 100 R², of the last model with all modalities."""
    rows = [row for row in report["evaluations"] if row["metric"] in {"accuracy", "r2"}]
    last = max(rows, key=lambda row: (row["stage"], row.get("round", 0), len(row["available"])))
    return 100 * float(last["value"])


if __name__ == "__main__":
    main()
