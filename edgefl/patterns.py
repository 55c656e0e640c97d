"""Counts of samples by pattern: the exact modalities that a sample has, among a device's counts by modality.

The counts of a, b and of all samples do not say how many have both. Where some sample lacks a modality, "&a&b" -> how
many have exactly these two. Samples with one modality are what the others leave of its count.
No numpy: supervisors import this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MARK = "&"
#: Modalities of a device from which on patterns are not counted: there would be 57 of two and more.
MOST = 6
Pattern = tuple[str, ...]


def is_pattern_key(key: str) -> bool:
    """Whether a key of sample counts is a modality pattern."""
    return key.startswith(_MARK)


def pattern_counts(present: Mapping[str, npt.NDArray[np.bool_]]) -> dict[str, int]:
    """Counts by pattern of two modalities and more; {} if every sample has all of ``present``'s ([N] each)."""
    names = list(present)
    if not 1 < len(names) < MOST or all(flags.all() for flags in present.values()):
        return {}
    counts = Counter(zip(*(flags.tolist() for flags in present.values()), strict=True))
    found = {}
    for pattern, count in sorted(counts.items()):
        own = [name for name, here in zip(names, pattern, strict=True) if here]
        if len(own) > 1:
            found["".join(f"{_MARK}{name}" for name in own)] = count
    return found


def patterns_of(samples: Mapping[str, int], modalities: Sequence[str]) -> dict[Pattern, int]:
    """Pattern -> samples that have exactly these of ``modalities``, by a device's counts.

    Where the counts name no pattern: exact for two modalities; of more, the rarer are assumed to lie within the others.
    """
    own = [m for m in modalities if samples.get(m)]
    found: dict[Pattern, int] = {}
    for key, count in samples.items():
        if is_pattern_key(key):
            here = key.split(_MARK)[1:]
            pattern = tuple(m for m in own if m in here)
            found[pattern] = found.get(pattern, 0) + count
    if not found:
        return _assumed({m: samples[m] for m in own}, samples.get("", 0))
    for m in own:
        rest = samples[m] - sum(count for pattern, count in found.items() if m in pattern and len(pattern) > 1)
        found[m,] = max(0, rest)
    return {pattern: count for pattern, count in found.items() if pattern and count}


def _assumed(counts: Mapping[str, int], total: int) -> dict[Pattern, int]:
    if len(counts) == 2:
        (a, of_a), (b, of_b) = counts.items()
        total = min(total or of_a + of_b, of_a + of_b)
        found = {(a, b): of_a + of_b - total, (a,): total - of_b, (b,): total - of_a}
    else:
        order = sorted(counts, key=lambda m: -counts[m])
        rest = [*(counts[m] for m in order[1:]), 0]
        found = {tuple(m for m in counts if m in order[: k + 1]): counts[order[k]] - rest[k] for k in range(len(order))}
    return {pattern: count for pattern, count in found.items() if count > 0}
