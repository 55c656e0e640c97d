"""Zeros at the input (MMiC, arXiv 2505.06911, after FedMultimodal, arXiv 2306.09486): absent values are zeros.

They go through the modality's encoder and train it, as those of any sample. A modality that no sample of a device has
stays absent there. At inference an absent modality is zeros at the projection, as with ``zero``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.data.encoders import Encoder
from edgefl.methods.stand_ins import zero
from edgefl.registry import register
from edgefl.roles import StandIn


class Completed(NamedTuple):
    """The data in which every modality of the device is there."""

    dataset: Dataset

    def metrics(self) -> dict[str, float]:
        """Nothing: zeros are not made of anything."""
        return {}

    def reason(self) -> str:
        """Nothing falls short."""
        return ""


def complete(dataset: Dataset, encoders: Mapping[str, Encoder]) -> Completed:
    """The data set with its absent values, which are zeros, as present ones; which samples were whole is kept."""
    own = [m for m in dataset.signature() if m in encoders]
    whole = np.logical_and.reduce([dataset.has(m) for m in own])
    present = dataset.present | {m: np.ones(len(dataset), dtype=bool) for m in own}
    return Completed(replace(dataset, present=present, whole=whole))


def completed_counts(samples: Mapping[str, int], encoders: Mapping[str, Encoder]) -> dict[str, int]:
    """``samples`` with every sample in each modality that any has."""
    return {m: samples[""] if m in encoders and count else count for m, count in samples.items()}


register(
    StandIn(
        "zero_input",
        "zeros in place of its values, which train its encoder too (MMiC's code); at inference zeros",
        make=zero,
        completed_data=complete,
        completed_counts=completed_counts,
    )
)
