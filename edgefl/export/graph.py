"""What a bundle computes, as one torch module: encode, project, fill in the absent modalities, fuse, classify.

Which modalities a row has is an input where there are several: nothing of a modality that a row lacks reaches its
answer. The prototype mask is ``edgefl.prototypes.mask`` without control flow (``edgefl.prototypes.torch_mask``) and
with tables of a fixed capacity P. No row valid in both: the stand-in is zero, so all-false ``valid`` gives the zero
mask. Small networks that match are inside the graph. Where absent modalities are reconstructed, the graph holds the
networks that make them, and there are no tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from edgefl.export.manifest import fillable, table_names
from edgefl.models.encoders.base import TokenState
from edgefl.models.heads import mean_at_hand
from edgefl.models.staged import StagedModel
from edgefl.models.vectors import unit
from edgefl.prototypes.matcher import Matcher
from edgefl.prototypes.torch_mask import SCORES, Table, averaged, cosine, logarithms, mixed

#: The networks "match/<m>" of one modality, with their weights.
Speakers = Sequence[tuple[float, StagedModel]]
#: Matched rows [B, O, k] and their weights [B, O, k].
Matches = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Matching:
    """How prototypes are found: by which score, how many are mixed, how sharply.

    ``speakers``: for a trained matcher, the networks of each modality the bundle takes.
    """

    matcher: Matcher
    speakers: Mapping[str, Speakers] = field(default_factory=dict)


class BundleGraph(nn.Module):
    """The model for the modalities ``given``; ``matching`` None: there are no tables, and absent modalities are zero
    or, if it ``reconstructs``, made from those given.

    Labelled models give logits and probabilities [B, C], and with tables for the O modalities that may be absent the
    matched rows [B, O, k] (-1: none) and their weights. Unlabelled ones give each modality's normalised projection
    [B, d], zero where it is absent.
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
        self.fills = fillable(model.spec, self.given)
        self.matching = matching if self.fills else None
        self.reconstructs = reconstructs and bool(self.fills)
        speakers = matching.speakers.values() if matching else ()
        self.networks = nn.ModuleList(network for one in speakers for _, network in one)

    def forward(
        self, inputs: tuple[Tensor, ...], presence: tuple[Tensor, ...], tables: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """``inputs``: each [B, …] in the order of ``given``; ``presence``: for each which rows have it [B] (above one
        half), none at all: every row has them; ``tables``: rows and valid of each modality in turn.
        """
        has = {m: flags > 0.5 for m, flags in zip(self.given, presence, strict=True)} if presence else {}
        states = self._encode(dict(zip(self.given, inputs, strict=True)), has)
        r = {m: self.model.project(m, self.model.pool_tokens(m, state)) for m, state in states.items()}
        r |= {m: torch.where(rows.unsqueeze(1), r[m], 0.0) for m, rows in has.items()}
        if not self.model.spec.classes:
            return tuple(unit(own) for own in r.values())
        made, matches = self._stand_ins(r, has, tables)
        full = r | {m: torch.where(has[m].unsqueeze(1), r[m], new) if m in has else new for m, new in made.items()}
        logits = self.model.classify(self.model.fuse(full, self._at_hand(r, has, matches), states))
        return (logits, logits.softmax(dim=1), *matches)

    def _encode(self, inputs: dict[str, Tensor], has: Mapping[str, Tensor]) -> dict[str, TokenState]:
        # Past StagedModel.embed, whose check of the sample's shape would fix the length of texts.
        states: dict[str, TokenState] = {m: self.model.part(f"{m}/embed")(x) for m, x in inputs.items()}
        masks = {m: state.mask for m, state in states.items()}
        if has and self.model.spec.encoder_sharing == "multiway":  # attention over what a row has
            states = {m: state._replace(mask=_shown(state, has[m])) for m, state in states.items()}
        for k in range(1, self.depth + 1):
            states = self.model.run_stage(k, states)
        return {m: self.model.norm(m, state)._replace(mask=masks[m]) for m, state in states.items()}

    def _stand_ins(
        self, r: dict[str, Tensor], has: Mapping[str, Tensor], tables: tuple[Tensor, ...]
    ) -> tuple[dict[str, Tensor], Matches | tuple[()]]:
        """Stand-ins [B, d] for the modalities that may be absent, and what was matched for them."""
        if self.matching is not None:
            names = table_names(self.model.spec, self.given, self.matching.matcher)
            pairs = [Table(*tables[i : i + 2]) for i in range(0, len(tables), 2)]
            return self._matched(r, has, dict(zip(names, pairs, strict=True)), self.matching)
        if self.reconstructs:
            at_hand = mean_at_hand(r, has or None)
            return {m: self.model.reconstruct(m, at_hand) for m in self.fills}, ()
        return {m: torch.zeros_like(next(iter(r.values()))) for m in self.fills if m not in r}, ()

    def _matched(
        self, r: dict[str, Tensor], has: Mapping[str, Tensor], tables: dict[str, Table], matching: Matching
    ) -> tuple[dict[str, Tensor], Matches]:
        matcher, made, rows, weights = matching.matcher, {}, [], []
        said: dict[tuple[str, str], Tensor] = {}
        for absent in self.fills:
            other, each = tables[absent], []
            for m in (m for m in r if m != absent):
                key = (m, absent if matcher.metric == "prior" else "")  # the others' scores serve every absent modality
                if key not in said:
                    said[key] = self._scores(m, absent, r[m], tables, matching)
                among = self._among(m, other, tables, matcher)
                each.append((said[key], among & has[m].unsqueeze(1) if has else among))
            k = min(matcher.k, len(other.valid))
            scores, among = averaged(each)
            scores = logarithms(scores) if matcher.metric == "classifier" else scores
            made[absent], found, shares = mixed(scores, among, other.rows, k, matcher.temperature)
            needed = ~has[absent].unsqueeze(1) if absent in has else None
            rows.append(found if needed is None else torch.where(needed, found, -1))
            weights.append(shares if needed is None else torch.where(needed, shares, 0.0))
        return made, (torch.stack(rows, 1), torch.stack(weights, 1))

    def _among(self, m: str, other: Table, tables: Mapping[str, Table], matcher: Matcher) -> Tensor:
        """Which rows [P] of the absent modality's table the modality ``m`` can tell."""
        if not matcher.trained:
            return tables[m].valid & other.valid
        if matcher.metric == "prior":
            return other.valid
        # A classifier knows nothing of the spare rows.
        return other.valid & (torch.arange(len(other.valid), device=other.valid.device) < self.model.spec.classes)

    def _scores(self, m: str, absent: str, r: Tensor, tables: Mapping[str, Table], matching: Matching) -> Tensor:
        """Scores [B, P] of the rows of ``absent`` by r [B, d] of the modality ``m``: by its table or its networks."""
        metric, rows = matching.matcher.metric, tables[absent].rows
        if not matching.matcher.trained:
            return SCORES[metric](r, tables[m].rows)
        total = sum(weight for weight, _ in matching.speakers[m])
        scores: Tensor | None = None
        for weight, network in matching.speakers[m]:
            own = cosine(network.prior(m, absent, r), rows) if metric == "prior" else network.match(m, r).softmax(dim=1)
            scores = own * (weight / total) if scores is None else scores + own * (weight / total)
        if scores is None:
            raise ValueError(f"no network speaks for '{m}'")
        return scores if metric == "prior" else F.pad(scores, (0, len(rows) - self.model.spec.classes))

    def _at_hand(
        self, r: dict[str, Tensor], has: Mapping[str, Tensor], matches: Matches | tuple[()]
    ) -> dict[str, Tensor] | None:
        """[B] a modality: of joint fusion whose tokens count; of a mean, what was given and stand-ins that are not
        zero, since zeros say that nothing is there.
        """
        if self.model.spec.fusion != "mean":
            return dict(has) or None
        every = torch.ones_like(next(iter(r.values()))[:, 0], dtype=torch.bool)
        counted = {m: has.get(m, every) if m in self.given else ~every for m in self.model.spec.encoders}
        for i, m in enumerate(self.fills):
            if matches:
                counted[m] = counted[m] | (matches[1][:, i].sum(dim=1) > 0)
            elif self.reconstructs:
                counted[m] = every
        return counted


def _shown(state: TokenState, has: Tensor) -> Tensor:
    """Which tokens [B, N] are real and of a modality that the row has."""
    rows = has.unsqueeze(1).expand(-1, state.tokens.shape[1])
    return rows if state.mask is None else rows & state.mask
