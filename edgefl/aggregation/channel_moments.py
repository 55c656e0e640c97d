"""Mean and deviation of each channel, or column, over the fleet, of the moments of each device's data.

mean = sum_k w_k mean_k,   std^2 = sum_k w_k (var_k + (mean_k - mean)^2),   w_k = n_k / sum n, capped: as if the data
were in one place. What devices send is checked before it counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from edgefl.aggregation.mean import OF, capped
from edgefl.records import Moments

#: Beyond what float32 squares without overflow, with room to spare; no sensor's unit needs it.
LARGEST = 1e15
#: A deviation below this share of a channel's size is rounding of float32: the channel is constant, and stays unscaled.
CONSTANT = 1e-6
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
    mean = math.fsum(weight * sent[name].mean[c] for name, weight in weights.items())
    spread = (w * (sent[name].variance[c] + (sent[name].mean[c] - mean) ** 2) for name, w in weights.items())
    return mean, _usable(math.sqrt(math.fsum(spread)), mean)


def _cells(moments: Moments, c: int) -> int:
    return moments.counts[c] if moments.counts else moments.count


def _usable(std: float, mean: float) -> float:
    return std if std > CONSTANT * math.hypot(std, mean) else 1.0


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
