"""Gaussian noise on a part's weights, from the operating system's generator.

Numbers of a seeded generator would be known to whoever knows the seed, as every device of a run does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.aggregation.mean import BLOCK, BUFFERS, Tensor, Tensors

#: So many random bytes: ``os.urandom``.
Entropy = Callable[[int], bytes]


class Noise(NamedTuple):
    """Noise of a round. ``deviation``: its standard deviation on each weight of the mean.

    ``denominator``: of the mean, whoever takes part: each device weighs one part of it, the rest the model as it was.
    ``longest``: the most that a device's change may measure. ``shares``: how many devices' own noise makes the whole;
    0: the server makes all. ``dishonest``: senders whose own noise does not count.
    """

    denominator: float
    deviation: float
    longest: float
    shares: float = 0.0
    dishonest: float = 0.0

    def lacking(self, senders: int) -> float:
        """Standard deviation of what is missing of the noise when so many devices have sent their shares."""
        if not self.shares:
            return self.deviation
        return self.deviation * math.sqrt(max(0.0, 1 - max(0.0, senders - self.dishonest) / self.shares))


def gaussians(count: int, entropy: Entropy) -> npt.NDArray[np.float64]:
    """So many standard normal numbers [count], in f64 (Box and Muller 1958).

    sqrt(-2 log u) cos(2 pi v) and sqrt(-2 log u) sin(2 pi v), of u in (0, 1] and v in [0, 1) with 53 random bits each;
    none is beyond 8.6, where the probability of any is 1e-17.
    """
    half = (count + 1) // 2
    bits = np.frombuffer(entropy(16 * half), np.uint64).reshape(2, half) >> np.uint64(11)
    u, v = (bits[0] + 1.0) * 2.0**-53, bits[1] * (2 * math.pi * 2.0**-53)
    radius = np.sqrt(-2 * np.log(u))
    return np.concatenate([radius * np.cos(v), radius * np.sin(v)])[:count]


def with_noise(
    tensors: Tensors, previous: Tensors, deviation: float, entropy: Entropy, factor: float = 1.0
) -> dict[str, Tensor]:
    """Tensors with Gaussian noise added to each weight, their change from ``previous`` times ``factor``.

    ``deviation``: the noise's standard deviation. Buffers and integers are those of ``previous``: noise would break
    them.
    """
    noisy: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype.kind != "f" or name.endswith(BUFFERS):
            noisy[name] = previous[name]
            continue
        noisy[name] = np.array(tensor, np.float32, order="C")
        flat = noisy[name].reshape(-1)
        for start in range(0, flat.size, BLOCK):
            piece = flat[start : start + BLOCK]
            if factor != 1:
                before = previous[name].reshape(-1)[start : start + BLOCK]
                piece[:] = before + factor * np.subtract(piece, before, dtype=np.float64)
            if deviation:
                piece += deviation * gaussians(piece.size, entropy)
    return noisy
