"""Aggregation weights of the devices.

samples (FedAvg):  w_k ~ n_k over the devices that trained the part.
fediot (Zhao, Barnaghi and Haddadi 2022, arXiv 2109.04833):  w_k ~ n_k, times ``factor`` where device k trains two or
more modalities; per part, so that a part of one modality is averaged over the devices that have it. 100 is the factor
in its published code, where all devices have the same number of samples: n_k beside it is this project's choice.
cka (FedMVP, arXiv 2406.11048):  gamma_i = softmax_i(sum over j other than i of s_ij),  s_ij = CKA(outputs of i, of j on
the same probe pairs),  CKA(X, Y) = |Y^T X|^2 / (|X^T X| |Y^T Y|), Frobenius norms, columns centred (Kornblith et
al. 2019, arXiv 1905.00414).
relationship (AproMFL, arXiv 2502.04400):  weight_ij = softmax_j(cos(theta_i, theta_j)) over the devices j that hold the
mapping, i itself included (D-A6); theta is the flattened mapping. Buffers do not count: integers, and the running
statistics of batch norm, which describe inputs, and whose size would drown the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from edgefl.aggregation.mean import BUFFERS, Layout, MisfitError, Tensors, check, layout_of, proportional
from edgefl.data.arrays import Array
from edgefl.errors import ModelError, Problem
from edgefl.registry import Option, Recipe, Rule, Weight, default, register

Floats = npt.NDArray[np.float64]
Load = Callable[[], Tensors]
#: A run of elements of one flattened tensor: name, first, end.
Piece = tuple[str, int, int]

#: Outputs come as f32: a spread below its spacing (2^-23 of the value) is rounding, so the representation is constant.
_RESOLUTION = 2.0**-23
#: What all devices' pieces may take at once: a mapping of 2 million weights of 50 devices is then loaded 7 times.
BUDGET_BYTES = 128 * 2**20
_SMALLEST_NORM = 1e-12


def by_samples(samples: Mapping[str, int], modalities: Mapping[str, int] | None = None) -> dict[str, float]:
    """Weights, which sum to 1, of the devices with samples; devices with none are left out."""
    return proportional(samples)


def fediot(samples: Mapping[str, int], modalities: Mapping[str, int], *, factor: float = 100.0) -> dict[str, float]:
    """As ``by_samples``, ``factor`` times as much where ``modalities``, how many a device trains, are two or more.

    Raises ModelError for a device whose modalities are not known.
    """
    unknown = sorted(device for device, count in samples.items() if count > 0 and device not in modalities)
    if unknown:
        raise ModelError(
            f"how many modalities device '{unknown[0]}' trains is not known",
            remedy="Give the number of modalities of every device with samples, or set weight: samples.",
        )
    return proportional(
        {device: n * (factor if modalities.get(device, 0) > 1 else 1.0) for device, n in samples.items()}
    )


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
        for row, device in zip(rows, names, strict=True):
            tensors = loaders[device]()
            try:
                check(tensors, layout)
            except MisfitError as error:
                raise MisfitError(error.reason, f"device '{device}': {error.message}") from None
            np.concatenate([tensors[name].reshape(-1)[first:end] for name, first, end in pieces], out=row)
        products += rows @ rows.T
    return names, products


def _pieces(layout: Layout, limit: int) -> Iterator[list[Piece]]:
    """The elements that count, in sets of at most ``limit``."""
    pieces: list[Piece] = []
    room = limit
    for name, (shape, floating) in layout.items():
        size = int(np.prod(shape, dtype=np.int64)) if floating and not name.endswith(BUFFERS) else 0
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


def _alone(recipe: Recipe) -> list[Problem]:
    return [
        Problem(role, f"weight: own exchanges nothing; set {role}: {default(role)}")
        for role in ("cluster", "prototypes", "repair", "optimise")
        if default(role) not in recipe[role]
    ]


_WHOLE_DEPTH = "cka compares models at the whole depth, which with schedule: mixed some do not have; set another weight"
register(
    Weight("samples", "number of samples, per part", default=True, weigh=by_samples),
    Weight(
        "fediot",
        "the same, devices with several modalities counting more (FedIoT)",
        {"factor": Option(100.0, "how many times as much", least=0)},
        weigh=fediot,
    ),
    Weight(
        "own",
        "nothing is exchanged: each device trains alone",
        conflicts=_alone,
        per_round=True,
        weigh=by_samples,
        exchange="nothing",
    ),
    Weight(
        "cka",
        "how much a model's view of probe samples agrees with the others' (FedMVP)",
        rules=(Rule("schedule", "by_budget", _WHOLE_DEPTH, wanted=False),),
        per_round=True,
        similarity=cka_weights,
    ),
    Weight(
        "relationship",
        "each device gets its own mean of the mappings, by their cosine; its classifier stays at home (AproMFL)",
        per_round=True,
        headless="weight: relationship exchanges the mappings, the heads, and without them nothing is left to map",
        weigh=by_samples,
        personal=relationship,
        exchange="mappings",
        moves=True,
    ),
)
