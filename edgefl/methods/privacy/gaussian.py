"""Client-level differential privacy: DP-FedAvg (McMahan et al., ICLR 2018, arXiv 1710.06963, algorithm 1).

theta' = theta + (sum_k D_k min(1, C / |D_k|) + N(0, (z C)^2 I)) / W,  where D_k is the whole change of device k.

The noise is the server's, or (``at``: devices) each device clips its change and adds N(0, (z C)^2 / n I) to it before
it sends it (distributed noise: Dwork et al., EUROCRYPT 2006; Goryczka, Xiong 2015), n = W - t. Of m that came all but t
count as honest, and the server adds what is missing of each part: (z C)^2 (1 - (m - t) / n), where that is above 0.
t is 1 by default: a device knows its own share, and could take it off.

W is fixed, whoever takes part. A device alone moves the sum by C at most, so each round is a Gaussian mechanism with
mu = 1 / z, and T of them are one with mu^2 = T / z^2 (Dong, Roth, Su 2019, arXiv 1905.02383, corollary 3.3). Exactly:

delta = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu)  (Balle, Wang, ICML 2018, arXiv 1805.06530).

What is protected is whether a device's data are in the run, as against a device that takes its place and changes
nothing ("zero-out", Kairouz et al. 2021, arXiv 2103.00039). The paper's moments accountant also counts that devices
are drawn at random (amplification). That is not counted here: devices see whether they are asked. Towards a server that
sees each update by itself, a device's u updates have mu^2 = u n / z^2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from edgefl.aggregation.mean import WeightedMean
from edgefl.aggregation.noise import Noise
from edgefl.aggregation.pieces import Changes
from edgefl.errors import Problem
from edgefl.methods.robust.norm_clipping import norm_clipping
from edgefl.methods.robust.trimmed import alike
from edgefl.registry import Account, Option, Recipe, Slot, choose, offers, register
from edgefl.roles import Combine

#: Where the ratio of Mills is taken by its series, which is then right to 2e-5.
_FAR = 20.0
#: |g| of g ~ N(0, I), of any size, is further from its mean once in 1e15: 2 e^(-t^2 / 2).
_SURE = 8.4


def resolve(devices: int, rounds: int, **options: Any) -> Recipe:
    """W and z as numbers, and what devices do to their updates.

    W: ``denominator``, 0 for the number of devices. z: ``noise``, 0 for the least that keeps (epsilon, delta) over all
    rounds.
    """
    over, z = options["denominator"] or float(devices), options["noise"]
    z = z or noise_for(rounds, options["epsilon"], options["delta"])
    slots: dict[str, Slot] = {"combine": {"gaussian_noise": {**options, "denominator": over, "noise": z}}}
    if options["at"] == "devices":
        deviation = z * options["clip"] / math.sqrt(shares(over, options["dishonest"]))
        slots["upload"] = {"noised_share": {"clip": options["clip"], "deviation": deviation}}
    return slots


def shares(denominator: float, dishonest: float) -> float:
    """n, how many devices' shares are the whole noise."""
    return max(1.0, denominator - dishonest)


def noise_of(*, clip: float, noise: float, denominator: float, at: str, dishonest: float) -> Noise:
    """Deviation z C / W, and whose it is."""
    whole = Noise(denominator, noise * clip / denominator, clip)
    return whole if at == "server" else whole._replace(shares=shares(denominator, dishonest), dishonest=dishonest)


def clipped(
    changes: Mapping[str, Changes], *, clip: float, noise: float, denominator: float, at: str, dishonest: float
) -> tuple[dict[str, float], dict[str, object]]:
    """min(1, C / |D_k|) where that is below 1; the record has no norms, which would tell of the devices.

    With a device's own noise |D_k| is bounded by C and the longest noise. What is shorter than any noise has none, and
    is left out.
    """
    factors, told = norm_clipping(changes, norm=clip)
    if at == "server":
        return factors, {"bound": clip}
    bare, share = [], noise * clip / math.sqrt(shares(denominator, dishonest))
    factors = {}
    for device, length in cast("dict[str, float]", told["norms"]).items():
        size = sum(part.size for part in changes.values() if device in part.devices)
        most = clip + share * (math.sqrt(size) + _SURE)
        if length < share * (size / math.sqrt(size + 1) - _SURE):
            bare.append(device)
            factors[device] = 0.0
        elif length > most:
            factors[device] = most / length
    note = f"{', '.join(bare)} sent a change without its noise, which was left out; upgrade the agent."
    return factors, {"bound": clip, **({"note": note} if bare else {})}


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


def account(
    spent: float,
    uploads: int,
    *,
    noise: float,
    delta: float,
    epsilon: float,
    denominator: float = 1.0,
    at: str = "server",
    dishonest: float = 0.0,
) -> Account:
    """The account after one more round; over where another would cost more than the budget ``epsilon``."""
    each = noise**-2
    now, after = spent + each, spent + 2 * each
    record = {"epsilon": epsilon_of(now, delta), "delta": delta, "budget": epsilon}
    if at == "devices":
        record["server"] = epsilon_of(uploads * shares(denominator, dishonest) * each, delta)
    return Account(now, record, over=epsilon_of(after, delta) > epsilon)


def unfit(recipe: Recipe) -> list[Problem]:
    """``too_little``, and an upload in the place of the noise that devices add."""
    if choose("combine", recipe).options["at"] == "server" or offers(recipe, "upload", "default"):
        return too_little(recipe)
    return [*too_little(recipe), Problem("upload", "with at: devices it is their changes with noise; leave it out")]


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
            "at": Option("server", "who adds the noise; devices: each its share", choices=("server", "devices")),
            "dishonest": Option(
                1, "t, devices whose share does not count, as they add none or tell it; each knows its own", least=0
            ),
        },
        rules=alike("gaussian_noise"),
        conflicts=unfit,
        per_round=True,
        screen=clipped,
        accumulate=WeightedMean,
        equal=True,
        moves=True,
        resolve=resolve,
        noise=noise_of,
        account=account,
    )
)
