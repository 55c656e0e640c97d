"""One training step, the same code on a device and (with shapes only, on the meta device) in the planner.

With micro-batches, only the encoders are run in pieces, and the gradient stays that of the whole batch: (1) encode
every piece without a graph, (2) run heads, fusion and loss on the whole batch and differentiate down to the encodings,
(3) run each piece again with a graph and push its share of that gradient through. Heads hold batch norm and losses may
couple samples, so they always see the whole batch; they are small in activations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map  # torch's own; no public alias

from edgefl.models.encoder import Stage, TokenState, device_of_input, inject_gradients, rows_in, rows_of
from edgefl.models.multiway import MultiwayStage, Piece, merged_states, pieces
from edgefl.models.row_linear import InFile, in_files
from edgefl.models.spec import fuses_tokens, is_encoder, modality_of, shares_attention, with_lora
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Hyper, Job, Precision
from edgefl.registry import Slot, chosen
from edgefl.resources.tensor_counters import standing_for
from edgefl.training.batches import Batch
from edgefl.training.forward import Auxiliary, Forward
from edgefl.training.optimizers import (
    SGD,
    Adafactor,
    AdamW,
    Apollo,
    Group,
    Optimizer,
    OptimizerInBackward,
    optimizer_in_backward,
    parameters_of,
)


def prepare(model: StagedModel, trained: Sequence[str], *, checkpoint: bool = False) -> None:
    """Freeze what is not trained: no gradient, evaluation mode (decision D-L1: frozen parts keep no dropout).

    ``checkpoint``: trained encoder stages keep nothing inside their blocks for the backward pass.
    """
    for name in model.parts_present:
        part = model.part(name)
        part.requires_grad_(name in trained)
        part.train(name in trained)
        if isinstance(part, Stage | MultiwayStage):
            part.activation_checkpointing = checkpoint and not {*with_lora(model.spec, name)}.isdisjoint(trained)


def make_optimizer(
    model: StagedModel, trained: Sequence[str], hyper: Hyper, extra: Sequence[torch.nn.Parameter] = ()
) -> Optimizer:
    """A fresh optimiser over the trained parts, in the groups "encoder" and "head"; ``extra`` belongs to the heads."""
    groups = []
    for group in ("encoder", "head"):
        parts = [name for name in trained if (group == "encoder") == is_encoder(name)]
        parameters = [p for name in parts for p in model.part(name).parameters()]
        parameters += extra if group == "head" else ()
        if parameters:
            lr, decay = hyper.lr.get(group, 1e-3), hyper.weight_decay.get(group, 0.0)
            groups.append(Group(tuple(parameters), lr, decay))
    if hyper.optimizer == "sgd":
        return SGD(tuple(groups), hyper.momentum)
    if hyper.optimizer == "adafactor":
        return Adafactor(tuple(groups))
    if hyper.optimizer == "apollo":
        return Apollo(tuple(groups))
    return AdamW(tuple(groups))


@dataclass(frozen=True)
class Pass:
    """Result of a forward pass, as input to the backward pass.

    ``encoded[m]``: encoder outputs; its field ``tokens`` is h [n_m, D], or [n_m, N, D] for joint fusion. ``seed``:
    dropout seed for the repeated pass over the micro-batches; None without micro-batches.
    """

    loss: Tensor
    forward: Forward
    encoded: dict[str, TokenState]
    seed: int | None


class Updates(NamedTuple):
    """How a model's parameters are updated, the same in every step of a round."""

    parameters: Sequence[torch.nn.Parameter]
    in_backward: OptimizerInBackward | None
    in_files: Sequence[InFile]


def updates_of(model: StagedModel, job: Job, optimizer: Optimizer) -> Updates:
    """Updates of the trained parameters by this optimiser."""
    return Updates(parameters_of(optimizer), optimizer_in_backward(job, optimizer, model), in_files(model))


def train_step(
    model: StagedModel,
    job: Job,
    batch: Batch,
    optimizer: Optimizer,
    auxiliary: Auxiliary,
    updates: Updates | None = None,
) -> tuple[float, Forward]:
    """One step; returns the loss and the forward pass. Raises nothing of its own.

    ``updates``: of an earlier step of the round.
    """
    parameters, in_backward, files = updates or updates_of(model, job, optimizer)
    for parameter in parameters:
        parameter.grad = None
    done = run_forward(model, job, batch, auxiliary)
    run_backward(model, job, batch, done, in_backward)
    if job.hyper.clip_norm > 0:
        torch.nn.utils.clip_grad_norm_(parameters, job.hyper.clip_norm)
    optimizer.step()
    for layer in files:
        layer.release()
    return float(done.loss.detach()), done.forward


def run_forward(model: StagedModel, job: Job, batch: Batch, auxiliary: Auxiliary) -> Pass:
    """The loss of a batch, in pieces of ``hyper.micro_batch`` rows through the encoders."""
    micro = job.hyper.micro_batch if job.hyper.micro_batch < batch.size else 0
    seed = int(torch.randint(2**31, ())) if micro else None
    encoded = _encode_batch(model, job, batch, micro, seed or 0)
    joint = fuses_tokens(job.model)
    pooled = {m: model.pool_tokens(m, state) if joint else state.tokens for m, state in encoded.items()}
    with computing_in(job.hyper.precision, _device(batch)):
        projected = {m: model.project(m, h) for m, h in pooled.items()}
    missing = chosen("missing", job.slots.missing)[0]
    forward = Forward(
        model=model,
        size=batch.size,
        encoded=pooled,
        projected={m: widened(r) for m, r in projected.items()},
        rows=batch.rows,
        labels=batch.labels,
        targets=batch.targets,
        sets=batch.sets,
        missing=(missing.name, missing.options),
        auxiliary=auxiliary,
        pseudo_labels=batch.pseudo_labels,
        tokens=encoded if joint else None,
        objective=job.slots.objective,
    )
    return Pass(total_loss(forward, job.slots.objective), forward, encoded, seed)


def run_backward(
    model: StagedModel, job: Job, batch: Batch, done: Pass, in_backward: OptimizerInBackward | None = None
) -> None:
    """Gradients of every trained parameter, into their ``grad``, but for those that ``in_backward`` updates at once."""
    in_backward = in_backward or OptimizerInBackward([], lambda _: None)
    if done.seed is None:
        with in_backward.watching(set(), done.loss):
            done.loss.backward()  # type: ignore[no-untyped-call]
        return
    encoders = {p for part in job.stage.trained if is_encoder(part) for p in model.part(part).parameters()}
    with in_backward.watching(encoders, done.loss):
        done.loss.backward()  # type: ignore[no-untyped-call]
    for unit in _units(job, batch):
        _replay(model, job, unit, done, encoders, in_backward)


def _trains_encoder(job: Job, modality: str) -> bool:
    """Whether anything trained gets a gradient through this modality's encodings."""
    multiway = shares_attention(job.model)
    return any(is_encoder(part) and (multiway or modality_of(part) == modality) for part in job.stage.trained)


def _units(job: Job, batch: Batch) -> list[Batch]:
    """Batches encoded together: each modality alone, all rows its own; with shared attention the whole batch."""
    if shares_attention(job.model):
        return [batch]
    return [Batch(rows_in(x), {m: x}, {m: None}, None) for m, x in batch.inputs.items()]


def _encode_batch(model: StagedModel, job: Job, batch: Batch, micro: int, seed: int) -> dict[str, TokenState]:
    """``encoded`` of a Pass; in pieces of ``micro`` rows, leaves without a graph that collect the gradient."""
    encoded: dict[str, TokenState] = {}
    for unit in _units(job, batch):
        if micro == 0:
            encoded |= _run(model, job, unit, next(_pieces(unit, 0)))
            continue
        with torch.no_grad():
            found = []
            for i, piece, alike in _traced(job, unit):
                with _seeded(seed + i, _device(unit)), standing_for(1 + len(alike)):
                    states = _run(model, job, unit, piece)
                found += [(piece.own, states), *((other.own, tree_map(_another, states)) for other in alike)]
                del states
            whole = merged_states(unit.inputs, found)
            del found
        for m, state in whole.items():
            state.tokens.requires_grad_(_trains_encoder(job, m))
        encoded |= whole
    return encoded


def _replay(
    model: StagedModel,
    job: Job,
    unit: Batch,
    done: Pass,
    encoders: set[torch.nn.Parameter],
    in_backward: OptimizerInBackward,
) -> None:
    """Push the gradient that the encodings collected through each piece of the encoders."""
    gradients = {m: grad for m in unit.inputs if (grad := done.encoded[m].tokens.grad) is not None}
    chosen = [
        (i, piece, 1 + len(alike), wanted)
        for i, piece, alike in _traced(job, unit)
        if (wanted := [m for m in piece.own if m in gradients])
    ]
    for i, piece, times, wanted in chosen:
        not_whole = encoders if i < chosen[-1][0] else set()
        with _seeded((done.seed or 0) + i, _device(unit)), in_backward.watching(not_whole), standing_for(times):
            again = _run(model, job, unit, piece)
            values = [again[m].tokens for m in wanted]
            end = inject_gradients(values, [gradients[m][piece.own[m]] for m in wanted])
            end.backward()  # type: ignore[no-untyped-call]


def _run(model: StagedModel, job: Job, unit: Batch, piece: Piece) -> dict[str, TokenState]:
    """The rows of a piece through the encoders: h [n, D] or, for joint fusion, tokens [n, N, D] and their masks."""
    inputs = {m: rows_of(unit.inputs[m], index) for m, index in piece.own.items()}
    with computing_in(job.hyper.precision, _device(unit)):
        if not fuses_tokens(job.model):
            encoded = model.encode_batch(inputs, piece.rows, piece.size, job.stage.depth)
            return {m: TokenState(widened(h)) for m, h in encoded.items()}
        states = model.encode_batch_tokens(inputs, piece.rows, piece.size, job.stage.depth)
    return {m: TokenState(widened(state.tokens), state.mask) for m, state in states.items()}


def _pieces(unit: Batch, micro: int) -> Iterator[Piece]:
    return pieces({m: rows_in(x) for m, x in unit.inputs.items()}, unit.rows, unit.size, micro)


def _traced(job: Job, unit: Batch) -> list[tuple[int, Piece, list[Piece]]]:
    """Pieces to run: their number, the piece, and later pieces it stands for.

    On the meta device the second stands for all up to the last: of one modality and as many rows, they take the same
    memory and FLOPs.
    """
    found: list[tuple[int, Piece, list[Piece]]] = []
    every = list(_pieces(unit, job.hyper.micro_batch))
    repeats = _device(unit).type == "meta" and not shares_attention(job.model)
    for i, piece in enumerate(every):
        if repeats and 1 < i < len(every) - 1:
            found[-1][2].append(piece)
        else:
            found.append((i, piece, []))
    return found


def _another(value: object) -> object:
    return torch.empty_like(value) if isinstance(value, Tensor) else value


def _device(unit: Batch) -> torch.device:
    return device_of_input(next(iter(unit.inputs.values())))


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Both runs of a piece draw the same dropout, and nothing else notices."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def total_loss(forward: Forward, objective: Slot) -> Tensor:
    """Sum of weight x term."""
    terms = [
        float(term.options.get("weight", 1.0)) * term.bind(term.method.loss)(forward)
        for term in chosen("objective", objective)
    ]
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


_NARROWED = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.scaled_dot_product_attention,
    torch.matmul,
    torch.bmm,
    Tensor.matmul,
    Tensor.__matmul__,
}


def computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Mixed precision: matrices are multiplied in bf16, weights, sums and the loss stay in f32 (arXiv 1905.12322).

    Inside, forward passes multiply matrices in ``precision``. Backward passes follow by themselves. On a device torch's
    own autocast does it, and fused attention never holds the scores of all pairs of tokens.
    """
    if precision == "f32":
        return contextlib.nullcontext()
    if device.type == "meta":
        return _Narrowed()
    # Without its cache: it would hold a narrow copy of every weight until the context ends.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def widened(value: Tensor) -> Tensor:
    """The results of narrow products, in f32."""
    return value.float() if value.dtype == torch.bfloat16 else value


class _Narrowed(TorchFunctionMode):
    """Autocast's effect on shapes alone: on the meta device, where torch has none, so that the price is right."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func in _NARROWED:
            args, kwargs = tree_map(_narrowed, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class FusedAttention(TorchFunctionMode):
    """On the meta device attention keeps what the CPU's fused kernel does; with dropout that kernel is not used."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        run: Callable[..., object] = _attention if func is F.scaled_dot_product_attention else func
        return run(*args, **(kwargs or {}))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: bool
) -> Tensor:
    if dropout_p > 0 or not query.is_meta or options.get("enable_gqa"):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)
    options.pop("enable_gqa", None)
    mask = attn_mask.to(query.dtype) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - what the CPU runs, by its name
    attended: Tensor = fused(query, key, value, dropout_p, attn_mask=mask, **options)[0]
    return attended


def _narrowed(value: object) -> object:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.dtype == torch.float32 else value
