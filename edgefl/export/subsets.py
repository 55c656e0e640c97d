"""Subsets of a model's modalities for an export's checks."""

from __future__ import annotations

from itertools import combinations

import numpy as np

#: All subsets are looked at up to this many modalities, 15 of them; beyond, the whole, each alone and as many drawn.
ALL_SUBSETS, DRAWN = 4, 8


def subset_list(modalities: tuple[str, ...], rng: np.random.Generator) -> list[tuple[str, ...]]:
    """Subsets of the modalities to check, the complete one first; of many modalities a sample."""
    several = [some for n in range(len(modalities), 1, -1) for some in combinations(modalities, n)]
    if len(modalities) > ALL_SUBSETS:
        drawn = rng.choice(len(several) - 1, DRAWN, replace=False) + 1
        several = [several[0], *(several[i] for i in sorted(drawn.tolist()))]
    return [*several, *((m,) for m in modalities if len(modalities) > 1)] or [modalities]
