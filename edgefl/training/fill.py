"""Filling in absent modalities: what a stand-in is made of, what it is, and the batch that results.

Training, evaluation and exported graphs call :func:`fill` alike; the stand-ins are methods
(``edgefl.methods``). torch is loaded when the first batch is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from edgefl.lazy import torch
from edgefl.models.spec import MISSING
from edgefl.prototypes.mask import DEFAULT_MATCHER, TOP_K, Matcher
from edgefl.registry import Slot, chosen, default

if TYPE_CHECKING:
    from torch import Tensor, nn

    from edgefl.models.spec import ModelSpec
    from edgefl.models.staged import StagedModel
    from edgefl.plan.job import Slots
    from edgefl.prototypes.mask import Mixture, Networks, Table

#: Options of the prototypes at inference, where no sample has a label.
BY_MATCH: Mapping[str, float | str] = {"by": "match"}
#: The same where the labels of a test set are shown.
BY_LABEL: Mapping[str, float | str] = {"by": "label"}


@dataclass(frozen=True)
class AtHand:
    """A batch as far as stand-ins are made from it.

    ``full``: projections [B, d] by modality, zeros in rows without it; ``has``: which rows have it [B], without an
    entry: all; ``model``: for its parts that make a stand-in; ``tables``: the global prototypes; ``labels`` [B], below
    0: unknown, None: no sample has one; ``options``: of the slot; ``matcher``: how prototypes are found, with
    ``networks`` where it is a trained one.
    """

    full: Mapping[str, Tensor]
    has: Mapping[str, Tensor]
    model: StagedModel
    tables: Mapping[str, Table] = field(default_factory=dict)
    labels: Tensor | None = None
    options: Mapping[str, float | str] = field(default_factory=dict)
    matcher: Matcher = DEFAULT_MATCHER
    networks: Networks = field(default_factory=dict)

    @property
    def module(self) -> nn.Module:
        """The module that the method's ``build`` makes."""
        return self.model.part(MISSING)

    def zeros(self) -> Tensor:
        """[B, d]."""
        return torch.zeros_like(next(iter(self.full.values())))

    def rows(self, value: bool) -> Tensor:
        """``value`` for every row [B]."""
        return torch.full_like(next(iter(self.full.values()))[:, 0], value, dtype=torch.bool)


class Made(NamedTuple):
    """Stand-ins of one modality [B, d]; in which rows they are more than zeros [B], so that a mean over modalities
    counts them; and the prototypes they are mixed from, if any.
    """

    values: Tensor
    counted: Tensor
    mixture: Mixture | None = None


#: (modality, what is at hand) -> its stand-ins
Make = Callable[[str, AtHand], Made]


class Filled(NamedTuple):
    """Projections or stand-ins [B, d] of every modality of a model; the rows [B] in which a mean over modalities counts
    each, without entries: all; and the stand-ins that were made.
    """

    values: Mapping[str, Tensor]
    counted: Mapping[str, Tensor]
    made: Mapping[str, Made]


def fill(make: Make, given: AtHand) -> Filled:
    """The projections ``given``, with stand-ins by ``make`` in the rows that lack a modality of the model."""
    values: dict[str, Tensor] = {}
    counted: dict[str, Tensor] = {}
    made: dict[str, Made] = {}
    for m in given.model.spec.encoders:
        own, has = given.full.get(m), given.has.get(m)
        if own is not None and has is None:
            values[m], counted[m] = own, given.rows(True)
            continue
        new = made[m] = make(m, given)
        if own is None or has is None:
            values[m], counted[m] = new.values, new.counted
        else:
            values[m], counted[m] = torch.where(has.unsqueeze(1), own, new.values), has | new.counted
    return Filled(values, counted, made)


def hide(has: Mapping[str, Tensor], drop: float) -> dict[str, Tensor]:
    """``has`` with one modality, each as likely, hidden in a share ``drop`` of the samples that have them all."""
    if drop <= 0 or len(has) < 2:
        return dict(has)
    complete = torch.stack(list(has.values())).all(0)
    dropped = torch.rand(complete.shape, device=complete.device) < drop
    which = torch.randint(len(has), complete.shape, device=complete.device)
    return {m: rows & ~(complete & dropped & (which == i)) for i, (m, rows) in enumerate(has.items())}


def at_inference(missing: Slot, model: ModelSpec, tables: Mapping[str, object]) -> str:
    """Name of the recipe's own stand-in where inference can make it, else of the default, zeros."""
    (own,) = chosen("missing", missing)
    return own.name if own.method.offers(model, tables) else default("missing")


def inferred(name: str, missing: Slot) -> tuple[Make, dict[str, float | str]]:
    """A stand-in at inference and its options: the recipe's where it is the recipe's own, else its defaults."""
    (one,) = chosen("missing", {name: missing.get(name, {})})
    return one.method.make, {**one.options, **BY_MATCH}


def matcher_of(slots: Slots, networks: Mapping[str, object], k: int | msgspec.UnsetType = msgspec.UNSET) -> Matcher:
    """The recipe's matcher; cosine until the small networks it needs have been trained (in the closing round).

    ``k``: as chosen on hold-outs, in place of the recipe's; ``TOP_K`` where that is 0 and none has been chosen.
    """
    options = chosen("prototypes", slots.prototypes)[0].options
    metric = str(options.get("match", DEFAULT_MATCHER.metric))
    mixed = int(options.get("k", TOP_K)) or TOP_K if k is msgspec.UNSET else k
    matcher = Matcher(metric, mixed, float(options.get("temperature", 0.0)))
    return DEFAULT_MATCHER if matcher.trained and not networks else matcher
