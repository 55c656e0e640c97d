"""Parts in fewer bytes: rounded, as a change of what the other side holds, or the largest changes alone.

What the other side gets to hold, q, follows exactly from what is sent; what is lost, target - q, is sent with the next
round's (error feedback, arXiv 1901.09847). A packed part is an object of encoding "packed": of tensor t it holds
``t|f16`` or ``t|bf16`` (bits as int16), ``t|int8`` with ``t|scale`` (one a row), ``t|top`` with ``t|at`` and
``t|scale``, or ``t|whole`` where packing would not pay: integers, and tensors smaller than ``WHOLE_BELOW``.

    int8: s_r = max|x_r| / 127, q = round(x / s);  top: the share k of the largest |x|, these as int8
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.errors import ProtocolError
from edgefl.protocol.parts import DEFAULT_LIMIT_BYTES, decode_part, encode_part, encoding_of
from edgefl.records import PACKINGS

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]
#: Elements below which a tensor travels whole: biases and norms are few bytes, and sensitive.
WHOLE_BELOW = 1024
#: A packed part larger than this share of the whole is sent whole.
WORTH = 0.9
_LEVELS = 127
_FORMS = frozenset({"whole", "f16", "bf16", "int8", "scale", "top", "at"})


class Packed(NamedTuple):
    """What is sent, and what the other side will hold once it has it."""

    data: bytes
    held: dict[str, Array]


def pack(target: Tensors, base: Tensors, packing: str, top: float) -> Packed:
    """``target`` for somebody who holds ``base`` (the same names and shapes).

    ``top``: share of the values that "delta+top" sends. Raises ProtocolError for an unknown packing, or values that it
    can not hold.
    """
    if packing not in PACKINGS:
        raise ProtocolError(f"unknown packing {packing!r}; there are {', '.join(PACKINGS)}")
    form = packing.removeprefix("delta+")
    sent: dict[str, Array] = {}
    held: dict[str, Array] = {}
    for name, tensor in sorted(target.items()):
        value = np.asarray(tensor)
        if value.dtype.kind != "f" or value.size < WHOLE_BELOW or form == "f32":
            sent[f"{name}|whole"], held[name] = value, value
            continue
        start = base[name] if packing.startswith("delta+") else np.zeros((), np.float32)
        change = (value - start).astype(np.float32, copy=False)
        coded = _code(name, change, form, top)
        sent |= coded
        held[name] = np.asarray(start + _decode(name, coded, change.shape), np.float32)
    return Packed(encode_part(sent, "packed"), held)


def is_packed(data: bytes | memoryview) -> bool:
    """Whether an object is a packed part."""
    return encoding_of(data) == "packed"


def unpack(
    data: bytes | memoryview, base: Tensors | None, packing: str, limit: int = DEFAULT_LIMIT_BYTES
) -> dict[str, Array]:
    """What ``pack`` called ``held``; ``base`` may be None for a packing that is no change of it.

    Raises ProtocolError, naming the tensor, for what can not be right.
    """
    coded = decode_part(data, limit, finite=True, copy=False)
    names: dict[str, None] = {}
    for key in coded:
        name, _, form = key.rpartition("|")
        if not name or form not in _FORMS:
            raise ProtocolError(f"tensor {key[:80]!r} does not belong into a packed part")
        names[name] = None
    if base is None and packing.startswith("delta+"):
        raise ProtocolError(f"a part packed as {packing} says nothing without what it is based on")
    if base is not None and names.keys() != base.keys():
        strange = min(names.keys() ^ base.keys())
        raise ProtocolError(f"tensor {strange[:80]!r} is in the packed part or in what it is based on, but not in both")
    held = {}
    for name in names:
        if f"{name}|whole" in coded:
            held[name] = coded[f"{name}|whole"]
            continue
        shape = next((coded[key].shape for form in ("f16", "bf16", "int8") if (key := f"{name}|{form}") in coded), ())
        start = np.zeros((), np.float32)
        if base is not None:
            shape = base[name].shape
            start = base[name] if packing.startswith("delta+") else start
        held[name] = np.asarray(start + _decode(name, coded, shape), np.float32)
    return held


def add_lost(tensors: Tensors, lost: Tensors) -> dict[str, Array]:
    """``tensors`` with what earlier rounds have not sent of them."""
    return {name: value + lost[name] if name in lost else value for name, value in tensors.items()}


def lost_of(target: Tensors, held: Tensors) -> dict[str, Array]:
    """What the other side lacks of ``target``; tensors that arrived whole are left out."""
    found = {name: value - held[name] for name, value in target.items() if np.asarray(value).dtype.kind == "f"}
    return {name: value for name, value in found.items() if value.any()}


def _code(name: str, change: Array, form: str, top: float) -> dict[str, Array]:
    if form == "f16":
        with np.errstate(over="ignore"):
            half = change.astype(np.float16)
        if not np.isfinite(half).all():
            raise ProtocolError(
                f"tensor {name!r} has values up to {np.abs(change).max():.3g}, more than f16 holds",
                remedy="Set transfer.up and transfer.down to another packing, such as bf16.",
            )
        return {f"{name}|f16": half.view(np.int16)}
    if form == "bf16":
        return {f"{name}|bf16": _bf16(change)}
    if form == "int8":
        rows = change.reshape(change.shape[0], -1)
        values, scale = _levels(rows, np.abs(rows).max(axis=1, initial=0.0))
        return {f"{name}|int8": values.reshape(change.shape), f"{name}|scale": scale}
    flat = change.reshape(-1)
    count = max(1, round(top * flat.size))
    at = np.sort(np.argpartition(np.abs(flat), flat.size - count)[flat.size - count :]).astype(np.int32)
    chosen = flat[at][None]
    values, scale = _levels(chosen, np.abs(chosen).max(axis=1, initial=0.0))
    return {f"{name}|top": values[0], f"{name}|at": at, f"{name}|scale": scale}


def _levels(rows: Array, largest: Array) -> tuple[Array, Array]:
    """int8 [R, n] and their scales [R]."""
    scale = np.asarray(largest / _LEVELS, np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.where(scale[:, None] > 0, rows / scale[:, None], 0)
    return np.clip(np.rint(levels), -_LEVELS, _LEVELS).astype(np.int8), scale


def _decode(name: str, coded: Tensors, shape: tuple[int, ...]) -> Array:
    """The values of one tensor as they arrive, f32; by IEEE arithmetic alone, so that both sides get the same bits."""

    def piece(form: str, wanted: tuple[int, ...] | None, dtype: type) -> Array:
        value = coded.get(f"{name}|{form}")
        if value is None or value.dtype != dtype or (wanted is not None and value.shape != wanted):
            raise ProtocolError(f"tensor {name[:80]!r}: '{form}' is missing, or is not {dtype.__name__} {wanted or ''}")
        return value

    if f"{name}|f16" in coded:
        return piece("f16", shape, np.int16).view(np.float16).astype(np.float32)
    if f"{name}|bf16" in coded:
        bits = piece("bf16", shape, np.int16).view(np.uint16).astype(np.uint32)
        return np.asarray((bits << np.uint32(16)).view(np.float32))
    if f"{name}|int8" in coded:
        scale = piece("scale", shape[:1], np.float32)
        rows = piece("int8", shape, np.int8).reshape(shape[0], -1).astype(np.float32)
        return (rows * scale[:, None]).reshape(shape)
    values, scale = piece("top", None, np.int8), piece("scale", (1,), np.float32)
    at = piece("at", values.shape, np.int32)
    size = int(np.prod(shape))
    if at.size and (int(at[0]) < 0 or int(at[-1]) >= size or (np.diff(at) <= 0).any()):
        raise ProtocolError(f"tensor {name[:80]!r}: places are not ascending ones of {size}")
    out = np.zeros(size, np.float32)
    out[at] = values.astype(np.float32) * scale
    return out.reshape(shape)


def _bf16(values: Array) -> Array:
    """Rounded to the nearest, of two to the even one, as int16 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.asarray((rounded >> np.uint32(16)).astype(np.uint16).view(np.int16))
