"""The small models that guess an absent modality (PmcmFL, arXiv 2312.13508), trained on a device in the closing round.

classifier: CE(m(r_a), y).  prior: first ½[CE(L, diagonal) + CE(Lᵀ, diagonal)], L = cos(m(r_a), r_b) / τ, then
mean (m(r_a) - r_b)^2.  r are the projections of the finished model and do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edgefl.errors import DataError, ModelError, RunError
from edgefl.lazy import F, torch
from edgefl.methods.fedmml.clip import clip_loss

if TYPE_CHECKING:
    from torch import Tensor, nn


class MatcherSettings(msgspec.Struct, frozen=True):
    """How a small model is trained: AdamW, shuffled batches of at least ``batch_size`` rows.

    A prior takes ``epochs`` with the CLIP loss at ``temperature`` and as many with the squared error. 100 are the
    paper's for a classifier (appendix D); its larger priors take 200 and 500.
    """

    epochs: int = 100
    batch_size: int = 32
    lr: float = 1e-3
    weight_decay: float = 1e-4
    temperature: float = 0.05


def train_classifier(
    module: nn.Module, r: Tensor, labels: Tensor, settings: MatcherSettings, generator: np.random.Generator
) -> float:
    """Train ``module`` ([B, d] -> logits [B, C]) on ``r`` [N, d] and ``labels`` [N] (-1: left out).

    Returns the mean cross-entropy over all labelled rows afterwards. ``module`` ends in evaluation mode, without
    gradients. Raises DataError when no row has a label, RunError when the loss is not finite.
    """
    x, y = r.detach()[labels >= 0], labels[labels >= 0]
    if not len(x):
        raise DataError("no sample with this modality has a label: its classifier cannot be trained")
    return _train(module, [lambda rows: classifier_loss(module, x[rows], y[rows])], x, settings, generator)


def classifier_loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """CE(m(x), y) of ``x`` [B, d] and classes ``y`` [B]."""
    return F.cross_entropy(module(x), y)


def train_prior(
    module: nn.Module, r: Tensor, other: Tensor, settings: MatcherSettings, generator: np.random.Generator
) -> float:
    """Train ``module`` ([B, d] -> [B, d']) to turn ``r`` [N, d] into ``other`` [N, d'] of the same complete samples.

    Returns the mean squared error over all of them afterwards. ``module`` ends in evaluation mode, without gradients.
    Raises DataError for fewer than two complete samples, RunError when the loss is not finite.
    """
    x, z = r.detach(), other.detach()
    if len(x) < 2 or len(x) != len(z):
        raise DataError(f"a prior needs two complete samples or more, got {len(x)} and {len(z)} rows")
    clip, error = prior_losses(module, settings.temperature)
    losses = [lambda rows: clip(x[rows], z[rows]), lambda rows: error(x[rows], z[rows])]
    return _train(module, losses, x, settings, generator)


def prior_losses(module: nn.Module, temperature: float) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """The losses of a prior in the order of its training, each of ``x`` [B, d] and what it is to become [B, d']."""

    def clip(x: Tensor, z: Tensor) -> Tensor:
        return clip_loss(F.normalize(module(x), dim=1), F.normalize(z, dim=1), temperature)

    def error(x: Tensor, z: Tensor) -> Tensor:
        return F.mse_loss(module(x), z)

    return [clip, error]


def _train(
    module: nn.Module,
    losses: list[Callable[[Tensor], Tensor]],
    x: Tensor,
    settings: MatcherSettings,
    generator: np.random.Generator,
) -> float:
    """``settings.epochs`` with each loss in turn; the last one over all rows of ``x``."""
    if settings.epochs < 1 or settings.batch_size < 2:
        raise ModelError(
            f"small models need epochs >= 1 and batches of 2, got {settings.epochs} and {settings.batch_size}",
            remedy="A contrast needs another sample to compare with.",
        )
    from edgefl.training.flop_cache import counted  # loads torch
    from edgefl.training.optimizers import AdamW, Group, Optimizer

    def step(loss: Callable[[Tensor], Tensor], rows: Tensor, optimizer: Optimizer) -> None:
        module.zero_grad(set_to_none=True)
        loss(rows).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    module.requires_grad_(True).train()
    seed = int(generator.integers(2**31))
    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
        torch.manual_seed(seed)  # dropout follows it, and nothing else notices
        for i, loss in enumerate(losses):
            kind = f"matcher {i} {shapes}".encode()
            optimizer = AdamW((Group(tuple(module.parameters()), settings.lr, settings.weight_decay),))
            for rows in _batches(len(x), settings, generator):
                work = partial(step, loss, rows.to(x.device), optimizer)
                # "nothing": the FLOPs of a contrast, which compares every row with every other, are no sum over rows.
                counted(kind, (("rows", len(rows)),), work, linear="nothing")
    module.zero_grad(set_to_none=True)
    module.eval()
    with torch.no_grad():
        every = partial(losses[-1], torch.arange(len(x), device=x.device))
        final = float(counted(f"matcher's loss {shapes}".encode(), (("rows", len(x)),), every, linear="nothing"))
    if not np.isfinite(final):
        raise RunError(f"a small model's loss became {final}", remedy="Lower the learning rate of the small models.")
    return final


def _batches(count: int, settings: MatcherSettings, generator: np.random.Generator) -> Iterator[Tensor]:
    """Every row once an epoch, in even batches: none short, since a contrast of one row teaches nothing."""
    for _ in range(settings.epochs):
        for rows in np.array_split(generator.permutation(count), max(1, count // settings.batch_size)):
            yield torch.from_numpy(rows)
