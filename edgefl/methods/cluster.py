"""Clusters of devices: none, and what clusterings of raw samples share.

Features: sum over modalities m of P_m^T x_m, P_m Gaussian, seeded by the name. The same seeds give the same matrices on
every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edgefl.data.arrays import Array
from edgefl.data.dataset import Dataset
from edgefl.data.tokens import PADDING
from edgefl.errors import DataError, Problem
from edgefl.registry import Option, Recipe, offers, register
from edgefl.roles import Cluster

Floats = npt.NDArray[np.float32]
#: device -> the tensors of its signature.
Signatures = Mapping[str, Mapping[str, Array]]

#: Width of the features.
WIDTH = 256
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


def described(tensors: Mapping[str, Array]) -> str:
    """The first tensors' names, types and shapes, for an error."""
    listed = [f"'{name[:40]}' {tensor.dtype} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:3]]
    return ", ".join(listed) + f" and {len(tensors) - 3} more" * (len(tensors) > 3) if listed else "nothing"


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


#: Option of every clustering of devices.
MODELS = Option("shared", "whether each cluster has a model of its own", ("shared", "own"))
register(
    Cluster("none", "all devices form one group", default=True),
)
