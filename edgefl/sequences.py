"""Sequences that are not walked through: names that are drawn from, and values made when they are asked for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class Made(Sequence[T]):
    """``count`` values, each made by its place, every time it is asked for."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._places = range(count)
        self._make = make

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        if isinstance(place, slice):
            return [self._make(one) for one in self._places[place]]
        return self._make(self._places[place])


class SortedNames(Sequence[str]):
    """``names``, which are sorted, without those of ``left_out`` that are among them."""

    def __init__(self, names: Sequence[str], left_out: Iterable[str] = ()) -> None:
        self._names = names
        gaps = [place for name in sorted(set(left_out)) if (place := place_of(names, name)) is not None]
        self._before = [gap - index for index, gap in enumerate(gaps)]  # names that stay before each gap

    def without(self, name: str) -> SortedNames:
        """The same without this one as well."""
        return SortedNames(self, [name])

    def __len__(self) -> int:
        return len(self._names) - len(self._before)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place %= len(self)
        return self._names[place + bisect_right(self._before, place)]


def place_of(names: Sequence[str], name: str) -> int | None:
    """The place of a name among sorted ones; None: it is not among them."""
    place = bisect_left(names, name)
    return place if place < len(names) and names[place] == name else None
