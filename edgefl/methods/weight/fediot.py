"""FedIoT's weights (Zhao, Barnaghi and Haddadi 2022, arXiv 2109.04833): devices with several modalities count more.

w_k ~ n_k, times ``factor`` where device k trains two or more modalities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from edgefl.aggregation.weights import proportional
from edgefl.errors import ModelError
from edgefl.registry import Options, Weight, register


class Fediot(Options, frozen=True):
    """Options of FedIoT's weights."""

    factor: Annotated[float, Meta(ge=0, description="how many times as much")] = 100.0


def fediot(samples: Mapping[str, int], modalities: Mapping[str, int], *, factor: float = 100.0) -> dict[str, float]:
    """w_k ~ n_k, times ``factor`` where the device trains two or more modalities; otherwise as ``by_samples``.

    FedIoT's multimodal FedAvg (Zhao, Barnaghi and Haddadi 2022, arXiv 2109.04833), per part: a part of one modality
    is averaged over the devices that have it. 100 is the factor in its published code; there all devices have the same
    number of samples, so that n_k beside it is this project's choice. ``modalities``: device -> how many it trains.
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


register(
    Weight(
        "fediot",
        "the same, devices with several modalities counting more (FedIoT)",
        Fediot,
        source="arXiv 2109.04833",
        weigh=fediot,
    )
)
