"""Predicted against measured: step memory and FLOPs of every stage of three pairs of encoders, each in its own process.

The planner's figures (``edgefl.pricing.round_price``) beside what the kernel's high-water mark and the counter say of
the same step on random samples: ViT-Tiny and DistilBERT without labels, AST and ViT-Tiny with labels, two sensors with
labels; end to end, layer-wise, and layer-wise with a stored prefix; then what the planner falls back to: in pieces, and
in pieces with blocks computed anew, end to end and in the last stage with embeddings (nothing can be stored).

    python -m benchmarks.cost.predictions [--write docs/results] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.cost.device_pages import elsewhere, page_name, title
from benchmarks.cost.resources import random_inputs, small_step
from edgefl.models.check import encoder_of_size
from edgefl.models.spec import HeadSpec, ModelSpec
from edgefl.plan.job import Hyper, Job, Slots
from edgefl.plan.training_samples import can_cache, with_cache
from edgefl.registry import method
from edgefl.resources.process_memory import give_back_at_once

#: pair -> (encoders, classes, batch). AST is at a quarter of its ten seconds: the whole takes 24 GiB.
PAIRS: dict[str, tuple[dict[str, Any], int, int]] = {
    "ViT-Tiny + DistilBERT, CLIP": (
        {"image": encoder_of_size("vision", "paper"), "text": encoder_of_size("text", "paper")},
        0,
        64,
    ),
    "AST (2.5 s) + ViT-Tiny, supervised": (
        {"audio": encoder_of_size("audio", "paper", (256, 128)), "image": encoder_of_size("vision", "paper")},
        309,
        16,
    ),
    "two sensors, supervised": (
        {m: encoder_of_size("sensor", "base", (256, 6)) for m in ("acc", "gyro")},
        6,
        256,
    ),
}
STAGES = 6
STEPS = 3


class Compared(msgspec.Struct, frozen=True):
    """One stage: bytes and FLOPs, predicted and measured or counted."""

    pair: str
    what: str
    stage: int
    predicted_peak: float
    measured_peak: float
    predicted_flops: float
    counted_flops: float


def jobs(pair: str) -> list[tuple[str, Job]]:
    """What is compared: (what, job)."""
    encoders, classes, batch = PAIRS[pair]
    names = tuple(str(i) for i in range(classes))
    model = ModelSpec(encoders, STAGES, HeadSpec(), 256, classes, names)
    task = {"cross_entropy": {"weight": 1.0}} if classes else {"clip": {"weight": 1.0, "temperature": 0.05}}
    slots = Slots(task, {"zero": {}} if classes else {"ignore": {}})  # type: ignore[arg-type]
    hyper = Hyper(batch_size=batch, lr={"encoder": 1e-5, "head": 1e-4})
    found = [
        (
            "end to end",
            Job(model, method("schedule", "end_to_end").stages(model, [1] * STAGES, "frozen")[0], hyper, slots),
        )
    ]
    for stage in method("schedule", "layerwise").stages(model, [1] * STAGES, "frozen"):
        job = Job(model, stage, hyper, slots)
        found.append(("layer-wise", job))
        if can_cache(job):
            found.append(("layer-wise, stored prefix", with_cache(job, "f16")))
    embedded = replace(stage, trained=(*(f"{m}/embed" for m in encoders), *stage.trained))
    for what, of in (("end to end", found[0][1].stage), ("layer-wise with embeddings", embedded)):
        for size, checkpoint in ((batch // 4, False), (batch // 16, False), (batch // 16, True)):
            how = replace(hyper, micro_batch=size, checkpoint=checkpoint)
            told = f"{what}, pieces of {size}{', checkpointed' if checkpoint else ''}"
            found.append((told, Job(model, of, how, slots)))
    return found


def compare(pair: str, index: int, device: str) -> Compared:
    """One job, alone in its process, set up like a trainer."""
    what, job = jobs(pair)[index]
    give_back_at_once()
    import torch

    from edgefl.models.staged import build
    from edgefl.plan.training_samples import built_parts
    from edgefl.pricing.round_price import price_step
    from edgefl.resources.memory_probe import MemoryProbe
    from edgefl.resources.tensor_counters import FlopCounter
    from edgefl.training import step as steps
    from edgefl.training.batches import Batch
    from edgefl.training.forward import Auxiliary

    torch.manual_seed(0)
    size = job.hyper.batch_size
    predicted_peak, predicted_flops, *_ = price_step(job, dict.fromkeys(job.model.encoders, size))
    small_step(steps, device)

    def batch() -> Batch:
        inputs = random_inputs(job, size, device)
        labels = torch.randint(job.model.classes, (size,), device=device) if job.model.classes else None
        return Batch(size, inputs, dict.fromkeys(inputs), labels, complete=size)

    with MemoryProbe(device) as memory:
        model = build(job.model, built_parts(job), device=device)
        steps.prepare(model, job.stage.trained, checkpoint=job.hyper.checkpoint)
        optimizer = steps.make_optimizer(model, job.stage.trained, job.hyper)
        for _ in range(STEPS):
            steps.train_step(model, job, batch(), optimizer, Auxiliary())
    with FlopCounter() as counter:
        steps.train_step(model, job, batch(), optimizer, Auxiliary())
    measured = memory.figures()["step_peak_bytes"].value or 0.0
    return Compared(pair, what, job.stage.index, float(predicted_peak), measured, predicted_flops, float(counter.flops))


def measured(pair: str, index: int, device: str) -> Compared:
    """One job's row, from a process of its own."""
    asked = json.dumps({"pair": pair, "index": index, "device": device})
    command = [sys.executable, "-m", "benchmarks.cost.predictions", "--child", asked]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row = msgspec.json.decode(done.stdout.splitlines()[-1], type=Compared)
    sys.stderr.write(f"{pair} · {row.what} · stage {row.stage}: {row.measured_peak / 2**20:,.0f} MiB\n")
    return row


def page(rows: list[Compared], device: str) -> str:
    """Markdown."""
    about, option = (__doc__ or "").split("\n\n")[1], ""
    if device != "cpu":
        about, option = about.replace("the kernel's high-water mark", "torch's allocator"), f" --device {device}"
    lines = [
        title("Predicted against measured", device),
        "",
        *about.splitlines(),
        "",
        f"Made by `python -m benchmarks.cost.predictions{option}` on device {device}.",
        "",
        "| pair | what | stage | step memory predicted, MiB | measured | error | GFLOP predicted | counted | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory = [row.predicted_peak / 2**20, row.measured_peak / 2**20]
        flops = [row.predicted_flops / 1e9, row.counted_flops / 1e9]
        cells = [
            row.pair,
            row.what,
            str(row.stage),
            *(f"{value:,.0f}" for value in memory),
            f"{memory[0] / memory[1] - 1:+.1%}",
            *(f"{value:,.1f}" for value in flops),
            f"{flops[0] / flops[1] - 1:+.2%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    memory_error = max((abs(row.predicted_peak / row.measured_peak - 1) for row in rows), default=0.0)
    flops_error = max((abs(row.predicted_flops / row.counted_flops - 1) for row in rows), default=0.0)
    lines += ["", f"Largest error of memory {memory_error:.1%}, of FLOPs {flops_error:.2%}, of {len(rows)} stages."]
    lines += elsewhere("predictions", device)
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--write", type=Path, help="folder for predictions.md; on a GPU predictions_cuda.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        asked = json.loads(options.child)
        sys.stdout.write(msgspec.json.encode(compare(**asked)).decode() + "\n")
        return
    asked = [(pair, index, options.device) for pair in PAIRS for index in range(len(jobs(pair)))]
    with ThreadPoolExecutor(options.parallel) as pool:
        rows = list(pool.map(lambda one: measured(*one), asked))
    text = page(rows, options.device)
    sys.stdout.write(text)
    if options.write is not None:
        (options.write / page_name("predictions", options.device)).write_text(text)


if __name__ == "__main__":
    main()
