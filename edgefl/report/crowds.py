"""Charts of large fleets: quantiles of all devices, and the extreme ones by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: More devices than this are no longer told apart by eye; then this many are named.
MANY, WORST = 40, 20
#: Rows in place of all devices -> share of the devices below.
QUANTILES = {"highest of all": 1.0, "90 % quantile": 0.9, "median": 0.5, "10 % quantile": 0.1}


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile of the values at ``share``, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def rows_of(devices: Sequence[str], key: Callable[[str], float | tuple[float, ...]]) -> tuple[list[str], list[str]]:
    """(quantile rows, devices with a row): of many devices those with the largest ``key``, else all."""
    if len(devices) <= MANY:
        return [], list(devices)
    return list(QUANTILES), sorted(devices, key=key, reverse=True)[:WORST]


def how_many(devices: Sequence[str], shown: Sequence[str], which: str) -> str:
    """Caption text on devices without a row; "" for none.

    ``which``: description of the devices ``shown``, such as "that trained the fewest stages".
    """
    rest = len(devices) - len(shown)
    return (
        f" Named: of {len(devices)} devices the {len(shown)} {which}, and {rest} others in the rows of all."
        if rest
        else ""
    )
