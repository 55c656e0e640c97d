"""Resources by the convention of LW-FedMML's paper (arXiv 2407.15426), to compare with its figures; not what runs here.

One client. Bytes: parameters and buffers, a ViT with its unused pooler, a DistilBERT with its table of position
numbers; of a round down and up, 4 bytes a value; layer-wise also each stage with rounds once more, one way, when it is
finished. FLOPs: of one sample over all epochs, 1 a multiply-accumulate, 5 an element of a layer norm; what is trained
counts three times its forward pass, what is frozen once, and every encoder stage whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from edgefl.models.parts import part_size_bytes
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.plan.job import Job, Stage
from edgefl.plan.stages import encoder_stage
from edgefl.resources.tensor_counters import FlopCounter
from edgefl.training.batches import meta_input

T = TypeVar("T")
#: Operations an element of a layer norm.
NORM = 5
#: Rows of a traced pass.
_ROWS = 2


class Totals(NamedTuple):
    """Of all rounds: bytes down and up of one client, FLOPs of one sample."""

    bytes: float
    flops: float


def totals(model: ModelSpec, stages: Sequence[Stage], epochs: int) -> Totals:
    """A schedule's stages, each with its rounds of ``epochs`` epochs."""
    sizes, flops = part_bytes(model), part_flops(model)
    alone = len(stages) > 1 and all(_is_single(stage) for stage in stages)
    sent = spent = 0.0
    for stage in stages:
        trained = set(stage.trained)
        finished = [p for p in trained if encoder_stage(p)] if stage.rounds and alone else []
        sent += 2 * stage.rounds * sum(sizes[part] for part in trained) + sum(sizes[part] for part in finished)
        forward = sum(flops[part] * (3 if part in trained else 1) for part in stage.present if part in flops)
        spent += stage.rounds * epochs * forward
    return Totals(sent, spent)


def part_bytes(model: ModelSpec) -> dict[str, int]:
    """Part -> bytes, with what the paper's libraries hold besides."""
    built = build(model, device="meta")
    sizes = {part: part_size_bytes(built, part) for part in built.parts_present}
    for m, encoder in model.encoders.items():
        sizes[f"{m}/embed"] += _besides(encoder)
    return sizes


def part_flops(model: ModelSpec) -> dict[str, float]:
    """Part -> operations of one sample's forward pass, of the parts that encode, project, fuse and classify."""
    built = build(model, device="meta").eval()
    found: dict[str, float] = {}

    def ran(part: str, work: Callable[[], T]) -> T:
        with torch.no_grad(), FlopCounter({torch.ops.aten.native_layer_norm: _norm}) as counter:
            result = work()
        found[part] = counter.flops / 2 / _ROWS
        return result

    projected = {}
    for m in model.encoders:
        x = meta_input(Job(model=model), m, _ROWS)
        state = ran(f"{m}/embed", lambda: built.embed(m, x))  # noqa: B023 - run at once
        for k in range(1, model.stages + 1):
            state = ran(f"{m}/stage{k}", lambda: built.stage(m, k, state))  # noqa: B023 - the same
        pooled = ran(f"{m}/norm", lambda: built.pool(m, state))  # noqa: B023 - the same
        projected[m] = ran(f"head/{m}", lambda: built.project(m, pooled))  # noqa: B023 - the same
    if model.classes:
        fused = ran("fusion", lambda: built.fuse(projected))
        ran("task", lambda: built.classify(fused))
    return found


def _is_single(stage: Stage) -> bool:
    """Whether one encoder stage is trained, which is then frozen."""
    return len({n for part in stage.trained if (n := encoder_stage(part))}) == 1


def _norm(x: Sequence[int], *_: object, **__: object) -> int:
    return 2 * NORM * math.prod(x)


def _besides(encoder: EncoderSpec) -> int:
    """Bytes of what `transformers`' whole models hold and our parts do not: a pooler, numbers of positions."""
    if encoder.kind == "text":
        return 8 * (encoder.positions or encoder.input_shape[0])
    return 4 * (encoder.width**2 + encoder.width) if encoder.kind == "vision" else 0
