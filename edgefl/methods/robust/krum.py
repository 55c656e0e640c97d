"""Krum and Multi-Krum (Blanchard et al., NIPS 2017, arXiv 1703.02757).

score s(k) = sum over the n - f - 2 updates j nearest to k of |V_k - V_j|^2;  the mean of the m updates of lowest score.

V_k is the whole change of device k. Of devices that trained different parts, |V_k - V_j|^2 is the mean over the weights
that both trained. f is ``share`` of the n updates, rounded up, and at most (n - 3) / 2, since the paper needs
n > 2 f + 2: of fewer than five updates none is left out. m = 1 is Krum; by default m = n - f (Multi-Krum).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from edgefl.aggregation.mean import WeightedMean
from edgefl.aggregation.pieces import Changes, Floats
from edgefl.methods.fedavg.weighted_mean import ABSENT, keeps, one_model
from edgefl.methods.robust.trimmed import alike
from edgefl.registry import Option, register
from edgefl.roles import Combine


def krum(
    changes: Mapping[str, Changes], *, share: float = 0.2, keep: float = 0
) -> tuple[dict[str, float], dict[str, object]]:
    """Factor 0 for the updates that are not chosen; and the scores of all. ``share``: f / n, ``keep``: m (0: n - f)."""
    names = sorted({device for part in changes.values() for device in part.devices})
    n = len(names)
    f = max(0, min(math.ceil(share * n - 1e-9), (n - 3) // 2))
    if not f:
        return {}, {"note": f"Of {n} updates none is left out: five or more, and a share above 0, are needed."}
    distances = squared_distances(changes, names)
    np.fill_diagonal(distances, np.inf)  # j is another than k
    scores = np.sort(distances, axis=1)[:, : n - f - 2].sum(axis=1)
    ordered = sorted(range(n), key=lambda k: (scores[k], names[k]))
    left_out = ordered[min(int(keep) or n - f, n - f) :]
    return {names[k]: 0.0 for k in left_out}, {
        "f": f,
        "of": n,
        "scores": dict(zip(names, scores.tolist(), strict=True)),
    }


def squared_distances(changes: Mapping[str, Changes], names: list[str]) -> Floats:
    """|V_k - V_j|^2 / d over the d weights that k and j both trained [n, n]; infinite where that is none."""
    place = {name: k for k, name in enumerate(names)}
    total, sizes = np.zeros((2, len(names), len(names)))
    for part in changes.values():
        at = np.ix_(*[[place[device] for device in part.devices]] * 2)
        squares = np.diag(part.products)
        total[at] += np.maximum(squares[:, None] + squares[None, :] - 2 * part.products, 0.0)
        sizes[at] += part.size
    return np.divide(total, sizes, out=np.full_like(total, np.inf), where=sizes > 0)


register(
    Combine(
        "krum",
        "mean of the updates that lie nearest to their neighbours (Krum, Multi-Krum, arXiv 1703.02757)",
        {
            "share": Option(0.2, "share of the updates that may be an attacker's, rounded up", least=0, most=0.5),
            "keep": Option(
                0, "number of updates that are averaged; 1: Krum; 0: all but `share` of them (Multi-Krum)", least=0
            ),
            **ABSENT,
        },
        rules=alike("krum"),
        conflicts=one_model,
        per_round=True,
        screen=krum,
        accumulate=WeightedMean,
        keeps=keeps,
        equal=True,
    )
)
