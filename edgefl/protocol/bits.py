"""Small whole numbers in dense bits: planes of equal width, Golomb-Rice codes of gaps, bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgefl.errors import ProtocolError
from edgefl.plan.packed_sizes import bytes_of_bits, rice_of

Array = np.ndarray[Any, np.dtype[Any]]


def to_planes(numbers: Array, width: int) -> Array:
    """The lowest ``width`` bits of each number, u8 [width, ceil(n / 8)]: all lowest bits first."""
    planes = np.empty((width, bytes_of_bits(numbers.size)), np.uint8)
    for place in range(width):
        planes[place] = np.packbits(numbers & (1 << place), bitorder="little")
    return planes


def from_planes(planes: Array, count: int, dtype: type = np.uint8) -> Array:
    """``count`` numbers from their planes."""
    numbers: Array = np.zeros(count, dtype)
    for place, plane in enumerate(planes):
        numbers |= np.unpackbits(plane, count=count, bitorder="little").astype(dtype, copy=False) << dtype(place)
    return numbers


def to_gaps(at: Array, size: int) -> Array:
    """Ascending places of ``size`` as the gaps between them, u8; rice_of(size, count) bits of each lie in planes.

    The rest of a gap is as many zeros before a one; these come first.
    """
    low = rice_of(size, at.size)
    gaps = np.diff(at, prepend=-1) - 1
    ends = np.cumsum((gaps >> low) + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1 if at.size else 0, np.bool_)
    unary[ends] = True
    return np.concatenate((np.packbits(unary, bitorder="little"), to_planes(gaps, low).reshape(-1)))


def from_gaps(coded: Array, count: int, size: int) -> Array:
    """``count`` ascending places of ``size``, int64. Raises ProtocolError for what ``to_gaps`` cannot have made."""
    if count > size:
        raise ProtocolError(f"{count} places of {size}")
    low = rice_of(size, count)
    unary = coded.size - low * bytes_of_bits(count)
    if not bytes_of_bits(count) <= unary <= bytes_of_bits(count + (size >> low)):
        raise ProtocolError(f"{coded.size} bytes of gaps between {count} places of {size}")
    ends = np.flatnonzero(np.unpackbits(coded[:unary], bitorder="little"))
    if ends.size != count or (count and ends[-1] < 8 * (unary - 1)):
        raise ProtocolError(f"{ends.size} gaps between {count} places, or bytes behind the last")
    gaps = from_planes(coded[unary:].reshape(low, bytes_of_bits(count)), count, np.int64)
    gaps += (np.diff(ends, prepend=-1) - 1) << low
    at: Array = np.cumsum(gaps + 1) - 1
    if count and at[-1] >= size:
        raise ProtocolError(f"a place beyond {size}")
    return at


def to_bf16(values: Array) -> Array:
    """f32 as bfloat16's bits, int16: rounded to the nearest, of two to the even one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.asarray(bits.astype(np.uint16).view(np.int16))


def from_bf16(bits: Array) -> Array:
    """bfloat16's bits, int16, as f32."""
    return np.asarray((bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32))
