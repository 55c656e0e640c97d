"""PACFL (Vahidian et al. 2023, arXiv 2209.10526): clusters by principal angles between the devices' class bases.

X_c = U S V^T [F, n_c], the features of class c, which a device sends the first directions of U of, once;
angle_ij = arccos(largest singular value of Q_i^T Q_j)  between the spans of the bases, Q orthonormal; average linkage,
cut at a threshold. Clusters are numbered in the sorted order of their first devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edgefl.data.arrays import Array, Indices
from edgefl.data.dataset import Dataset
from edgefl.errors import DataError, ModelError, ProtocolError
from edgefl.methods.cluster import (
    MODELS,
    WIDTH,
    Signatures,
    checked_features,
    described,
    features_of,
    own_models,
    two_models,
)
from edgefl.prototypes.kmeans import Labels, renumber
from edgefl.registry import Option, Rule, Signature, register
from edgefl.roles import Cluster

#: Directions of a class at most: the paper's value.
RANK = 3
#: Directions whose singular value is below this share of the largest are rounding: of f32 features, and of sent bases.
_RESOLUTION = 1e-5
#: How far the products of an orthonormal basis in f32 (or sent as f16) may be from 0 and 1.
_ORTHONORMAL = 1e-2
_CLASS = re.compile(r"class\.(0|[1-9]\d{0,8})")


def bases(features: Array, labels: Indices | None, classes: int, rank: int = RANK) -> dict[str, Array]:
    """Tensors "class.<c>", f32 [F, r], orthonormal, of each class c with samples; r is ``rank``, or what they span.

    ``features`` [N, F]; ``labels`` [N], -1 for none. Raises DataError when no class has samples, for labels out of
    range, and when all bases together have more than F / 2 directions: two such spans always meet, at angle 0.
    """
    x = checked_features(features)
    y = np.full(len(x), -1) if labels is None else labels
    if y.shape != x.shape[:1] or int(y.max()) >= classes or rank < 1:
        raise DataError(f"{len(x)} samples, labels {list(y.shape)} below {classes} and rank {rank} do not match")
    found: dict[str, Array] = {}
    for c in np.unique(y[y >= 0]):
        u, s, _ = np.linalg.svd(x[y == c].T.astype(np.float64), full_matrices=False)
        kept = min(rank, int((s > _RESOLUTION * s[0]).sum()))
        if kept:
            found[f"class.{c}"] = np.ascontiguousarray(u[:, :kept], np.float32)
    if not found:
        raise DataError("no labelled sample has features", remedy="Set cluster: lsh, which needs no labels.")
    directions = sum(basis.shape[1] for basis in found.values())
    if 2 * directions > x.shape[1]:
        raise DataError(
            f"{len(found)} classes have {directions} directions, more than half of the {x.shape[1]} features",
            remedy=f"Use features of width {2 * directions} or more, a lower rank, or cluster: lsh.",
        )
    return found


def sign(dataset: Dataset, classes: int, seed: int) -> dict[str, Array]:
    """The bases of a device's samples; ``seed`` is the run's, the same on every device."""
    return bases(features_of(dataset, seed=seed), dataset.labels, classes)


def layout(class_counts: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (safetensors' type, shape) of what :func:`sign` makes of samples of these classes."""
    return {f"class.{c}": ("F32", (WIDTH, min(RANK, count))) for c, count in enumerate(class_counts) if count}


def check_bases(tensors: Mapping[str, Array]) -> None:
    """Raises ProtocolError unless ``tensors`` are what :func:`sign` makes."""
    directions = 0
    for name, basis in tensors.items():
        fits = basis.ndim == 2 and basis.shape[0] == WIDTH and 1 <= basis.shape[1] <= RANK
        if not _CLASS.fullmatch(name) or not fits or basis.dtype != np.float32:
            raise ProtocolError(f"not float32 [{WIDTH}, 1 to {RANK}] of classes 'class.<c>', but {described(tensors)}")
        q = basis.astype(np.float64)
        if not np.allclose(q.T @ q, np.eye(q.shape[1]), atol=_ORTHONORMAL):  # NaN is close to nothing
            raise ProtocolError(f"basis '{name}' is not orthonormal")
        directions += q.shape[1]
    if not 0 < 2 * directions <= WIDTH:
        raise ProtocolError(f"bases of {directions} directions in all, between 1 and {WIDTH // 2} can be right")


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


def _span(device: str, tensors: Mapping[str, Array]) -> npt.NDArray[np.float64]:
    """An orthonormal basis [F, r] of the span of all of a device's class bases together."""
    bases = [np.asarray(tensors[name], np.float64) for name in sorted(tensors)]
    if not bases or any(b.ndim != 2 or len(b) != len(bases[0]) or not np.isfinite(b).all() for b in bases):
        raise ProtocolError(f"device '{device}' sent no bases: finite numbers [features, directions] for each class")
    u, s, _ = np.linalg.svd(np.concatenate(bases, axis=1), full_matrices=False)
    if not s.size or not s[0] > 0:
        raise ProtocolError(f"device '{device}' sent bases that span nothing")
    return np.asarray(u[:, s > _RESOLUTION * s[0]])


_NO_CLASSES = "pacfl compares the devices class by class, and no term of the objective has classes; set cluster: lsh"
register(
    Cluster(
        "pacfl",
        "by the smallest principal angle between bases of their classes, average linkage (PACFL)",
        {"threshold": Option(30.0, "largest angle within a group, in degrees", least=0, most=90), "models": MODELS},
        rules=(Rule("objective", "labels", _NO_CLASSES),),
        conflicts=two_models,
        own_models=own_models,
        per_round=True,
        signature=Signature("bases", sign, layout, check_bases),
        group=pacfl,
    )
)
