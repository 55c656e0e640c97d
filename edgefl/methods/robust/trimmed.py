"""Coordinate-wise median and trimmed mean (Yin et al., ICML 2018, arXiv 1803.01498, definitions 1 and 2).

median: theta_j = med {theta_kj : k}.  trimmed mean: theta_j = the mean of {theta_kj : k} without its c largest and
its c smallest,  c = beta n, here rounded up and at most (n - 1) / 2, rounded down. With that c it is the median, which
of an even n is the mean of the middle two.

All devices count alike, as in the paper: its bounds are of a share of the devices, and how many samples a device has is
its own word. A part is combined over the devices that trained it. Of one or two of them nothing can be trimmed: it is
their mean. Of integers and booleans the lower median counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from edgefl.aggregation.mean import Layout, Load, Tensor
from edgefl.aggregation.pieces import BUDGET_BYTES, Piece, pieces, rows_of
from edgefl.registry import Option, Rule, register
from edgefl.roles import Combine

Combined = tuple[dict[str, Tensor], dict[str, float]]

#: 8-byte values of each element at a time: integers as loaded and in order, or floats so, and which are trimmed.
_COPIES = 2


def median(loaders: Mapping[str, Load], layout: Layout) -> Combined:
    """The coordinate-wise median, and each device's share of values that are not in the middle."""
    return trim(loaders, layout, len(loaders))


def trimmed_mean(loaders: Mapping[str, Load], layout: Layout, *, share: float = 0.2) -> Combined:
    """The coordinate-wise trimmed mean, and each device's share of values that are trimmed. ``share``: beta."""
    return trim(loaders, layout, math.ceil(share * len(loaders) - 1e-9))


def trim(loaders: Mapping[str, Load], layout: Layout, cut: int, budget_bytes: int = BUDGET_BYTES) -> Combined:
    """Coordinate-wise mean without the ``cut`` smallest and largest of the n values.

    ``cut`` is lowered to (n - 1) // 2: the median, or the mean of the two in the middle, is left at least. Sums are
    over sorted values, in f64: they do not depend on the devices' order.
    """
    loads, n = list(loaders.values()), len(loaders)
    cut = min(cut, (n - 1) // 2)
    first = loads[0]()
    combined: dict[str, Tensor] = {
        name: np.empty(shape, np.float32 if floating else first[name].dtype)
        for name, (shape, floating) in layout.items()
    }
    sizes = {
        floating: {k: combined[k].size for k, (_, f) in layout.items() if f == floating} for floating in (True, False)
    }
    limit = max(1, budget_bytes // (8 * _COPIES * n))
    trimmed = np.zeros(n)
    for held in pieces(sizes[True], limit):
        rows = rows_of(loads, held, np.float32)  # [n, elements]
        kept = np.sort(rows, axis=0)[cut : n - cut]
        trimmed += ((rows < kept[0]) | (rows > kept[-1])).sum(axis=1)
        _put(combined, held, kept.mean(axis=0, dtype=np.float64))
    for held in pieces(sizes[False], limit):
        _put(combined, held, np.sort(rows_of(loads, held, np.int64), axis=0)[(n - 1) // 2])
    total = max(1, sum(sizes[True].values()))
    return combined, {device: float(count) / total for device, count in zip(loaders, trimmed, strict=True)}


def _put(combined: Mapping[str, Tensor], held: Sequence[Piece], values: Tensor) -> None:
    """The values of these pieces into the flattened tensors."""
    start = 0
    for name, first, end in held:
        combined[name].reshape(-1)[first:end] = values[start : start + end - first]
        start += end - first


def alike(name: str) -> tuple[Rule, ...]:
    """The rule of a method by which all devices count alike."""
    text = f"{name} counts all devices alike, as its paper does; leave slots.weight out"
    return (Rule("weight", "default", text),)


register(
    Combine(
        "median",
        "median of each weight over the devices (Yin et al., arXiv 1803.01498)",
        rules=alike("median"),
        per_round=True,
        merge=median,
        equal=True,
        moves=True,
    ),
    Combine(
        "trimmed_mean",
        "mean of each weight without the devices' largest and smallest values (Yin et al., arXiv 1803.01498)",
        {
            "share": Option(
                0.2, "share of the devices whose values are left out at either end, rounded up", least=0, most=0.5
            )
        },
        rules=alike("trimmed_mean"),
        per_round=True,
        merge=trimmed_mean,
        equal=True,
        moves=True,
    ),
)
