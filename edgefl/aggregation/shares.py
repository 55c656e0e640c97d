"""Shares of a total, and a cap on them."""

from __future__ import annotations

from collections.abc import Mapping


def proportional(amounts: Mapping[str, float]) -> dict[str, float]:
    """Weights, sum 1, of the devices whose amount is above 0, in order of name; empty when there is none."""
    present = {device: amount for device, amount in sorted(amounts.items()) if amount > 0}
    total = sum(present.values())
    return {device: amount / total for device, amount in present.items()}


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
