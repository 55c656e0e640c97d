"""A class prototype in place of an absent modality's projection (PmcmFL, arXiv 2312.13508, eqs 4-6).

By label: P_m[y], the global prototype of the sample's own class (the paper).
By match: what inference does, from the modalities s that the sample has: sum_j w_j P_m[c_j] over the classes c_j whose
prototypes P_s lie nearest to r_s in the mean over s (docs/decisions/0005, 0034), by the recipe's metric; in training
cosine where that is a small network, since those are trained last.
"""

from __future__ import annotations

from edgefl.lazy import torch
from edgefl.methods.stand_ins import DROP, zero
from edgefl.prototypes.mask import stand_in
from edgefl.registry import Option, Rule, register
from edgefl.roles import StandIn
from edgefl.training.fill import AtHand, Made


def prototype(modality: str, given: AtHand) -> Made:
    """Prototypes by label or by match; zeros while there are none, and for samples without a label.

    Raises ModelError where a trained matcher has no network.
    """
    if given.options.get("by", "label") == "match":
        mixture = stand_in(modality, given.full, given.has, given.tables, given.matcher, given.networks)
        if mixture is None:
            return zero(modality, given)
        return Made(mixture.values, mixture.weights.sum(dim=1) > 0, mixture)
    table = given.tables.get(modality)
    if table is None or given.labels is None:
        return zero(modality, given)
    labels = given.labels.clamp(min=0)
    known = given.labels >= 0
    return Made(torch.where(known.unsqueeze(1), table.rows[labels], given.zeros()), known & table.valid[labels])


_BY = Option(
    "label",
    "whose: that of the sample's own class (the paper), or of the classes that the modality at hand matches, as at "
    "inference",
    ("label", "match"),
)
_CLASSES = "prototype needs class prototypes; set prototypes: class_mean, or another missing"
register(
    StandIn(
        "prototype",
        "a global prototype (arXiv 2312.13508); zeros until there is one",
        {"by": _BY, **DROP},
        rules=(Rule("prototypes", "candidates", _CLASSES),),
        make=prototype,
        offered=lambda model, tables: bool(tables),
        inferred="the prototypes of the classes that match",
    ),
)
