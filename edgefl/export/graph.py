"""What a bundle computes, as one torch module: encode, project, fill in the absent modalities, fuse, classify.

The prototype mask is ``edgefl.prototypes.mask`` without control flow (``edgefl.models.matching``) and with tables of a
fixed capacity P. No row valid in both: the stand-in is zero, so all-false ``valid`` gives the zero mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgefl.models.build import StagedModel
from edgefl.models.encoder import TokenState
from edgefl.models.matching import Table, stand_in, unit


@dataclass(frozen=True)
class Matching:
    """How many rows the tables have, how many of them are mixed, and how sharply."""

    capacity: int
    top_k: int
    temperature: float


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
        states = self._encode(dict(zip(self.given, inputs, strict=True)))
        projections = {m: self.model.project(m, self.model.pool_tokens(m, s.tokens)) for m, s in states.items()}
        if not self.model.spec.classes:
            return tuple(unit(r) for r in projections.values())
        matched: tuple[Tensor, ...] = ()
        if self.matching is not None:
            pairs = [Table(*tables[i : i + 2]) for i in range(0, len(tables), 2)]
            matched = self._fill(projections, dict(zip(self.model.spec.encoders, pairs, strict=True)), self.matching)
        else:
            like = next(iter(projections.values()))
            projections |= {m: torch.zeros_like(like) for m in self.absent}
        logits = self.model.classify(self.model.fuse(projections, self._at_hand(projections, matched), states))
        return (logits, logits.softmax(dim=1), *matched)

    def _encode(self, inputs: dict[str, Tensor]) -> dict[str, TokenState]:
        # Past StagedModel.embed, whose check of the sample's shape would fix the length of texts.
        states: dict[str, TokenState] = {m: self.model.part(f"{m}/embed")(x) for m, x in inputs.items()}
        for k in range(1, self.depth + 1):
            states = self.model.run_stage(k, states)
        return {m: self.model.norm(m, state) for m, state in states.items()}

    def _at_hand(self, projections: dict[str, Tensor], matched: tuple[Tensor, ...]) -> dict[str, Tensor] | None:
        """What counts in a mean: what was given, and stand-ins made of prototypes; zeros say that nothing is there."""
        if self.model.spec.fusion != "mean":
            return None
        whole = torch.ones_like(next(iter(projections.values()))[:, 0], dtype=torch.bool)
        has = dict.fromkeys(self.given, whole)
        for i, m in enumerate(self.absent):
            has[m] = matched[1][:, i].sum(dim=1) > 0 if matched else ~whole
        return has

    def _fill(
        self, projections: dict[str, Tensor], tables: dict[str, Table], matching: Matching
    ) -> tuple[Tensor, Tensor]:
        source = self.given[0]
        found = []
        for modality in self.absent:
            projections[modality], index, weights = stand_in(
                projections[source], tables[source], tables[modality], matching.top_k, matching.temperature
            )
            found.append((index, weights))
        return torch.stack([index for index, _ in found], 1), torch.stack([weights for _, weights in found], 1)
