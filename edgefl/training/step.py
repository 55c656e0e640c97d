"""One training step, the same code on a device and (with shapes only, on the meta device) in the planner.

With micro-batches, only the encoders are run in pieces, and the gradient stays that of the whole batch: (1) encode
every piece without a graph, (2) run heads, fusion and loss on the whole batch and differentiate down to the encodings,
(3) run each piece again with a graph and push its share of that gradient through. Heads hold batch norm and losses may
couple samples, so they always see the whole batch; they are small in activations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.models.build import StagedModel
from edgefl.models.matching import Table
from edgefl.models.spec import modality_of
from edgefl.plan.values import Hyper, Job
from edgefl.training.batches import Batch
from edgefl.training.objectives import Forward, total_loss
from edgefl.training.optimizers import SGD, AdamW, Group, Optimizer, parameters_of


def prepare(model: StagedModel, trained: Sequence[str]) -> None:
    """Freeze what is not trained: no gradient, evaluation mode (decision D-L1: frozen parts keep no dropout)."""
    for name in model.parts_present:
        part = model.part(name)
        part.requires_grad_(name in trained)
        part.train(name in trained)


def make_optimizer(model: StagedModel, trained: Sequence[str], hyper: Hyper) -> Optimizer:
    """A fresh optimiser over the trained parts, in the groups "encoder" and "head"."""
    groups = []
    for group in ("encoder", "head"):
        parts = [name for name in trained if (group == "encoder") == is_encoder(name)]
        parameters = [p for name in parts for p in model.part(name).parameters()]
        if parameters:
            lr, decay = hyper.lr.get(group, 1e-3), hyper.weight_decay.get(group, 0.0)
            groups.append(Group(tuple(parameters), lr, decay))
    if hyper.optimizer == "sgd":
        return SGD(tuple(groups), hyper.momentum)
    return AdamW(tuple(groups))


def is_encoder(part: str) -> bool:
    """Whether a part belongs to the learning-rate group "encoder"."""
    return modality_of(part) is not None and not part.startswith("head/")


@dataclass(frozen=True)
class Pass:
    """A finished forward pass. ``encoded[m]``: [n_m, D]; ``seed``: of the pieces' dropout, None when run whole."""

    loss: Tensor
    forward: Forward
    encoded: dict[str, Tensor]
    seed: int | None


def train_step(
    model: StagedModel,
    job: Job,
    batch: Batch,
    optimizer: Optimizer,
    tables: Mapping[str, Table],
) -> tuple[float, Forward]:
    """One step; returns the loss and the forward pass. Raises nothing of its own."""
    parameters = parameters_of(optimizer)
    for parameter in parameters:
        parameter.grad = None
    done = run_forward(model, job, batch, tables)
    run_backward(model, job, batch, done)
    if job.hyper.clip_norm > 0:
        torch.nn.utils.clip_grad_norm_(parameters, job.hyper.clip_norm)
    optimizer.step()
    return float(done.loss.detach()), done.forward


def run_forward(model: StagedModel, job: Job, batch: Batch, tables: Mapping[str, Table]) -> Pass:
    """The loss of a batch, in pieces of ``hyper.micro_batch`` rows through the encoders."""
    micro = job.hyper.micro_batch if job.hyper.micro_batch < batch.size else 0
    seed = int(torch.randint(2**31, ())) if micro else None
    encoded = {m: _encode(model, m, x, job, micro, seed or 0) for m, x in batch.inputs.items()}
    forward = Forward(
        model=model,
        size=batch.size,
        projected={m: model.project(m, h) for m, h in encoded.items()},
        rows=batch.rows,
        labels=batch.labels,
        missing=next(iter(job.slots.missing.items()), ("zero", {})),
        tables=tables,
    )
    return Pass(total_loss(forward, job.slots.objective), forward, encoded, seed)


def run_backward(model: StagedModel, job: Job, batch: Batch, done: Pass) -> None:
    """Gradients of every trained parameter, into their ``grad``."""
    done.loss.backward()  # type: ignore[no-untyped-call]
    if done.seed is not None:
        for m, h in done.encoded.items():
            _replay(model, m, batch.inputs[m], h, job, done.seed)


def _trains_encoder(job: Job, modality: str) -> bool:
    return any(is_encoder(part) and modality_of(part) == modality for part in job.stage.trained)


def _encode(model: StagedModel, modality: str, x: Tensor, job: Job, micro: int, seed: int) -> Tensor:
    """[n, D] encodings; in pieces of ``micro`` rows they are leaves without a graph that collect the gradient."""
    depth = job.stage.depth
    if micro == 0:
        return model.encode(modality, x, depth)
    with torch.no_grad():
        pieces = []
        for i, piece in enumerate(torch.split(x, micro)):
            with _seeded(seed + i, x.device):
                pieces.append(model.encode(modality, piece, depth))
    return torch.cat(pieces).requires_grad_(_trains_encoder(job, modality))


def _replay(model: StagedModel, modality: str, x: Tensor, h: Tensor, job: Job, seed: int) -> None:
    """Push the gradient that ``h`` collected through each piece of the encoder."""
    if h.grad is None:
        return
    micro = job.hyper.micro_batch
    for i, (piece, grad) in enumerate(zip(torch.split(x, micro), torch.split(h.grad, micro), strict=True)):
        with _seeded(seed + i, x.device):
            model.encode(modality, piece, job.stage.depth).backward(grad)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Both runs of a piece draw the same dropout, and nothing else notices."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
