"""Clusters of devices by LSH sketches, which each device sends once (MMiC, arXiv 2505.06911).

hash_r(x) = signs of G_r^T x, in ``BITS`` Gaussian directions; row r counts the samples in each of the 2^BITS buckets.
Clusters: K-means of the normalised counts, numbered in the sorted order of their first devices.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edgefl.data.arrays import Array
from edgefl.errors import ProtocolError
from edgefl.methods.cluster import MODELS, Signatures, checked_features, described, features_of, own_models, two_models
from edgefl.prototypes.kmeans import kmeans
from edgefl.registry import Option, Signature, register
from edgefl.roles import Cluster

#: Rows and bits of the sketch that is sent: those of the authors' configuration.
ROWS, BITS = 100, 12
#: A count is sent as its share of the samples in units of 1/32767, an int16, which every encoding passes as it is: 100
#: rows of 12 bits are 819,200 bytes (as f32: 1.6 MB). Finer than the share of one sample of 30,000.
UNIT = 32767
#: Numbers of a sketch that is sent on joining, 4,096 bytes: K-means asks for distances alone.
SENT = 1024


def sketch(features: Array, rows: int = ROWS, bits: int = BITS, seed: int = 0) -> dict[str, Array]:
    """The tensor "sketch", int16 [rows, 2^bits]: shares of the samples in units of 1 / UNIT; from features [N, F].

    The order of the samples does not matter, nor the length of a sample's features. Raises DataError without samples,
    and for features that are not finite.
    """
    x = checked_features(features)
    rng = np.random.default_rng(seed)
    places = 2 ** np.arange(bits)
    counts = np.empty((rows, 2**bits))
    for row in counts:
        signs = x @ rng.standard_normal((x.shape[1], bits), np.float32) > 0  # [N, bits]
        row[:] = np.bincount(signs @ places, minlength=2**bits)
    return {"sketch": np.rint(counts * (UNIT / len(x))).astype(np.int16)}


def check_sketch(tensors: Mapping[str, Array]) -> None:
    """Raises ProtocolError unless ``tensors`` are what a device sends for these clusters."""
    counts = tensors.get("sketch")
    if len(tensors) != 1 or counts is None or counts.dtype != np.int16 or counts.shape != (ROWS, 2**BITS):
        raise ProtocolError(f"not one tensor 'sketch', int16 {[ROWS, 2**BITS]}, but {described(tensors)}")
    low, total = int(counts.min()), int(counts.sum(axis=1).min())
    if low < 0 or total < 1:
        raise ProtocolError(f"a sketch with a count of {low} and a row that sums to {total}: shares of samples are not")


def lsh(signatures: Signatures, rng: np.random.Generator, *, clusters: float) -> dict[str, int]:
    """device -> cluster, at most ``clusters`` of them. ``signatures``: device -> {"sketch": counts [rows, buckets]}.

    The sketches are checked (``check_sketch``). Devices with equal ones are together.
    """
    devices = sorted(signatures)
    if not devices:
        return {}
    found = kmeans(_coordinates(devices, signatures), int(clusters), rng)
    return {device: int(label) for device, label in zip(devices, found.labels, strict=True)}


def _coordinates(devices: list[str], signatures: Signatures) -> npt.NDArray[np.float64]:
    """Points [N, at most N] that are as far from each other as the sketches: these have 409,600 counts each.

    Equal sketches give the very same point.
    """
    sketches = [signatures[device]["sketch"] for device in devices]
    place: dict[bytes, int] = {}
    index = [place.setdefault(sketch.tobytes(), len(place)) for sketch in sketches]
    distinct = [sketches[index.index(i)] for i in range(len(place))]
    products = np.zeros((len(distinct), len(distinct)))
    for row in range(len(distinct[0])):
        shares = np.stack([sketch[row] / sketch[row].sum() for sketch in distinct])  # [N, buckets]
        products += shares @ shares.T
    values, vectors = np.linalg.eigh(products)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0)))[index])


def projected(counts: Array, seed: int) -> dict[str, Array]:
    """The tensor "sketch", f32 [SENT]: ``counts`` [rows, buckets] in random sums, as far from others as the whole.

    Each bucket counts into one of the sums, with a random sign: squared distances keep their mean, and lie within
    some sqrt(2 / SENT) = 4 % of it (Charikar et al. 2002, count sketch).
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rng = np.random.default_rng([seed, SENT])
    places, signs = rng.integers(SENT, size=shares.size), rng.choice([-1.0, 1.0], size=shares.size)
    return {"sketch": np.bincount(places, signs * shares.ravel(), SENT).astype(np.float32)}


def check_projected(tensors: Mapping[str, Array]) -> None:
    """Raises ProtocolError unless ``tensors`` are what a device sends for these clusters when it joins."""
    sums = tensors.get("sketch")
    if len(tensors) != 1 or sums is None or sums.dtype != np.float32 or sums.shape != (SENT,):
        raise ProtocolError(f"not one tensor 'sketch', float32 {[SENT]}, but {described(tensors)}")
    if np.abs(sums).max() > ROWS:
        raise ProtocolError(f"a sketch with a sum of {np.abs(sums).max():g}: of {ROWS} rows of shares none is as large")


def lsh_joining(signatures: Signatures, rng: np.random.Generator, *, clusters: float) -> dict[str, int]:
    """device -> cluster, at most ``clusters`` of them, of sketches as ``projected`` makes them."""
    devices = sorted(signatures)
    points = np.array([signatures[device]["sketch"] for device in devices], np.float64).reshape(-1, SENT)
    return dict(zip(devices, kmeans(points, int(clusters), rng).labels.tolist(), strict=True)) if devices else {}


GROUPS = {"clusters": Option(8, "number of groups", least=1), "models": MODELS}
register(
    Cluster(
        "lsh",
        "by sketches of their features: random sign hashes, then K-means (MMiC)",
        GROUPS,
        conflicts=two_models,
        own_models=own_models,
        per_round=True,
        signature=Signature(
            "sketch",
            lambda dataset, classes, seed: sketch(features_of(dataset, seed=seed), seed=seed),
            lambda class_counts: {"sketch": ("I16", (ROWS, 2**BITS))},
            check_sketch,
        ),
        group=lsh,
    ),
    Cluster(
        "lsh_joining",
        "by such sketches of all devices before the first round, 4 kB each, sent on joining (MMiC)",
        GROUPS,
        conflicts=two_models,
        own_models=own_models,
        per_round=True,
        signature=Signature(
            "projected_sketch",
            lambda dataset, classes, seed: projected(
                sketch(features_of(dataset, seed=seed), seed=seed)["sketch"], seed
            ),
            lambda class_counts: {"sketch": ("F32", (SENT,))},
            check_projected,
            joining=True,
        ),
        group=lsh_joining,
    ),
)
