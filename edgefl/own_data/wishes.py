"""Roles of a table's columns that are known: by the user's words."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from edgefl.data.label_sets import SEPARATOR
from edgefl.errors import DataError

#: Kinds of a column; and those of encoders, of a modality.
COLUMN_KINDS = ("number", "category", "date", "text")
MODALITY_KINDS = ("sensor", "table", "vision", "audio", "text")
#: What labels are: one class a sample, several, or a number.
Task = Literal["", "classes", "multilabel", "number"]


class Roles(NamedTuple):
    """Columns by their role; "" and empty: to be found out. ``kinds``: column, or modality -> its kind.

    ``label``: of several columns of yes and no as "cat;dog"; ``task``: what the labels are.
    """

    label: str = ""
    group: str = ""
    drop: frozenset[str] = frozenset()
    kinds: Mapping[str, str] = {}
    task: Task = ""

    @property
    def named(self) -> list[str]:
        """Columns that have to be there."""
        return [name for name in (self.label, self.group, *sorted(self.drop)) if name]


NO_ROLES = Roles()


def wished(label: Iterable[str], group: str, drop: Iterable[str], kinds: Iterable[str], task: Task = "") -> Roles:
    """The roles of a command's options. Raises DataError for a kind that is none."""
    chosen = {}
    for text in kinds:
        name, equals, kind = text.rpartition("=")
        if not equals or not name or kind not in (*COLUMN_KINDS, *MODALITY_KINDS):
            raise DataError(
                f"--kind {text!r:.80} names no kind",
                remedy=f"NAME=KIND: a column is {', '.join(COLUMN_KINDS)}; a modality {', '.join(MODALITY_KINDS)}.",
            )
        chosen[name] = kind
    return Roles(SEPARATOR.join(dict.fromkeys(label)), group, frozenset(drop), chosen, task)


def to_use(column: str, kind: str) -> str:
    """The option that uses a column in another way."""
    return f"to use it{'' if kind == 'text' else f' as a {kind}'}: --kind {shlex.quote(f'{column}={kind}')}"
