"""Stand-ins for an absent modality's projection (arXiv 2312.13508, eqs 4-6, and its baselines).

zero: 0.  random: N(0, 1).  prototype by label: P_m[y], the global prototype of the sample's own class (the paper).
prototype by match: what inference does, from the modalities s that the sample has: sum_j w_j P_m[c_j] over the
classes c_j whose prototypes P_s lie nearest to r_s in the mean over s (docs/decisions/0005, 0034), by the recipe's
metric; in training cosine where that is a small network, since those are trained last.
reconstruction: MLP_m(mean of the other r at hand) (MMiC's variant).
ignore leaves incomplete samples out before batches are made, completion makes what it can before training: zeros for
what is left.

``drop`` hides one modality of a complete sample from the fusion with that probability, so that every device learns to
do without (modality dropout: Neverova et al., ModDrop, arXiv 1501.00102; ``edgefl.training.fill`` has it).
"""

from __future__ import annotations

from edgefl.lazy import torch
from edgefl.prototypes.mask import stand_in
from edgefl.registry import Option, Rule, register
from edgefl.roles import StandIn
from edgefl.training.fill import AtHand, Made


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


def reconstruction(modality: str, given: AtHand) -> Made:
    """Predicted from the mean of the other modalities a row shows; no gradient reaches what it was predicted from."""
    from edgefl.models.heads import mean_of_shown

    others = {m: r.detach() for m, r in given.full.items() if m != modality}
    if not others:
        return zero(modality, given)
    has = [given.has[m] if m in given.has else given.rows(True) for m in others] if given.has else None
    return Made(given.model.reconstruct(modality, mean_of_shown(list(others.values()), has)), given.rows(True))


_DROP = {
    "drop": Option(0.0, "probability that a complete sample trains with one of its modalities hidden", least=0, most=1)
}
_BY = Option(
    "label",
    "whose: that of the sample's own class (the paper), or of the classes that the modality at hand matches, as at "
    "inference",
    ("label", "match"),
)
_CLASSES = "prototype needs class prototypes; set prototypes: class_mean, or another missing"
_TERM = "reconstruction needs the term of the same name in the objective; add it"
register(
    StandIn("zero", "zeros", _DROP, default=True, make=zero, offered=lambda model, tables: True),
    StandIn("ignore", "samples that lack a modality are left out", make=zero, complete_only=True),
    StandIn("random", "standard normal noise", _DROP, make=random),
    StandIn(
        "prototype",
        "a global prototype (arXiv 2312.13508); zeros until there is one",
        {"by": _BY, **_DROP},
        rules=(Rule("prototypes", "classes", _CLASSES),),
        make=prototype,
        offered=lambda model, tables: bool(tables),
        tables=True,
        inferred="the prototypes of the classes that match",
    ),
    StandIn(
        "reconstruction",
        "predicted from the modalities at hand by a small network trained along (MMiC)",
        _DROP,
        rules=(Rule("objective", "reconstruction", _TERM),),
        make=reconstruction,
        offered=lambda model, tables: model.reconstruction,
        inferred="what a small network, trained along, makes of the others",
    ),
)
