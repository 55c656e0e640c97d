"""Stand-ins for an absent modality's projection (arXiv 2312.13508, eqs 4-6, and its baselines).

zero: 0.  random: N(0, 1).  prototype by label: P_m[y], the global prototype of the sample's own class (the paper).
prototype by match: what inference does, from the modalities s that the sample has: sum_j w_j P_m[c_j] over the
classes c_j whose prototypes P_s lie nearest to r_s in the mean over s (docs/decisions/0005, 0034), by the recipe's
metric; in training cosine where that is a small network, since those are trained last.
reconstruction: MLP_m(mean of the other r at hand) (MMiC's variant).
ignore leaves incomplete samples out before batches are made, completion makes what it can before training: zeros for
what is left.

``drop`` hides one modality of a complete sample from the fusion with that probability, so that every device learns to
do without (modality dropout: Neverova et al., ModDrop, arXiv 1501.00102).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from edgefl.errors import Problem
from edgefl.lazy import torch
from edgefl.registry import Options, Recipe, StandIn, offers, register
from edgefl.training.fill import AtHand, Made

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.models.spec import ModelSpec


class Dropped(Options, frozen=True):
    """Options of a stand-in that complete samples can be trained with too."""

    drop: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="probability that a complete sample trains with one of its modalities hidden",
        ),
    ] = 0.0


class Prototype(Options, frozen=True):
    """Options of the prototype mask."""

    by: Annotated[
        Literal["label", "match"],
        Meta(
            description=(
                "whose: that of the sample's own class (the paper), or of the classes that the modality at "
                "hand matches, as at inference"
            )
        ),
    ] = "label"
    drop: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="probability that a complete sample trains with one of its modalities hidden",
        ),
    ] = 0.0


def _prototypes(recipe: Recipe) -> list[Problem]:
    if offers(recipe, "prototypes", "classes"):
        return []
    return [Problem("missing", "prototype needs class prototypes; set prototypes: class_mean, or another missing")]


def _trained(recipe: Recipe) -> list[Problem]:
    if offers(recipe, "objective", "reconstructs"):
        return []
    return [Problem("missing", "reconstruction needs the term of the same name in the objective; add it")]


def zero(modality: str, given: AtHand) -> Made:
    """Zeros."""
    return Made(given.zeros(), given.rows(False))


def random(modality: str, given: AtHand) -> Made:
    """Standard normal noise."""
    return Made(torch.randn_like(given.zeros()), given.rows(True))


def prototype(modality: str, given: AtHand) -> Made:
    """Prototypes by label or by match; zeros while there are none, and for samples without a label.

    Raises ModelError where a trained matcher has no network.
    """
    if given.options.get("by", "label") == "match":
        return _matched(modality, given)
    table = given.tables.get(modality)
    if table is None or given.labels is None:
        return zero(modality, given)
    labels = given.labels.clamp(min=0)
    known = given.labels >= 0
    return Made(torch.where(known.unsqueeze(1), table.rows[labels], given.zeros()), known & table.valid[labels])


def _matched(modality: str, given: AtHand) -> Made:
    from edgefl.prototypes import mask

    mixture = mask.stand_in(modality, given.full, given.has, given.tables, given.matcher, given.networks)
    if mixture is None:
        return zero(modality, given)
    return Made(mixture.values, mixture.weights.sum(dim=1) > 0, mixture)


def reconstruction(modality: str, given: AtHand) -> Made:
    """Predicted from the mean of the other modalities a row shows; no gradient reaches what it was predicted from."""
    from edgefl.models.heads import mean_at_hand

    others = {m: r.detach() for m, r in given.full.items() if m != modality}
    if not others:
        return zero(modality, given)
    has = {m: given.has[m] if m in given.has else given.rows(True) for m in others} if given.has else None
    return Made(given.model.reconstruct(modality, mean_at_hand(others, has)), given.rows(True))


def hide(has: Mapping[str, Tensor], drop: float) -> dict[str, Tensor]:
    """``has`` with one modality, each as likely, hidden in a share ``drop`` of the samples that have them all."""
    if drop <= 0 or len(has) < 2:
        return dict(has)
    complete = torch.stack(list(has.values())).all(0)
    chosen = torch.rand(complete.shape, device=complete.device) < drop
    which = torch.randint(len(has), complete.shape, device=complete.device)
    return {m: rows & ~(complete & chosen & (which == i)) for i, (m, rows) in enumerate(has.items())}


def _always(model: ModelSpec, tables: Mapping[str, object]) -> bool:
    return True


def _with_tables(model: ModelSpec, tables: Mapping[str, object]) -> bool:
    return bool(tables)


def _with_parts(model: ModelSpec, tables: Mapping[str, object]) -> bool:
    return model.reconstruction


register(
    StandIn("zero", "zeros", Dropped, default=True, make=zero, offered=_always),
    StandIn("ignore", "samples that lack a modality are left out", make=zero, complete_only=True),
    StandIn("random", "standard normal noise", Dropped, make=random),
    StandIn(
        "prototype",
        "a global prototype (arXiv 2312.13508); zeros until there is one",
        Prototype,
        conflicts=_prototypes,
        make=prototype,
        offered=_with_tables,
        tables=True,
        inferred="the prototypes of the classes that match",
    ),
    StandIn(
        "reconstruction",
        "predicted from the modalities at hand by a small network trained along (MMiC)",
        Dropped,
        conflicts=_trained,
        make=reconstruction,
        offered=_with_parts,
        inferred="what a small network, trained along, makes of the others",
    ),
)
