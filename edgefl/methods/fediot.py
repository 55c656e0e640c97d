"""Weights that count devices with several modalities more (FedIoT: Zhao, Barnaghi and Haddadi 2022, arXiv 2109.04833).

w_k ~ n_k, times ``factor`` where device k trains two or more modalities; per part, so that a part of one modality is
averaged over the devices that have it. 100 is the factor in its published code, where all devices have the same number
of samples: n_k beside it is this project's choice.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.aggregation.mean import proportional
from edgefl.errors import ModelError
from edgefl.registry import Option, register
from edgefl.roles import Weight


def fediot(samples: Mapping[str, int], modalities: Mapping[str, int], *, factor: float = 100.0) -> dict[str, float]:
    """Weights, which sum to 1: samples, times ``factor`` where a device trains two or more ``modalities``.

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
        {"factor": Option(100.0, "how many times as much", least=0)},
        weigh=fediot,
    )
)
