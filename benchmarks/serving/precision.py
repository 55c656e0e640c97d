"""Precision of exported bundles: size, latency against torch, and accuracy of each subset of the sensors.

Size and latency: encoders of the papers' sizes with random weights, each with its head and classifier, in f32 and with
every large weight in 8 bits; torch, onnxruntime f32 and onnxruntime int8 answer the same inputs in turn, in one
process, onnxruntime in the micro-batches that `edgefl serve` would choose.
Accuracy: har_hapt (EDGEFL_DATA), four devices of 150 windows, trained by the product's coordinator and agents in one
process; its test windows given each subset, before and after.

`python -m benchmarks.serving.precision`
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.common.inprocess import run_shares
from benchmarks.common.sections import put
from edgefl.api.export_run import export_run
from edgefl.data.sources import load_pair
from edgefl.export import precision
from edgefl.export.bundle_format import Manifest, input_ports, output_ports, read_manifest
from edgefl.export.drafts import Draft
from edgefl.export.form import Form
from edgefl.export.graph import BundleGraph
from edgefl.export.measure import BATCHES, machine, processor
from edgefl.export.micro_batch import fastest
from edgefl.export.precision_record import Reduced
from edgefl.export.session import Session, open_session
from edgefl.export.tracing import to_onnx
from edgefl.models.check import encoder_of_size
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.registry import method
from edgefl.run_records import BundleRow
from edgefl.serve.catalogue import TUNING_S

MIB = 2**20
#: Kind -> size, and the shape of a sample; empty: the size's own.
ENCODERS: dict[str, tuple[str, tuple[int, ...]]] = {
    "sensor": ("base", (128, 6)),
    "text": ("paper", ()),
    "vision": ("paper", ()),
    "audio": ("paper", ()),
}
#: Attention of 1214 tokens holds 0.6 GiB of weights a block at batch 8; at 32 two sessions took 16 GiB.
LARGEST = {"audio": 8}
RUNNERS = ("torch", "f32", "int8")
#: At least three calls of each, and more for as long as this.
SECONDS = 20.0
SENSORS = ("acc", "gyro")
DEVICES, ROWS, TEST = 4, 150, 480
RUN = {
    "name": "precision",
    "recipe": "lw-prototypes",
    "model": {
        "stages": 2,
        "encoders": {m: {"kind": "sensor", "size": "small", "depth": 4, "patch": 16} for m in SENSORS},
        "head": {"kind": "none"},
        "fusion_width": 64,
    },
    "training": {"rounds": [3, 4], "epochs": 2, "batch_size": 16, "lr": {"encoder": 3e-3, "head": 3e-3}},
    "round": {"devices": DEVICES, "join_s": 120, "quorum": 1.0},
    "evaluate": "stage",
}


@dataclass(frozen=True)
class Measured:
    """Of one encoder: bytes and micro-batches of f32 and int8; median milliseconds by batch and runner."""

    kind: str
    size: str
    bytes_: tuple[int, int]
    micro_batches: tuple[int, int]
    latency: dict[int, dict[str, float]]
    calls: dict[int, int]


def measured(kind: str, threads: int) -> Measured:
    """The encoder, exported and timed."""
    size, shape = ENCODERS[kind]
    encoder = encoder_of_size(kind, size, shape)
    spec = ModelSpec({kind: encoder}, stages=encoder.depth, head=HeadSpec(256, 128), classes=10, fusion_width=128)
    model = build(spec, seed=3).requires_grad_(False).eval()
    graph = BundleGraph(model, encoder.depth, (kind,), method("missing", "zero").make)
    inputs, axes = input_ports(spec, (kind,))
    described = Manifest(name=kind, inputs=inputs, outputs=output_ports(spec, (kind,), 0), axes=axes)
    f32 = to_onnx(Draft(graph, described, {}), Form())
    proto = precision.loaded(f32)
    values = {kind: inputs_of(encoder, 8)}
    narrow = precision.needs_reduced_range(processor())
    int8 = precision.to_int8(proto, precision.weight_of(proto, ()), values, reduce_range=narrow)
    sessions = [open_session(data, threads=threads) for data in (f32, int8)]
    pairs = [(session, micro_batch(session, kind, encoder)) for session in sessions]
    latency, calls = {}, {}
    for batch in (BATCHES[0], LARGEST.get(kind, BATCHES[1])):
        x = inputs_of(encoder, batch)
        tensor = torch.from_numpy(x)

        def in_torch(tensor: torch.Tensor = tensor) -> None:
            with torch.inference_mode():
                graph((tensor,), (), ())

        runs: list[Callable[[], object]] = [
            in_torch,
            *(partial(run_in, session, kind, x, rows) for session, rows in pairs),
        ]
        latency[batch], calls[batch] = in_turn(runs)
    return Measured(kind, size, (len(f32), len(int8)), (pairs[0][1], pairs[1][1]), latency, calls)


def micro_batch(session: Session, kind: str, encoder: EncoderSpec) -> int:
    """The size that a server of this bundle alone would choose."""
    return fastest(lambda rows: session.run(["logits"], {kind: inputs_of(encoder, rows)}), TUNING_S)


def run_in(session: Session, kind: str, x: np.ndarray, rows: int) -> None:
    """Answer ``x`` [B, *shape] in micro-batches of ``rows``, as a bundle does."""
    parts = [session.run(["logits"], {kind: x[start : start + rows]}) for start in range(0, len(x), rows)]
    np.concatenate([part for (part,) in parts])


def inputs_of(encoder: EncoderSpec, batch: int) -> np.ndarray:
    """[batch, *shape] of noise, or of token ids."""
    rng, shape = np.random.default_rng(batch), (batch, *encoder.input_shape)
    if encoder.kind == "text":
        return rng.integers(1, encoder.vocabulary, shape, dtype=np.int64)
    return rng.random(shape, dtype=np.float32)


def in_turn(runs: Sequence[Callable[[], object]]) -> tuple[dict[str, float], int]:
    """Median milliseconds of each of ``RUNNERS``, called one after the other again and again; and how often."""
    taken: list[list[float]] = [[] for _ in runs]
    for one in runs:
        one()
    start = time.monotonic()
    while len(taken[0]) < 3 or (time.monotonic() - start < SECONDS and len(taken[0]) < 51):
        for one, times in zip(runs, taken, strict=True):
            began = time.perf_counter()
            one()
            times.append(1000 * (time.perf_counter() - began))
    return {name: median(times) for name, times in zip(RUNNERS, taken, strict=True)}, len(taken[0])


def trained(folder: Path) -> list[tuple[BundleRow, Reduced]]:
    """The run, its export with int8, and what that cost."""
    train, test = (half for half in load_pair("har_hapt") if half is not None)
    test = test.subset(np.random.default_rng(0).permutation(len(test))[:TEST])
    rows = np.random.default_rng(1).permutation(len(train))[: DEVICES * ROWS].reshape(DEVICES, ROWS)
    run_shares(folder, {**RUN, "seed": 1}, {f"device-{i}": train.subset(own) for i, own in enumerate(rows)}, test)
    return exported(folder / "run", folder / "bundles")


def exported(run: Path, output: Path) -> list[tuple[BundleRow, Reduced]]:
    """A run's bundles in int8 and what that cost."""
    done = export_run(run, output=output, form=Form(("int8", "f16")))
    found = [(row, read_manifest(Path(row.path).parent).reduced) for row in done.rows]
    return [(row, one) for row, one in found if one is not None]


def sizes(rows: Sequence[Measured], threads: int) -> list[str]:
    """Markdown: size and latency."""
    lines = [
        f"{machine()}, {threads} thread(s), CPUExecutionProvider, torch {torch.__version__}.",
        "Medians of calls in turn; *×*: how many times faster than torch; *by*: micro-batches of f32 and int8,",
        f"chosen by measurement in {TUNING_S:g} s, as `edgefl serve` does.",
        "",
        "| encoder | size f32 → int8, MiB | share | batch | by | torch, ms | f32, ms | × | int8, ms | × | calls |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        f32, int8 = row.bytes_
        for batch, ms in row.latency.items():
            by = ", ".join(str(min(rows, batch)) for rows in row.micro_batches)
            first = f"| {row.kind} {row.size} | {f32 / MIB:.1f} → {int8 / MIB:.1f} | {int8 / f32:.2f} |"
            first = first if batch == BATCHES[0] else "| | | |"
            lines.append(
                f"{first} {batch} | {by} | {ms['torch']:.1f} | {ms['f32']:.1f} | {ms['torch'] / ms['f32']:.2f} | "
                f"{ms['int8']:.1f} | {ms['torch'] / ms['int8']:.2f} | {row.calls[batch]} |"
            )
    return lines


def verdict(rows: Sequence[Measured]) -> list[str]:
    """Sentences: which goals were reached, and where not."""
    cases = [(f"{row.kind} at {batch}", ms) for row in rows for batch, ms in row.latency.items()]
    share = max((row.bytes_[1] / row.bytes_[0] for row in rows), default=0.0)
    lines = [f"int8 files are {share:.2f} of f32's size at most (goal: 0.30)."]
    for runner, goal in (("int8", 2.0), ("f32", 1.0)):
        slow = [f"{name} ({ms['torch'] / ms[runner]:.2f})" for name, ms in cases if ms["torch"] < goal * ms[runner]]
        reached = f"{len(cases) - len(slow)} of {len(cases)} cases"
        missed = f"; not {', '.join(slow)}" if slow else ""
        lines.append(f"{runner} is at least {goal:.0f} × as fast as torch in {reached}{missed}.")
    return ["", *lines]


def accuracies(rows: Sequence[tuple[BundleRow, Reduced]], title: str) -> list[str]:
    """Markdown: accuracy of each subset."""
    lines = ["", f"### {title}", "", "| bundle | precision | size, MiB | given | accuracy, % | left in f32 |"]
    lines.append("|---|---|---|---|---|---|")
    for row, one in rows:
        size = f"{one.before_bytes / MIB:.2f} → {row.size_bytes / MIB:.2f}"
        for loss in one.losses:
            change = f"{loss.before:.1f} → {loss.after:.1f}"
            left = f"{len(one.left)} of {one.converted + len(one.left)}" if row.precision == "int8" else ""
            lines.append(f"| {row.name} | {row.precision} | {size} | {' + '.join(loss.given)} | {change} | {left} |")
    return lines


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", choices=ENCODERS, nargs="*", default=list(ENCODERS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--run", type=Path, nargs="*", default=[], help="finished runs whose bundles are tried as well")
    parser.add_argument("--no-training", action="store_true", help="without the run on har_hapt")
    parser.add_argument("--write", type=Path, help="page of results whose section Precision is written")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for kind in given.encoders:
        rows.append(measured(kind, given.threads))
        print("\n".join(sizes(rows[-1:], given.threads)), flush=True)
    lines = sizes(rows, given.threads) + verdict(rows)
    with tempfile.TemporaryDirectory(prefix="edgefl-precision-") as name:
        folder = Path(name)
        if not given.no_training:
            (folder / "har").mkdir()
            lines += accuracies(trained(folder / "har"), f"Accuracy: har_hapt, {TEST} test windows")
        for run in given.run:
            lines += accuracies(exported(run, folder / run.name / "bundles"), f"Accuracy: the run {run.name}")
    text = "`python -m benchmarks.serving.precision`\n\n" + "\n".join(lines)
    print(text)
    if given.write:
        put(given.write, "Precision", text, head="# Serving\n")


if __name__ == "__main__":
    main()
