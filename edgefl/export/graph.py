"""What a bundle computes, as one torch module: encode, project, fill in the absent modalities, fuse, classify.

The prototype mask is ``edgefl.prototypes.mask`` without control flow (``edgefl.models.matching``) and with tables of a
fixed capacity P. No row valid in both: the stand-in is zero, so all-false ``valid`` gives the zero mask. Small networks
that match are inside the graph. Where absent modalities are reconstructed, the graph holds the networks that make them,
and there are no tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from edgefl.export.manifest import table_names
from edgefl.models.build import StagedModel
from edgefl.models.encoder import TokenState
from edgefl.models.heads import mean_at_hand
from edgefl.models.matching import Table, cosine, mixed, stand_in, unit
from edgefl.prototypes.mask import Matcher


@dataclass(frozen=True)
class Matching:
    """How prototypes are found: by which score, how many are mixed, how sharply.

    ``speakers``: for a trained matcher, the networks "match/<m>" of the modality at hand, with their weights.
    """

    matcher: Matcher
    speakers: tuple[tuple[float, StagedModel], ...] = ()


class BundleGraph(nn.Module):
    """The model for the modalities ``given``; ``matching`` None: there are no tables, and absent modalities are zero
    or, if it ``reconstructs``, made from those given.

    Labelled models give logits and probabilities [B, C], and with tables for the O absent modalities the matched rows
    [B, O, k] (-1: none) and their weights. Unlabelled ones give each modality's normalised projection [B, d].
    """

    def __init__(
        self,
        model: StagedModel,
        depth: int,
        given: Sequence[str],
        matching: Matching | None,
        *,
        reconstructs: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.depth = depth
        self.given = tuple(given)
        self.absent = tuple(m for m in model.spec.encoders if m not in given) if model.spec.classes else ()
        self.matching = matching if self.absent else None
        self.reconstructs = reconstructs
        self.networks = nn.ModuleList(network for _, network in matching.speakers) if matching else None

    def forward(self, inputs: tuple[Tensor, ...], tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """``inputs``: each [B, …] in the order of ``given``; ``tables``: rows and valid of each modality in turn."""
        states = self._encode(dict(zip(self.given, inputs, strict=True)))
        projections = {m: self.model.project(m, self.model.pool_tokens(m, s)) for m, s in states.items()}
        if not self.model.spec.classes:
            return tuple(unit(r) for r in projections.values())
        matched: tuple[Tensor, ...] = ()
        if self.matching is not None:
            names = table_names(self.model.spec, self.given, self.matching.matcher)
            pairs = [Table(*tables[i : i + 2]) for i in range(0, len(tables), 2)]
            matched = self._fill(projections, dict(zip(names, pairs, strict=True)), self.matching)
        elif self.reconstructs:
            at_hand = mean_at_hand(projections)
            projections |= {m: self.model.reconstruct(m, at_hand) for m in self.absent}
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
        """What counts in a mean: what was given, and stand-ins; zeros say that nothing is there."""
        if self.model.spec.fusion != "mean":
            return None
        whole = torch.ones_like(next(iter(projections.values()))[:, 0], dtype=torch.bool)
        has = dict.fromkeys(self.given, whole)
        for i, m in enumerate(self.absent):
            has[m] = matched[1][:, i].sum(dim=1) > 0 if matched else whole if self.reconstructs else ~whole
        return has

    def _fill(
        self, projections: dict[str, Tensor], tables: dict[str, Table], matching: Matching
    ) -> tuple[Tensor, Tensor]:
        source, matcher = self.given[0], matching.matcher
        r, found = projections[source], []
        for m in self.absent:
            k = min(matcher.k, len(tables[m].valid))
            if matcher.trained:
                scores, among = self._heard(r, m, tables[m], matching)
                made = mixed(scores, among, tables[m].rows, k, matcher.temperature)
            else:
                made = stand_in(r, tables[source], tables[m], k, matcher.temperature, matcher.metric)
            projections[m] = made[0]
            found.append(made[1:])
        return torch.stack([index for index, _ in found], 1), torch.stack([weights for _, weights in found], 1)

    def _heard(self, r: Tensor, absent: str, other: Table, matching: Matching) -> tuple[Tensor, Tensor]:
        """Scores [B, P] of ``other``'s rows by the networks, weighed, and which rows may match [P]."""
        source, total = self.given[0], sum(weight for weight, _ in matching.speakers)
        scores: Tensor | None = None
        for weight, network in matching.speakers:
            if matching.matcher.metric == "classifier":
                own = network.match(source, r).softmax(dim=1)
            else:
                own = cosine(network.prior(source, absent, r), other.rows)
            scores = own * (weight / total) if scores is None else scores + own * (weight / total)
        if scores is None:
            raise ValueError(f"no network speaks for '{source}'")
        if matching.matcher.metric != "classifier":
            return scores, other.valid
        classes, rows = self.model.spec.classes, len(other.valid)
        known = torch.arange(rows, device=r.device) < classes  # a classifier knows nothing of the spare rows
        return F.pad(scores, (0, rows - classes)), other.valid & known
