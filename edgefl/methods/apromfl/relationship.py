"""Weights of each device's own mean of the mappings (AproMFL, arXiv 2502.04400).

weight_ij = softmax_j(cos(theta_i, theta_j)) over the devices j that hold the mapping, i itself included (D-A6); theta
is the flattened mapping. Buffers do not count: integers, and the running statistics of batch norm, which describe
inputs, and whose size would drown the weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgefl.aggregation.mean import Load
from edgefl.aggregation.pieces import inner_products
from edgefl.methods.fedavg.samples import by_samples
from edgefl.registry import register
from edgefl.roles import Weight

_SMALLEST_NORM = 1e-12


def relationship(loaders: Mapping[str, Load]) -> dict[str, dict[str, float]]:
    """device -> device -> weight, each row of sum 1, for one mapping. ``loaders``: its holders; none: empty.

    A mapping of zeros has cosine 0 with every other and itself. Raises MisfitError, naming the device, for tensors that
    differ from the first device's in names or shapes, or are not finite.
    """
    if not loaders:
        return {}
    names, products = inner_products(loaders)
    norms = np.maximum(np.sqrt(np.diag(products)), _SMALLEST_NORM)
    powers = np.exp(products / np.outer(norms, norms))
    weights = powers / powers.sum(axis=1, keepdims=True)
    return {i: {j: float(weights[r, c]) for c, j in enumerate(names)} for r, i in enumerate(names)}


register(
    Weight(
        "relationship",
        "each device gets its own mean of the mappings, by their cosine; its classifier stays at home (AproMFL)",
        per_round=True,
        headless="weight: relationship exchanges the mappings, the heads, and without them nothing is left to map",
        weigh=by_samples,
        personal=relationship,
        exchange="mappings",
        moves=True,
    )
)
