"""Micro-batch size of a bundle on this machine, by measurement.

A micro-batch is what one call of onnxruntime computes. Its activations pass through the caches once a layer: beyond
some size they do not stay there, below it calls cost more than what they compute. On one core of an EPYC (1 MiB of L2)
32 pictures by 4 take 0.81 of the time at once, and 32 windows of a small sensor encoder by 4 take 1.17 (decision 0097).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from edgefl.export.runtime import ROWS, Bundle

#: What is tried, the smallest first.
SIZES = tuple(2**power for power in range(ROWS.bit_length()))
#: Timed calls of each size; the fastest one counts, since other load only slows.
CALLS = 5
#: A larger micro-batch needs no gain: it has fewer calls. Smaller ones have to be faster by this share.
GAIN = 0.02


def tuned(bundle: Bundle, seconds: float) -> Bundle:
    """The bundle with its fastest micro-batch size on a processor, found in ``seconds`` or so; on a GPU as it is."""
    if bundle.session.get_providers()[0] != "CPUExecutionProvider":
        return bundle
    axes = bundle.manifest.axes
    shapes = {
        port.name: [axes[size].maximum or 1 if isinstance(size, str) else size for size in port.shape[1:]]
        for port in bundle.manifest.inputs
    }

    def compute(rows: int) -> None:
        ones = {port.name: np.ones((rows, *shapes[port.name]), port.dtype) for port in bundle.manifest.inputs}
        replace(bundle, rows=rows).predict(ones)  # ones: token 0 is padding, and cut off

    return replace(bundle, rows=fastest(compute, seconds))


def fastest(compute: Callable[[int], object], seconds: float) -> int:
    """Size of ``SIZES`` with the least time a sample; those are tried that fit in ``seconds``, the first in any case.

    Slow models get small sizes, for which it was never the calls that cost: where a sample takes 30 ms, four at a time
    were the fastest, and where it takes 1.4 s, one.
    """
    end = time.monotonic() + seconds
    best: dict[int, float] = {}
    took = 0.0
    for rows in SIZES:
        if best and time.monotonic() + 4 * took > end:  # two calls, each twice as long as the last
            break
        took = best[rows] = _seconds(partial(compute, rows))
        if time.monotonic() + took < end:  # the first allocated the memory of this shape
            took = best[rows] = _seconds(partial(compute, rows))
    for _ in range(CALLS - 1):
        for rows in best:
            if time.monotonic() + best[rows] > end:
                break
            best[rows] = min(best[rows], _seconds(partial(compute, rows)))
    least = min(best[rows] / rows for rows in best)
    return max(rows for rows in best if best[rows] / rows <= least * (1 + GAIN))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
