"""What stands in for an absent modality's projection while training (arXiv 2312.13508, eqs 4-6, and its baselines).

zero: 0.  random: N(0, 1).  prototype by label: P_m[y], the global prototype of the sample's own class (the paper).
prototype by match: what inference will do, from the modalities s that the sample has: sum_j w_j P_m[c_j] over the
classes c_j whose prototypes P_s lie nearest to r_s in the mean over s (docs/decisions/0005, 0034), by the recipe's
metric; cosine where that is a small network, since those are trained last.

``drop`` hides one modality of a complete sample from the fusion with that probability, so that every device learns to
do without (modality dropout: Neverova et al., ModDrop, arXiv 1501.00102).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from edgefl.models.heads import mean_at_hand
from edgefl.models.staged import StagedModel
from edgefl.prototypes.matcher import DEFAULT_MATCHER, Matcher
from edgefl.prototypes.torch_mask import SCORES, Table, averaged, mixed


class AtHand(NamedTuple):
    """What a stand-in may be made of.

    ``full``: projections [B, d] by modality, zeros in rows without it; ``has``: which rows have it [B];
    ``tables``: the global prototypes; ``labels`` [B], below 0: unknown, None: nobody has one; ``options``: of the slot;
    ``model``: for its parts that make a stand-in; ``matcher``: how prototypes are found, by no trained network.
    """

    full: Mapping[str, Tensor]
    has: Mapping[str, Tensor]
    tables: Mapping[str, Table]
    labels: Tensor | None
    options: Mapping[str, float | str]
    model: StagedModel
    matcher: Matcher = DEFAULT_MATCHER

    def zeros(self) -> Tensor:
        """Zeros [B, d]: nothing in place of it."""
        return torch.zeros_like(next(iter(self.full.values())))


#: (modality, what is at hand) -> stand-ins [B, d]
StandIn = Callable[[str, AtHand], Tensor]


def zero(modality: str, given: AtHand) -> Tensor:
    """Zeros."""
    return given.zeros()


def random(modality: str, given: AtHand) -> Tensor:
    """Standard normal noise."""
    return torch.randn_like(given.zeros())


def prototype(modality: str, given: AtHand) -> Tensor:
    """Prototypes by label or by match; zeros while there are none, and for samples without a label."""
    table = given.tables.get(modality)
    if table is None:
        return given.zeros()
    if given.options.get("by", "label") == "match":
        return _matched(modality, given)
    if given.labels is None:
        return given.zeros()
    known = (given.labels >= 0).unsqueeze(1)
    return torch.where(known, table.rows[given.labels.clamp(min=0)], given.zeros())


def _matched(modality: str, given: AtHand) -> Tensor:
    """From all other modalities a sample has: their scores averaged, as in ``methods.prototypes.mask`` at inference."""
    other, matcher = given.tables[modality], given.matcher
    each = [
        (SCORES[matcher.metric](r, given.tables[m].rows), given.tables[m].valid & other.valid & given.has[m][:, None])
        for m, r in given.full.items()
        if m != modality and m in given.tables
    ]
    if not each:
        return given.zeros()
    scores, among = averaged(each)
    return mixed(scores, among, other.rows, min(matcher.k, other.rows.shape[0]), matcher.temperature)[0]


def reconstruction(modality: str, given: AtHand) -> Tensor:
    """Predicted from the mean of the other modalities a row shows; no gradient reaches what it was predicted from."""
    others = {m: r.detach() for m, r in given.full.items() if m != modality}
    if not others:
        return given.zeros()
    return given.model.reconstruct(modality, mean_at_hand(others, {m: given.has[m] for m in others}))


def hide(has: Mapping[str, Tensor], drop: float) -> dict[str, Tensor]:
    """``has`` with one modality, each as likely, hidden in a share ``drop`` of the samples that have them all."""
    if drop <= 0 or len(has) < 2:
        return dict(has)
    complete = torch.stack(list(has.values())).all(0)
    chosen = torch.rand(complete.shape, device=complete.device) < drop
    which = torch.randint(len(has), complete.shape, device=complete.device)
    return {m: rows & ~(complete & chosen & (which == i)) for i, (m, rows) in enumerate(has.items())}


#: ``ignore`` leaves incomplete samples out before batches are made, ``completion`` makes what it can before training:
#: zeros for what is left.
MISSING: dict[str, StandIn] = {
    "ignore": zero,
    "zero": zero,
    "random": random,
    "prototype": prototype,
    "completion": zero,
    "reconstruction": reconstruction,
}
