"""The multiway transformer (VLMo, arXiv 2111.02358; used by PmcmFL, arXiv 2312.13508), in plain torch, pre-norm.

A layer: x <- x + attention(norm(x)) over the tokens of all modalities at hand, weights shared; then for each
modality m its own x_m <- x_m + mlp_m(norm_m(x_m)). With one modality it is an ordinary transformer layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from edgefl.models.encoder import TokenState, attend, checkpoint, joined_mask
from edgefl.models.spec import EncoderSpec


class SharedAttention(nn.Module):
    """x + attention(norm(x)): tokens [B, N, D], keys [B, N] (bool, which tokens are real) or None -> [B, N, D]."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.attention_dropout = spec.dropout
        self.norm = nn.LayerNorm(spec.width)
        self.qkv = nn.Linear(spec.width, 3 * spec.width)
        self.out = nn.Linear(spec.width, spec.width)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, tokens: Tensor, keys: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm(tokens)).chunk(3, dim=2)
        attended = attend(q, k, v, self.heads, keys, self.attention_dropout if self.training else 0.0)
        after: Tensor = tokens + self.dropout(self.out(attended))
        return after


class FeedForward(nn.Module):
    """x + mlp(norm(x)): one modality's tokens [B, N, D] -> [B, N, D]."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        hidden = int(spec.width * spec.mlp_ratio)
        self.norm = nn.LayerNorm(spec.width)
        self.mlp = nn.Sequential(nn.Linear(spec.width, hidden), nn.GELU(), nn.Linear(hidden, spec.width))
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        after: Tensor = tokens + self.dropout(self.mlp(self.norm(tokens)))
        return after


class MultiwayStage(nn.Module):
    """A multiway stage's layers: shared attention, or one modality's feed-forward.

    Run by `run_stage`.
    """

    def __init__(self, layer: Callable[[EncoderSpec], nn.Module], spec: EncoderSpec, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(spec) for _ in range(count))
        self.activation_checkpointing = False  # as ``Stage.activation_checkpointing``


def run_stage(
    shared: MultiwayStage, own: Mapping[str, MultiwayStage], states: Mapping[str, TokenState]
) -> dict[str, TokenState]:
    """Rows that all have the modalities of ``states``, in the same order, through one stage."""
    lengths = [state.tokens.shape[1] for state in states.values()]
    tokens = torch.cat([state.tokens for state in states.values()], dim=1)
    keys = joined_mask([(state.tokens, state.mask) for state in states.values()])
    checkpointed = shared.activation_checkpointing or any(stage.activation_checkpointing for stage in own.values())

    def layer(i: int, tokens: Tensor) -> Tensor:
        pieces = torch.split(shared.layers[i](tokens, keys), lengths, dim=1)
        return torch.cat([own[m].layers[i](piece) for m, piece in zip(states, pieces, strict=True)], dim=1)

    for i, attention in enumerate(shared.layers):
        read = [attention, *(stage.layers[i] for stage in own.values())]
        run = partial(layer, i)
        tokens = checkpoint(run, tokens, read) if checkpointed else run(tokens)
    after = torch.split(tokens, lengths, dim=1)
    return {m: TokenState(piece, state.mask) for (m, state), piece in zip(states.items(), after, strict=True)}


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

    ``rows[m]`` [n_m] says which of the batch's ``size`` rows have modality m, None: all; ``counts[m]`` = n_m. On the
    meta device it is unknown which; there the first n_m are taken, so that modalities overlap as much as they can: what
    it prices is never too little. Every row with any modality is in exactly one pattern. When all rows have everything,
    there is one pattern of slices: nothing is copied and no value is read.
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


def merged(
    modalities: Iterable[str], found: Iterable[tuple[Mapping[str, Index], Mapping[str, Tensor]]]
) -> dict[str, Tensor]:
    """Results of patterns or pieces, each with the positions they were taken from, as one tensor [n_m, …] a modality.

    In the order of ``modalities``, without those of which there is no result.
    """
    parts: dict[str, list[tuple[Index, Tensor]]] = {m: [] for m in modalities}
    for index, values in found:
        for m, value in values.items():
            parts[m].append((index[m], value))
    return {m: _in_order(some) for m, some in parts.items() if some}


def merged_states(
    modalities: Collection[str], found: Iterable[tuple[Mapping[str, Index], Mapping[str, TokenState]]]
) -> dict[str, TokenState]:
    """As :func:`merged`, of tokens [n_m, N, D] and of the masks of those modalities that have one."""
    states = list(found)
    tokens = merged(modalities, ((index, {m: s.tokens for m, s in some.items()}) for index, some in states))
    masks = merged(
        modalities, ((index, {m: s.mask for m, s in some.items() if s.mask is not None}) for index, some in states)
    )
    return {m: TokenState(values, masks.get(m)) for m, values in tokens.items()}


def _in_order(found: list[tuple[Index, Tensor]]) -> Tensor:
    if len(found) == 1 and isinstance(found[0][0], slice):
        return found[0][1].contiguous()  # a pooled token is a view that would keep all tokens alive
    values = torch.cat([value for _, value in found])
    places = [index for index, _ in found if isinstance(index, Tensor)]
    if not places:  # slices come in their order
        return values
    return values.index_select(0, torch.argsort(torch.cat(places)))
