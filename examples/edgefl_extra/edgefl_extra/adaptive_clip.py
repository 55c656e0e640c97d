"""Adaptive clipping (Andrew et al., NeurIPS 2021, arXiv 1905.03871): private changes, clipped at a quantile of theirs.

θ' = θ + (Σ_k D_k min(1, C / |D_k|) + N(0, (z_Δ C)² I)) / W,  where D_k is the whole change of device k, W fixed.
b = (|{k: |D_k| <= C}| + N(0, σ_b²)) / n, in 0 … 1;  C' = C exp(-η (b - γ)):  C moves to the γ-quantile of the |D_k|.

Account: sum and count are one Gaussian mechanism with 1 / z² = 1 / z_Δ² + 1 / σ_b², of which the count takes ``share``;
z, ε and δ are then as of gaussian_noise, whose account this is. A device in whose place one changes nothing moves the
sum by C at most, and the count by 1: the paper counts ± 1/2 about a half, which is for devices that are added or
removed. C follows from noisy numbers alone; the factors in the coordinator's record are exact, as those of
gaussian_noise. n is the number of usable updates: who answers with one is not hidden. For the count to say anything,
z / √share has to be well below n.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgefl.aggregation.mean import WeightedMean
from edgefl.aggregation.noise import Entropy, Noise, gaussians
from edgefl.methods.privacy.gaussian import account, too_little
from edgefl.methods.robust.norm_clipping import norm_clipping
from edgefl.methods.robust.trimmed import alike
from edgefl.registry import Option, Recipe, Screening, register
from edgefl.roles import Combine

if TYPE_CHECKING:
    from edgefl.aggregation.pieces import Changes

entropy: Entropy = os.urandom


def clipped(
    changes: Mapping[str, Changes], *, clip: float, quantile: float, rate: float, noise: float, share: float
) -> Screening:
    """min(1, C / |D_k|) where that is below 1, and C'."""
    factors, _ = norm_clipping(changes, norm=clip)
    devices = {device for part in changes.values() for device in part.devices}
    if not devices:
        return Screening({}, {"bound": clip})
    count = len(devices) - len(factors) + noise / math.sqrt(share) * float(gaussians(1, entropy)[0])
    below = min(max(count / len(devices), 0.0), 1.0)
    following = clip * math.exp(-rate * (below - quantile))
    return Screening(factors, {"bound": clip, "next": following}, {"clip": following})


def resolve(devices: int, rounds: int, **options: float) -> Recipe:
    """W as a number."""
    return {"combine": {"adaptive_clip": {**options, "denominator": options["denominator"] or float(devices)}}}


def noise_of(*, clip: float, noise: float, share: float, denominator: float) -> Noise:
    """W, z_Δ C / W and C."""
    return Noise(denominator, noise / math.sqrt(1 - share) * clip / denominator, clip)


ADAPTIVE_CLIP = Combine(
    "adaptive_clip",
    "mean of changes clipped at a quantile of their lengths, with Gaussian noise (arXiv 1905.03871)",
    {
        "clip": Option(0.1, "C of the first round", least=1e-6),
        "quantile": Option(0.5, "γ, share of the changes that C is to leave whole", least=0, most=1),
        "rate": Option(0.2, "η, rate of C", least=0, most=10),
        "noise": Option(3.0, "z of sum and count together, in units of their sensitivities", least=1e-3, most=1e6),
        "share": Option(0.1, "share of the account that the count takes", least=1e-6, most=0.999),
        "epsilon": Option(8.0, "budget: the run ends before it costs more", least=0.01),
        "delta": Option(1e-5, "the delta of that epsilon; below one over the number of devices", least=1e-12, most=0.1),
        "denominator": Option(0.0, "W, what the sum is divided by; 0: round.devices", least=0),
    },
    rules=alike("adaptive_clip"),
    conflicts=too_little,
    per_round=True,
    screen=clipped,
    accumulate=WeightedMean,
    equal=True,
    moves=True,
    resolve=resolve,
    noise=noise_of,
    account=account,
)
register(ADAPTIVE_CLIP)
