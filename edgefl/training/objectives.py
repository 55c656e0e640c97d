"""Terms of the local loss, as a closed dictionary: each takes a forward pass and its options, returns a scalar.

cross_entropy: CE(task(fusion([r_1; …; r_M])), y) over the labelled samples; absent r_m are stand-ins.
modality_contrast: mean over m of CE(cos(r_m, P_m) / τ, y), P_m [C, d] the global prototypes of modality m: equation 7
of arXiv 2312.13508 with a class-level denominator (D-P4) and on each modality, so that matching by cosine works.
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
from edgefl.models.matching import Table, unit
from edgefl.training.missing import MISSING, AtHand, hide


@dataclass
class Forward:
    """Projections of one batch. ``projected[m]``: [n_m, d]; ``rows[m]``: which of the B rows these are, None: all.

    ``missing``: the slot's choice and its options; ``tables``: the global prototypes.
    """

    model: StagedModel
    size: int
    projected: dict[str, Tensor]
    rows: dict[str, Tensor | None]
    labels: Tensor | None
    missing: tuple[str, Mapping[str, float | str]]
    tables: Mapping[str, Table]
    logits: Tensor | None = None

    def filled(self) -> dict[str, Tensor]:
        """[B, d] of every modality of the model, with stand-ins where a sample lacks it (or has it hidden)."""
        name, options = self.missing
        drop = float(options.get("drop", 0.0))
        wanted = list(self.model.spec.encoders)
        if drop == 0 and all(m in self.projected and self.rows[m] is None for m in wanted):
            return self.projected
        full, has = self._spread()
        has = hide(has, drop) if len(full) == len(wanted) else has
        given = AtHand(full, has, self.tables, self.labels, options)
        result = {}
        for m in wanted:
            stand_in = MISSING[name](m, given)
            result[m] = torch.where(has[m].unsqueeze(1), full[m], stand_in) if m in full else stand_in
        return result

    def _spread(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Projections as [B, d] with zeros where there are none, and which rows have them [B]."""
        full, has = {}, {}
        for m, own in self.projected.items():
            rows = self.rows[m]
            if rows is None:
                full[m] = own
                has[m] = torch.ones(self.size, dtype=torch.bool, device=own.device)
            else:
                full[m] = own.new_zeros(self.size, own.shape[1]).index_copy(0, rows, own)
                has[m] = torch.zeros(self.size, dtype=torch.bool, device=own.device).index_fill(0, rows, True)
        return full, has


def cross_entropy(forward: Forward, options: Mapping[str, float | str]) -> Tensor:
    """Mean cross-entropy of the labelled samples; stores the logits [B, C] in ``forward`` for the accuracy."""
    model = forward.model
    forward.logits = model.classify(model.fuse(forward.filled()))
    if forward.labels is None:
        return forward.logits.sum() * 0.0
    return F.cross_entropy(forward.logits, forward.labels, ignore_index=-1)


def modality_contrast(forward: Forward, options: Mapping[str, float | str]) -> Tensor:
    """Mean over the modalities at hand; zero while there are no prototypes. Classes without one are left out.

    No branch depends on values: the meta device prices it as it runs, and a GPU need not wait.
    """
    none = next(iter(forward.projected.values())).new_zeros(())
    total, terms = none, none
    for modality, projected in forward.projected.items():
        table, labels, rows = forward.tables.get(modality), forward.labels, forward.rows[modality]
        if table is None or labels is None:
            continue
        own = labels if rows is None else labels[rows]
        known = (own >= 0) & table.valid[own.clamp(min=0)]
        cosine = unit(projected) @ unit(table.rows).T
        # The lowest finite number, not -inf: a row with no class at all would be NaN, weight zero or not.
        logits = (cosine / float(options["temperature"])).masked_fill(~table.valid, torch.finfo(cosine.dtype).min)
        summed = F.cross_entropy(logits, torch.where(known, own, -1), ignore_index=-1, reduction="sum")
        total = total + summed / known.sum().clamp(min=1)
        terms = terms + known.any()
    return total / terms.clamp(min=1) + _nothing(forward)


def clip(forward: Forward, options: Mapping[str, float | str]) -> Tensor:
    """Contrast of the two modalities' normalised projections over the samples that have both; 0 for fewer than 2."""
    a, b = list(forward.model.spec.encoders)
    if a not in forward.projected or b not in forward.projected:
        return _nothing(forward)
    z_a, z_b = _complete(forward, a, b)
    if z_a.shape[0] < 2:
        return _nothing(forward)
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


def _nothing(forward: Forward) -> Tensor:
    """Zero, but part of the graph, so that ``backward`` has a way to go."""
    return next(iter(forward.projected.values())).sum() * 0.0


def _complete(forward: Forward, a: str, b: str) -> tuple[Tensor, Tensor]:
    """Projections of the samples that have both modalities, in the same order."""
    rows_a, rows_b, z_a, z_b = forward.rows[a], forward.rows[b], forward.projected[a], forward.projected[b]
    if rows_a is None and rows_b is None:
        return z_a, z_b
    if z_a.is_meta:  # which rows these are is not known there: as many as can be
        both = min(len(z_a), len(z_b))
        return z_a[:both], z_b[:both]
    every = torch.arange(forward.size, device=z_a.device)
    rows_a = every if rows_a is None else rows_a
    rows_b = every if rows_b is None else rows_b
    return z_a[torch.isin(rows_a, rows_b)], z_b[torch.isin(rows_b, rows_a)]
