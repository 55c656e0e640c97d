"""Parts in fewer bytes: rounded, as a change of what the other side holds, or the largest changes alone.

What the other side reconstructs, q, follows exactly from what is sent; the residual, target - q, is sent with the next
round's (error feedback, arXiv 1901.09847). A packed part is an object of encoding "packed": of tensor t it holds
``t|f16`` or ``t|bf16`` (bits as int16), ``t|int8`` or ``t|int4`` (two a byte, the first one low) with ``t|scale`` (one
a row), ``t|top`` with ``t|gaps`` and ``t|scale``, or ``t|whole`` where packing would not pay or not be right: integers,
small tensors, and those of one dimension, which are biases, norms and running averages (a variance has no error
feedback: it would become negative).

    int8: s_r = max|x_r| / 127, q = round(x / s);  int4: the same with 7;  top: the share k of the largest |x|, as int8
    eden1 to eden4: ``edgefl.protocol.rotated_parts``
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from edgefl.errors import ProtocolError
from edgefl.plan.job import Transfer
from edgefl.plan.packed_sizes import (
    EDEN_BITS,
    count_of,
    object_bytes,
    sent_bytes,
)
from edgefl.protocol.bits import from_bf16, from_gaps, to_bf16, to_gaps
from edgefl.protocol.rotated_parts import (
    BLOCK,
    Tensors,
    added,
    blocks,
    compress_rotated,
    decompress_rotated,
    difference,
    travels_whole,
    type_of,
)
from edgefl.protocol.tensors import DEFAULT_LIMIT_BYTES, Array, decode_part, encode_part
from edgefl.records import PACKINGS

_LEVELS = {"int8": 127, "int4": 7}


class Compressed(NamedTuple):
    """Bytes sent, tensors the other side reconstructs from them, and the residual of the tensors that have one."""

    data: bytes
    reconstructed: dict[str, Array]
    residual: dict[str, Array]


def compress(target: Tensors, base: Tensors, packing: str, top: float, *, reconstruct: bool = True) -> Compressed:
    """``target`` for a receiver that holds ``base`` (the same names and shapes).

    ``top``: share of the values that "delta+top" sends; ``reconstruct`` False: nothing is reconstructed, and the
    residual is written where ``target`` lies. Raises ProtocolError for an unknown packing, or values it cannot hold.
    """
    if packing not in PACKINGS:
        raise ProtocolError(f"unknown packing {packing!r}; there are {', '.join(PACKINGS)}")
    form = packing.removeprefix("delta+")
    if form in EDEN_BITS:
        rotated = compress_rotated(target, base, EDEN_BITS[form], reconstruct=reconstruct)
        return Compressed(encode_part(rotated.sent, "packed"), rotated.reconstructed, rotated.residual)
    sent: dict[str, Array] = {}
    reconstructed: dict[str, Array] = {}
    residual: dict[str, Array] = {}
    for name, tensor in sorted(target.items()):
        value = np.asarray(tensor)
        if form == "f32" or travels_whole(value):
            sent[f"{name}|whole"] = value
            if reconstruct:
                reconstructed[name] = value
            continue
        start = np.asarray(base[name], np.float32).reshape(len(value), -1) if packing.startswith("delta+") else None
        rows = difference(value, start, copy=reconstruct)
        coded = _code(name, rows, form, top)  # ``rows`` keeps what this does not say
        sent |= {key: one.reshape(value.shape) if one.shape == rows.shape else one for key, one in coded.items()}
        if reconstruct:
            reconstructed[name] = added(start, _decode(name, sent, value.shape, form, top)).reshape(value.shape)
        if rows.any():
            residual[name] = rows.reshape(value.shape)
    return Compressed(encode_part(sent, "packed"), reconstructed, residual)


def pays(tensors: Tensors, packing: str, transfer: Transfer) -> bool:
    """Whether these are sent compressed: the rules say so, and it makes them smaller by a tenth."""
    if packing == "f32" or transfer.whole:
        return False
    layout = {name: type_of(np.asarray(tensor)) for name, tensor in tensors.items()}
    return sent_bytes(layout, packing, transfer) < object_bytes(layout)


@np.errstate(over="ignore", invalid="ignore")  # of a peer's scales; who reads the tensors checks that they are finite
def decompress(
    data: bytes | memoryview, base: Tensors | None, packing: str, limit: int = DEFAULT_LIMIT_BYTES, top: float = 1.0
) -> dict[str, Array]:
    """As ``Compressed.reconstructed``; ``base`` may be None for a packing that is no change of it.

    ``limit`` bounds both the packed bytes and what they unpack to, before anything is allocated. ``top``: the largest
    share of values that "delta+top" may send: their places take 30 times the bytes of their levels meanwhile.

    Raises ProtocolError, naming the tensor, for what cannot be right.
    """
    coded, form = decode_part(data, limit, finite=True, copy=False), packing.removeprefix("delta+")
    if form in EDEN_BITS:
        return decompress_rotated(coded, base, packing, limit)
    names: dict[str, None] = {}
    known = {"whole"} if form == "f32" else {"whole", "scale", "gaps", form}
    for key in coded:
        name, _, entry = key.rpartition("|")
        if not name or entry not in known:
            raise ProtocolError(f"tensor {key[:80]!r} does not belong into a packed part")
        names[name] = None
    if base is None and packing.startswith("delta+"):
        raise ProtocolError(f"a part packed as {packing} says nothing without what it is based on")
    if base is not None and names.keys() != base.keys():
        strange = min(names.keys() ^ base.keys())
        raise ProtocolError(f"tensor {strange[:80]!r} is in the packed part or in what it is based on, but not in both")
    reconstructed = {}
    room = limit
    for name in names:
        if (whole := coded.get(f"{name}|whole")) is not None:
            reconstructed[name] = whole
            room -= whole.nbytes
            continue
        if base is None:
            stored = coded.get(f"{name}|{form}")
            shape = () if stored is None else stored.shape
        else:
            shape = base[name].shape
        room -= math.prod(max(1, size) for size in shape) * np.dtype(np.float32).itemsize
        if room < 0:
            raise ProtocolError(f"tensor {name[:80]!r} of shape {list(shape)} unpacks to more than {limit} bytes")
        if len(shape) < 2:
            raise ProtocolError(f"tensor {name[:80]!r} of shape {list(shape)} travels whole, and does not here")
        change = _decode(name, coded, shape, form, top)
        start = None
        if base is not None and packing.startswith("delta+"):
            start = np.asarray(base[name], np.float32).reshape(change.shape)
        reconstructed[name] = added(start, change).reshape(shape)
    return reconstructed


def add_residual(tensors: Tensors, residual: Tensors, *, used_up: bool = False) -> dict[str, Array]:
    """``tensors`` plus the residual that earlier rounds have left of them.

    ``used_up``: they are not read without it; the sums are written where they lie, if that may be written to.
    """
    return {
        name: np.add(value, residual[name], out=value if used_up and value.flags.writeable else None)
        if name in residual
        else value
        for name, value in tensors.items()
    }


def _code(name: str, rows: Array, form: str, top: float) -> dict[str, Array]:
    """[R, n] f32 as it travels; ``rows`` becomes what is lost of it."""
    if form == "top":
        return _code_top(name, rows, top)
    stored: Array = np.empty(*_stored(rows.shape, form))
    scale = np.zeros(len(rows), np.float32)
    for some in blocks(rows):
        values = rows[some]
        if form in _LEVELS:
            scale[some] = np.abs(values).max(axis=1, initial=0.0) / _LEVELS[form]
            levels = _levels(values, scale[some], form)
            stored[some] = levels if form == "int8" else _in_pairs(levels)
        elif form == "bf16":
            stored[some] = to_bf16(values)
        else:
            with np.errstate(over="ignore"):
                half = values.astype(np.float16)
            if not np.isfinite(half).all():
                raise ProtocolError(
                    f"tensor {name!r} has values up to {np.abs(values).max():.3g}, more than f16 holds",
                    remedy="Set transfer.up and transfer.down to another packing, such as bf16.",
                )
            stored[some] = half.view(np.int16)
        rows[some] -= _values(stored[some], form, scale[some])[:, : rows.shape[1]]
    coded = {f"{name}|{form}": stored}
    return coded | {f"{name}|scale": scale} if form in _LEVELS else coded


def _code_top(name: str, rows: Array, top: float) -> dict[str, Array]:
    flat = rows.reshape(-1)
    count = count_of(flat.size, top)
    sizes = np.abs(flat)
    sizes.partition(flat.size - count)
    least = sizes[flat.size - count]
    del sizes
    found = [
        first + np.flatnonzero(np.abs(flat[first : first + BLOCK]) >= least) for first in range(0, flat.size, BLOCK)
    ]
    at = np.concatenate(found)
    if len(at) > count:  # equals of the least: the first of them
        equal = np.flatnonzero(np.abs(flat[at]) == least)
        at = np.delete(at, equal[len(equal) - (len(at) - count) :])
    chosen = flat[at][None]
    scale = np.asarray(np.abs(chosen).max(axis=1, initial=0.0) / _LEVELS["int8"], np.float32)
    levels = _levels(chosen, scale, "int8")
    flat[at] -= _values(levels, "int8", scale)[0]
    return {f"{name}|top": levels[0], f"{name}|gaps": to_gaps(at, flat.size), f"{name}|scale": scale}


def _stored(shape: tuple[int, ...], form: str) -> tuple[tuple[int, ...], type]:
    """(shape, dtype) in which values [R, ...] travel."""
    if form == "int4":
        return (shape[0], (math.prod(shape[1:]) + 1) // 2), np.uint8
    return shape, np.int8 if form == "int8" else np.int16


def _levels(rows: Array, scale: Array, form: str) -> Array:
    """int8 [R, n]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.where(scale[:, None] > 0, rows / scale[:, None], 0)
    return np.clip(np.rint(levels), -_LEVELS[form], _LEVELS[form]).astype(np.int8)


def _in_pairs(levels: Array) -> Array:
    """Levels -7 to 7 [R, n] as bytes [R, (n + 1) // 2]: 8 more than each, a last one without another beside 8."""
    high = (levels[:, 1::2] + 8).astype(np.uint8)
    low = (levels[:, ::2] + 8).astype(np.uint8)
    if high.shape[1] < low.shape[1]:
        high = np.pad(high, ((0, 0), (0, 1)), constant_values=8)
    return np.asarray(low | high << np.uint8(4))


def _values(stored: Array, form: str, scale: Array) -> Array:
    """[R, n] f32 of values as they travel; by IEEE arithmetic alone, so that both sides get the same bits."""
    if form == "int8":
        return np.asarray(stored.astype(np.float32) * scale[:, None])
    if form == "int4":
        levels = np.stack((stored & np.uint8(15), stored >> np.uint8(4)), axis=2).reshape(len(stored), -1)
        return np.asarray((levels.astype(np.float32) - np.float32(8)) * scale[:, None])
    if form == "f16":
        return np.asarray(stored.view(np.float16).astype(np.float32))
    return from_bf16(stored)


def _decode(name: str, coded: Tensors, shape: tuple[int, ...], form: str, top: float) -> Array:
    """One tensor's values as they arrive, f32 [R, n] with R the first axis."""

    def piece(form: str, wanted: tuple[int, ...] | None, dtype: type) -> Array:
        value = coded.get(f"{name}|{form}")
        if value is None or value.dtype != dtype or (value.ndim != 1 if wanted is None else value.shape != wanted):
            raise ProtocolError(f"tensor {name[:80]!r}: '{form}' is missing, or is not {dtype.__name__} {wanted or ''}")
        return value

    if form != "top":
        stored = piece(form, *_stored(shape, form)).reshape(shape[0], -1)
        scale = piece("scale", shape[:1], np.float32) if form in _LEVELS else np.zeros(shape[0], np.float32)
        out = np.empty((shape[0], math.prod(shape[1:])), np.float32)
        for some in blocks(out):
            out[some] = _values(np.ascontiguousarray(stored[some]), form, scale[some])[:, : out.shape[1]]
        return out
    values, scale = piece("top", None, np.int8), piece("scale", (1,), np.float32)
    coded_gaps, size = piece("gaps", None, np.uint8), math.prod(shape)
    if values.size > (most := count_of(size, top)):
        raise ProtocolError(f"tensor {name[:80]!r}: {values.size} of {size} values, at most {most} are agreed on")
    try:
        at = from_gaps(coded_gaps, values.size, size)
    except ProtocolError as error:
        raise ProtocolError(f"tensor {name[:80]!r}: {error.message}") from error
    flat = np.zeros(size, np.float32)
    flat[at] = _values(values[None], "int8", scale)[0]
    return flat.reshape(shape[0], -1)
