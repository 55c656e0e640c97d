"""Devices to clusters, once, by what each sent of its features (``edgefl.methods.cluster.signature``).

LSH (MMiC, arXiv 2505.06911): K-means of the normalised count sketches.
PACFL (Vahidian et al. 2023, arXiv 2209.10526):  angle_ij = arccos(largest singular value of Q_i^T Q_j)  between the
spans of the devices' class bases, Q orthonormal; average linkage, cut at a threshold.
Clusters are numbered in the sorted order of their first devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgefl.errors import ModelError, ProtocolError
from edgefl.prototypes.kmeans import Labels, kmeans, renumber

Floats = npt.NDArray[np.float64]
Signatures = Mapping[str, Mapping[str, npt.NDArray[Any]]]

#: Directions whose singular value is below this share of the largest are rounding: bases travel as f32.
_RESOLUTION = 1e-5


def lsh(signatures: Signatures, rng: np.random.Generator, *, clusters: float = 8) -> dict[str, int]:
    """device -> cluster, at most ``clusters`` of them. ``signatures``: device -> {"sketch": counts [rows, buckets]}.

    Devices with equal sketches are together. Raises ProtocolError, naming the device, for what is no sketch.
    """
    devices = sorted(signatures)
    if not devices:
        return {}
    found = kmeans(_coordinates(devices, signatures), int(clusters), rng)
    return {device: int(label) for device, label in zip(devices, found.labels, strict=True)}


def pacfl(
    signatures: Signatures, rng: np.random.Generator | None = None, *, threshold: float = 30.0, clusters: float = 0
) -> dict[str, int]:
    """device -> cluster: joined while the mean angle between two clusters is at most ``threshold`` degrees.

    ``signatures``: device -> {name: basis [F, r]}; ``clusters`` above 0: joined on until there are no more than these.
    Nothing is drawn: ``rng`` is there for the slot. Raises ProtocolError, naming the device, for what is no basis.
    """
    devices = sorted(signatures)
    spans = [_span(device, signatures[device]) for device in devices]
    for device, span in zip(devices, spans, strict=True):
        if len(span) != len(spans[0]):
            raise ProtocolError(
                f"device '{device}' has bases of width {len(span)}, '{devices[0]}' of {len(spans[0])}",
                remedy="All devices of a run need features of one width.",
            )
    angles = np.zeros((len(devices), len(devices)))
    for i, j in zip(*np.triu_indices(len(devices), 1), strict=True):
        angles[i, j] = angles[j, i] = smallest_angle(spans[i], spans[j])
    labels = average_linkage(angles, threshold, int(clusters))
    return {device: int(label) for device, label in zip(devices, labels, strict=True)}


def smallest_angle(q1: npt.NDArray[Any], q2: npt.NDArray[Any]) -> float:
    """The smallest principal angle in degrees, 0 to 90, between the spans of two orthonormal bases [F, r1], [F, r2].

    Good to 1e-5 degrees: the arc cosine is flat near 0. Spans with r1 + r2 > F always meet: 0.
    """
    if q1.ndim != 2 or q2.ndim != 2 or len(q1) != len(q2) or not q1.size or not q2.size:
        raise ModelError(f"there is no angle between bases {list(q1.shape)} and {list(q2.shape)}")
    largest = np.linalg.svd(np.asarray(q1, np.float64).T @ np.asarray(q2, np.float64), compute_uv=False)[0]
    return float(np.degrees(np.arccos(min(1.0, largest))))


def average_linkage(distances: npt.NDArray[Any], threshold: float, clusters: int = 0) -> Labels:
    """Clusters [N] of N points with symmetric ``distances`` [N, N], numbered by first appearance.

    The two clusters of the smallest mean distance are joined, while that is at most ``threshold`` or there are more
    than ``clusters`` (0: any number will do).
    """
    between = np.array(distances, np.float64)
    np.fill_diagonal(between, np.inf)
    labels, sizes = np.arange(len(between)), np.ones(len(between))
    for left in range(len(between), 1, -1):
        a, b = sorted(np.unravel_index(between.argmin(), between.shape))
        if between[a, b] > threshold and not 0 < clusters < left:
            break
        joined = (sizes[a] * between[a] + sizes[b] * between[b]) / (sizes[a] + sizes[b])  # inf stays inf
        between[a], between[:, a], between[b], between[:, b] = joined, joined, np.inf, np.inf
        between[a, a] = np.inf
        sizes[a] += sizes[b]
        labels[labels == b] = a
    return renumber(labels)


def _coordinates(devices: list[str], signatures: Signatures) -> Floats:
    """Points [N, at most N] that are as far from each other as the sketches: these have 409,600 counts each.

    Equal sketches give the very same point.
    """
    sketches = [_sketch(device, signatures[device]) for device in devices]
    if len({sketch.shape for sketch in sketches}) > 1:
        shapes = ", ".join(f"{list(s.shape)} ('{d}')" for d, s in zip(devices, sketches, strict=True))
        raise ProtocolError(
            f"sketches of several shapes: {shapes}", remedy="All devices of a run need the same rows and bits."
        )
    place: dict[bytes, int] = {}
    index = [place.setdefault(sketch.tobytes(), len(place)) for sketch in sketches]
    distinct = [sketches[index.index(i)] for i in range(len(place))]
    products = np.zeros((len(distinct), len(distinct)))
    for row in range(len(distinct[0])):
        shares = np.stack([sketch[row] / sketch[row].sum(dtype=np.float64) for sketch in distinct])  # [N, buckets]
        products += shares @ shares.T
    values, vectors = np.linalg.eigh(products)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0)))[index])


def _sketch(device: str, tensors: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    counts = tensors.get("sketch", np.zeros(0))
    good = counts.ndim == 2 and counts.size > 0 and bool(np.isfinite(counts).all()) and bool((counts >= 0).all())
    if not good or not (counts.sum(axis=1) > 0).all():
        raise ProtocolError(
            f"device '{device}' sent no sketch: counts [rows, buckets], none below 0, every row above 0 in all"
        )
    return counts


def _span(device: str, tensors: Mapping[str, npt.NDArray[Any]]) -> Floats:
    """An orthonormal basis [F, r] of the span of all of a device's class bases together."""
    bases = [np.asarray(tensors[name], np.float64) for name in sorted(tensors)]
    if not bases or any(b.ndim != 2 or len(b) != len(bases[0]) or not np.isfinite(b).all() for b in bases):
        raise ProtocolError(f"device '{device}' sent no bases: finite numbers [features, directions] for each class")
    u, s, _ = np.linalg.svd(np.concatenate(bases, axis=1), full_matrices=False)
    if not s.size or not s[0] > 0:
        raise ProtocolError(f"device '{device}' sent bases that span nothing")
    return np.asarray(u[:, s > _RESOLUTION * s[0]])
