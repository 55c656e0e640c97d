"""Parts: named tensors as safetensors bytes, the same bytes for the same tensors, and back under strict checks.

The metadata name the encoding. Bytes come from peers, so the header is checked in full before any tensor is made.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from edgefl.errors import ProtocolError
from edgefl.storage.file_pages import let_go
from edgefl.storage.objects import object_id

__all__ = ["DEFAULT_LIMIT_BYTES", "ENCODINGS", "decode_part", "encode_part", "object_id"]

Array = np.ndarray[Any, np.dtype[Any]]

#: Largest part, decoded. The largest part of the published models, DistilBERT's embeddings, is 94 MB in f32.
DEFAULT_LIMIT_BYTES = 2 * 1024**3
#: Largest safetensors header: about 100 bytes a tensor, so this admits 10,000 tensors in one part.
MAX_HEADER_BYTES = 1024 * 1024
#: Headers up to this size are kept once taken apart.
_KEPT_HEADER_BYTES = 16 * 1024
#: The dtypes a part may hold, little-endian: what parameters, buffers and counts of torch modules need. In the order in
#: which safetensors writes them.
_DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "F16": np.dtype("<f2"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_WHOLE = frozenset(("I64", "I32", "I16", "I8", "U8", "BOOL"))


#: name -> dtype in which floating-point tensors travel; integers and booleans always pass unchanged. "packed": what
#: ``edgefl.protocol.packing`` makes of a part.
ENCODINGS = {"f32": "F32", "f16": "F16", "packed": "F32"}


def encode_part(tensors: Mapping[str, Array], encoding: str = "f32") -> bytes:
    """``tensors`` as safetensors bytes; equal tensors give equal bytes whatever their order in the mapping.

    Raises ProtocolError for an unknown encoding, a dtype that can't travel, or values the encoding can't hold.
    """
    stored = _DTYPES[_stored(encoding)]
    packed = {}
    for name in sorted(tensors):
        tensor = np.asarray(tensors[name], order="C")
        if tensor.dtype.kind == "f":
            packed[name] = _cast(name, tensor, stored)
        elif any(tensor.dtype == _DTYPES[code] for code in _WHOLE):
            packed[name] = tensor
        else:
            raise ProtocolError(f"tensor {name!r} has dtype {tensor.dtype}, which a part cannot hold")
    data = _written(packed, encoding)
    for tensor in tensors.values():
        let_go(np.asarray(tensor))
    return data


def _written(tensors: Mapping[str, Array], encoding: str) -> bytes:
    """The bytes that safetensors' own ``save`` makes, which holds each value three times meanwhile."""
    codes = {name: _CODES[tensor.dtype] for name, tensor in tensors.items()}
    places = list(_DTYPES)
    header: dict[str, object] = {"__metadata__": {"encoding": encoding}}
    ordered, end = sorted(tensors, key=lambda name: (places.index(codes[name]), name)), 0
    for name in ordered:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": codes[name], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *(tensors[name].data for name in ordered)))


def _stored(encoding: str) -> str:
    if encoding not in ENCODINGS:
        raise ProtocolError(f"unknown encoding {encoding[:40]!r}; there are {', '.join(sorted(ENCODINGS))}")
    return ENCODINGS[encoding]


def _cast(name: str, tensor: Array, dtype: np.dtype[Any]) -> Array:
    if tensor.dtype == dtype:
        return tensor
    with np.errstate(over="ignore"):
        packed = tensor.astype(dtype)
    if np.count_nonzero(np.isinf(packed)) != np.count_nonzero(np.isinf(tensor)):
        raise ProtocolError(
            f"tensor {name!r} has values beyond {dtype.name}'s range: the largest is {np.abs(tensor).max():.4g}",
            remedy="Use the encoding f32 for this run.",
        )
    return packed


def decode_part(
    data: bytes | bytearray | memoryview,
    limit: int = DEFAULT_LIMIT_BYTES,
    *,
    finite: bool = False,
    copy: bool = True,
) -> dict[str, Array]:
    """The tensors of a part, floating-point ones as float32, in order of their names.

    ``limit`` bounds the decoded bytes, before anything is allocated. ``finite``: refuse NaN and infinity.
    ``copy=False``: tensors that need no conversion are read-only views into ``data`` (half the memory).
    Raises ProtocolError naming the tensor for anything malformed.
    """
    header, body = _split(data, limit)
    header.check_fills(len(body))
    if header.decoded_bytes > limit:
        raise ProtocolError(f"part of {header.decoded_bytes} bytes once decoded exceeds the limit of {limit}")
    tensors = Views()
    if not copy:
        tensors.header, runs = header, _runs(header, body)
        tensors.runs = runs and runs[0]
    for name, entry in header.entries.items():
        dtype = _DTYPES[entry.code]
        stored = np.frombuffer(body, dtype, math.prod(entry.shape), entry.begin).reshape(entry.shape)
        if stored.dtype.kind == "b" and stored.size and int(stored.view(np.uint8).max()) > 1:
            raise ProtocolError(f"tensor {name[:80]!r}: a boolean is neither 0 nor 1")
        if finite and stored.dtype.kind == "f" and not np.isfinite(stored).all():
            raise ProtocolError(f"tensor {name[:80]!r} has values that are not finite")
        tensor = stored.astype(np.float32) if entry.code == "F16" else stored
        tensors[name] = tensor.copy() if copy and tensor is stored else tensor
    return tensors


def read_layout(file: BinaryIO) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Shape of each tensor of a part in a file, sorted by name, and whether it is floating. Its values are not read.

    Raises ProtocolError for anything malformed, OSError.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = _header_bytes(file.read(8), size)
    header = _header(file.read(length))
    header.check_fills(size - 8 - length)
    return {name: (entry.shape, entry.code not in _WHOLE) for name, entry in header.entries.items()}


def is_alike(data: memoryview, other: memoryview) -> bool:
    """Whether two parts have the same header, and bodies of one length: the same tensors, of other values."""
    begin = data[:8]
    end = 8 + int.from_bytes(begin, "little")
    return len(data) == len(other) and begin == other[:8] and data[8:end] == other[8:end]


class Views(dict[str, Array]):
    """Tensors of a part that are views into its bytes, with what a whole part is calculated with at once.

    ``header``: equal ones are of equal layouts; ``runs``: flat views of the float32 tensors that lie one behind the
    other, None for a part with booleans or of another encoding.
    """

    header: _Header | None = None
    runs: list[Array] | None = None

    def over(self, runs: list[Array]) -> dict[str, Array]:
        """Tensors of the same layout whose floats are views into ``runs``; the others are copies."""
        if self.header is None:
            raise ValueError("these tensors lie in no part")
        begins = [begin for begin, _ in self.header.spans[()][0]]
        found: dict[str, Array] = {}
        for name, entry in self.header.entries.items():
            if entry.code != "F32" or entry.begin == entry.end:
                found[name] = self[name].copy()
                continue
            place = bisect_right(begins, entry.begin) - 1
            first = (entry.begin - begins[place]) // 4
            found[name] = runs[place][first : first + math.prod(entry.shape)].reshape(entry.shape)
        return found


def float_runs(data: memoryview, apart: tuple[str, ...] = ()) -> tuple[list[Array], list[Array]] | None:
    """Flat views of a part's float32 tensors that lie one behind the other; those named ``…apart`` are the second list.

    None for a part with booleans, or of another encoding. Raises ProtocolError.
    """
    header, body = _split(data, len(data))
    header.check_fills(len(body))
    return _runs(header, body, apart)


def _runs(header: _Header, body: memoryview, apart: tuple[str, ...] = ()) -> tuple[list[Array], list[Array]] | None:
    spans = header.spans.get(apart)
    if spans is None:
        spans = header.spans[apart] = _spans_of(header, apart)
    if not spans:
        return None
    whole, rest = ([np.frombuffer(body[begin:end], "<f4") for begin, end in of] for of in spans)
    return whole, rest


def _spans_of(header: _Header, apart: tuple[str, ...]) -> tuple[list[list[int]], ...]:
    if header.encoding != "f32" or any(entry.code == "BOOL" for entry in header.entries.values()):
        return ()
    spans: tuple[list[list[int]], list[list[int]]] = ([], [])
    for name, entry in sorted(header.entries.items(), key=lambda item: item[1].begin):
        if entry.code == "F32" and entry.end > entry.begin:
            of = spans[name.endswith(apart)]
            if of and of[-1][1] == entry.begin:
                of[-1][1] = entry.end
            else:
                of.append([entry.begin, entry.end])
    return spans


def is_packed(data: bytes | bytearray | memoryview) -> bool:
    """Whether a part is packed (``edgefl.protocol.packing``). Raises ProtocolError for what is no part."""
    return _split(data, memoryview(data).nbytes)[0].encoding == "packed"


class _Entry(NamedTuple):
    """One tensor as the header describes it; offsets in bytes after the header."""

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the tensor. An axis of no length counts as one: such a tensor's other axes are also only claimed."""
        itemsize = _DTYPES[self.code].itemsize if self.code in _WHOLE else 4
        return math.prod(max(1, size) for size in self.shape) * itemsize


class _Header(NamedTuple):
    """A checked header: tensors by name, in order; they lie one behind the other and fill ``body_bytes``."""

    encoding: str
    entries: dict[str, _Entry]
    body_bytes: int
    decoded_bytes: int
    spans: dict[tuple[str, ...], tuple[list[list[int]], ...]]  # as ``_spans_of`` found them

    def check_fills(self, body_bytes: int) -> None:
        if self.body_bytes != body_bytes:
            raise ProtocolError(f"the tensors of a part fill {self.body_bytes} bytes, {body_bytes} are there")


def _header_bytes(begin: bytes | memoryview, size: int) -> int:
    """Length of the header of a part of ``size`` bytes, which stands in its first 8."""
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise ProtocolError(f"part of {size} bytes with a header of {length}: truncated or not safetensors")
    return length


def _split(data: bytes | bytearray | memoryview, limit: int) -> tuple[_Header, memoryview]:
    view = memoryview(data).cast("B").toreadonly()
    if len(view) > limit + MAX_HEADER_BYTES:
        raise ProtocolError(f"part of {len(view)} bytes exceeds the limit of {limit}")
    end = 8 + _header_bytes(view[:8], len(view))
    return _header(bytes(view[8:end])), view[end:]


def _header(data: bytes) -> _Header:
    return _parsed(data) if len(data) <= _KEPT_HEADER_BYTES else _parse(data)


def _parse(data: bytes) -> _Header:
    try:
        header = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the header of a part is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError("the header of a part is not a JSON object")
    metadata = header.pop("__metadata__", None)
    encoding = metadata.get("encoding") if isinstance(metadata, dict) else None
    if not isinstance(encoding, str):
        raise ProtocolError("the header of a part names no encoding")
    stored = _stored(encoding)
    entries = {name: _entry(name, header[name], stored) for name in sorted(header)}
    body_bytes = 0  # the tensors lie one behind the other: no holes, no overlap
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != body_bytes:
            raise ProtocolError(f"tensor {name[:80]!r}: begins at byte {entry.begin} where {body_bytes} is due")
        body_bytes = entry.end
    return _Header(encoding, entries, body_bytes, sum(entry.decoded_bytes for entry in entries.values()), {})


#: The headers of one part are the same bytes in every round and on every device: each is taken apart once.
_parsed = lru_cache(maxsize=64)(_parse)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ProtocolError("the header of a part names something twice")
    return found


def _entry(name: str, raw: object, floating: str) -> _Entry:
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ProtocolError(f"tensor {name[:80]!r}: half a character in its name, which no message can carry")
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise ProtocolError(f"tensor {name[:80]!r}: malformed entry in the header")
    code, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(code, str) or (code not in _WHOLE and code != floating):
        raise ProtocolError(f"tensor {name[:80]!r}: dtype {str(code)[:20]!r} is not one this encoding holds")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or len(shape) > 32:  # numpy 1.26's limit
        raise ProtocolError(f"tensor {name[:80]!r}: malformed shape or offsets")
    begin, end = offsets
    if end - begin != math.prod(shape) * _DTYPES[code].itemsize:
        raise ProtocolError(f"tensor {name[:80]!r}: shape {shape} does not fill its {end - begin} bytes")
    return _Entry(code, tuple(shape), begin, end)


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**48 for item in value)
