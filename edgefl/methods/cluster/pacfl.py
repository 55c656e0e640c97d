"""PACFL (Vahidian et al. 2023, arXiv 2209.10526): clusters by principal angles between the devices' class bases.

angle_ij = arccos(largest singular value of Q_i^T Q_j)  between the spans of the bases, Q orthonormal; average linkage,
cut at a threshold. Clusters are numbered in the sorted order of their first devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from msgspec import Meta

from edgefl.data.arrays import Array
from edgefl.errors import ModelError, Problem, ProtocolError
from edgefl.methods.cluster.signatures import Floats, Models, Signatures, own_models
from edgefl.prototypes.kmeans import Labels, renumber
from edgefl.registry import Cluster, Options, Recipe, offers, register

#: Directions whose singular value is below this share of the largest are rounding: bases travel as f32.
_RESOLUTION = 1e-5


class Pacfl(Options, frozen=True):
    """Options of clusters by principal angles."""

    threshold: Annotated[float, Meta(ge=0, le=90, description="largest angle within a group, in degrees")] = 30.0
    models: Models = "shared"


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


def smallest_angle(q1: Array, q2: Array) -> float:
    """The smallest principal angle in degrees, 0 to 90, between the spans of two orthonormal bases [F, r1], [F, r2].

    Good to 1e-5 degrees: the arc cosine is flat near 0. Spans with r1 + r2 > F always meet: 0.
    """
    if q1.ndim != 2 or q2.ndim != 2 or len(q1) != len(q2) or not q1.size or not q2.size:
        raise ModelError(f"there is no angle between bases {list(q1.shape)} and {list(q2.shape)}")
    largest = np.linalg.svd(np.asarray(q1, np.float64).T @ np.asarray(q2, np.float64), compute_uv=False)[0]
    return float(np.degrees(np.arccos(min(1.0, largest))))


def average_linkage(distances: Array, threshold: float, clusters: int = 0) -> Labels:
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


def _span(device: str, tensors: Mapping[str, Array]) -> Floats:
    """An orthonormal basis [F, r] of the span of all of a device's class bases together."""
    bases = [np.asarray(tensors[name], np.float64) for name in sorted(tensors)]
    if not bases or any(b.ndim != 2 or len(b) != len(bases[0]) or not np.isfinite(b).all() for b in bases):
        raise ProtocolError(f"device '{device}' sent no bases: finite numbers [features, directions] for each class")
    u, s, _ = np.linalg.svd(np.concatenate(bases, axis=1), full_matrices=False)
    if not s.size or not s[0] > 0:
        raise ProtocolError(f"device '{device}' sent bases that span nothing")
    return np.asarray(u[:, s > _RESOLUTION * s[0]])


def _classes(recipe: Recipe) -> list[Problem]:
    if not offers(recipe, "objective", "labels"):
        text = "pacfl compares the devices class by class, and no term of the objective has classes; set cluster: lsh"
        return [Problem("cluster", text), *own_models(recipe)]
    return own_models(recipe)


register(
    Cluster(
        "pacfl",
        "by the smallest principal angle between bases of their classes, average linkage (PACFL)",
        Pacfl,
        source="arXiv 2209.10526",
        conflicts=_classes,
        per_round=True,
        signature="bases",
        group=pacfl,
    )
)
