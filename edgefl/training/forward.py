"""Forward pass of a batch as the terms of the loss see it: projections, stand-ins, the joint representation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from edgefl.models.encoders.base import TokenState
from edgefl.models.staged import StagedModel
from edgefl.prototypes.mask import Table
from edgefl.prototypes.matcher import DEFAULT_MATCHER, Matcher
from edgefl.registry import method
from edgefl.training.fill import AtHand, Filled, fill, hide


@dataclass(frozen=True)
class Auxiliary:
    """What terms need besides the model; empty where the recipe has no such term.

    ``tables``: the global prototypes, and the ``matcher`` that finds them while training. By modality:
    ``private_heads``, copies that are trained along, and ``teachers``, the heads as received. ``received``: (parameter,
    its value when it came) of all trained.
    """

    tables: Mapping[str, Table] = field(default_factory=dict)
    private_heads: Mapping[str, nn.Module] = field(default_factory=dict)
    teachers: Mapping[str, nn.Module] = field(default_factory=dict)
    received: tuple[tuple[nn.Parameter, Tensor], ...] = ()
    matcher: Matcher = DEFAULT_MATCHER

    @property
    def extra(self) -> list[nn.Parameter]:
        """Parameters that are trained along and belong to no part of the model."""
        return [parameter for head in self.private_heads.values() for parameter in head.parameters()]


def copied(head: nn.Module, *, trained: bool) -> nn.Module:
    """A head's private copy (trained) or the teacher made of it (frozen, in evaluation mode)."""
    return copy.deepcopy(head).requires_grad_(trained).train(trained)


@dataclass
class Forward:
    """One batch. ``encoded[m]``: h [n_m, D]; ``projected[m]``: r [n_m, d]; ``rows[m]``: which of the B rows, None: all.

    ``labels`` [B], -1: none; ``pseudo_labels`` [B]: class or local cluster, -1: none; ``missing``: the slot's choice
    and its options; ``tokens``: for joint fusion; ``objective``: the recipe's terms and their options, for terms that
    hold another one's.
    """

    model: StagedModel
    size: int
    encoded: Mapping[str, Tensor]
    projected: Mapping[str, Tensor]
    rows: Mapping[str, Tensor | None]
    labels: Tensor | None
    missing: tuple[str, Mapping[str, float | str]]
    auxiliary: Auxiliary = field(default_factory=Auxiliary)
    pseudo_labels: Tensor | None = None
    tokens: Mapping[str, TokenState] | None = None
    objective: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)

    @cached_property
    def spread(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Projections as [B, d] with zeros where there are none, and which rows have them [B]."""
        return self._spread(self.projected)

    def private_projections(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """As ``spread``, by the private copies of the heads."""
        return self._projected_by(self.auxiliary.private_heads)

    def teacher_projections(self) -> dict[str, Tensor]:
        """As the first of ``spread``, by the heads as they were received; no gradient."""
        with torch.no_grad():
            return self._projected_by(self.auxiliary.teachers)[0]

    @cached_property
    def at_hand(self) -> dict[str, Tensor]:
        """Which rows show a modality to the fusion [B]: those that have it and, with ``drop``, have it not hidden."""
        _, has = self.spread
        drop = float(self.missing[1].get("drop", 0.0))
        return hide(has, drop) if drop and len(has) == len(self.model.spec.encoders) else has

    @cached_property
    def filled(self) -> Filled:
        """Every modality of the model, with stand-ins where a row does not show it."""
        name, options = self.missing
        full, _ = self.spread
        complete = all(m in self.projected and self.rows[m] is None for m in self.model.spec.encoders)
        has = {} if complete and not options.get("drop") else self.at_hand
        tables, matcher = self.auxiliary.tables, self.auxiliary.matcher
        given = AtHand(full, has, self.model, tables, self.labels, options, matcher)
        return fill(method("missing", name).make, given)

    @cached_property
    def fused(self) -> Tensor:
        """f [B, fused width]: the joint representation."""
        return self.model.fuse(self.filled.values, self.at_hand, self.tokens, self.rows, self.filled.counted)

    @cached_property
    def logits(self) -> Tensor:
        """[B, C]."""
        return self.model.classify(self.fused)

    @property
    def classified(self) -> Tensor | None:
        """The logits if a term has asked for them."""
        return self.__dict__.get("logits")

    def nothing(self) -> Tensor:
        """Zero, but part of the graph, so that ``backward`` has a way to go."""
        return next(iter(self.projected.values())).sum() * 0.0

    def _projected_by(self, heads: Mapping[str, nn.Module]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self._spread({m: heads[m](h) for m, h in self.encoded.items() if m in heads})

    def _spread(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        full, has = {}, {}
        for m, own in values.items():
            rows = self.rows[m]
            if rows is None:
                full[m] = own
                has[m] = torch.ones(self.size, dtype=torch.bool, device=own.device)
            else:
                full[m] = own.new_zeros(self.size, own.shape[1]).index_copy(0, rows, own)
                has[m] = torch.zeros(self.size, dtype=torch.bool, device=own.device).index_fill(0, rows, True)
        return full, has
