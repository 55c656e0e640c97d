"""Clusters of devices by LSH sketches, which each device sends once (MMiC, arXiv 2505.06911).

hash_r(x) = signs of G_r^T x, in ``BITS`` Gaussian directions; row r counts the samples in each of the 2^BITS buckets.
Features: sum over modalities m of P_m^T x_m, P_m Gaussian, seeded by the name. The same seeds give the same matrices on
every device. Clusters: K-means of the normalised counts, numbered in the sorted order of their first devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edgefl.data.arrays import Array
from edgefl.data.dataset import Dataset
from edgefl.data.tokens import PADDING
from edgefl.errors import DataError, Problem, ProtocolError
from edgefl.prototypes.kmeans import kmeans
from edgefl.registry import Option, Recipe, Signature, offers, register
from edgefl.roles import Cluster

Floats = npt.NDArray[np.float32]
#: device -> the tensors of its signature.
Signatures = Mapping[str, Mapping[str, Array]]

#: Width of the features.
WIDTH = 256
#: Rows and bits of the sketch that is sent: those of the authors' configuration.
ROWS, BITS = 100, 12
#: A count is sent as its share of the samples in units of 1/32767, an int16, which every encoding passes as it is: 100
#: rows of 12 bits are 819,200 bytes (as f32: 1.6 MB). Finer than the share of one sample of 30,000.
UNIT = 32767
#: Numbers of a sketch that is sent on joining, 4,096 bytes: K-means asks for distances alone.
SENT = 1024
#: Input values whose projection is made at a time: at width 256 it takes 4 MiB, that of a whole image 154 MB.
_BLOCK = 4096
#: Samples read at a time, which may lie on disk; each time the projection is drawn again.
_SAMPLES = 4096
#: Rows of the projection of token ids: more than the 30,522 of BERT's vocabulary; larger ids share rows.
_TOKENS = 2**15


def features_of(dataset: Dataset, width: int = WIDTH, seed: int = 0) -> Floats:
    """Fixed features [N, width] of raw samples, without parameters and the same on every device.

    Values are projected as they are, scaled so that a modality counts by its root mean square, not by its length. Token
    ids are words, not amounts: a text is projected as the counts of its ids. An absent modality adds zeros, so that
    devices of different modalities have features of one width.
    """
    features = np.zeros((len(dataset), width), np.float32)
    for m, array in sorted(dataset.modalities.items()):
        project = _project_tokens if array.dtype == np.int64 else _project_values
        for start in range(0, len(array), _SAMPLES):
            some = slice(start, min(start + _SAMPLES, len(array)))
            values = array[some].reshape(some.stop - start, math.prod(array.shape[1:]))  # [n, D]
            rng = np.random.default_rng([seed, *m.encode()])
            features[some] += project(values, width, rng) * dataset.present[m][some, None]
    return features


def _project_values(values: Array, width: int, rng: np.random.Generator) -> Floats:
    """[N, D] -> [N, width], by a Gaussian matrix of variance 1/D."""
    out = np.zeros((len(values), width), np.float32)
    for first in range(0, values.shape[1], _BLOCK):
        block = values[:, first : first + _BLOCK]
        out += block @ rng.standard_normal((block.shape[1], width), np.float32)
    return np.asarray(out / np.float32(math.sqrt(max(1, values.shape[1]))))


def _project_tokens(ids: Array, width: int, rng: np.random.Generator) -> Floats:
    """[N, T] -> [N, width]: the sum of the words' Gaussian rows over the root of how many words there are."""
    table = rng.standard_normal((_TOKENS, width), np.float32)
    out = np.zeros((len(ids), width), np.float32)
    words = ids != PADDING
    for place in range(ids.shape[1]):
        out += table[ids[:, place] % _TOKENS] * words[:, place, None]
    return np.asarray(out / np.sqrt(np.maximum(words.sum(axis=1, keepdims=True), 1)), np.float32)


def checked_features(features: Array) -> Floats:
    """``features`` [N, F] as f32. Raises DataError unless they are finite and of one sample or more."""
    x = np.asarray(features, np.float32)
    if x.ndim != 2 or not x.size or not np.isfinite(x).all():
        raise DataError(f"a signature needs finite features [N, F] of one sample or more, not {list(x.shape)}")
    return x


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


def described(tensors: Mapping[str, Array]) -> str:
    """The first tensors' names, types and shapes, for an error."""
    listed = [f"'{name[:40]}' {tensor.dtype} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:3]]
    return ", ".join(listed) + f" and {len(tensors) - 3} more" * (len(tensors) > 3) if listed else "nothing"


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


def own_models(models: str) -> bool:
    """True for one model a cluster."""
    return models == "own"


def two_models(recipe: Recipe) -> list[Problem]:
    """Conflict of cluster models with the personal models of a weight."""
    if any(options.get("models") == "own" for options in recipe["cluster"].values()) and (
        offers(recipe, "weight", "personal")
    ):
        return [Problem("cluster", "weight: relationship gives each device a model already; set models: shared")]
    return []


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


#: Option of every clustering of devices.
MODELS = Option("shared", "whether each cluster has a model of its own", ("shared", "own"))
GROUPS = {"clusters": Option(8, "number of groups", least=1), "models": MODELS}
register(
    Cluster("none", "all devices form one group", default=True),
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
        ),
        joining=True,
        group=lsh_joining,
    ),
)
