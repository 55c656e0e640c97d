"""Bytes of a part as it travels, whole or packed, from its layout alone: what is priced, and whether packing pays.

Exact but for the places of "delta+top", whose code is as long as that of places drawn at random.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from math import prod

from edgefl.plan.job import Transfer

#: Tensor name -> (safetensors' name of the type, shape).
Layout = Mapping[str, tuple[str, tuple[int, ...]]]
#: Bytes of a value by safetensors' name of its type.
_WIDTH = {"F32": 4, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
#: Elements below which a tensor travels whole: few bytes, and sensitive.
WHOLE_BELOW = 1024
#: A packed part larger than this share of the whole is sent whole.
WORTH = 0.9
#: Bits a value of the forms that rotate a tensor (``edgefl.protocol.eden``).
EDEN_BITS = {"eden1": 1, "eden2": 2, "eden3": 3, "eden4": 4}
#: Bytes of the seed of a part's rotation.
SEED_BYTES = 8


def travels_whole(code: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this type and shape is sent as it is, however its part is packed."""
    return not code.startswith("F") or len(shape) < 2 or prod(shape) < WHOLE_BELOW


def object_bytes(layout: Layout, encoding: str = "f32") -> int:
    """Bytes of an encoded part (``protocol.tensors.encode_part``) of tensors in this layout, header included."""
    header: dict[str, object] = {"__metadata__": {"encoding": encoding}}
    end = 0
    for name, (kind, shape) in sorted(layout.items(), key=lambda item: (-_WIDTH[item[1][0]], item[0])):
        start, end = end, end + _WIDTH[kind] * prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = len(json.dumps(header, separators=(",", ":")).encode())
    return 8 + -(-text // 8) * 8 + end


def sent_bytes(layout: Layout, packing: str, transfer: Transfer) -> int:
    """Bytes of a part's object as it is sent: packed, unless that saves less than a tenth, or the round is whole."""
    whole = object_bytes(layout)
    if packing == "f32" or transfer.whole:
        return whole
    packed = object_bytes(packed_layout(layout, packing, transfer.top), "packed")
    return packed if packed <= WORTH * whole else whole


def packed_layout(layout: Layout, packing: str, top: float) -> Layout:
    """Layout of the packed part; ``top``: share of the values that "delta+top" sends."""
    form = packing.removeprefix("delta+")
    packed = {name: one for name, one in layout.items() if not travels_whole(*one)}
    beside = {f"{name}|whole": one for name, one in layout.items() if name not in packed}
    if form in EDEN_BITS:
        sizes = [prod(shape) for _, shape in packed.values()]
        together = sum(prod(shape) for code, shape in beside.values() if code == "F32")
        return {name: one for name, one in beside.items() if one[0] != "F32"} | {
            "|seed": ("U8", (SEED_BYTES,)),
            "|levels": ("U8", (sum(EDEN_BITS[form] * bytes_of_bits(size) for size in sizes),)),
            "|scale": ("I16", (sum(map(scales_of, sizes)),)),
            "|whole": ("F32", (together,)),
        }
    for name, (_, shape) in packed.items():
        beside |= {f"{name}|{key}": one for key, one in _packed_tensor(shape, form, top).items()}
    return beside


def _packed_tensor(shape: tuple[int, ...], form: str, top: float) -> Layout:
    rows, size = shape[0], prod(shape)
    if form == "int8":
        return {"int8": ("I8", shape), "scale": ("F32", (rows,))}
    if form == "int4":
        return {"int4": ("U8", (rows, (prod(shape[1:]) + 1) // 2)), "scale": ("F32", (rows,))}
    if form == "top":
        count = count_of(size, top)
        return {"top": ("I8", (count,)), "gaps": ("U8", (_gap_bytes(size, count),)), "scale": ("F32", (1,))}
    return {form: ("I16", shape)}


def bytes_of_bits(bits: int) -> int:
    """Bytes that hold so many bits."""
    return -(-bits // 8)


def block_of(size: int) -> int:
    """Side of the square that a block of a rotated tensor is: it has 4,096 values, 1,024 or 16.

    A block's square root must be a power of two for a rotation without rounded factors. 4,096 values look normal after
    the rotation, and ten times as many stay in a core's cache.
    """
    return next((side for side in (64, 32) if side * side <= size), 4)


def scales_of(size: int) -> int:
    """Scales of a rotated tensor: one a block; the last block overlaps the one before and leaves a rest of it."""
    return -(-size // block_of(size) ** 2)


def count_of(size: int, top: float) -> int:
    """Values of a tensor that "delta+top" sends."""
    return max(1, round(top * size))


def rice_of(size: int, count: int) -> int:
    """Low bits of a gap between ``count`` of ``size`` places in the Golomb-Rice code.

    Shortest for places at random: r bits where the mean gap is between 0.95 and 1.9 times 2^r.
    """
    return (53 * (size - count) // (100 * count)).bit_length() if count else 0


def _gap_bytes(size: int, count: int) -> int:
    """Expected bytes of coded gaps: quotients in unary, low bits plane by plane. Gaps are taken as geometric."""
    low = rice_of(size, count)
    none = 1 - count / size
    quotients = count * none**2**low / (1 - none**2**low) if none else 0.0
    return bytes_of_bits(math.ceil(count + quotients)) + low * bytes_of_bits(count)
