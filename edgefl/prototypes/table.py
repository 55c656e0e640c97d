"""The prototype library: one mean vector per class and table, merged over devices.

PmcmFL, arXiv 2312.13508, equations 1 to 3:  P[c] = sum_n w_n p_n[c] / sum_n w_n  over the devices n that hold class c.
A table is one modality's representations, or the fused ones ("fused"). Where the paper is silent: D-P1 weights are
normalised by the modality's own total; D-P2 a class a device lacks is absent there and each class is renormalised over
its holders; D-P3 a class absent everywhere keeps its previous row, one never seen has a zero row and count 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgefl.errors import ModelError, ProtocolError

Array = npt.NDArray[np.float32]
Weighting = Literal["modality", "class"]

#: The table of representations of complete samples, beside one table per modality.
FUSED = "fused"
COUNT = ".count"


@dataclass(frozen=True)
class ClassMeans:
    """Means [C, d] and counts [C] of one table, f32. Count 0: the class is absent and its row is zero."""

    means: Array
    counts: Array

    def __post_init__(self) -> None:
        if self.means.ndim != 2 or self.counts.shape != self.means.shape[:1]:
            raise ModelError(
                f"prototypes need means [classes, width] and counts [classes], got {list(self.means.shape)} "
                f"and {list(self.counts.shape)}",
                remedy="Build the table with prototypes.table.class_means, or read it with from_tensors.",
            )

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which classes have a prototype, [C]."""
        return self.counts > 0


def of_several(table: ClassMeans, least: float) -> ClassMeans:
    """The table without the rows of fewer than ``least`` samples: those classes are absent."""
    kept = table.counts >= least
    return ClassMeans(np.where(kept[:, None], table.means, np.float32(0)), np.where(kept, table.counts, np.float32(0)))


def empty(classes: int, width: int) -> ClassMeans:
    """A table in which every class is absent."""
    return ClassMeans(np.zeros((classes, width), np.float32), np.zeros(classes, np.float32))


def class_means(h: npt.ArrayLike, labels: npt.ArrayLike, classes: int) -> ClassMeans:
    """The mean of ``h`` [N, d] per class. Label -1: left out. Raises ModelError for labels >= ``classes``.

    Batches can be summarised one by one: merged by "class" they are the mean over all of them.
    """
    rows = np.asarray(h, np.float32)
    y = np.asarray(labels, np.int64)
    if rows.ndim != 2 or y.shape != rows.shape[:1]:
        raise ModelError(
            f"representations {list(rows.shape)} and labels {list(y.shape)} do not match as [N, d] and [N]"
        )
    if y.size and int(y.max()) >= classes:
        raise ModelError(f"label {int(y.max())} is out of range: the model has {classes} classes")
    known = y >= 0
    sums = np.zeros((classes, rows.shape[1]), np.float64)
    np.add.at(sums, y[known], rows[known])
    counts = np.bincount(y[known], minlength=classes).astype(np.float64)
    return ClassMeans((sums / np.maximum(counts, 1)[:, None]).astype(np.float32), counts.astype(np.float32))


class Merger:
    """Merges tables (all [C, d]) one at a time, so that memory does not grow with the number of devices.

    ``weighting`` "modality": a device counts with all its samples of the modality (the paper); "class": with those of
    the class at hand.
    """

    def __init__(self, weighting: Weighting = "modality") -> None:
        if weighting not in ("modality", "class"):
            raise ModelError(f"unknown prototype weighting {weighting!r}", remedy="Choose modality or class.")
        self.weighting = weighting
        self._sums: npt.NDArray[np.float64] | None = None  # [C, d]
        self._weights = np.zeros(0)  # [C]
        self._counts = np.zeros(0)  # [C]

    def add(self, local: ClassMeans) -> None:
        """Take one device's table. Raises ModelError, changing nothing, when its shape differs from the others'."""
        if self._sums is None:
            self._sums = np.zeros(local.means.shape)
            self._weights = np.zeros(local.counts.shape)
            self._counts = np.zeros(local.counts.shape)
        _same_shape(self._sums.shape, local)
        counts = local.counts.astype(np.float64)
        total = counts.sum()
        weights = counts if self.weighting == "class" else np.where(counts > 0, total, 0.0)
        self._sums += weights[:, None] * local.means
        self._weights += weights
        self._counts += counts

    def result(self, previous: ClassMeans | None = None) -> ClassMeans:
        """The merged table; classes of no device stay as in ``previous``. Raises ModelError when empty."""
        if self._sums is None:
            if previous is None:
                raise ModelError("no prototypes to merge, and none from an earlier round")
            return previous
        held = self._weights > 0
        means = (self._sums / np.where(held, self._weights, 1.0)[:, None]).astype(np.float32)
        counts = self._counts.astype(np.float32)
        if previous is not None:
            _same_shape(self._sums.shape, previous)
            means = np.where(held[:, None], means, previous.means)
            counts = np.where(held, counts, previous.counts)
        return ClassMeans(means, counts)


def to_tensors(tables: Mapping[str, ClassMeans]) -> dict[str, npt.NDArray[np.float32]]:
    """The tables as the tensors of the "prototypes" part: "<name>" [C, d] and "<name>.count" [C]."""
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, table in tables.items():
        tensors[name] = np.ascontiguousarray(table.means, np.float32)
        tensors[name + COUNT] = np.ascontiguousarray(table.counts, np.float32)
    return tensors


def from_tensors(tensors: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, ClassMeans]:
    """The inverse of :func:`to_tensors`. Raises ProtocolError for what a device should not have sent."""
    tables: dict[str, ClassMeans] = {}
    for name in sorted(tensors):
        if name.endswith(COUNT):
            if name.removesuffix(COUNT) not in tensors:
                raise ProtocolError(f"prototypes: '{name}' has no table beside it")
            continue
        if name + COUNT not in tensors:
            raise ProtocolError(f"prototypes: table '{name}' has no counts")
        means = np.asarray(tensors[name], np.float32)
        counts = np.asarray(tensors[name + COUNT], np.float32)
        if means.ndim != 2 or counts.shape != means.shape[:1]:
            raise ProtocolError(
                f"prototypes: table '{name}' is {list(means.shape)} with counts {list(counts.shape)}, "
                "expected [classes, width] and [classes]"
            )
        if not (np.isfinite(means).all() and np.isfinite(counts).all()) or (counts < 0).any():
            raise ProtocolError(f"prototypes: table '{name}' holds values that are not finite, or negative counts")
        tables[name] = ClassMeans(means, counts)
    return tables


def _same_shape(expected: tuple[int, ...], table: ClassMeans) -> None:
    if table.means.shape != expected:
        raise ModelError(
            f"a prototype table is {list(table.means.shape)}, the others are {list(expected)}",
            remedy="All devices of a run need the same classes and representation width.",
        )
