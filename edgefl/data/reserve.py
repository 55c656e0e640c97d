"""Draws inside the named data sets: the share reserved for pretraining, and pairs at random. Both have fixed seeds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgefl.data.arrays import Array, Indices, generator
from edgefl.errors import DataError

#: The role of a reserved sample, beside 0 train, 1 test, 2 left out.
RESERVED = 3
#: Of these draws; a run's own seed does not change what is reserved, nor which digits make a pair.
SEED = 20_080


def draw(
    name: str, share: float, units: Array, eligible: npt.NDArray[np.bool_], strata: Array | None = None
) -> npt.NDArray[np.bool_]:
    """[N]: which samples of the data set ``name`` are reserved: ``share`` of the ``eligible`` [N] ``units`` [N].

    Whole units, the same share of each stratum [N]; of each at least one is left. A larger share holds a smaller one.
    Raises DataError for an invalid share, and where it is less than one unit everywhere.
    """
    if isinstance(share, bool) or not isinstance(share, float | int) or not 0 <= share < 1:
        raise DataError(f"{name}: reserve is {share!r}", remedy="Give a share from 0 to below 1, such as 0.33.")
    held = np.zeros(len(units), dtype=bool)
    if not share:
        return held
    strata = np.zeros(len(units), dtype=np.int64) if strata is None else strata
    for stratum in np.unique(strata[eligible]):
        mine = eligible & (strata == stratum)
        found = np.unique(units[mine])
        count = min(round(share * len(found)), len(found) - 1)
        held |= mine & np.isin(units, generator(SEED, f"reserve {stratum}").permutation(found)[:count])
    if not held.any():
        raise DataError(f"{name}: a share of {share:g} reserves nothing", remedy="Raise the option reserve.")
    return held


def repaired(role: Array, groups: Array) -> Indices:
    """[N]: for each sample the one whose second modality it gets: at random among those of its role and group."""
    order = np.arange(len(role), dtype=np.int64)
    for part in np.unique(role):
        for group in np.unique(groups):
            rows = np.flatnonzero((role == part) & (groups == group))
            order[rows] = generator(SEED, f"pair {part} {group}").permutation(rows)
    return order
