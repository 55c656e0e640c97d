"""Label sets of their own: devices of one run whose labels are of different sets, as in AproMFL (arXiv 2502.04400).

A label "@group:animals" is the class "animals" of the label set "group". Where every label name of a run says its set,
each set is a softmax over its own classes, by a part ``task/<set>`` that the devices with its labels alone train.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

_MARK = "@"
_NAME = re.compile(rf"{_MARK}([A-Za-z][A-Za-z0-9_-]{{0,31}}):(.+)", re.DOTALL)


def space_of(name: str) -> str:
    """The label set that a label name says; "": none."""
    found = _NAME.fullmatch(name)
    return found[1] if found else ""


def spaces_in(names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Label set -> places of its classes in ``names``, ascending; {} where a name says none."""
    return _spaces(tuple(names))


@lru_cache(64)
def _spaces(names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(space_of(name), []).append(place)
    return {} if "" in found else {space: tuple(places) for space, places in sorted(found.items())}


def words_of(names: Sequence[str]) -> tuple[str, ...]:
    """Names of classes as people call them: with their set where there are several; () where a name says none."""
    return _words(tuple(names))


@lru_cache(64)
def _words(names: tuple[str, ...]) -> tuple[str, ...]:
    found = [_NAME.fullmatch(name) for name in names]
    several = len(spaces_in(names)) > 1
    return () if None in found else tuple(f"{one[1]}:{one[2]}" if several else one[2] for one in found if one)


def samples_key(space: str) -> str:
    """The key of a label set among a device's counts of samples, where it cannot be a modality's."""
    return _MARK + space


def is_samples_key(key: str) -> bool:
    """Whether a key of a device's counts of samples is a label set's."""
    return key.startswith(_MARK)


def keyed_spaces(counts: Iterable[str]) -> set[str]:
    """The label sets among the keys of a device's counts of samples."""
    return {key.removeprefix(_MARK) for key in counts if is_samples_key(key)}
