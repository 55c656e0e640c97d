"""Functions that several objectives share: masks of the rows that count, and means over them.

No shape and no branch depends on values, so that the planner can price a step on the meta device: rows that do not
count are masked, and the result is that of the rows that do. What stands in the others does not matter, not even NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from edgefl.lazy import F, torch
from edgefl.registry import Option, Rule

if TYPE_CHECKING:
    from torch import Tensor


#: modality -> [B, d]
Embeddings: TypeAlias = "Mapping[str, Tensor]"
#: modality -> [B], whether the row is real
Flags: TypeAlias = "Mapping[str, Tensor]"


class Terms(NamedTuple):
    """Loss values and the boolean mask of the valid ones.

    Both [N], one a sample, or both scalars, one a modality or pair; a value is 0 where the mask is False.
    """

    values: Tensor
    counts: Tensor

    def mean(self) -> Tensor:
        """Over those that count; 0 when none does."""
        return mean_where(self.values, self.counts)


def mean_where(values: Tensor, counts: Tensor) -> Tensor:
    """Masked mean of ``values``; 0 for an empty mask.

    ``counts``: the mask, bool, of the same shape as ``values``.
    """
    return torch.where(counts, values, 0.0).sum() / counts.sum().clamp(min=1)


def mean_of(found: Sequence[Terms], embeddings: Embeddings) -> Tensor:
    """Mean of the scalar terms that count; 0, but part of the graph of ``embeddings``, when none does."""
    if not found:
        return nothing(embeddings)
    return mean_where(torch.stack([one.values for one in found]), torch.stack([one.counts for one in found]))


def known_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """CE of the rows of ``logits`` [N, C] whose ``target`` [N] is known, not -1: their mean; 0 when none is."""
    summed = F.cross_entropy(logits, target, ignore_index=-1, reduction="sum")
    return summed / (target >= 0).sum().clamp(min=1)


def binary_cross_entropy(logits: Tensor, sets: Tensor, known: Tensor) -> Tensor:
    """-sum_c log p(c is in the set, or not) of ``logits`` and ``sets`` [N, C]: the mean over the rows ``known`` [N].

    0 when none is.
    """
    each = F.binary_cross_entropy_with_logits(logits, sets, reduction="none").sum(dim=1)
    return mean_where(each, known)


def nothing(embeddings: Embeddings) -> Tensor:
    """Zero, but part of the graph, so that ``backward`` has a way to go."""
    return next(iter(embeddings.values()))[:0].sum()


def blank(rows: Tensor, has: Tensor) -> Tensor:
    """Rows [B, d], those that are not real [B] zero: neither their values nor their gradients can spoil the others."""
    return torch.where(has.unsqueeze(1), rows, 0.0)


def masked(logits: Tensor, keep: Tensor) -> Tensor:
    """The others count as nothing in a softmax, logsumexp or cross-entropy."""
    # The lowest finite number, not -inf: a row with nothing to keep would be NaN, weight zero or not.
    return logits.masked_fill(~keep, torch.finfo(logits.dtype).min)


def off_diagonal(size: int, like: Tensor) -> Tensor:
    """[size, size]: False on the diagonal, on the device of ``like``."""
    return ~torch.eye(size, dtype=torch.bool, device=like.device)


def softmax_temperature(default: float) -> Option:
    """The option of the terms that have a softmax."""
    return Option(default, "softmax temperature", least=0.001)


def needs_joint(term: str) -> Rule:
    """The rule of a term that compares with the joint representation, which only labels train."""
    text = f"{term} needs the joint representation, which is learned with labels; add the term cross_entropy"
    return Rule("objective", "labels", text)


def squared_distance(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Sum of the squared distances of parameters to their anchors, which get no gradient. At least one pair."""
    total = torch.zeros((), device=pairs[0][0].device)
    for parameter, anchor in pairs:
        total = total + (parameter - anchor.detach()).square().sum()
    return total
