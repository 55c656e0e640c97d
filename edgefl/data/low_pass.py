"""A low-pass filter for recordings that come to a lower rate: what that rate cannot show must not show as slow.

A sinc of cut-off _CUTOFF times the new rate in a Kaiser window: flat up to 0.39 of that rate, 60 dB down from half of
it on. A stretch without a gap is filtered by itself, continued by its reflection in its ends, so that levels and ramps
stay what they are.
"""

from __future__ import annotations

import math

import numpy as np

from edgefl.data.arrays import Array, Indices
from edgefl.data.dataset import Flags

#: Zeros of the kernel on each side, the window's shape (60 dB), and the cut-off of the new rate.
_ZEROS, _BETA, _CUTOFF = 16, 5.65, 0.443
#: Of the own rate: where less is taken away, what folds back lies beside what was there.
ALIKE = 0.9
#: Values filtered at a time, at least: bounds what that takes.
_BLOCK = 2**16
#: Values that are convolved as fast without a transform.
_SHORT = 1024
#: Beyond, a value is none that can be stored, and is said where it is.
_LARGEST = float(np.finfo(np.float32).max)


def low_passed(column: Array, times: Array, gaps: Flags, period: float, rate: float) -> Array:
    """The values [T] at their ``times`` [T] without what is too fast for ``rate`` Hz; NaN, between ``gaps`` [T - 1].

    ``period``: seconds from one to the next. Stretches of less than a step of the new rate stay as they are.
    """
    found = column.astype(np.float64)
    if not (np.abs(found[~np.isnan(found)]) <= _LARGEST).all():
        return found
    ratio = 1 / (rate * period)
    kernels: dict[int, Array] = {}
    for first, last in zip(*_stretches(np.isnan(found), gaps), strict=True):
        if last - first < max(2.0, ratio):
            continue
        own = times[first:last]
        grid = np.linspace(own[0], own[-1], round((own[-1] - own[0]) / period) + 1)
        half = min(math.ceil(_ZEROS * ratio), len(grid) - 1)
        if half not in kernels:
            kernels[half] = _kernel(half, ratio)
        smooth = _convolved(np.interp(grid, own, found[first:last]), kernels[half])
        found[first:last] = np.interp(own, grid, smooth)
    return found


def _stretches(absent: Flags, gaps: Flags) -> tuple[Indices, Indices]:
    """First and last + 1 of the rows that follow each other without a gap."""
    cut = gaps | absent[1:] | absent[:-1]
    first = np.flatnonzero(~absent & np.concatenate(([True], cut)))
    return first, np.flatnonzero(~absent & np.concatenate((cut, [True]))) + 1


def _kernel(half: int, ratio: float) -> Array:
    """[2 half + 1] for values at ``ratio`` times the new rate."""
    at = np.arange(-half, half + 1)
    kernel = np.sinc(2 * _CUTOFF / ratio * at) * np.kaiser(len(at), _BETA)
    return np.asarray(kernel / kernel.sum())


def _convolved(values: Array, kernel: Array) -> Array:
    """Values [n], continued by their reflection in both ends, with the kernel: by blocks (overlap-save)."""
    half = len(kernel) // 2
    before, after = 2 * values[0] - values[half:0:-1], 2 * values[-1] - values[-2 : -half - 2 : -1]
    padded = np.concatenate((before, values, after))
    if len(padded) <= _SHORT:
        return np.convolve(padded, kernel, "valid")
    size = 1 << (min(max(_BLOCK, 4 * len(kernel)), len(padded)) - 1).bit_length()
    spectrum = np.fft.rfft(kernel, size)
    found = np.empty(len(values))
    for start in range(0, len(values), size - 2 * half):
        block = np.fft.irfft(np.fft.rfft(padded[start : start + size], size) * spectrum, size)
        part = found[start : start + size - 2 * half]
        part[:] = block[2 * half : 2 * half + len(part)]
    return found
