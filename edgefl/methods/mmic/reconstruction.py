"""Each modality's projection, predicted from the others' (the reconstruction variant of MMiC, arXiv 2505.06911).

mean_M mean_i ‖r̂_i^M - r_i^M‖² / d,  r̂^M made from the other modalities, r^M not differentiated.
As a stand-in:  MLP_m(mean of the other r at hand).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgefl.lazy import torch
from edgefl.methods.stand_ins import DROP, zero
from edgefl.methods.terms import Embeddings, Flags, Terms, blank, mean_of, mean_where
from edgefl.registry import TERM_WEIGHT, Rule, register
from edgefl.roles import Objective, StandIn
from edgefl.training.fill import AtHand, Made

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.models.spec import EncoderSpec
    from edgefl.training.forward import Forward


def reconstruction(predicted: Mapping[str, Tensor], real: Embeddings, has: Flags) -> Tensor:
    """``predicted[m]`` [B, d] for some of the modalities, made from the others that a row has; ``real[m]`` [B, d].

    On rows that have the modality and another one; a modality without such a row does not count, 0 when none counts.
    """
    found = []
    for m, made in predicted.items():
        others = [flags for other, flags in has.items() if other != m]
        if not others:
            continue
        rows = has[m] & torch.stack(others).any(dim=0)
        error = (blank(made, rows) - blank(real[m].detach(), rows)).square().mean(dim=1)
        found.append(Terms(mean_where(error, rows), rows.any()))
    return mean_of(found, predicted)


def loss(forward: Forward) -> Tensor:
    """Each modality's projection predicted from the others' a sample has; the projections themselves do not move."""
    from edgefl.models.heads import mean_of_shown  # loads torch

    full, has = forward.spread
    predicted = {}
    for m in full:
        others = {other: r.detach() for other, r in full.items() if other != m}
        if others:
            given = mean_of_shown(list(others.values()), [has[other] for other in others])
            predicted[m] = forward.model.reconstruct(m, given)
    return reconstruction(predicted, full, has) if predicted else forward.nothing()


def stand_in(modality: str, given: AtHand) -> Made:
    """Predicted from the mean of the other modalities a row shows; no gradient reaches what it was predicted from."""
    from edgefl.models.heads import mean_of_shown

    others = {m: r.detach() for m, r in given.full.items() if m != modality}
    if not others:
        return zero(modality, given)
    has = [given.has[m] if m in given.has else given.rows(True) for m in others] if given.has else None
    return Made(given.model.reconstruct(modality, mean_of_shown(list(others.values()), has)), given.rows(True))


def shape(encoders: Mapping[str, EncoderSpec]) -> dict[str, object]:
    """Networks of the model that predict each modality's projection from the others'."""
    return {"reconstruction": True}


_TERM = "reconstruction needs the term of the same name in the objective; add it"
register(
    Objective(
        "reconstruction",
        "each modality's projection is predicted from the others'",
        {"weight": TERM_WEIGHT},
        loss=loss,
        modalities=2,
        auxiliaries=("reconstruction",),
        shape=shape,
    ),
    StandIn(
        "reconstruction",
        "predicted from the modalities at hand by a small network trained along (MMiC)",
        DROP,
        rules=(Rule("objective", "reconstruction", _TERM),),
        make=stand_in,
        offered=lambda model, tables: model.reconstruction,
        inferred="what a small network, trained along, makes of the others",
    ),
)
