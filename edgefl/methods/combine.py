"""How updates become one: a streaming weighted mean per part."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from edgefl.aggregation.mean import WeightedMean
from edgefl.registry import Combine, Options, register


class Mean(Options, frozen=True):
    """Options of the mean."""

    absent: Annotated[
        Literal["keep", "leave_out"],
        Meta(
            description=(
                "devices of the round whose stage or budget left out an encoder stage of a modality that they have: "
                "they count as keeping it as it was, or are left out"
            )
        ),
    ] = "keep"


register(Combine("mean", "streaming weighted mean per part", Mean, default=True, accumulate=WeightedMean))
