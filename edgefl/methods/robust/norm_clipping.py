"""Norm clipping at the server (Sun et al. 2019, arXiv 1911.07963, section 4).

theta' = theta + sum_k w_k D_k / max(1, |D_k| / M),  where D_k is the whole change of device k.

The paper fixes M. By default it is the median of the round's |D_k| here, since a usual length depends on model, rate
and round; of fewer than three updates nothing is then clipped. ``round.clip_change`` bounds by three times the median.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from edgefl.aggregation.mean import OF, WeightedMean
from edgefl.aggregation.pieces import Changes
from edgefl.methods.fedavg.weighted_mean import ABSENT, keeps, one_model
from edgefl.registry import Option, register
from edgefl.roles import Combine


def norm_clipping(changes: Mapping[str, Changes], *, norm: float = 0.0) -> tuple[dict[str, float], dict[str, object]]:
    """min(1, M / |D_k|) where that is below 1; and M and the norms. ``norm``: M; 0: the median."""
    squares: dict[str, list[float]] = {}
    for part in changes.values():
        for device, square in zip(part.devices, part.products.diagonal().tolist(), strict=True):
            squares.setdefault(device, []).append(max(square, 0.0))
    norms = {device: math.sqrt(math.fsum(own)) for device, own in sorted(squares.items())}
    if not norm and len(norms) < OF:
        return {}, {"norms": norms, "note": f"Of {len(norms)} updates no length is usual: none is clipped."}
    most = norm or statistics.median(norms.values())
    if not most:
        return {}, {"norms": norms, "note": "The usual length is 0, as most updates changed nothing: none is clipped."}
    factors = {device: most / length for device, length in norms.items() if length > most}
    return factors, {"norms": norms, "bound": most}


register(
    Combine(
        "norm_clipping",
        "weighted mean of changes that are scaled down to a length at most (Sun et al., arXiv 1911.07963)",
        {"norm": Option(0.0, "the length; 0: the median of the round's", least=0), **ABSENT},
        conflicts=one_model,
        screen=norm_clipping,
        accumulate=WeightedMean,
        keeps=keeps,
    )
)
