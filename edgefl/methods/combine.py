"""How updates become one: a streaming weighted mean per part."""

from __future__ import annotations

from edgefl.aggregation.mean import WeightedMean
from edgefl.registry import Combine, Option, register

_ABSENT = Option(
    "keep",
    "devices of the round whose stage or budget left out an encoder stage of a modality that they have: they count as "
    "keeping it as it was, or are left out",
    ("keep", "leave_out"),
)
register(
    Combine("mean", "streaming weighted mean per part", {"absent": _ABSENT}, default=True, accumulate=WeightedMean)
)
