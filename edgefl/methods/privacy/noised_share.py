"""A device's share of Gaussian noise (distributed noise: Dwork et al., EUROCRYPT 2006; Goryczka, Xiong 2015).

theta_k = theta + D_k min(1, C / |D_k|) + N(0, s^2 I),  where D_k is the whole change of device k, s = z C / sqrt(n).

Of n such devices the sum has the noise N(0, (z C)^2 I) of DP-FedAvg (``edgefl.methods.privacy.gaussian``, which sets C
and s, and accounts). A round that is tried again draws again, and is accounted for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from edgefl.aggregation.mean import BLOCK, BUFFERS
from edgefl.aggregation.noise import Entropy, with_noise
from edgefl.errors import DivergedError, Problem
from edgefl.registry import Option, Recipe, register
from edgefl.roles import Upload

if TYPE_CHECKING:
    from edgefl.aggregation.mean import Tensors
    from edgefl.registry import Trained

entropy: Entropy = os.urandom


def length(parts: Mapping[str, Tensors], received: Mapping[str, Tensors]) -> float:
    """|D|, of the weights of all parts together, in f64."""
    squares = []
    for part, tensors in parts.items():
        for name, tensor in tensors.items():
            if tensor.dtype.kind != "f" or name.endswith(BUFFERS):
                continue
            flat, before = tensor.reshape(-1), received[part][name].reshape(-1)
            for start in range(0, flat.size, BLOCK):
                span = slice(start, start + BLOCK)
                change = np.subtract(flat[span], before[span], dtype=np.float64)
                squares.append(float(change @ change))
    return math.sqrt(math.fsum(squares))


def send(
    trained: Trained, generator: np.random.Generator, *, clip: float, deviation: float
) -> tuple[dict[str, Tensors], Tensors]:
    """Every part, clipped together and with noise; buffers and integers as received.

    Raises DivergedError for a change that is not finite, which noise would not hide.
    """
    found = length(trained.parts, trained.received)
    if not math.isfinite(found):
        raise DivergedError(
            "the trained weights are not finite numbers",
            remedy="Lower training.lr, or set training.clip_norm: 1.0.",
        )
    factor = min(1.0, clip / found) if found else 1.0
    parts = trained.parts.items()
    return {part: with_noise(own, trained.received[part], deviation, entropy, factor) for part, own in parts}, {}


def by_hand(recipe: Recipe) -> list[Problem]:
    """Noise without the account that says what it is worth."""
    text = "is what combine: gaussian_noise sets; leave slots.upload out, and set slots.combine: {gaussian_noise: {at:"
    return [Problem("upload.noised_share", f"{text} devices}}}}")]


register(
    Upload(
        "noised_share",
        "every part, clipped and with a share of the noise; gaussian_noise sets it (at: devices)",
        {
            "clip": Option(1.0, "C, the most that the whole change may measure", least=1e-6),
            "deviation": Option(1.0, "s, standard deviation of the noise on each weight", least=0),
        },
        conflicts=by_hand,
        send=send,
    )
)
