"""All devices' values of a part side by side, piece by piece: each part is loaded again for every set of pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.aggregation.mean import BUFFERS, Layout, Load, MisfitError, Tensor, check, layout_of, refusal

Floats = npt.NDArray[np.float64]
#: A run of elements of one flattened tensor: name, first, end.
Piece = tuple[str, int, int]

#: What all devices' pieces may take at once: a part of 2 million weights of 50 devices is then loaded 7 times.
BUDGET_BYTES = 128 * 2**20


def pieces(sizes: Mapping[str, int], limit: int) -> Iterator[list[Piece]]:
    """The elements of tensors of these sizes, in sets of at most ``limit``."""
    held: list[Piece] = []
    room = limit
    for name, size in sizes.items():
        first = 0
        while first < size:
            end = min(size, first + room)
            held.append((name, first, end))
            room -= end - first
            first = end
            if not room:
                yield held
                held, room = [], limit
    if held:
        yield held


def rows_of(loaders: Sequence[Load], held: Sequence[Piece], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The devices' values [K, elements of these pieces]; one device's part is in memory beside them."""
    rows = np.empty((len(loaders), sum(end - first for _, first, end in held)), dtype)
    for row, load in zip(rows, loaders, strict=True):
        tensors = load()
        np.concatenate([tensors[name].reshape(-1)[first:end] for name, first, end in held], out=row)
    return rows


def weight_sizes(layout: Layout) -> dict[str, int]:
    """Elements of each tensor that is a weight: floating, and no statistic of batch norm."""
    return {
        name: math.prod(shape) for name, (shape, floating) in layout.items() if floating and not name.endswith(BUFFERS)
    }


def inner_products(loaders: Mapping[str, Load], budget_bytes: int = BUDGET_BYTES) -> tuple[list[str], Floats]:
    """The devices, sorted, and the inner products [K, K] of their flattened weights.

    Raises MisfitError, naming the device, for tensors that differ from the first device's in names or shapes, or are
    not finite. At any time one part is loaded, and pieces of all devices of ``budget_bytes`` in all.
    """
    names = sorted(loaders)
    layout = layout_of(loaders[names[0]]())
    products = np.zeros((len(names), len(names)))
    fitting = [_fitting(device, loaders[device], layout) for device in names]
    for held in pieces(weight_sizes(layout), max(1, budget_bytes // (8 * len(names)))):
        rows = rows_of(fitting, held, np.float64)
        products += rows @ rows.T
        del rows  # before the next ones are made
    return names, products


def _fitting(device: str, load: Load, layout: Layout) -> Callable[[], Mapping[str, Tensor]]:
    def checked() -> Mapping[str, Tensor]:
        tensors = load()
        try:
            check(tensors, layout)
        except MisfitError as error:
            raise MisfitError(error.reason, f"device '{device}': {error.message}") from None
        return tensors

    return checked


class Changes(NamedTuple):
    """The devices' changes of one part: their inner products [K, K], over ``size`` weights."""

    devices: list[str]
    products: Floats
    size: int


def changes_of(loaders: Mapping[str, Load], previous: Load, layout: Layout) -> Changes:
    """The changes against ``previous``, of the devices whose part fits it.

    <x_i - x, x_j - x> = <x_i, x_j> - <x_i, x> - <x, x_j> + <x, x>, in f64.
    """
    fitting = {d: load for d, load in loaders.items() if refusal(load, partial(check, layout=layout)) is None}
    (_, *devices), gram = inner_products({"": previous, **fitting})  # "" is no device, and sorts before all
    products = gram[1:, 1:] - gram[1:, :1] - gram[:1, 1:] + gram[0, 0]
    return Changes(devices, products, sum(weight_sizes(layout).values()))
