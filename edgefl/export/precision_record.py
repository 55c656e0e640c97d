"""Manifest entries on an export in less than 32 bits: accuracy, size, latency. No torch, no onnx."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

#: How a bundle holds and computes its weights; inputs and outputs are float32 in each.
Precision = Literal["f32", "f16", "int8"]
EXACT: Precision = "f32"


class SubsetLoss(msgspec.Struct, frozen=True):
    """Percent right with the modalities ``given`` alone, of the ``samples`` with these: in f32, and after."""

    given: tuple[str, ...] = ()
    samples: int = 0
    before: float = 0.0
    after: float = 0.0

    @property
    def points(self) -> float:
        """Percentage points lost; negative: won."""
        return self.before - self.after


class Timing(msgspec.Struct, frozen=True):
    """Median milliseconds of ``runs`` calls with ``batch`` samples, in turn with the f32 bundle."""

    batch: int = 0
    before_ms: float = 0.0
    after_ms: float = 0.0
    runs: int = 0


class Reduced(msgspec.Struct, frozen=True):
    """The comparison of a bundle of lower precision with the f32 one of the same export.

    ``measure``: what is percent "right": "accuracy" by labels; "agreement" with the f32 bundle's labels, where the
    samples have none; "cosine" of embeddings with the f32 bundle's, where the model has no classes. ``data``: where the
    samples came from, which calibrate the ranges of ``calibrated`` nodes as well. ``converted``: nodes of this
    precision, ``left``: those that would lose too much and stay in f32. ``reduce_range``: weights of 7 bits, for
    processors whose 8-bit products saturate.
    """

    before_bytes: int = 0
    measure: Literal["accuracy", "agreement", "cosine"] = "accuracy"
    data: str = ""
    losses: tuple[SubsetLoss, ...] = ()
    max_loss: float = 0.0
    converted: int = 0
    calibrated: int = 0
    left: tuple[str, ...] = ()
    reduce_range: bool = False
    timings: tuple[Timing, ...] = ()
    machine: str = ""
    provider: str = ""
    threads: int = 0

    @property
    def worst(self) -> float:
        """Largest loss of a subset in points; NaN for non-finite answers."""
        points = [one.points for one in self.losses]
        return max(points, default=0.0) if all(map(math.isfinite, points)) else math.nan
