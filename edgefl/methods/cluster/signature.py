"""What a device sends once, so that the server can tell which devices have alike data: a sketch, or class bases.

LSH (MMiC, arXiv 2505.06911): hash_r(x) = signs of G_r^T x, in ``bits`` Gaussian directions; row r counts the samples in
each of the 2^bits buckets. PACFL (arXiv 2209.10526): X_c = U S V^T [F, n_c], the features of class c; the first of U.
Features: sum over modalities m of P_m^T x_m, P_m Gaussian, seeded by the name. The same seeds give the same matrices on
every device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edgefl.data.arrays import Array, Indices
from edgefl.data.dataset import Dataset
from edgefl.data.tokens import PADDING
from edgefl.errors import DataError, ProtocolError

Floats = npt.NDArray[np.float32]

#: Width of the features: room for three directions each of 42 classes.
WIDTH = 256
#: Rows and bits of the sketch that is sent, and directions of a class at most: the papers' values.
ROWS, BITS, RANK = 100, 12, 3
#: A count is sent as its share of the samples in units of 1/32767, an int16, which every encoding passes as it is: 100
#: rows of 12 bits are 819,200 bytes (as f32: 1.6 MB). Finer than the share of one sample of 30,000.
UNIT = 32767
#: Counts of the largest sketch: with 2 bytes each, 1 MiB.
_COUNTS_MAX = 2**19
#: Input values whose projection is made at a time: at width 256 it takes 4 MiB, that of a whole image 154 MB.
_BLOCK = 4096
#: Samples read at a time, which may lie on disk; each time the projection is drawn anew.
_SAMPLES = 4096
#: Rows of the projection of token ids: more than the 30,522 of BERT's vocabulary; larger ids share rows.
_TOKENS = 2**15
#: Singular values below this share of the largest are rounding of f32 features.
_RESOLUTION = 1e-5
#: How far the products of an orthonormal basis in f32 (or sent as f16) may be from 0 and 1.
_ORTHONORMAL = 1e-2
_CLASS = re.compile(r"class\.(0|[1-9]\d{0,8})")


def features_of(dataset: Dataset, width: int, seed: int = 0) -> Floats:
    """Fixed features [N, width] of raw samples, without parameters and the same on every device.

    Values are projected as they are, scaled so that a modality counts by its root mean square, not by its length. Token
    ids are words, not amounts: a text is projected as the counts of its ids. An absent modality adds zeros, so that
    devices of different modalities have features of one width.
    """
    if width < 1:
        raise DataError(f"features need a width of 1 or more, not {width}")
    features = np.zeros((len(dataset), width), np.float32)
    for m, array in sorted(dataset.modalities.items()):
        project = _project_tokens if array.dtype == np.int64 else _project_values
        for start in range(0, len(array), _SAMPLES):
            some = slice(start, min(start + _SAMPLES, len(array)))
            values = array[some].reshape(some.stop - start, math.prod(array.shape[1:]))  # [n, D]
            rng = np.random.default_rng([seed, *m.encode()])
            features[some] += project(values, width, rng) * dataset.present[m][some, None]
    return features


def signature_of(dataset: Dataset, kind: str, classes: int, seed: int) -> dict[str, Array]:
    """What ``kind`` ("sketch" or "bases") of a device's samples is sent; ``seed`` is the run's, the same everywhere."""
    features = features_of(dataset, WIDTH, seed)
    return sketch(features, seed=seed) if kind == "sketch" else bases(features, dataset.labels, classes)


def signature_layout(kind: str, class_counts: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (safetensors' type, shape) of what :func:`signature_of` makes of samples of these classes."""
    if kind == "sketch":
        return {"sketch": ("I16", (ROWS, 2**BITS))}
    return {f"class.{c}": ("F32", (WIDTH, min(RANK, count))) for c, count in enumerate(class_counts) if count}


def check_signature(tensors: Mapping[str, Array], kind: str) -> None:
    """Raises ProtocolError unless ``tensors`` are what :func:`signature_of` makes for ``kind`` ("": for nobody)."""
    if kind == "sketch":
        _check_sketch(tensors)
    elif kind == "bases":
        _check_bases(tensors)
    else:
        raise ProtocolError("a signature that nobody asked for", remedy="Only a recipe with clusters takes signatures.")


def sketch(features: Array, rows: int = ROWS, bits: int = BITS, seed: int = 0) -> dict[str, Array]:
    """The tensor "sketch", int16 [rows, 2^bits]: shares of the samples in units of 1 / UNIT; from features [N, F].

    The order of the samples does not matter, nor the length of a sample's features. Raises DataError without samples,
    for features that are not finite, and for sketches beyond 1 MiB.
    """
    x = _checked(features)
    if rows < 1 or bits < 1 or rows * 2**bits > _COUNTS_MAX:
        raise DataError(
            f"a sketch of {rows} rows of {bits} bits is not between 1 and {_COUNTS_MAX} counts",
            remedy="Take fewer bits, or fewer rows.",
        )
    rng = np.random.default_rng(seed)
    places = 2 ** np.arange(bits)
    counts = np.empty((rows, 2**bits))
    for row in counts:
        signs = x @ rng.standard_normal((x.shape[1], bits), np.float32) > 0  # [N, bits]
        row[:] = np.bincount(signs @ places, minlength=2**bits)
    return {"sketch": np.rint(counts * (UNIT / len(x))).astype(np.int16)}


def bases(features: Array, labels: Indices | None, classes: int, rank: int = RANK) -> dict[str, Array]:
    """Tensors "class.<c>", f32 [F, r], orthonormal, of each class c with samples; r is ``rank``, or what they span.

    ``features`` [N, F]; ``labels`` [N], -1 for none. Raises DataError when no class has samples, for labels out of
    range, and when all bases together have more than F / 2 directions: two such spans always meet, at angle 0.
    """
    x = _checked(features)
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
    for column, used in zip(ids.T, words.T, strict=True):
        out += table[column % _TOKENS] * used[:, None]
    return np.asarray(out / np.sqrt(np.maximum(words.sum(axis=1, keepdims=True), 1)), np.float32)


def _checked(features: Array) -> Floats:
    x = np.asarray(features, np.float32)
    if x.ndim != 2 or not x.size or not np.isfinite(x).all():
        raise DataError(f"a signature needs finite features [N, F] of one sample or more, not {list(x.shape)}")
    return x


def _check_sketch(tensors: Mapping[str, Array]) -> None:
    counts = tensors.get("sketch")
    if len(tensors) != 1 or counts is None or counts.dtype != np.int16 or counts.shape != (ROWS, 2**BITS):
        raise ProtocolError(f"not one tensor 'sketch', int16 {[ROWS, 2**BITS]}, but {_described(tensors)}")
    low, total = int(counts.min()), int(counts.sum(axis=1, dtype=np.int64).min())
    if low < 0 or total < 1:
        raise ProtocolError(f"a sketch with a count of {low} and a row that sums to {total}: shares of samples are not")


def _check_bases(tensors: Mapping[str, Array]) -> None:
    directions = 0
    for name, basis in tensors.items():
        fits = basis.ndim == 2 and basis.shape[0] == WIDTH and 1 <= basis.shape[1] <= RANK
        if not _CLASS.fullmatch(name) or not fits or basis.dtype != np.float32:
            raise ProtocolError(f"not float32 [{WIDTH}, 1 to {RANK}] of classes 'class.<c>', but {_described(tensors)}")
        q = basis.astype(np.float64)
        if not np.allclose(q.T @ q, np.eye(q.shape[1]), atol=_ORTHONORMAL):  # NaN is close to nothing
            raise ProtocolError(f"basis '{name}' is not orthonormal")
        directions += q.shape[1]
    if not 0 < 2 * directions <= WIDTH:
        raise ProtocolError(f"bases of {directions} directions in all, between 1 and {WIDTH // 2} can be right")


def _described(tensors: Mapping[str, Array]) -> str:
    listed = [f"'{name[:40]}' {tensor.dtype} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:3]]
    return ", ".join(listed) + f" and {len(tensors) - 3} more" * (len(tensors) > 3) if listed else "nothing"
