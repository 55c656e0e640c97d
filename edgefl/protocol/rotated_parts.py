"""Parts whose changes are rotated and quantised (``edgefl.protocol.eden``), all their tensors together.

The tensors lie one behind the other, by name: ``|levels``, ``|scale`` and ``|seed`` of all that are rotated, ``|whole``
of the rest in f32; a header for each would be more than a bit a value in a small model. The seed is a hash of target
and base: the signs of two devices, or rounds, are independent, and a round that is tried again sends the same bytes. A
device that chooses its seed can send nothing that it could not send by choosing levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import xxhash

from edgefl.errors import ProtocolError
from edgefl.plan.packed_sizes import EDEN_BITS, bytes_of_bits, packed_layout, scales_of
from edgefl.plan.packed_sizes import travels_whole as type_travels_whole
from edgefl.protocol.bits import Array, from_bf16
from edgefl.protocol.eden import Coded, decode, encode

Tensors = Mapping[str, Array]
#: Values worked on at a time: a part is a copy of a large tensor already, and there must not be four.
BLOCK = 2**18


class Rotated(NamedTuple):
    """A part's entries as sent, the tensors reconstructed from them, and the residual."""

    sent: dict[str, Array]
    reconstructed: dict[str, Array]
    residual: dict[str, Array]


def compress_rotated(target: Tensors, base: Tensors, bits: int, *, reconstruct: bool) -> Rotated:
    """``target`` for a receiver that holds ``base``.

    ``reconstruct`` False: nothing is reconstructed, and the residual is written where ``target`` lies. Raises
    ProtocolError for changes that are not finite.
    """
    named = sorted((name, np.asarray(tensor)) for name, tensor in target.items())
    digest = xxhash.xxh3_64()
    for name, value in named:
        for side in (value, base[name]):
            digest.update(np.ascontiguousarray(side).data)
    seed = digest.digest()
    sent: dict[str, Array] = {"|seed": np.frombuffer(seed, np.uint8)}
    levels, scales, whole = [np.empty(0, np.uint8)], [np.empty(0, np.int16)], [np.empty(0, np.float32)]
    reconstructed: dict[str, Array] = {}
    residual: dict[str, Array] = {}
    for name, value in named:
        if travels_whole(value):
            if value.dtype.kind == "f":
                whole.append(np.asarray(value, np.float32).reshape(-1))
            else:
                sent[f"{name}|whole"] = value
            if reconstruct:
                reconstructed[name] = value
            continue
        start = np.asarray(base[name], np.float32).reshape(len(value), -1)
        rows = difference(value, start, copy=reconstruct)
        change = np.empty_like(rows) if reconstruct else None
        coded = encode(rows.reshape(-1), bits, seed, None if change is None else change.reshape(-1))
        if not np.isfinite(from_bf16(coded.scales)).all():
            raise ProtocolError(
                f"tensor {name!r} has changes that are not finite, or whose squares are not",
                remedy="Set transfer.up and transfer.down to another packing, such as delta+bf16.",
            )
        levels.append(coded.levels.reshape(-1))
        scales.append(coded.scales)
        if change is not None:
            reconstructed[name] = added(start, change).reshape(value.shape)
        if rows.any():
            residual[name] = rows.reshape(value.shape)
    sent |= {"|levels": np.concatenate(levels), "|scale": np.concatenate(scales), "|whole": np.concatenate(whole)}
    return Rotated(sent, reconstructed, residual)


def decompress_rotated(coded: Tensors, base: Tensors | None, packing: str, limit: int) -> dict[str, Array]:
    """The part that ``coded`` makes of ``base``. Raises ProtocolError for what cannot be right."""
    if base is None:
        raise ProtocolError(f"a part packed as {packing} says nothing without what it is based on")
    types = {name: type_of(value) for name, value in sorted(base.items())}
    rotated = {name: math.prod(shape) for name, (code, shape) in types.items() if not type_travels_whole(code, shape)}
    if (room := 4 * sum(rotated.values())) > limit:
        raise ProtocolError(f"a part of {len(types)} tensors unpacks to {room} bytes, more than {limit}")
    expected = packed_layout(types, packing, 0.0)
    if wrong := coded.keys() ^ expected.keys():
        raise ProtocolError(f"tensor {min(wrong)[:80]!r} is in the packed part or follows from its base, but not both")
    if wrong := {name for name in expected if type_of(coded[name]) != expected[name]}:
        raise ProtocolError(f"tensor {min(wrong)[:80]!r} of a packed part is not {expected[min(wrong)]}")
    if not np.isfinite(from_bf16(coded["|scale"])).all():
        raise ProtocolError("a packed part has scales that are not finite")
    reconstructed: dict[str, Array] = {}
    used = {"|levels": 0, "|scale": 0, "|whole": 0}

    def take(key: str, count: int) -> Array:
        used[key] += count
        return coded[key][used[key] - count : used[key]]

    bits, seed = EDEN_BITS[packing.removeprefix("delta+")], coded["|seed"].tobytes()
    for name, (code, shape) in types.items():
        if code != "F32":
            reconstructed[name] = coded[f"{name}|whole"]
        elif name in rotated:
            size = rotated[name]
            levels = take("|levels", bits * bytes_of_bits(size)).reshape(bits, -1)
            change = decode(Coded(levels, take("|scale", scales_of(size))), size, bits, seed)
            reconstructed[name] = added(np.asarray(base[name], np.float32).reshape(-1), change).reshape(shape)
        else:
            reconstructed[name] = take("|whole", math.prod(shape)).reshape(shape)
    return reconstructed


def travels_whole(tensor: Array) -> bool:
    """Whether a tensor is sent as it is, however its part is packed."""
    return type_travels_whole(*type_of(tensor))


def type_of(tensor: Array) -> tuple[str, tuple[int, ...]]:
    """Type as a part's header names it, and shape."""
    code = "BOOL" if tensor.dtype.kind == "b" else f"{tensor.dtype.kind}{8 * tensor.itemsize}".upper()
    return "F32" if code.startswith("F") else code, tensor.shape


def difference(value: Array, start: Array | None, *, copy: bool) -> Array:
    """value - start as [R, n], where ``value`` lies unless ``copy``."""
    make = np.array if copy or not value.flags.writeable else np.asarray
    rows = make(value, np.float32).reshape(len(value), -1)
    if start is not None:
        for some in blocks(rows):
            rows[some] -= start[some]
    return rows


def blocks(rows: Array) -> list[slice]:
    step = max(1, BLOCK // max(1, rows.shape[1]))
    return [slice(first, first + step) for first in range(0, len(rows), step)]


def added(start: Array | None, change: Array) -> Array:
    """start + change, into ``change``; one IEEE addition a value, so that both sides get the same bits."""
    return change if start is None else np.add(start, change, out=change)
