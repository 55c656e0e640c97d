"""What a bundle computes, as one torch module: encode, project, fill in the absent modalities, fuse, classify.

The prototype mask is ``edgefl.prototypes.mask`` without control flow and with tables of a fixed capacity P:

    score_p = cosine(r, own_p);  best k among the rows valid in both tables;  w = softmax(score / T);  sum_j w_j other_j

No row valid in both: the stand-in is zero. So a call that gives all-false ``valid`` gets the zero mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgefl.models.build import StagedModel

#: In place of the cosine of a row that must not match: exp((-1e4 - 1) / T) is zero for every temperature below 90.
EXCLUDED = -1e4
#: Norms below this count as this, as in ``edgefl.prototypes.matching``.
SMALLEST_NORM = 1e-12


@dataclass(frozen=True)
class Matching:
    """How many rows the tables have, how many of them are mixed, and how sharply."""

    capacity: int
    top_k: int
    temperature: float


@dataclass(frozen=True)
class Table:
    """One modality's prototypes [P, d] and which rows hold one [P]."""

    rows: Tensor
    valid: Tensor


class BundleGraph(nn.Module):
    """The model for the modalities ``given``; ``matching`` None: absent modalities are zero, and there are no tables.

    Labelled models give logits and probabilities [B, C], and with tables for the O absent modalities the matched rows
    [B, O, k] (-1: none) and their weights. Unlabelled ones give each modality's normalised projection [B, d].
    """

    def __init__(self, model: StagedModel, depth: int, given: Sequence[str], matching: Matching | None) -> None:
        super().__init__()
        self.model = model
        self.depth = depth
        self.given = tuple(given)
        self.absent = tuple(m for m in model.spec.encoders if m not in given) if model.spec.classes else ()
        self.matching = matching if self.absent else None

    def forward(self, inputs: tuple[Tensor, ...], tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """``inputs``: each [B, …] in the order of ``given``; ``tables``: rows and valid of each modality in turn."""
        projections = {m: self._project(m, x) for m, x in zip(self.given, inputs, strict=True)}
        if not self.model.spec.classes:
            return tuple(unit(r) for r in projections.values())
        matched: tuple[Tensor, ...] = ()
        if self.matching is not None:
            pairs = [Table(*tables[i : i + 2]) for i in range(0, len(tables), 2)]
            matched = self._fill(projections, dict(zip(self.model.spec.encoders, pairs, strict=True)), self.matching)
        else:
            like = next(iter(projections.values()))
            projections |= {m: torch.zeros_like(like) for m in self.absent}
        logits = self.model.classify(self.model.fuse(projections))
        return (logits, logits.softmax(dim=1), *matched)

    def _project(self, modality: str, x: Tensor) -> Tensor:
        # Past StagedModel.embed, whose check of the sample's shape would fix the length of texts.
        state = self.model.part(f"{modality}/embed")(x)
        for k in range(1, self.depth + 1):
            state = self.model.stage(modality, k, state)
        return self.model.project(modality, self.model.pool(modality, state))

    def _fill(
        self, projections: dict[str, Tensor], tables: dict[str, Table], matching: Matching
    ) -> tuple[Tensor, Tensor]:
        source = self.given[0]
        found = []
        for modality in self.absent:
            projections[modality], index, weights = stand_in(
                projections[source], tables[source], tables[modality], matching
            )
            found.append((index, weights))
        return torch.stack([index for index, _ in found], 1), torch.stack([weights for _, weights in found], 1)


def stand_in(r: Tensor, own: Table, other: Table, matching: Matching) -> tuple[Tensor, Tensor, Tensor]:
    """For projections r [B, d]: stand-ins of the other modality [B, d], matched rows [B, k] (-1: none), weights [B, k].

    The weights sum to one, or are all zero when no row is valid in both tables.
    """
    among = own.valid & other.valid  # [P]
    cosines = unit(r) @ unit(own.rows).T  # [B, P]
    best, index = torch.where(among, cosines, EXCLUDED).topk(matching.top_k, dim=1)
    usable = among[index]  # [B, k]
    weights = (best / matching.temperature).softmax(dim=1) * usable
    total = weights.sum(dim=1, keepdim=True)
    weights = weights / torch.where(total > 0, total, 1.0)
    mixed = (weights.unsqueeze(2) * other.rows[index]).sum(dim=1)
    return mixed, torch.where(usable, index, -1), weights


def unit(rows: Tensor) -> Tensor:
    """Rows [N, d] scaled to length one; a zero row stays zero."""
    return rows / (rows * rows).sum(dim=1, keepdim=True).sqrt().clamp(min=SMALLEST_NORM)
