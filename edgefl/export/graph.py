"""Torch modules of one bundle and of all: encode, project, fill in absent modalities, fuse, classify.

Which modalities a row has is an input where there are several: nothing of a modality that a row lacks reaches its
answer. Absent modalities are filled in by the code of training and evaluation (``edgefl.training.fill``).
Prototype tables are inputs of a fixed capacity P, of which ``valid`` says which rows hold one: all false gives the zero
mask. Small networks that match, and networks that reconstruct, are inside the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from edgefl.data.label_sets import classes_in
from edgefl.export.bundle_format import present_name, table_names
from edgefl.models.encoder import TokenState
from edgefl.models.spec import shares_attention
from edgefl.models.staged import StagedModel
from edgefl.models.vectors import unit
from edgefl.prototypes.mask import DEFAULT_MATCHER, Matcher, Table
from edgefl.training.fill import BY_MATCH, AtHand, Made, Make, fill
from edgefl.training.matching import WeightedNetworks, answers


class Encoded(NamedTuple):
    """One modality's tokens [B, N, D] after the final norm, and their projection r [B, d]."""

    tokens: TokenState
    projection: Tensor


class BundleGraph(nn.Module):
    """Graph of a bundle for rows with any of the modalities ``given``; ``make``: stand-ins for the others.

    ``options``: of ``make``; ``matcher``: how prototypes are found; ``networks``: those of each modality of ``given``
    where it is a trained one.
    Labelled models give logits and probabilities [B, C] and, with tables, for the O modalities that may be absent the
    matched rows [B, O, k] (-1: none) and their weights. Unlabelled ones give each modality's normalised projection
    [B, d], zero where it is absent.
    """

    def __init__(
        self,
        model: StagedModel,
        depth: int,
        given: Sequence[str],
        make: Make,
        matcher: Matcher = DEFAULT_MATCHER,
        networks: Mapping[str, WeightedNetworks] | None = None,
        options: Mapping[str, float | str] = BY_MATCH,
    ) -> None:
        super().__init__()
        self.model = model
        self.depth = depth
        self.given = tuple(given)
        self.make, self.options = make, options
        self.matcher = matcher
        self.networks = nn.ModuleList(network for each in (networks or {}).values() for _, network in each)
        self.answers = {m: answers(each, m) for m, each in (networks or {}).items()}

    def forward(
        self, inputs: tuple[Tensor, ...], presence: tuple[Tensor, ...], tables: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """``inputs``: each [B, …] in the order of ``given``; ``presence``: for each which rows have it [B] (above one
        half), none at all: every row has them; ``tables``: rows and valid of each modality of ``table_names`` in turn,
        none where the stand-ins are not made of prototypes.
        """
        has = {m: flags > 0.5 for m, flags in zip(self.given, presence, strict=True)} if presence else {}
        return self.answer(self.encoded(dict(zip(self.given, inputs, strict=True)), has), has, tables)

    def encoded(self, inputs: Mapping[str, Tensor], has: Mapping[str, Tensor]) -> dict[str, Encoded]:
        """Modality -> encoded and projected input; ``has`` matters only to encoders with shared attention."""
        states = self._encode(inputs, has)
        return {m: Encoded(s, self.model.project(m, self.model.pool_tokens(m, s))) for m, s in states.items()}

    def answer(
        self, encoded: Mapping[str, Encoded], has: Mapping[str, Tensor], tables: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Outputs of ``forward``, from the encoded inputs on."""
        r = {
            m: torch.where(has[m].unsqueeze(1), one.projection, 0.0) if has else one.projection
            for m, one in encoded.items()
        }
        if not self.model.spec.classes:
            return tuple(unit(own) for own in r.values())
        names = table_names(self.model.spec, self.given, self.matcher) if tables else ()
        pairs = zip(names, tables[::2], tables[1::2], strict=True)
        found = {m: Table(means, valid > 0.5) for m, means, valid in pairs}
        filled = fill(self.make, self.at_hand(r, has, found))
        tokens = {m: one.tokens for m, one in encoded.items()}
        logits = self.model.classify(self.model.fuse(filled.values, has or None, tokens, counted=filled.counted))
        return (logits, probabilities(logits, self.model.spec.label_names), *_matches(filled.made, has))

    def at_hand(self, r: Mapping[str, Tensor], has: Mapping[str, Tensor], tables: Mapping[str, Table]) -> AtHand:
        """Inputs of the stand-ins: projections, presence, tables, matcher."""
        return AtHand(r, has, self.model, tables, None, self.options, self.matcher, self.answers)

    def _encode(self, inputs: Mapping[str, Tensor], has: Mapping[str, Tensor]) -> dict[str, TokenState]:
        # Past StagedModel.embed, whose check of the sample's shape would fix the length of texts.
        states: dict[str, TokenState] = {m: self.model.part(f"{m}/embed")(x) for m, x in inputs.items()}
        masks = {m: state.mask for m, state in states.items()}
        if has and shares_attention(self.model.spec):  # attention over what a row has
            states = {m: state._replace(mask=_shown(state, has[m])) for m, state in states.items()}
        for k in range(1, self.depth + 1):
            states = self.model.run_stage(k, states)
        return {m: self.model.norm(m, state)._replace(mask=masks[m]) for m, state in states.items()}


def probabilities(logits: Tensor, labels: Sequence[str]) -> Tensor:
    """Probabilities [B, C] of ``logits``: softmax, or sigmoid for samples with several labels."""
    return logits.softmax(dim=1) if classes_in(labels) is None else logits.sigmoid()


class Together(nn.Module):
    """Graphs of a model's bundles as a single one, with each modality encoded once.

    Encoders are most of a bundle's nodes, and tracing costs milliseconds a node. With shared attention, tokens differ
    by bundle, so that encoders are repeated.
    """

    def __init__(self, graphs: Sequence[BundleGraph], inputs: Sequence[str], tables: Sequence[Sequence[str]]) -> None:
        """``inputs``: names of everything the graphs take; ``tables``: of those each graph's tables, in its order."""
        super().__init__()
        self.graphs = tuple(graphs)  # a tuple, so that the weights keep the names they have in one bundle's graph
        self.model = graphs[0].model
        self.networks = nn.ModuleList(dict.fromkeys(one for graph in graphs for one in graph.networks))
        self.inputs, self.tables = tuple(inputs), tuple(tables)

    def forward(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs of one graph after the other."""
        given = dict(zip(self.inputs, values, strict=True))
        apart = not shares_attention(self.model.spec)
        every = dict.fromkeys(m for graph in self.graphs for m in graph.given)
        once = self.graphs[0].encoded({m: given[m] for m in every}, {}) if apart else {}
        found: list[Tensor] = []
        for graph, names in zip(self.graphs, self.tables, strict=True):
            has = {m: given[present_name(m)] > 0.5 for m in graph.given if len(graph.given) > 1}
            own = once if apart else graph.encoded({m: given[m] for m in graph.given}, has)
            found += graph.answer({m: own[m] for m in graph.given}, has, [given[name] for name in names])
        return tuple(found)


def _matches(made: Mapping[str, Made], has: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Matched rows and weights [B, O, k] of mixed prototypes; -1 and 0 for modalities present in a row."""
    rows, weights = [], []
    for m, new in made.items():
        if new.mixture is not None:
            needed = ~has[m].unsqueeze(1) if m in has else None
            rows.append(new.mixture.rows if needed is None else torch.where(needed, new.mixture.rows, -1))
            weights.append(new.mixture.weights if needed is None else torch.where(needed, new.mixture.weights, 0.0))
    return (torch.stack(rows, 1), torch.stack(weights, 1)) if rows else ()


def _shown(state: TokenState, has: Tensor) -> Tensor:
    """Flags [B, N] of real tokens in rows with the modality."""
    rows = has.unsqueeze(1).expand(-1, state.tokens.shape[1])
    return rows if state.mask is None else rows & state.mask
