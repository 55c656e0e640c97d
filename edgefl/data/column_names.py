"""A model's columns among the names in a table or a record."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

#: Columns that a line names.
_NAMED = 10
#: Likeness of names by which one may stand for another: Discont for Discount has 0.93, City for Country 0.73.
_NEAR = 0.75
#: Pairs of names that are compared at most, and letters of one: 0.2 s, whatever a request names.
_PAIRS, _LETTERS = 10_000, 64


class ColumnNames(NamedTuple):
    """Names there and names wanted.

    ``renamed``: name that is there -> the model's; ``lacking``: name of the model that is not there -> one that is
    there and may be meant ("": none).
    """

    renamed: Mapping[str, str]
    lacking: Mapping[str, str]

    def notes(self, consequence: str) -> list[str]:
        """Sentences on columns under another name, and on absent ones with their ``consequence``."""
        told = []
        if self.renamed:
            spelt = [f"{name!r:.60} as {to!r}" for name, to in self.renamed.items()]
            told.append(f"columns by another spelling: {_listed(spelt)}")
        if self.lacking:
            absent = [
                f"{name!r}" + (f" (there is {near!r:.60})" if near else "") for name, near in self.lacking.items()
            ]
            told.append(f"no column {_listed(absent)}: {consequence}")
        return told


def others(names: Sequence[str]) -> list[str]:
    """A sentence on columns unknown to the model; [] where there are none."""
    return [f"not used: {_listed([f'{name!r:.60}' for name in names])}"] if names else []


def column_names(names: Collection[str], wanted: Sequence[str]) -> ColumnNames:
    """The columns ``wanted`` among ``names``.

    A column is found by its name, else by the only one that differs in capitals, blanks and _ alone, or in a - or point
    that no digit follows.
    """
    absent = [name for name in dict.fromkeys(wanted) if name not in names]
    known = set(wanted)
    spare = {name: _plain(name) for name in names if name not in known}
    short = list(dict.fromkeys(plain for plain in spare.values() if len(plain) <= _LETTERS))
    short = short if len(short) * len(absent) <= _PAIRS else []
    there, sought = Counter(spare.values()), Counter(map(_plain, wanted))
    first = {plain: name for name, plain in reversed(spare.items())}
    renamed: dict[str, str] = {}
    lacking: dict[str, str] = {}
    for name in absent:
        plain = _plain(name)
        if plain and there[plain] == sought[plain] == 1:
            renamed[first[plain]] = name
        else:
            near = difflib.get_close_matches(plain, short, n=1, cutoff=_NEAR)
            lacking[name] = first[near[0]] if near else ""
    return ColumnNames(renamed, dict(sorted(lacking.items(), key=lambda pair: not pair[1])))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _plain(name: str) -> str:
    return re.sub(r"[\s_]+|[.-](?!\d)", "", name.casefold())  # x.2 and lag-1 are no x2 and lag1
