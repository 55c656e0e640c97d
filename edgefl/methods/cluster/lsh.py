"""LSH sketches (MMiC, arXiv 2505.06911): K-means of the devices' normalised count sketches of their features.

Clusters are numbered in the sorted order of their first devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from msgspec import Meta

from edgefl.data.arrays import Array
from edgefl.errors import ProtocolError
from edgefl.methods.cluster.signatures import Floats, Models, Signatures, own_models
from edgefl.prototypes.kmeans import kmeans
from edgefl.registry import Cluster, Options, register


class Lsh(Options, frozen=True):
    """Options of clusters by sketches."""

    clusters: Annotated[int, Meta(ge=1, description="number of groups")] = 8
    models: Models = "shared"


def lsh(signatures: Signatures, rng: np.random.Generator, *, clusters: float = 8) -> dict[str, int]:
    """device -> cluster, at most ``clusters`` of them. ``signatures``: device -> {"sketch": counts [rows, buckets]}.

    Devices with equal sketches are together. Raises ProtocolError, naming the device, for what is no sketch.
    """
    devices = sorted(signatures)
    if not devices:
        return {}
    found = kmeans(_coordinates(devices, signatures), int(clusters), rng)
    return {device: int(label) for device, label in zip(devices, found.labels, strict=True)}


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


def _sketch(device: str, tensors: Mapping[str, Array]) -> Array:
    counts = tensors.get("sketch", np.zeros(0))
    good = counts.ndim == 2 and counts.size > 0 and bool(np.isfinite(counts).all()) and bool((counts >= 0).all())
    if not good or not (counts.sum(axis=1) > 0).all():
        raise ProtocolError(
            f"device '{device}' sent no sketch: counts [rows, buckets], none below 0, every row above 0 in all"
        )
    return counts


register(
    Cluster(
        "lsh",
        "by sketches of their features: random sign hashes, then K-means (MMiC)",
        Lsh,
        source="arXiv 2505.06911",
        conflicts=own_models,
        per_round=True,
        signature="sketch",
        group=lsh,
    )
)
