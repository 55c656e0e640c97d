"""Terms of the local loss, as a closed dictionary: each takes a forward pass and its options, returns a scalar.

cross_entropy: CE(task(fusion([r_1; …; r_M])), y) over the labelled samples; absent r_m are stand-ins.
modality_contrast: mean over m of CE(cos(r_m, P_m) / τ, y), P_m [C, d] the global prototypes of modality m: equation 7 of
arXiv 2312.13508 with a class-level denominator (D-P4) and on each modality, so that matching by cosine works.
clip: ½[CE(L, diagonal) + CE(Lᵀ, diagonal)], L = z_a z_bᵀ / τ, z L2-normalised, over the complete samples
(arXiv 2407.15426).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from torch import Tensor

from edgefl.models.build import StagedModel
from edgefl.training.missing import MISSING


@dataclass
class Forward:
    """Projections of one batch. ``projected[m]``: [n_m, d]; ``rows[m]``: which of the B rows these are, None: all."""

    model: StagedModel
    size: int
    projected: dict[str, Tensor]
    rows: dict[str, Tensor | None]
    labels: Tensor | None
    missing: str
    prototypes: Mapping[str, Tensor]
    logits: Tensor | None = None

    def filled(self, modality: str) -> Tensor:
        """[B, d]: the projections of ``modality``, with stand-ins where it is absent."""
        own = self.projected.get(modality)
        if own is not None and self.rows[modality] is None:
            return own
        like = own if own is not None else next(iter(self.projected.values()))
        stand_in = MISSING[self.missing](
            self.size, self.model.spec.head.out, self.prototypes.get(modality), self.labels, like
        )
        rows = self.rows.get(modality)
        return stand_in if own is None or rows is None else stand_in.index_copy(0, rows, own)


def cross_entropy(forward: Forward, options: Mapping[str, float | str]) -> Tensor:
    """Mean cross-entropy of the labelled samples; stores the logits [B, C] in ``forward`` for the accuracy."""
    model = forward.model
    forward.logits = model.classify(model.fuse({m: forward.filled(m) for m in model.spec.encoders}))
    if forward.labels is None:
        return forward.logits.sum() * 0.0
    return F.cross_entropy(forward.logits, forward.labels, ignore_index=-1)


def modality_contrast(forward: Forward, options: Mapping[str, float | str]) -> Tensor:
    """Mean over the modalities at hand; zero while there are no prototypes. Classes without one are left out."""
    terms = []
    for modality, projected in forward.projected.items():
        table, labels, rows = forward.prototypes.get(modality), forward.labels, forward.rows[modality]
        if table is None or labels is None:
            continue
        present = (table != 0).any(1)
        own = labels if rows is None else labels[rows]
        known = (own >= 0) & present[own.clamp(min=0)]
        if known.any():
            cosine = F.normalize(projected[known], dim=1) @ F.normalize(table, dim=1).T
            logits = (cosine / float(options["temperature"])).masked_fill(~present, -torch.inf)
            terms.append(F.cross_entropy(logits, own[known]))
    return torch.stack(terms).mean() if terms else next(iter(forward.projected.values())).sum() * 0.0


def clip(forward: Forward, options: Mapping[str, float | str]) -> Tensor:
    """Contrast of the two modalities' normalised projections over the samples that have both; 0 for fewer than 2."""
    a, b = list(forward.model.spec.encoders)
    if a not in forward.projected or b not in forward.projected:
        return next(iter(forward.projected.values())).sum() * 0.0
    z_a, z_b = _complete(forward, a, b)
    if z_a.shape[0] < 2:
        return (z_a.sum() + z_b.sum()) * 0.0
    return clip_loss(F.normalize(z_a, dim=1), F.normalize(z_b, dim=1), float(options["temperature"]))


def clip_loss(z_a: Tensor, z_b: Tensor, temperature: float) -> Tensor:
    """½[CE(L, diagonal) + CE(Lᵀ, diagonal)] with L = z_a z_bᵀ / temperature; z_a, z_b: [B, d], rows normalised."""
    logits = z_a @ z_b.T / temperature
    target = torch.arange(z_a.shape[0], device=z_a.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


OBJECTIVES: dict[str, Callable[[Forward, Mapping[str, float | str]], Tensor]] = {
    "cross_entropy": cross_entropy,
    "modality_contrast": modality_contrast,
    "clip": clip,
}


def total_loss(forward: Forward, objective: Mapping[str, Mapping[str, float | str]]) -> Tensor:
    """Sum of weight x term."""
    terms = [float(options["weight"]) * OBJECTIVES[name](forward, options) for name, options in objective.items()]
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def _complete(forward: Forward, a: str, b: str) -> tuple[Tensor, Tensor]:
    rows_a, rows_b = forward.rows[a], forward.rows[b]
    if rows_a is None and rows_b is None:
        return forward.projected[a], forward.projected[b]
    every = torch.arange(forward.size, device=forward.projected[a].device)
    rows_a = every if rows_a is None else rows_a
    rows_b = every if rows_b is None else rows_b
    return (
        forward.projected[a][torch.isin(rows_a, rows_b)],
        forward.projected[b][torch.isin(rows_b, rows_a)],
    )
