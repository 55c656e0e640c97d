"""Memory, FLOPs, bytes and seconds of end-to-end, progressive and layer-wise training and of ours, side by side.

The model of LW-FedMML (arXiv 2407.15426): ViT-Tiny/16 at 224 px and DistilBERT at text length 40, heads of width 4096,
CLIP, random weights; six stages, the last one measured, where all encoder blocks are present. The first three rows run
as the paper describes them, with none of the savings; each later row adds what its name says. Every row is a process of
its own, which trains steps on random samples: memory by the kernel's high-water mark (with --device cuda: torch's
allocator), FLOPs counted, seconds the median of its steps. Bytes are those of 90 rounds, each part in its encoding.

    python -m benchmarks.cost.resources [--batch 64 --batch 256] [--device cuda] [--write docs/results]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cost.resource_table import write_page
from edgefl.models.check import encoder_of_size
from edgefl.models.spec import HeadSpec, LoraSpec, ModelSpec, is_lora, part_names
from edgefl.plan.job import Cache, Hyper, Job, Precision, Slots, Stage, Transfer, Weights
from edgefl.plan.stages import packing_of, planned
from edgefl.records import Figure
from edgefl.registry import method
from edgefl.resources.process_memory import give_back_at_once

STAGES = 6
#: Rounds of each stage, 90 in all: the paper's for pretrained encoders; progressive has as many in each.
ROUNDS = {"end_to_end": [0, 0, 0, 0, 0, 90], "progressive": [15] * 6, "layerwise": [0, 0, 0, 10, 30, 50]}
#: Steps of a process: the first is not timed.
STEPS = 4
#: How fast and small exchange: changes in 4 bits.
PACKED = Transfer((("*", "delta+int4"),), (("*", "delta+int4"),))
#: How leanest does: 4 bits by EDEN, last rounds of a stage as well.
EDEN = Transfer((("*", "delta+eden4"),), (("*", "delta+eden4"),), closing="packed")


class Setting(msgspec.Struct, frozen=True):
    """One row: what is trained, and with which savings."""

    name: str
    schedule: str = "layerwise"
    savings: bool = True  # pooled tokens alone in the last block, updates inside the backward pass
    cache: Cache = ""
    micro_batch: int = 0
    optimizer: str = "adamw"
    transfer: Transfer = Transfer()
    precision: Precision = "f32"
    weights: Weights = "memory"
    rank: int = 0  # of low-rank terms of the heads' and the encoders' linear maps, which are trained in their place


SETTINGS = (
    Setting("end-to-end", "end_to_end", savings=False),
    Setting("progressive", "progressive", savings=False),
    Setting("layer-wise", savings=False),
    Setting("+ pooled tokens alone, early updates"),
    Setting("+ stored prefix, packed exchange = fast", cache="f16", transfer=PACKED),
    Setting("+ micro-batches of 32 = small", cache="f16", micro_batch=32, transfer=PACKED),
    Setting("+ Adafactor = smallest", cache="f16", micro_batch=32, optimizer="adafactor", transfer=PACKED),
    Setting("APOLLO-Mini in its place", cache="f16", micro_batch=32, optimizer="apollo", transfer=PACKED),
    Setting("+ weights on disk", cache="f16", micro_batch=32, optimizer="apollo", transfer=PACKED, weights="disk"),
    Setting(
        "the same in micro-batches of 16",
        cache="f16",
        micro_batch=16,
        optimizer="apollo",
        transfer=PACKED,
        weights="disk",
    ),
    Setting(
        "LoRA of rank 16, AdamW, EDEN = leanest", cache="f16", micro_batch=32, transfer=EDEN, weights="disk", rank=16
    ),
)
#: Beside them where there is a GPU.
ON_GPU = (
    Setting("fast in bf16", cache="f16", transfer=PACKED, precision="bf16"),
    Setting("small in bf16", cache="f16", micro_batch=32, transfer=PACKED, precision="bf16"),
)


class Row(msgspec.Struct, frozen=True):
    """What a setting took. Bytes of 90 rounds, one device; ``cache_fill_flops``: FLOPs of a sample's prefix, once.

    ``run_flops``: of a sample over all rounds, traced, with the filling.
    """

    setting: Setting
    batch: int
    step_peak: Figure
    process_peak: Figure
    flops_per_sample: float
    cache_fill_flops: float
    seconds: float
    predicted_peak: float
    predicted_flops: float
    payload_bytes: float = 0.0
    run_flops: float = 0.0


def paper_model(rank: int = 0) -> ModelSpec:
    """ViT-Tiny and DistilBERT with the paper's heads, unlabelled; with low-rank terms of this rank, 0: without."""
    pair = {"image": encoder_of_size("vision", "paper"), "text": encoder_of_size("text", "paper")}
    model = ModelSpec(pair, STAGES, HeadSpec(), 256, 0)
    adapted = tuple(part for part in part_names(model) if "/stage" in part or part.startswith("head/"))
    return msgspec.structs.replace(model, lora=LoraSpec(rank, 2.0 * rank, adapted, ("*",))) if rank else model


def stages_of(model: ModelSpec, schedule: str) -> tuple[Stage, ...]:
    """The stages, with the paper's rounds; embeddings are pretrained, and so frozen layer-wise."""
    return planned(model, method("schedule", schedule).stages(model, ROUNDS[schedule], "frozen"))


def job_of(setting: Setting, batch: int, model: ModelSpec | None = None) -> Job:
    """What a row trains: the last stage."""
    model = model or paper_model(setting.rank)
    hyper = Hyper(
        batch_size=batch,
        micro_batch=setting.micro_batch,
        optimizer=setting.optimizer,  # type: ignore[arg-type]
        cache=setting.cache,
        precision=setting.precision,
        weights=setting.weights,
        lr={"encoder": 1e-5, "head": 1e-4},
    )
    slots = Slots({"clip": {"weight": 1.0, "temperature": 0.05}}, {"ignore": {}})
    return Job(model, stages_of(model, setting.schedule)[-1], hyper, slots, transfer=setting.transfer)


def train(setting: Setting, batch: int, device: str) -> Row:
    """The steps themselves; alone in its process, set up like a trainer. Bytes of 90 rounds are left at 0."""
    give_back_at_once()
    import torch

    from edgefl.models.staged import build
    from edgefl.plan.training_samples import built_parts
    from edgefl.pricing.round_price import Pricer, price_part, price_step
    from edgefl.resources.memory_probe import MemoryProbe
    from edgefl.resources.tensor_counters import FlopCounter
    from edgefl.training import step as steps
    from edgefl.training.batches import Batch
    from edgefl.training.forward import Auxiliary
    from edgefl.training.weights_on_disk import on_disk

    if not setting.savings:
        without_savings(steps)
    torch.manual_seed(0)
    job = job_of(setting, batch)
    rows = dict.fromkeys(job.model.encoders, batch)
    priced = price_step(job, rows)
    beside = priced.holes + Pricer().libraries(job, list(rows))
    small_step(steps, device)
    spent = []
    with MemoryProbe(device) as memory:
        model = build(job.model, built_parts(job), device=device, settle=on_disk(job, Path.cwd()))
        steps.prepare(model, job.stage.trained)
        optimizer = steps.make_optimizer(model, job.stage.trained, job.hyper)
        for _ in range(STEPS):
            inputs = random_inputs(job, batch, device)
            samples = Batch(batch, inputs, dict.fromkeys(inputs), None, complete=batch)
            started = time.perf_counter()
            steps.train_step(model, job, samples, optimizer, Auxiliary())
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            spent.append(time.perf_counter() - started)
            del inputs, samples
    with FlopCounter() as counter:
        inputs = random_inputs(job, batch, device)
        samples = Batch(batch, inputs, dict.fromkeys(inputs), None, complete=batch)
        steps.train_step(model, job, samples, optimizer, Auxiliary())
    figures = memory.figures()
    cache_fill_flops = sum(price_part(job, m, p.steps[-1], p.depth)[1] for m, p in _prefixes(job).items())
    return Row(
        setting,
        batch,
        figures["step_peak_bytes"],
        figures["process_peak_bytes"],
        counter.flops / batch,
        cache_fill_flops,
        statistics.median(spent[1:]),
        float(priced.peak + (beside if device == "cpu" else 0)),
        priced.flops / batch,
        run_flops=run_flops(setting, batch),
    )


def run_flops(setting: Setting, batch: int) -> float:
    """FLOPs of a sample over the 90 rounds of one epoch; each part of a stored prefix is gone through once."""
    from edgefl.pricing.round_price import price_part, price_step

    last = job_of(setting, batch)
    total, gone = 0.0, set()
    for stage in stages_of(last.model, setting.schedule):
        job = msgspec.structs.replace(last, stage=stage)
        if stage.rounds:
            total += stage.rounds * price_step(job, dict.fromkeys(job.model.encoders, batch))[1] / batch
        for m, prefix in _prefixes(job).items() if stage.rounds else ():
            for depth, part in enumerate(prefix.steps):
                total += price_part(job, m, part, depth)[1] if part not in gone else 0.0
                gone.add(part)
    return total


def without_savings(steps: Any) -> None:
    """Blocks whole, gradients all at once: training as the paper describes it. Of the rest of this process."""
    from edgefl.models.staged import StagedModel
    from edgefl.pricing import round_price as pricing

    def whole(self: StagedModel, modality: str, x: Any, depth: int | None = None) -> Any:
        return self.pool_tokens(modality, self.encode_tokens(modality, x, depth))

    StagedModel.encode = whole  # type: ignore[method-assign]
    steps.optimizer_in_backward = lambda job, optimizer, model: None
    setattr(pricing, "optimizer_in_backward", lambda job, optimizer, model: None)  # noqa: B010 - a name that module has imported


def random_inputs(job: Job, batch: int, device: str) -> dict[str, Any]:
    """A batch as the device reads it: samples, or what a stored prefix holds."""
    import torch

    from edgefl.models.encoder import TokenState
    from edgefl.training.batches import meta_input

    inputs: dict[str, Any] = {}
    for m, encoder in job.model.encoders.items():
        shape = meta_input(job, m, batch)
        if isinstance(shape, TokenState):
            tokens = torch.randn(shape.tokens.shape).to(shape.tokens.dtype)
            mask = None if shape.mask is None else torch.ones(shape.mask.shape, dtype=torch.bool, device=device)
            inputs[m] = TokenState(tokens.to(device), mask, shape.depth)
        elif encoder.kind == "text":
            inputs[m] = torch.randint(1, encoder.vocabulary, tuple(shape.shape), device=device)
        else:
            inputs[m] = torch.rand(tuple(shape.shape), device=device)
    return inputs


@functools.cache
def paper_payload(schedule: str, transfer: Transfer, rank: int = 0) -> float:
    """``payload`` of the paper's model, once for all settings that send the same."""
    return payload(Setting("", schedule, transfer=transfer), paper_model(rank))


def payload(setting: Setting, model: ModelSpec) -> float:
    """Bytes up and down of one device over the 90 rounds, each part encoded as it travels.

    Where low-rank terms are trained, with all other parts once, in f32: heads are trained nowhere else.
    """
    import numpy as np

    from edgefl.models.parts import part_tensors
    from edgefl.models.staged import build
    from edgefl.protocol.packing import compress
    from edgefl.protocol.tensors import encode_part

    rng = np.random.default_rng(0)
    built = build(model)
    sizes: dict[tuple[str, str], int] = {}

    def size(part: str, packing: str) -> int:
        if (part, packing) not in sizes:
            base = part_tensors(built, part)
            moved = {
                n: v + 1e-3 * rng.standard_normal(v.shape, np.float32) if v.dtype.kind == "f" else v
                for n, v in base.items()
            }
            data = encode_part(moved) if packing == "f32" else compress(moved, base, packing, setting.transfer.top).data
            sizes[part, packing] = len(data)
        return sizes[part, packing]

    stages = [stage for stage in stages_of(model, setting.schedule) if stage.rounds]
    adapted = model.lora is not msgspec.UNSET
    total = sum(size(part, "f32") for part in part_names(model) if not is_lora(part)) if adapted else 0
    known: set[str] = set()
    for i, stage in enumerate(stages):
        for part in stage.trained:
            whole = size(part, "f32")
            up, down = (size(part, packing_of(rules, part)) for rules in (setting.transfer.up, setting.transfer.down))
            packed = setting.transfer.closing == "packed"  # else the first download and the last upload come whole
            total += (down if packed and part in known else whole) + (up if packed else whole)
            total += (stage.rounds - 1) * (up + down)
            later = stages[i + 1].trained if i + 1 < len(stages) else ()
            if part not in later:
                total += down if packed else whole  # frozen: its last state goes down once more
            known.add(part)
    return float(total)


def _prefixes(job: Job) -> Any:
    from edgefl.plan.training_samples import prefixes

    return prefixes(job)


def small_step(steps: Any, device: str) -> None:
    """What libraries take once belongs to no row."""
    import torch

    from edgefl.models.staged import build
    from edgefl.training.batches import Batch
    from edgefl.training.forward import Auxiliary

    pair = {
        "image": encoder_of_size("vision", "tiny", (16, 16, 3), depth=1),
        "text": encoder_of_size("text", "tiny", (4,), depth=1),
    }
    model = ModelSpec(pair, 1, HeadSpec(16, 8), 8, 0)
    stage = method("schedule", "end_to_end").stages(model, [1], "auto")[0]
    job = Job(model, stage, Hyper(batch_size=4), Slots({"clip": {"weight": 1.0, "temperature": 0.05}}, {"ignore": {}}))
    built = build(model, device=device)
    steps.prepare(built, stage.trained)
    optimizer = steps.make_optimizer(built, stage.trained, job.hyper)
    inputs = {
        "image": torch.rand(4, 16, 16, 3, device=device),
        "text": torch.ones(4, 4, dtype=torch.long, device=device),
    }
    steps.train_step(built, job, Batch(4, inputs, dict.fromkeys(inputs), None, complete=4), optimizer, Auxiliary())


def measured(setting: Setting, batch: int, device: str) -> Row:
    """The row, from a process of its own."""
    asked = json.dumps({"setting": msgspec.to_builtins(setting), "batch": batch, "device": device})
    command = [sys.executable, "-m", "benchmarks.cost.resources", "--child", asked]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row = msgspec.json.decode(done.stdout.splitlines()[-1], type=Row)
    sent = paper_payload(setting.schedule, setting.transfer, setting.rank)
    return msgspec.structs.replace(row, payload_bytes=sent)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, action="append", help="batch sizes; default 64 and 256")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", type=Path, help="folder for resources.md and its plot; on a GPU resources_cuda.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        asked = json.loads(options.child)
        row = train(msgspec.convert(asked["setting"], Setting), asked["batch"], asked["device"])
        sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        return
    rows = []
    for batch in options.batch or [64, 256]:
        for setting in (*SETTINGS, *(ON_GPU if options.device.startswith("cuda") else ())):
            rows.append(measured(setting, batch, options.device))
            sys.stderr.write(f"{batch} · {setting.name}: {rows[-1].step_peak.value or 0:,.0f} B\n")
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    sys.stdout.write(write_page(rows, options.device, threads, options.write))


if __name__ == "__main__":
    main()
