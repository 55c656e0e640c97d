"""Completion (FedMVP): samples that lack a modality get one made from a modality they have, once, before training.

A generator is ``make(source, target, values [n, *shape], classes [n]) -> [n, *shape] or None``; None: it can not make
this one. ``classes``: the names of the samples' classes, "" where there is none.
nearest: the local sample that has both and is most alike lends its other half. The others run a pretrained model
(``edgefl.data.generators``). What can not be made stays absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.data.dataset import Dataset, Encoder
from edgefl.errors import ConfigError, Problem

Array = npt.NDArray[np.generic]
Make = Callable[[str, str, Array, Sequence[str]], Array | None]
#: Token counts are kept in this many bins: enough to tell short texts apart.
_TOKEN_BINS = 512
#: Rows compared at once, so that the distances of a large share stay small in memory.
_ROWS = 256


class Completed(NamedTuple):
    """The data with what was made, and how many samples got each modality."""

    dataset: Dataset
    made: dict[str, int]


def complete(dataset: Dataset, encoders: Mapping[str, Encoder], make: Make) -> Completed:
    """Every absent modality of ``encoders`` made from the first of them that a sample has.

    The made ones count as present. A modality that nobody here has is made too, if the generator can.
    """
    modalities, present, made = dict(dataset.modalities), dict(dataset.present), {}
    whole: dict[str, Array] = {}
    for target, encoder in encoders.items():
        absent, count = ~dataset.has(target), 0
        for source in encoders:
            rows = np.flatnonzero(absent & dataset.has(source)) if source != target else np.empty(0, np.int64)
            values = (
                make(source, target, dataset.modalities[source][rows], _classes(dataset, rows)) if len(rows) else None
            )
            if values is None:
                continue
            if target not in whole:
                dtype = np.int64 if encoder.kind == "text" else np.float32
                nothing = np.zeros((len(dataset) if target not in modalities else 0, *values.shape[1:]), dtype)
                modalities[target] = whole[target] = np.array(modalities.get(target, nothing))
            whole[target][rows] = values
            absent[rows] = False
            count += len(rows)
        if target in modalities:
            present[target] = ~absent
        made[target] = count
    return Completed(replace(dataset, modalities=modalities, present=present), made)


def _classes(dataset: Dataset, rows: npt.NDArray[np.int64]) -> list[str]:
    labels = np.full(len(rows), -1) if dataset.labels is None else dataset.labels[rows]
    return [dataset.label_names[label] if label >= 0 else "" for label in labels]


def nearest(dataset: Dataset) -> Make:
    """The generator that needs no model: other halves of the local samples themselves."""

    def make(source: str, target: str, values: Array, classes: Sequence[str]) -> Array | None:
        donors = np.flatnonzero(dataset.has(source) & dataset.has(target))
        if not len(donors):
            return None
        known = _features(dataset.modalities[source][donors])
        chosen = []
        for start in range(0, len(values), _ROWS):
            wanted = _features(values[start : start + _ROWS])
            distance = (wanted**2).sum(1)[:, None] - 2 * wanted @ known.T + (known**2).sum(1)
            chosen.append(donors[distance.argmin(axis=1)])
        made: Array = dataset.modalities[target][np.concatenate(chosen)]
        return made

    return make


def generator(name: str, checkpoint: str, dataset: Dataset, encoders: Mapping[str, Encoder]) -> Make:
    """The generator a recipe names. Raises ConfigError for an unknown one, MissingDependencyError for its package."""
    if name == "nearest":
        return nearest(dataset)
    from edgefl.data.generators import GENERATORS

    if name not in GENERATORS:
        known = ", ".join(("nearest", *GENERATORS))
        raise ConfigError("recipe", [Problem("missing.completion.generator", f"unknown {name!r}; valid: {known}")])
    return GENERATORS[name](checkpoint, encoders)


def _features(values: Array) -> npt.NDArray[np.float32]:
    """[n, F]: what is compared. Numbers as they are; token ids as counts, wherever they stand."""
    if not np.issubdtype(values.dtype, np.integer):
        return values.reshape(len(values), -1).astype(np.float32)
    counts = np.zeros((len(values), _TOKEN_BINS), np.float32)
    rows, columns = np.nonzero(values)
    tokens = values[rows, columns].astype(np.int64) % _TOKEN_BINS
    np.add.at(counts, (rows, tokens), 1)
    return counts
