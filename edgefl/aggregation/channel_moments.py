"""Mean and deviation of each channel, or column, over the fleet, of the moments of each device's data.

mean = sum_k w_k mean_k,   std^2 = sum_k w_k (var_k + (mean_k - mean)^2),   w_k = n_k / sum n, capped: as if the data
were in one place. What devices send is checked before it counts, and of three or more none decides by its outliers: a
deviation beyond WIDE times that of a majority counts as that, and the mean as no further from theirs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from edgefl.aggregation.mean import OF, capped
from edgefl.records import Moments

#: Beyond what float32 squares without overflow, with room to spare; no sensor's unit needs it.
LARGEST = 1e15
#: A deviation below this share of a channel's size is rounding of float32: the channel is constant, and stays unscaled.
CONSTANT = 1e-6
#: One of four whose deviation is 300 times the others' makes that of the fleet 2.7 times theirs, not 150 times.
WIDE = 5.0
#: Of three or more devices none weighs more than this, whatever it claims.
MUCH = 0.5


class Scales(NamedTuple):
    """Constants of one modality's channels, whose data they are of, and which devices' are left out: device -> why."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    devices: tuple[str, ...]
    left_out: dict[str, str]


def doubt(moments: Moments, channels: int, most_steps: int) -> str:
    """Why a device's moments cannot be of so many channels and at most so many time steps, or samples; "": they can."""
    if not 0 < moments.count <= most_steps:
        return f"of {moments.count} time steps, and it has {most_steps}"
    if not len(moments.mean) == len(moments.variance) == channels or len(moments.counts) not in {0, channels}:
        return f"of {len(moments.mean)} channels, and the model takes {channels}"
    if not all(0 <= count <= moments.count for count in moments.counts):
        return "of columns with more cells than samples"
    sizes = [
        max(abs(m), math.sqrt(v)) if v >= 0 else math.nan for m, v in zip(moments.mean, moments.variance, strict=True)
    ]
    return "" if all(size <= LARGEST for size in sizes) else "not finite, negative or too large"


def combined(sent: Mapping[str, Moments], largest_share: float, largest_change: float) -> Scales | None:
    """The fleet's constants; None: no device is left. ``sent``: device -> moments without ``doubt``.

    ``largest_change``: a device whose channel is so many times as large as the median of the others' is left out
    (0: none is), where there are two others to compare it with.
    """
    left_out = _out_of_line(sent, largest_change)
    counted = {name: one for name, one in sent.items() if name not in left_out}
    if not counted:
        return None
    channels = range(len(next(iter(counted.values())).mean))
    pairs = [_channel(counted, c, min(largest_share, MUCH)) for c in channels]
    return Scales(tuple(m for m, _ in pairs), tuple(s for _, s in pairs), tuple(counted), left_out)


def _channel(sent: Mapping[str, Moments], c: int, share: float) -> tuple[float, float]:
    """Mean and deviation of one channel; 0 and 1 where no device has any."""
    counts = {name: size for name, one in sent.items() if (size := _cells(one, c))}
    if not counts:
        return 0.0, 1.0
    total = sum(counts.values())
    weights = capped({name: count / total for name, count in counts.items()}, share)
    parts = _bounded([_Part(weight, sent[name].mean[c], sent[name].variance[c]) for name, weight in weights.items()])
    mean = math.fsum(part.weight * part.mean for part in parts)
    spread = (part.weight * (part.variance + (part.mean - mean) ** 2) for part in parts)
    return mean, _usable(math.sqrt(math.fsum(spread)), mean)


class _Part(NamedTuple):
    """Share, mean and variance of the data of one device, or of several."""

    weight: float
    mean: float
    variance: float


def _together(one: _Part, other: _Part) -> _Part:
    """Mean and variance of both (Chan, Golub, LeVeque 1983)."""
    weight, apart = one.weight + other.weight, other.mean - one.mean
    share = other.weight / weight
    variance = (1 - share) * one.variance + share * other.variance + apart**2 * share * (1 - share)
    return _Part(weight, one.mean + apart * share, variance)


def _bounded(parts: Sequence[_Part]) -> list[_Part]:
    """The parts; from the narrowest on, beyond half of them none wider than WIDE times those before together."""
    found, order = list(parts), sorted(range(len(parts)), key=lambda i: (parts[i].variance, *parts[i]))
    whole = parts[order[0]]
    for at, i in enumerate(order[1:], start=1):
        std, part = math.sqrt(whole.variance), parts[i]
        reach = WIDE * std if len(parts) >= OF and 2 * at > len(parts) and _varies(std, whole.mean) else math.inf
        if math.sqrt(part.variance) > reach:
            mean = min(max(part.mean, whole.mean - reach), whole.mean + reach)
            found[i] = part = _Part(part.weight, mean, reach**2)
        whole = _together(whole, part)
    return found


def _cells(moments: Moments, c: int) -> int:
    return moments.counts[c] if moments.counts else moments.count


def _usable(std: float, mean: float) -> float:
    return std if _varies(std, mean) else 1.0


def _varies(std: float, mean: float) -> bool:
    return std > CONSTANT * math.hypot(std, mean)


def _out_of_line(sent: Mapping[str, Moments], most: float) -> dict[str, str]:
    found: dict[str, str] = {}
    if most <= 0 or len(sent) < OF:
        return found
    for c in range(len(next(iter(sent.values())).mean)):
        sizes = {n: math.hypot(one.mean[c], math.sqrt(one.variance[c])) for n, one in sent.items() if _cells(one, c)}
        for name, size in sizes.items() if len(sizes) >= OF else ():
            others = statistics.median(other for each, other in sizes.items() if each != name)
            if size > most * others and others > 0:
                found.setdefault(
                    name, f"channel {c}: its values are about {size:.3g}, the median of the others {others:.3g}"
                )
    return found
