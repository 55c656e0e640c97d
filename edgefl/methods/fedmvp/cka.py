"""Weights by how much a model's view of probe samples agrees with the others' (FedMVP, arXiv 2406.11048).

gamma_i = softmax_i(sum over j other than i of s_ij),  s_ij = CKA(outputs of i, of j on the same probe pairs),
CKA(X, Y) = |Y^T X|^2 / (|X^T X| |Y^T Y|), Frobenius norms, columns centred (Kornblith et al. 2019, arXiv 1905.00414).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edgefl.data.arrays import Array
from edgefl.errors import ModelError
from edgefl.registry import Rule, register
from edgefl.roles import Weight

Floats = npt.NDArray[np.float64]

#: Outputs come as f32: a spread below its spacing (2^-23 of the value) is rounding, so the representation is constant.
_RESOLUTION = 2.0**-23


def cka_weights(outputs: Mapping[str, Array]) -> dict[str, float]:
    """Weights, which sum to 1, of the devices whose models gave ``outputs`` [m, d] on the same m probe pairs.

    d may differ between devices. Raises ModelError, naming the device, for outputs that are not finite numbers [m, d].
    """
    grams = {device: centred_gram(device, output) for device, output in sorted(outputs.items())}
    for device, own in grams.items():
        first = next(iter(grams))
        if own.shape != grams[first].shape:
            raise ModelError(
                f"device '{device}' has outputs on {len(own)} probe pairs, '{first}' on {len(grams[first])}",
                remedy="Run every device's model on the same probe pairs.",
            )
    total_gram = sum(grams.values())  # sum over j of <G_i, G_j> = <G_i, sum over j of G_j>: N products, not N^2
    sums = {device: float((own * (total_gram - own)).sum()) for device, own in grams.items()}
    top = max(sums.values(), default=0.0)  # else exp overflows from 710 devices on
    odds = {device: math.exp(value - top) for device, value in sums.items()}
    total = sum(odds.values())
    return {device: value / total for device, value in odds.items()}


def centred_gram(device: str, output: Array) -> Floats:
    """X X^T [m, m] of the centred output [m, d], of Frobenius norm 1; zeros when the output is constant.

    <X X^T, Y Y^T> = |Y^T X|^2: the sum of the products of two devices' matrices is their CKA.
    """
    if output.ndim != 2 or not np.isfinite(output).all():
        raise ModelError(
            f"the outputs of device '{device}' on the probe pairs are not finite numbers [pairs, width]: shape "
            f"{list(output.shape)}",
            remedy="Leave the device out of the round: its model has diverged or is another one.",
        )
    x = output.astype(np.float64)
    centred = x - x.mean(axis=0)
    if np.linalg.norm(centred) <= _RESOLUTION * np.linalg.norm(x):
        return np.zeros((len(x), len(x)))
    products: Floats = centred @ centred.T
    return products / float(np.linalg.norm(products))


_WHOLE_DEPTH = "cka compares models at the whole depth, which with schedule: mixed some do not have; set another weight"
register(
    Weight(
        "cka",
        "how much a model's view of probe samples agrees with the others' (FedMVP)",
        rules=(Rule("schedule", "by_budget", _WHOLE_DEPTH, wanted=False),),
        per_round=True,
        similarity=cka_weights,
    )
)
