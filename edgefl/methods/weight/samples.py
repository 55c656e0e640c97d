"""Weights by numbers of samples: w_k ~ n_k over the devices that trained the part (FedAvg); and training alone.

FedIoT's multimodal FedAvg (Zhao, Barnaghi and Haddadi 2022, arXiv 2109.04833):  w_k ~ n_k, times ``factor`` where
device k trains two or more modalities; per part, so that a part of one modality is averaged over the devices that have
it. 100 is the factor in its published code; there all devices have the same number of samples, so that n_k beside it is
this project's choice.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.aggregation.mean import proportional
from edgefl.errors import ModelError, Problem
from edgefl.registry import Option, Recipe, Weight, default, register


def by_samples(samples: Mapping[str, int], modalities: Mapping[str, int] | None = None) -> dict[str, float]:
    """Weights, which sum to 1, of the devices with samples; devices with none are left out."""
    return proportional(samples)


def fediot(samples: Mapping[str, int], modalities: Mapping[str, int], *, factor: float = 100.0) -> dict[str, float]:
    """As ``by_samples``, ``factor`` times as much where ``modalities``, how many a device trains, are two or more.

    Raises ModelError for a device whose modalities are not known.
    """
    unknown = sorted(device for device, count in samples.items() if count > 0 and device not in modalities)
    if unknown:
        raise ModelError(
            f"how many modalities device '{unknown[0]}' trains is not known",
            remedy="Give the number of modalities of every device with samples, or set weight: samples.",
        )
    return proportional(
        {device: n * (factor if modalities.get(device, 0) > 1 else 1.0) for device, n in samples.items()}
    )


def _alone(recipe: Recipe) -> list[Problem]:
    return [
        Problem(role, f"weight: own exchanges nothing; set {role}: {default(role)}")
        for role in ("cluster", "prototypes", "repair", "optimise")
        if default(role) not in recipe[role]
    ]


register(
    Weight("samples", "number of samples, per part", default=True, weigh=by_samples),
    Weight(
        "fediot",
        "the same, devices with several modalities counting more (FedIoT)",
        {"factor": Option(100.0, "how many times as much", least=0)},
        source="arXiv 2109.04833",
        weigh=fediot,
    ),
    Weight(
        "own",
        "nothing is exchanged: each device trains alone",
        conflicts=_alone,
        per_round=True,
        weigh=by_samples,
        exchange="nothing",
    ),
)
