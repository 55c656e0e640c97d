"""Weights of each device's own mean of the mappings (AproMFL, arXiv 2502.04400).

weight_ij = softmax_j(cos(theta_i, theta_j)) over the devices j that hold the mapping, i itself included (D-A6); theta
is the flattened mapping. Buffers do not count: integers, and the running statistics of batch norm, which describe
inputs, and whose size would drown the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from edgefl.aggregation.mean import BUFFERS, Layout, MisfitError, Tensors, check, layout_of
from edgefl.methods.weight.samples import by_samples
from edgefl.registry import Weight, register

Floats = npt.NDArray[np.float64]
Load = Callable[[], Tensors]
#: A run of elements of one flattened tensor: name, first, end.
Piece = tuple[str, int, int]

#: What all devices' pieces may take at once: a mapping of 2 million weights of 50 devices is then loaded 7 times.
BUDGET_BYTES = 128 * 2**20
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


def inner_products(loaders: Mapping[str, Load], budget_bytes: int = BUDGET_BYTES) -> tuple[list[str], Floats]:
    """The devices, sorted, and the inner products [K, K] of their flattened mappings.

    All devices' mappings together may not fit in memory: they are gone through piece by piece, and each is loaded again
    for every set of pieces. At any time one mapping is loaded, and pieces of all devices of ``budget_bytes`` in all.
    """
    names = sorted(loaders)
    layout = layout_of(loaders[names[0]]())
    products = np.zeros((len(names), len(names)))
    for pieces in _pieces(layout, max(1, budget_bytes // (8 * len(names)))):
        rows = np.empty((len(names), sum(end - first for _, first, end in pieces)))  # [K, elements of these pieces]
        for k, device in enumerate(names):
            tensors = loaders[device]()
            try:
                check(tensors, layout)
            except MisfitError as error:
                raise MisfitError(error.reason, f"device '{device}': {error.message}") from None
            np.concatenate([tensors[name].reshape(-1)[first:end] for name, first, end in pieces], out=rows[k])
        products += rows @ rows.T
    return names, products


def _pieces(layout: Layout, limit: int) -> Iterator[list[Piece]]:
    """The elements that count, in sets of at most ``limit``."""
    pieces: list[Piece] = []
    room = limit
    for name, (shape, floating) in layout.items():
        size = math.prod(shape) if floating and not name.endswith(BUFFERS) else 0
        first = 0
        while first < size:
            end = min(size, first + room)
            pieces.append((name, first, end))
            room -= end - first
            first = end
            if not room:
                yield pieces
                pieces, room = [], limit
    if pieces:
        yield pieces


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
