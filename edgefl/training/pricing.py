"""The price of a round before it is run: the real training step on the meta device, with shapes and no data.

FLOPs are counted from the operations as they would run (2 per multiply-accumulate). Memory is the peak of live bytes:
weights, gradients, optimiser state, activations and batch. Nothing is allocated, so any model can be priced anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from edgefl.models.build import build
from edgefl.models.matching import Table
from edgefl.plan.fit import complete_only, usable_samples
from edgefl.plan.values import Job
from edgefl.resources.flops import FlopCounter
from edgefl.resources.live_bytes import LiveBytes
from edgefl.training.batches import LEAST_ROWS, meta_batch
from edgefl.training.step import make_optimizer, prepare, train_step


class Pricer:
    """Prices jobs and remembers them: stage, micro-batch and share of present rows decide the price of a step."""

    def __init__(self) -> None:
        self._steps: dict[object, tuple[int, float, float]] = {}

    def __call__(self, job: Job, samples: Mapping[str, int]) -> tuple[int, float]:
        """(step peak in bytes, FLOPs of one round) of ``job`` on a device with ``samples`` per modality ("" = all)."""
        total = usable_samples(job.slots, samples, list(job.model.encoders))
        size = job.hyper.batch_size
        steps = total // size * job.hyper.epochs
        own = [m for m in job.model.encoders if f"head/{m}" in job.stage.present]
        share = {m: 1.0 if complete_only(job.slots) else min(1.0, samples.get(m, 0) / max(1, total)) for m in own}
        rows = {m: max(LEAST_ROWS, round(size * share[m])) for m in own}
        peak, step_flops, forward_flops = self._step(job, rows)
        flops = steps * step_flops
        if "class_mean" in job.slots.prototypes:
            flops += forward_flops * samples.get("", 0) / size
        return peak, flops

    def _step(self, job: Job, rows: Mapping[str, int]) -> tuple[int, float, float]:
        hyper = job.hyper
        key = (job.stage.present, job.stage.trained, hyper.batch_size, hyper.micro_batch, tuple(sorted(rows.items())))
        if key not in self._steps:
            self._steps[key] = price_step(job, rows)
        return self._steps[key]


def price_step(job: Job, rows: Mapping[str, int]) -> tuple[int, float, float]:
    """(peak live bytes, FLOPs of a training step, FLOPs of a forward pass) with ``rows[m]`` rows of modality m.

    The peak is that of the second step: from then on the optimiser's state is there beside the activations.
    """
    with LiveBytes() as live:
        model = build(job.model, job.stage.present, device="meta", seed=0)
        prepare(model, job.stage.trained)
        optimizer = make_optimizer(model, job.stage.trained, job.hyper)
        text = [m for m, encoder in job.model.encoders.items() if encoder.kind == "text"]
        shapes = {m: tuple(encoder.input_shape) for m, encoder in job.model.encoders.items()}
        labelled = "cross_entropy" in job.slots.objective
        batch = meta_batch(shapes, rows, job.hyper.batch_size, text=text, labelled=labelled)
        tables = _meta_tables(job)
        with FlopCounter() as step:
            train_step(model, job, batch, optimizer, tables)
        train_step(model, job, batch, optimizer, tables)
    model.eval()
    with torch.no_grad(), FlopCounter() as forward:
        for m, x in batch.inputs.items():
            model.project(m, model.encode(m, x, job.stage.depth))
        if job.model.classes and len(batch.inputs) == len(job.model.encoders):
            width = job.model.head.out
            model.fuse({m: torch.empty(job.hyper.batch_size, width, device="meta") for m in job.model.encoders})
    return live.peak, float(step.flops), float(forward.flops)


def _meta_tables(job: Job) -> dict[str, Table]:
    """Prototypes as they are from the second round on."""
    classes, width = job.model.classes, job.model.head.out
    if "class_mean" not in job.slots.prototypes:
        return {}
    return {
        m: Table(torch.empty(classes, width, device="meta"), torch.empty(classes, dtype=torch.bool, device="meta"))
        for m in job.model.encoders
    }
