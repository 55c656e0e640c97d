"""Poverty repair (MMiC, arXiv 2505.06911): its options, and how whole uploads and single layers are repaired by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.methods.mmic.layer_exchange import ask, lend
from edgefl.methods.mmic.poverty_layer import PovertyObserver, poverty_layers
from edgefl.methods.mmic.poverty_substitution import mend, unlikely
from edgefl.registry import Option, Period, Rule, register
from edgefl.roles import Repair

if TYPE_CHECKING:
    from edgefl.models.staged import StagedModel
    from edgefl.plan.job import Job


def period(*, exchange: str, whole_every: float, layers: float) -> Period:
    """Rounds from one whole exchange to the next, and layers between."""
    return Period(int(whole_every), int(layers)) if exchange == "layer" else Period()


def observe(job: Job, model: StagedModel, *, form: str) -> PovertyObserver:
    """Observer of a device's training for its poverty layer."""
    return PovertyObserver(poverty_layers(job, model), exact=form == "exact", named=job.period is not None)


def unreadable(optimizer: str, *, form: str) -> str:
    """Why a poverty layer cannot be read from this local optimiser; "": it can."""
    if form == "exact" or optimizer in {"adamw", "sgd"}:
        return ""
    return f"{optimizer} does not keep what repair: poverty reads; use adamw or sgd, or poverty: {{form: exact}}"


_ONE_MODEL = "poverty mends one model for all, relationship makes one for each; set another weight, or repair: none"
_LACKING = "poverty needs samples that lack a modality, missing: ignore leaves them out"
register(
    Repair("none", "nothing", default=True),
    Repair(
        "poverty",
        "the layer that missing modalities change most comes from devices of the group with complete data (MMiC)",
        {
            "form": Option(
                "optimiser",
                "how the change is had: from copies, or from the optimiser's own step",
                ("exact", "optimiser"),
            ),
            "donors": Option(
                "less_affected",
                "who lends it: devices that trained with complete data in the round (eq. 11); less_affected: in rounds "
                "without any, those whose layers missing modalities changed less; cluster: all of the group with "
                "another such layer or none, those that did not train by it as it was sent (the authors' code)",
                ("complete", "less_affected", "cluster"),
            ),
            "exchange": Option(
                "whole",
                "what travels: everything trained in every round, or in the rounds between two whole exchanges one "
                "layer a device",
                ("whole", "layer"),
            ),
            "whole_every": Option(
                4,
                "exchange: layer alone: rounds of a period, whose first brings the model and whose last takes it",
                least=2,
            ),
            "layers": Option(
                1,
                "exchange: layer alone: most layers asked of a cluster in a round; 0: nothing travels between",
                least=0,
            ),
        },
        rules=(
            Rule("weight", "personal", _ONE_MODEL, wanted=False),
            Rule("missing", "complete_only", _LACKING, wanted=False),
        ),
        per_round=True,
        mend=mend,
        unlikely=unlikely,
        observe=observe,
        unreadable=unreadable,
        moves=True,
        period=period,
        ask=ask,
        lend=lend,
    ),
)
