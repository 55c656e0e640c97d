"""Upload after MFedMC (Yuan et al., arXiv 2401.16685): each device sends the encoders of its best modalities alone.

The ``gamma`` modalities m with the highest priority of a device are uploaded in its round t (from 0):

    p(m) = a_s S'(m) + a_c (1 - c'(m)) + a_r (t - l(m)) / (t + 1)

S'(m), c'(m): impact and size, scaled to 0 ... 1 over the device's modalities (min-max); l(m): the round in which m was
last uploaded, -1 before the first. As in the authors' code (github.com/liangqiyuan/mmFedMC), from which this was read.

Adapted: there impact is the sum of absolute SHAP values of a modality's predictions in a local random forest, which
fuses them. Here a network fuses, so that S(m) is the exact Shapley value of m in the game v(A) = - loss on the
hold-out given the modalities A. v of no modality is the same term in every S(m), and falls out of S'. A modality is its
encoder and its head. In the paper the fusion never travels; here fusion and classifier are everybody's and always do.
Ties are drawn. The paper's choice of clients is not here: that is a slot of its own (select).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from edgefl.models.spec import modality_of
from edgefl.registry import Option, register
from edgefl.roles import Upload

if TYPE_CHECKING:
    from edgefl.aggregation.mean import Tensors
    from edgefl.registry import Trained


def shapley(losses: Mapping[frozenset[str], float], modality: str, modalities: int) -> float:
    """S(m) = sum over A without m of |A|! (M - |A| - 1)! / M! (loss(A) - loss(A + m)); the loss of none is taken as 0.

    0 where no loss is known.
    """
    return sum(
        (losses.get(with_it - {modality}, 0.0) - loss) / (modalities * comb(modalities - 1, len(with_it) - 1))
        for with_it, loss in losses.items()
        if modality in with_it
    )


def scaled(values: Mapping[str, float]) -> dict[str, float]:
    """Values scaled to 0 ... 1; equal ones are 0."""
    low, high = min(values.values()), max(values.values())
    return {m: (value - low) / (high - low) if high > low else 0.0 for m, value in values.items()}


def send(
    trained: Trained, generator: np.random.Generator, *, gamma: float, impact: float, size: float, recency: float
) -> tuple[dict[str, Tensors], Tensors]:
    """The parts of the ``gamma`` modalities of highest priority, and those of no modality."""
    owners = {part: modality_of(part) for part in trained.parts}
    own = sorted({m for m in owners.values() if m is not None})
    kept = trained.kept
    now = int(kept["rounds"][0]) if kept else 0
    last = {m: int(kept[f"last/{m}"][0]) if f"last/{m}" in kept else -1 for m in own}
    values = {m: sum(t.size for p, each in trained.parts.items() if owners[p] == m for t in each.values()) for m in own}
    impacts, sizes = scaled({m: shapley(trained.losses, m, len(own)) for m in own}), scaled(values)
    priority = {
        m: impact * impacts[m] + size * (1 - sizes[m]) + recency * (now - last[m]) / (now + 1)
        for m in generator.permutation(own)
    }
    best = sorted(priority, key=lambda m: -priority[m])[: int(gamma)]
    noted = {f"last/{m}": now if m in best else last[m] for m in own} | {"rounds": now + 1}
    sent = {part: tensors for part, tensors in trained.parts.items() if owners[part] in {None, *best}}
    return sent, {name: np.array([number], np.int64) for name, number in noted.items()}


def most(part_bytes: Mapping[str, int], *, gamma: float) -> int:
    """The bytes of the ``gamma`` largest modalities, and of the parts of no modality."""
    sizes: dict[str | None, int] = {}
    for part, count in part_bytes.items():
        sizes[modality_of(part)] = sizes.get(modality_of(part), 0) + count
    always = sizes.pop(None, 0)
    return always + sum(sorted(sizes.values())[-int(gamma) :])


def _weight(of: str) -> Option:
    return Option(1 / 3, f"weight of {of} in a modality's priority", least=0)


MFEDMC = Upload(
    "mfedmc",
    "the encoders of its best modalities, by impact, size and recency (MFedMC, arXiv 2401.16685)",
    {
        "gamma": Option(1, "most modalities of an update", least=1),
        "impact": _weight("its impact on the loss (a_s)"),
        "size": _weight("the smallness of its encoder (a_c)"),
        "recency": _weight("the rounds since it was last sent (a_r)"),
    },
    send=send,
    most=most,
    returns=True,
)
register(MFEDMC)
