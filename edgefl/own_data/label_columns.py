"""Which column of a table is the label: by words in its name, by its values, by its place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from edgefl.data.recording import is_number
from edgefl.errors import DataError
from edgefl.own_data.code_columns import is_code
from edgefl.own_data.several_labels import NAMED, separator_of
from edgefl.own_data.wishes import Task

#: Names that say it.
LABEL = re.compile(r"(class|label|target|y|outcome|ground_?truth)(_?(name|id))?", re.IGNORECASE)
#: Words of names that labels often have: of public tables, also in German.
_WORDS = frozenset(
    re.findall(
        r"\w+",
        "class label target outcome category activity emotion diagnosis species breed origin quality type result "
        "variety survived income churn default fraud status condition disease sentiment topic genre "
        "sorte klasse ziel art typ",
    )
)
#: Words of names that a quantity to be predicted often has, where it is the last column.
_QUANTITIES = frozenset({"rating", "score", "price", "cost", "salary", "grade", "preis", "kosten"})
#: Most classes of a column that is not said to be the label, and values of a column of whole numbers that is a class.
MOST_CLASSES, _MOST_NUMBERS = 50, 20
#: Different values of a column of numbers beyond which it is a quantity.
_QUANTITY = 20


class Guess(NamedTuple):
    """The column of the label ("": none). ``said``: the user said so, or its name does; ``others``: also possible.

    ``numeric``: it is a quantity, and what is learned is its value; ``separator``: it holds several labels a row.
    ``why`` it was chosen.
    """

    column: str = ""
    said: bool = False
    others: tuple[str, ...] = ()
    numeric: bool = False
    several: bool = False
    separator: str = ""
    why: str = ""


def best_label(columns: Mapping[str, Sequence[str]], wanted: str, *, numbers: bool, task: Task = "") -> Guess:
    """The label among columns with their values. ``numbers``: whether one of whole numbers may be it unsaid.

    Raises DataError for a wanted column without a value, and for the ``task`` "number" of one that is none.
    """
    guess = _best(columns, wanted, numbers=numbers)
    return _by_task(guess, columns[guess.column], task) if guess.column else guess


def _by_task(guess: Guess, values: Sequence[str], task: Task) -> Guess:
    """The guess with the task of its labels: by the user's word, else by the values of the column."""
    if task == "number" and not all(map(is_number, values)):
        raise DataError(f"--task number: the column {guess.column} holds texts", remedy="Name another by --label.")
    if task in {"number", "classes"}:
        return guess._replace(numeric=task == "number")
    asked = task == "multilabel" or NAMED.fullmatch(guess.column) is not None
    separator = separator_of(values, asked=asked)
    several = task == "multilabel" or bool(separator)
    why = "cells of several labels" if separator else guess.why
    return guess._replace(several=several, separator=separator, numeric=guess.numeric and not several, why=why)


def _best(columns: Mapping[str, Sequence[str]], wanted: str, *, numbers: bool) -> Guess:
    if wanted:
        if not columns.get(wanted):
            raise DataError(f"the column {wanted} has no values", remedy="Name another by --label.")
        return Guess(wanted, said=True, numeric=is_quantity(columns[wanted]))
    last = next(reversed(list(columns)), "")
    full = max(map(len, columns.values()), default=0)
    scores = {c: _score(c, values, last=c == last, numbers=numbers, full=full) for c, values in columns.items()}
    fitting = sorted((c for c in scores if scores[c] > 0), key=lambda c: -scores[c])
    if not fitting:
        return Guess()
    best, *others = fitting
    if numbers:
        quantities = [c for c, values in columns.items() if is_quantity(values) and not is_code(c, values)]
        others += [c for c in quantities if c not in fitting]
    numeric = is_quantity(columns[best])
    why = _why(best, columns[best], last=best == last, numeric=numeric)
    return Guess(best, LABEL.fullmatch(best) is not None, tuple(others), numeric, why=why)


def _why(column: str, values: Sequence[str], *, last: bool, numeric: bool) -> str:
    """Reason for the likeliest label, in words."""
    named = LABEL.fullmatch(column) or _words(column) & (_WORDS | _QUANTITIES)
    kinds = "" if numeric else f"{len(set(values))} values"
    return ", ".join(filter(None, ("a usual name" if named else "", "the last column" if last else "", kinds)))


def _words(column: str) -> set[str]:
    return set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", column).lower()))


def is_quantity(values: Sequence[str]) -> bool:
    """Whether a column is numbers of which many differ, or that are no whole ones: no classes."""
    if not values or not all(map(is_number, values)):
        return False
    kinds = {float(value) for value in values}
    return len(kinds) > _QUANTITY or (len(kinds) > 2 and not all(value.is_integer() for value in kinds))


def _score(column: str, values: Sequence[str], *, last: bool, numbers: bool, full: int) -> float:
    """How much a column looks like a label; 0: not at all. ``full``: values of a column without empty cells."""
    kinds = len(set(values))
    if values and separator_of(values, asked=NAMED.fullmatch(column) is not None):
        return 7.0 if NAMED.fullmatch(column) else 1.5
    if LABEL.fullmatch(column) and values:
        return 8.0
    numeric = all(map(is_number, values))
    if column.lower() in _WORDS and 0 < kinds <= (2 if numeric else MOST_CLASSES):
        return 8.5 if last else 6.0  # of passengers class is less of a label than survived, the last
    words = _words(column)
    if last and numbers and words & _QUANTITIES and is_quantity(values):
        return 3.0
    if kinds < 2 or len(values) < 3 * kinds:
        return 0.0
    if numeric and not (numbers and kinds <= _MOST_NUMBERS and not is_quantity(values)):
        return 0.0
    if kinds > MOST_CLASSES or sum(len(value.split()) for value in values) >= 4 * len(values):
        return 0.0
    named = 4.0 if words & _WORDS else 0.0
    few = 0.25 * (1 - kinds / MOST_CLASSES)
    return (named + few + (0.5 if numeric else 1.0) + (0.75 if last else 0.0)) * len(values) / full
