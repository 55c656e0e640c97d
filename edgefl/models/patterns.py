"""Which rows of a batch have which modalities, and the batch cut into pieces of rows.

``rows[m]`` [n_m] says which of the batch's B rows have modality m, None: all. On the meta device it is unknown which;
there the first n_m are taken, so that modalities overlap as much as they can: what it prices is never too little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Rows = Mapping[str, "Tensor | None"]
#: Positions along the first axis of one modality's tensors.
Index = slice | Tensor


class Piece(NamedTuple):
    """Some rows of a batch: ``own[m]`` picks them out of modality m's tensors, ``rows[m]`` counts within the piece."""

    size: int
    own: dict[str, Index]
    rows: dict[str, Tensor | None]


def patterns(counts: Mapping[str, int], rows: Rows, size: int) -> dict[tuple[str, ...], dict[str, Index]]:
    """{modalities a row has: {modality: positions of those rows in its tensors}}, rows ascending.

    ``counts[m]`` = n_m. Every row with any modality is in exactly one pattern. When all rows have everything, there is
    one pattern of slices: nothing is copied and no value is read.
    """
    if all(rows[m] is None for m in counts):
        return {tuple(counts): dict.fromkeys(counts, slice(0, size))}
    places = {m: _places(rows[m], n) for m, n in counts.items()}
    members: dict[tuple[str, ...], list[int]] = {}
    for row in range(size):
        has = tuple(m for m in counts if row in places[m])
        if has:
            members.setdefault(has, []).append(row)
    return {
        has: {m: _tensor([places[m][row] for row in own], rows) for m in has} for has, own in sorted(members.items())
    }


def pieces(counts: Mapping[str, int], rows: Rows, size: int, most: int) -> Iterator[Piece]:
    """The batch in pieces of at most ``most`` rows, in order; a modality that no row of a piece has is left out.

    ``most`` = 0: one piece. A piece without any modality is skipped.
    """
    if most == 0:
        yield Piece(size, dict.fromkeys(counts, slice(None)), {m: rows[m] for m in counts})
        return
    places = {m: None if rows[m] is None else _places(rows[m], n) for m, n in counts.items()}
    for start in range(0, size, most):
        stop = min(start + most, size)
        index: dict[str, Index] = {}
        within: dict[str, Tensor | None] = {}
        for m, place in places.items():
            own = None if place is None else [row for row in range(start, stop) if row in place]
            if place is None or own is None:
                index[m], within[m] = slice(start, stop), None
            elif own:
                index[m] = _tensor([place[row] for row in own], rows)
                within[m] = None if len(own) == stop - start else _tensor([row - start for row in own], rows)
        if index:
            yield Piece(stop - start, index, within)


def _places(rows: Tensor | None, count: int) -> dict[int, int]:
    """{row of the batch: its place among the modality's rows}."""
    known = range(count) if rows is None or rows.is_meta else rows.tolist()
    return {row: place for place, row in enumerate(known)}


def _tensor(positions: list[int], rows: Rows) -> Tensor:
    device = next(own.device for own in rows.values() if own is not None)
    return torch.tensor(positions, device=device)


def merged(found: list[tuple[Index, Tensor]]) -> Tensor:
    """One modality's results, each with the positions they were taken from, as one tensor [n_m, …] in that order."""
    if len(found) == 1 and isinstance(found[0][0], slice):
        return found[0][1].contiguous()  # a pooled token is a view that would keep all tokens alive
    values = torch.cat([value for _, value in found])
    places = [index for index, _ in found if isinstance(index, Tensor)]
    if not places:  # slices come in their order
        return values
    return values.index_select(0, torch.argsort(torch.cat(places)))
