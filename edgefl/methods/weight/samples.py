"""How much each device counts in one part: w_k = n_k / sum of n over the devices that trained the part."""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.errors import ModelError


def by_samples(samples: Mapping[str, int]) -> dict[str, float]:
    """Weights, which sum to 1, of the devices with samples; devices with none are left out. Nobody has any: empty."""
    return _shares(samples)


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
    return _shares({device: n * (factor if modalities.get(device, 0) > 1 else 1.0) for device, n in samples.items()})


def capped(shares: Mapping[str, float], most: float) -> dict[str, float]:
    """Weights (sum 1) of which none exceeds ``most``: what is above it goes to the others, in proportion to theirs.

    Where ``most`` is less than one over their number, all weigh the same.
    """
    if most >= 1 or not shares:
        return dict(shares)
    high: set[str] = set()
    while over := {d for d, w in _rest(shares, high, most).items() if w > most * (1 + 1e-12)} - high:
        high |= over
    if len(high) == len(shares):
        return dict.fromkeys(shares, 1 / len(shares))
    return _rest(shares, high, most)


def _rest(shares: Mapping[str, float], high: set[str], most: float) -> dict[str, float]:
    """The devices in ``high`` weigh ``most``; the others share what is left."""
    left = sum(weight for device, weight in shares.items() if device not in high)
    scale = (1 - most * len(high)) / left if left else 0.0
    return {device: most if device in high else weight * scale for device, weight in shares.items()}


def _shares(amounts: Mapping[str, float]) -> dict[str, float]:
    present = {device: amount for device, amount in sorted(amounts.items()) if amount > 0}
    total = sum(present.values())
    return {device: amount / total for device, amount in present.items()}
