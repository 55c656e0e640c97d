"""Takes modalities away, as in devices without a sensor and samples without a reading (arXiv 2312.13508, section 5).

Each modality of each sample is dropped with probability q, independently; a sample that loses all is discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from edgefl.data.arrays import generator
from edgefl.data.dataset import Dataset
from edgefl.errors import DataError

_OPTIONS = ("rate", "keep", "devices", "complete", "unlabelled")


def drop(dataset: Dataset, options: Mapping[str, Any] | None, seed: int, *, device: str = "") -> Dataset:
    """``dataset`` with modalities taken away; the same for the same seed and device, whatever the other devices are.

    ``options``: ``rate`` q in 0..1, or {modality: q}; ``keep`` "discard" (a sample that loses all its modalities is
    left out) or "one" (it keeps one of them, at random); ``devices`` {device: [modalities it lacks wholly]};
    ``complete`` [devices whose samples lose nothing]; ``unlabelled`` [devices whose samples have no labels].
    A modality that no sample has any more is left out. Raises DataError for bad options, and when no sample is left.
    """
    given = dict(options or {})
    if device in given.get("unlabelled", ()):
        dataset = replace(dataset, labels=None, label_names=())
    rates, lacks = _rates(dataset, given), _lacks(dataset, given, device)
    if device in given.get("complete", ()):
        rates = dict.fromkeys(rates, 0.0)
    order = sorted(dataset.modalities)  # the draw must not depend on the order of a dictionary
    had = np.stack([dataset.present[m] & (m not in lacks) for m in order], axis=1)  # [N, M]
    rng = generator(seed, f"missing {device}")
    draw, choice = rng.random(had.shape), rng.random(had.shape)
    left = had & (draw >= np.array([rates[m] for m in order]))
    if given.get("keep", "discard") == "one":
        lost = had.any(axis=1) & ~left.any(axis=1)
        best = np.where(had, choice, -1.0).argmax(axis=1)
        left[lost, best[lost]] = True
    kept = left.any(axis=1)
    if not kept.any():
        who = f"device {device!r}" if device else "the data set"
        raise DataError(
            f"{who} loses every sample: of {len(dataset)}, none keeps a modality",
            remedy="Lower data.missing.rate, set data.missing.keep: one, or leave the device a modality.",
        )
    return _without(dataset.subset(kept), dict(zip(order, left[kept].T, strict=True)))


def _without(dataset: Dataset, left: dict[str, npt.NDArray[np.bool_]]) -> Dataset:
    names = [m for m in dataset.modalities if left[m].any()]
    modalities = {m: np.array(dataset.modalities[m]) for m in names}
    for m in names:
        modalities[m][~left[m]] = 0
    return replace(dataset, modalities=modalities, present={m: left[m].copy() for m in names})


def _rates(dataset: Dataset, given: dict[str, Any]) -> dict[str, float]:
    unknown = sorted(set(given) - set(_OPTIONS))
    if unknown:
        raise DataError(f"missing has no option {', '.join(unknown)}", remedy=f"Valid options: {', '.join(_OPTIONS)}.")
    if given.get("keep", "discard") not in {"discard", "one"}:
        raise DataError(f"missing.keep is {given['keep']!r}", remedy="Set it to discard or one.")
    rate = given.get("rate", 0.0)
    if isinstance(rate, Mapping):
        _known(dataset, rate, "missing.rate")
        rates = {m: float(rate.get(m, 0.0)) for m in dataset.modalities}
    else:
        rates = dict.fromkeys(dataset.modalities, float(rate))
    for m, q in rates.items():
        if not 0 <= q <= 1:
            raise DataError(f"missing.rate of {m!r} is {q:g}", remedy="A rate is a probability: 0 to 1.")
    return rates


def _lacks(dataset: Dataset, given: dict[str, Any], device: str) -> set[str]:
    lacks = set((given.get("devices") or {}).get(device, ()))
    _known(dataset, dict.fromkeys(lacks), f"missing.devices.{device}")
    return lacks


def _known(dataset: Dataset, names: Mapping[str, Any], where: str) -> None:
    unknown = sorted(set(names) - set(dataset.modalities))
    if unknown:
        raise DataError(
            f"{where} names {', '.join(unknown)}, which the data does not have",
            remedy=f"Its modalities: {', '.join(dataset.modalities)}.",
        )
