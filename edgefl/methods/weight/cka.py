"""Weights by how alike the devices' models see the same probe pairs.

FedMVP, arXiv 2406.11048:  gamma_i = softmax_i(sum over j other than i of s_ij),  s_ij = CKA(outputs of i, of j),
CKA(X, Y) = |Y^T X|^2 / (|X^T X| |Y^T Y|), Frobenius norms, columns centred (Kornblith et al. 2019, arXiv 1905.00414).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edgefl.data.arrays import Array
from edgefl.errors import ModelError, Problem
from edgefl.registry import Recipe, Weight, offers, register

Floats = npt.NDArray[np.float64]

#: Outputs come as f32: a spread below its spacing (2^-23 of the value) is rounding, so the representation is constant.
_RESOLUTION = 2.0**-23


def linear_cka(x: Array, y: Array) -> float:
    """Similarity, 0..1, of two representations [m, d] and [m, e] of the same m inputs.

    1 for a rotation, an isotropic scaling or a shift of one another; 0 where one of them is constant.
    """
    return _alike(_gram("x", x), _gram("y", y))


def cka_weights(outputs: Mapping[str, Array]) -> dict[str, float]:
    """Weights, which sum to 1, of the devices whose models gave ``outputs`` [m, d] on the same m probe pairs.

    d may differ between devices. Raises ModelError, naming the device, for outputs that are not finite numbers [m, d].
    """
    grams = {device: _gram(f"device '{device}'", output) for device, output in sorted(outputs.items())}
    for device, gram in grams.items():
        first = next(iter(grams))
        if gram.shape != grams[first].shape:
            raise ModelError(
                f"device '{device}' has outputs on {len(gram)} probe pairs, '{first}' on {len(grams[first])}",
                remedy="Run every device's model on the same probe pairs.",
            )
    total_gram = sum(grams.values())  # sum over j of <G_i, G_j> = <G_i, sum over j of G_j>: N products, not N^2
    sums = {device: float((gram * (total_gram - gram)).sum()) for device, gram in grams.items()}
    top = max(sums.values(), default=0.0)  # else exp overflows from 710 devices on
    odds = {device: math.exp(value - top) for device, value in sums.items()}
    total = sum(odds.values())
    return {device: value / total for device, value in odds.items()}


def _gram(whose: str, output: Array) -> Floats:
    """X X^T [m, m] of the centred output [m, d], of Frobenius norm 1; zeros when the output is constant."""
    if output.ndim != 2 or not np.isfinite(output).all():
        raise ModelError(
            f"the outputs of {whose} on the probe pairs are not finite numbers [pairs, width]: shape "
            f"{list(output.shape)}",
            remedy="Leave the device out of the round: its model has diverged or is another one.",
        )
    x = output.astype(np.float64)
    centred = x - x.mean(axis=0)
    if np.linalg.norm(centred) <= _RESOLUTION * np.linalg.norm(x):
        return np.zeros((len(x), len(x)))
    gram: Floats = centred @ centred.T
    return gram / float(np.linalg.norm(gram))


def _alike(gram_x: Floats, gram_y: Floats) -> float:
    if gram_x.shape != gram_y.shape:
        raise ModelError(
            f"representations of {len(gram_x)} and {len(gram_y)} inputs cannot be compared",
            remedy="Run both models on the same inputs.",
        )
    return float((gram_x * gram_y).sum())  # <X X^T, Y Y^T> = |Y^T X|^2


def _depth(recipe: Recipe) -> list[Problem]:
    if not offers(recipe, "schedule", "by_budget"):
        return []
    text = "cka compares models at the whole depth, which with schedule: mixed some do not have; set another weight"
    return [Problem("weight", text)]


register(
    Weight(
        "cka",
        "how much a model's view of probe samples agrees with the others' (FedMVP)",
        source="arXiv 2406.11048",
        conflicts=_depth,
        per_round=True,
        similarity=cka_weights,
    )
)
