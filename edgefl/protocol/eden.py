"""EDEN: a tensor rotated at random, and a level of the standard normal for each value, in 1 to 4 bits.

Vargaftik et al., ICML 2022, arXiv 2108.08842; with one bit DRIVE, arXiv 2105.08339.

    y = R x,  R = H D / sqrt(n);  q_i = level nearest to y_i / rms(y);  x' = s R^T q,  s = |y|^2 / <y, q>

H is Hadamard's matrix, D random signs. With this s, x' is x in the mean over D, and its squared error is 0.571, 0.133,
0.036 or 0.0096 of |x|^2, whatever x is. A tensor is cut into blocks of n values; no value is padded: the last block
overlaps the one before, and is rotated after it. R^T q is additions in a fixed order, a power of two and signs, and so
has the same bits everywhere; s is the sender's.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import shake_256
from typing import Any, NamedTuple

import numpy as np

from edgefl.plan.packed_sizes import block_of, bytes_of_bits
from edgefl.protocol.bits import from_bf16, from_planes, to_bf16, to_planes

Array = np.ndarray[Any, np.dtype[Any]]

#: The positive levels of least squared error for a standard normal value (Lloyd, Max), by bits.
LEVELS = {
    1: (0.7978846,),
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}
#: Values worked on at a time: 256 KiB and as much again twice stay in a core's second cache.
_AT_ONCE = 2**16


class Coded(NamedTuple):
    """A tensor's levels in planes (u8) and its scales (bfloat16's bits, int16)."""

    levels: Array
    scales: Array


@np.errstate(over="ignore", invalid="ignore")
def encode(values: Array, bits: int, seed: bytes, out: Array | None = None) -> Coded:
    """Code flat f32 values. Afterwards ``values`` holds the residual, and ``out`` what ``decode`` will return."""
    levels = np.empty((bits, bytes_of_bits(values.size)), np.uint8)
    scales: list[Array] = []
    rotation = _Rotation(values.size, seed)
    table = _table(bits)
    bounds = (table[1 : table.size // 2] + table[: table.size // 2 - 1]) * np.float32(0.5)
    for first, last in rotation.pieces():
        piece = values[first:last].copy()
        rotation.forward(piece)
        codes = np.empty(piece.size, np.uint8)
        rest = np.empty_like(piece)
        for rows, row_codes, row_rest in zip(*(rotation.rows(one) for one in (piece, codes, rest)), strict=True):
            rms = np.sqrt(np.einsum("ij,ij->i", rows, rows) / np.float32(rows.shape[1]))
            np.multiply(rows, np.divide(1, rms, out=np.zeros_like(rms), where=rms > 0)[:, None], out=row_rest)
            np.less(row_rest, 0, out=row_codes.view(np.bool_))
            row_codes <<= np.uint8(bits - 1)
            np.abs(row_rest, out=row_rest)
            for bound in bounds:
                row_codes += row_rest > bound
            np.take(table, row_codes, out=row_rest, mode="wrap")
            product = np.einsum("ij,ij->i", rows, row_rest)
            square = np.float32(rows.shape[1]) * rms * rms
            scale = to_bf16(np.divide(square, product, out=rms * np.float32(0), where=product > 0))
            row_rest *= from_bf16(scale)[:, None]
            scales.append(scale)
        levels[:, first // 8 : bytes_of_bits(last)] = to_planes(codes, bits)
        rotation.backward(rest)
        values[first:last] -= rest
        if out is not None:
            out[first:last] = rest
    return Coded(levels, np.concatenate(scales))


def decode(coded: Coded, size: int, bits: int, seed: bytes) -> Array:
    """``size`` values, f32."""
    out = np.empty(size, np.float32)
    rotation, table, used = _Rotation(size, seed), _table(bits), 0
    scales = from_bf16(coded.scales)
    for first, last in rotation.pieces():
        piece = out[first:last]
        codes = from_planes(coded.levels[:, first // 8 : bytes_of_bits(last)], last - first)
        np.take(table, codes, out=piece, mode="wrap")
        for rows in rotation.rows(piece):
            rows *= scales[used : used + len(rows), None]
            used += len(rows)
        rotation.backward(piece)
    return out


def _table(bits: int) -> Array:
    """Levels by code: the highest bit is the sign."""
    positive = np.asarray(LEVELS[bits], np.float32)
    return np.concatenate((positive, -positive))


class _Rotation:
    """Rotation of ``size`` values by pieces: each some blocks, the last perhaps one block and the rest."""

    def __init__(self, size: int, seed: bytes) -> None:
        self.size, self.side = size, block_of(size)
        self.block = self.side**2
        drawn = np.frombuffer(shake_256(seed).digest(bytes_of_bits(2 * self.block)), np.uint8)
        minus = np.unpackbits(drawn, count=2 * self.block, bitorder="little").astype(np.float32)
        self.signs = ((1 - 2 * minus) / np.float32(self.side)).reshape(2, self.block)
        self.work = np.empty((2, min(_AT_ONCE, -(-size // self.block) * self.block)), np.float32)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(first, last) of each piece, the last excluded."""
        blocks, rest = divmod(self.size, self.block)
        alone = (blocks - 1 if rest else blocks) * self.block
        for first in range(0, alone, _AT_ONCE):
            yield first, min(first + _AT_ONCE, alone)
        if rest:
            yield alone, self.size

    def rows(self, piece: Array) -> list[Array]:
        """The piece's values that share a scale, as rows."""
        rest = piece.size % self.block
        ends = [piece[:rest], piece[rest:]] if rest else [piece]
        return [ends[0].reshape(1, -1), ends[1].reshape(1, -1)] if rest else [piece.reshape(-1, self.block)]

    def forward(self, piece: Array) -> None:
        """R x in place of x."""
        rest = piece.size % self.block
        whole = piece[: piece.size - rest].reshape(-1, self.block)
        whole *= self.signs[0]
        self._hadamard(whole)
        if rest:
            overlapping = piece[rest:].reshape(1, -1)
            overlapping *= self.signs[1]
            self._hadamard(overlapping)

    def backward(self, piece: Array) -> None:
        """R^T y in place of y."""
        rest = piece.size % self.block
        if rest:
            overlapping = piece[rest:].reshape(1, -1)
            self._hadamard(overlapping)
            overlapping *= self.signs[1]
        whole = piece[: piece.size - rest].reshape(-1, self.block)
        self._hadamard(whole)
        whole *= self.signs[0]

    def _hadamard(self, blocks: Array) -> None:
        """H of every row [k, n]: of a square of values along its columns, then along its rows."""
        side = self.side
        squares = blocks.reshape(-1, side, side)
        here, there = self.work[:, : squares.size].reshape(2, side, len(squares), side)
        np.copyto(here, squares.swapaxes(0, 1))
        here, there = _butterflies(here, there)
        np.copyto(there, here.swapaxes(0, 2))
        here, there = _butterflies(there, here)
        np.copyto(squares, here.swapaxes(0, 1))


def _butterflies(here: Array, there: Array) -> tuple[Array, Array]:
    """H along the first axis: (the outcome, the other array), both of them written to."""
    side, step = len(here), 1
    while step < side:
        pairs, into = (one.reshape(side // (2 * step), 2, -1) for one in (here, there))
        np.add(pairs[:, 0], pairs[:, 1], out=into[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=into[:, 1])
        here, there, step = there, here, 2 * step
    return here, there
