"""The weighted mean of the updates (FedAvg, arXiv 1602.05629):  theta = sum_k w_k theta_k."""

from __future__ import annotations

from edgefl.aggregation.mean import WeightedMean
from edgefl.errors import Problem
from edgefl.registry import Option, Recipe, choose, offers, register
from edgefl.roles import Combine

ABSENT = {
    "absent": Option(
        "keep",
        "devices of the round whose stage or budget left out an encoder stage of a modality that they have: they count "
        "as keeping it as it was, or are left out",
        ("keep", "leave_out"),
    )
}


def keeps(absent: str) -> bool:
    """True where a device that skipped a part votes for its old weights."""
    return absent == "keep"


def one_model(recipe: Recipe) -> list[Problem]:
    """Problem of changes that are compared although devices began with models of their own."""
    text = f"{choose('combine', recipe).name} compares changes of one model, and each"
    if choose("cluster", recipe).flag("own_models"):
        return [Problem("combine", f"{text} cluster has its own; set models: shared, or combine: mean")]
    if offers(recipe, "weight", "personal"):
        return [Problem("combine", f"{text} device has its own; set weight: samples, or combine: mean")]
    return []


register(
    Combine("mean", "streaming weighted mean per part", ABSENT, default=True, accumulate=WeightedMean, keeps=keeps)
)
