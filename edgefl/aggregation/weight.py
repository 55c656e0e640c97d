"""How much each device counts in one part: w_k = n_k / sum of n over the devices that trained the part."""

from __future__ import annotations

from collections.abc import Mapping


def by_samples(samples: Mapping[str, int]) -> dict[str, float]:
    """Weights, which sum to 1, of the devices with samples; devices with none are left out. Nobody has any: empty."""
    trained = {device: count for device, count in sorted(samples.items()) if count > 0}
    total = sum(trained.values())
    return {device: count / total for device, count in trained.items()}
