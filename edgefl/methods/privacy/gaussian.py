"""Client-level differential privacy: DP-FedAvg (McMahan et al., ICLR 2018, arXiv 1710.06963, algorithm 1).

theta' = theta + (sum_k D_k min(1, C / |D_k|) + N(0, (z C)^2 I)) / W,  where D_k is the whole change of device k.

W is fixed, whoever takes part. A device alone moves the sum by C at most, so each round is a Gaussian mechanism with
mu = 1 / z, and T of them are one with mu^2 = T / z^2 (Dong, Roth, Su 2019, arXiv 1905.02383, corollary 3.3). Exactly:

delta = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu)  (Balle, Wang, ICML 2018, arXiv 1805.06530).

What is protected is whether a device's data are in the run, as against a device that takes its place and changes
nothing ("zero-out", Kairouz et al. 2021, arXiv 2103.00039). The paper's moments accountant also counts that devices
are drawn at random (amplification). That is not counted here: devices see whether they are asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from edgefl.aggregation.mean import WeightedMean
from edgefl.aggregation.noise import Noise
from edgefl.aggregation.pieces import Changes
from edgefl.errors import Problem
from edgefl.methods.robust.norm_clipping import norm_clipping
from edgefl.methods.robust.trimmed import alike
from edgefl.registry import Account, Option, Recipe, choose, register
from edgefl.roles import Combine

#: Where the ratio of Mills is taken by its series, which is then right to 2e-5.
_FAR = 20.0


def clipped(changes: Mapping[str, Changes], *, clip: float) -> tuple[dict[str, float], dict[str, object]]:
    """min(1, C / |D_k|) where that is below 1; the record has no norms, which would tell of the devices."""
    factors, _ = norm_clipping(changes, norm=clip)
    return factors, {"bound": clip}


def noise_of(
    devices: int, rounds: int, *, clip: float, noise: float, epsilon: float, delta: float, denominator: float
) -> Noise:
    """Gaussian noise of a round for the privacy budget.

    Denominator W, deviation z C / W, bound C = ``clip``. W: ``denominator``, 0 for the number of devices. z: ``noise``,
    0 for the least that keeps (epsilon, delta) over all rounds.
    """
    over = denominator or float(devices)
    return Noise(over, (noise or noise_for(rounds, epsilon, delta)) * clip / over, clip)


def delta_of(epsilon: float, mu: float) -> float:
    """The least delta of a Gaussian mechanism of sensitivity ``mu`` standard deviations."""
    far, near = epsilon / mu + mu / 2, epsilon / mu - mu / 2
    return math.erfc(near / math.sqrt(2)) / 2 - math.exp(-(near**2) / 2) * _mills(far)


def _mills(x: float) -> float:
    """Phi(-x) e^(x^2 / 2), which does not underflow."""
    if x < _FAR:
        return math.erfc(x / math.sqrt(2)) / 2 * math.exp(x**2 / 2)
    return (1 - x**-2) / (x * math.sqrt(2 * math.pi))


def epsilon_of(spent: float, delta: float) -> float:
    """The least epsilon at this delta of rounds with mu^2 = ``spent`` in all, by bisection to 1e-9."""
    mu = math.sqrt(spent)
    low, high = 0.0, 1.0
    while delta_of(high, mu) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle, mu) > delta else (low, middle)
    return high


def noise_for(rounds: int, epsilon: float, delta: float) -> float:
    """The least z by which so many rounds cost ``epsilon``, less a millionth, by bisection to 1e-9."""
    low, high, most = 0.0, 1.0, epsilon * (1 - 1e-6)
    while epsilon_of(rounds / high**2, delta) > most:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of(rounds / middle**2, delta) > most else (low, middle)
    return high


def account(spent: float, rounds: int, *, noise: float, delta: float, epsilon: float) -> Account:
    """The account after one more round; over where another would cost more than the budget ``epsilon``."""
    each = (noise or noise_for(rounds, epsilon, delta)) ** -2
    now, after = spent + each, spent + 2 * each
    record = {"epsilon": epsilon_of(now, delta), "delta": delta, "budget": epsilon}
    return Account(now, record, over=epsilon_of(after, delta) > epsilon)


def too_little(recipe: Recipe) -> list[Problem]:
    """Noise so weak that one round costs more than the budget."""
    slot = choose("combine", recipe)
    noise, delta, budget = (float(slot.options[name]) for name in ("noise", "delta", "epsilon"))
    if not noise or (first := epsilon_of(noise**-2, delta)) <= budget:
        return []
    text = f"one round with noise {noise:g} costs epsilon {first:.3g} at delta {delta:g}, and the budget is {budget:g}"
    return [Problem(f"combine.{slot.name}", f"{text}; give more noise, or a larger epsilon")]


register(
    Combine(
        "gaussian_noise",
        "mean of clipped changes with Gaussian noise: differential privacy of devices (DP-FedAvg, arXiv 1710.06963)",
        {
            "clip": Option(1.0, "C, the most that a device's whole change may measure", least=1e-6),
            "noise": Option(
                0.0,
                "z, its standard deviation in units of C; 0: such that all rounds cost `epsilon`",
                least=0,
                most=1e6,
            ),
            "epsilon": Option(8.0, "budget: the run ends before it costs more", least=0.01),
            "delta": Option(
                1e-5, "the delta of that epsilon; below one over the number of devices", least=1e-12, most=0.1
            ),
            "denominator": Option(
                0.0, "W, what the sum is divided by; 0: round.devices; where a selection asks fewer, as many", least=0
            ),
        },
        rules=alike("gaussian_noise"),
        conflicts=too_little,
        per_round=True,
        screen=clipped,
        accumulate=WeightedMean,
        equal=True,
        moves=True,
        noise=noise_of,
        account=account,
    )
)
