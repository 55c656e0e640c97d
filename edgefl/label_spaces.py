"""Label sets of their own: devices of one run whose labels are of different sets, as in AproMFL (arXiv 2502.04400).

A label "@group:animals" is the class "animals" of the label set "group". Where every label name of a run says its set,
each set is a softmax over its own classes, by a part ``task/<set>`` that the devices with its labels alone train.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgefl.records import is_modality

_MARK, _END = "@", ":"


def space_of(name: str) -> str:
    """The label set that a label name says; "": none."""
    space, end, label = name.removeprefix(_MARK).partition(_END)
    return space if name.startswith(_MARK) and end and label and is_modality(space) else ""


def spaces_in(names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Label set -> places of its classes in ``names``, ascending; {} where a name says none."""
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(space_of(name), []).append(place)
    return {} if "" in found else {space: tuple(places) for space, places in sorted(found.items())}


def words_of(names: Sequence[str]) -> tuple[str, ...]:
    """Names of classes as people call them: with their set where there are several; () where a name says none."""
    spaces = spaces_in(names)
    plain = tuple(name.removeprefix(_MARK) for name in names)
    return tuple(name.partition(_END)[2] for name in plain) if len(spaces) == 1 else plain if spaces else ()


def samples_key(space: str) -> str:
    """The key of a label set among a device's counts of samples, where it cannot be a modality's."""
    return _MARK + space


def keyed_spaces(counts: Iterable[str]) -> set[str]:
    """The label sets among the keys of a device's counts of samples."""
    return {key.removeprefix(_MARK) for key in counts if key.startswith(_MARK)}
