"""Tensors of the Open Inference Protocol: JSON or binary data to numpy and back, with every size bounded first.

The binary tensor data extension: the JSON is the body's first ``Inference-Header-Content-Length`` bytes; the bytes of
the tensors that name a ``binary_data_size`` follow, in their order, little-endian and row by row. BYTES elements begin
with their length as a little-endian uint32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgefl.data.readers import MAX_TEXT_BYTES
from edgefl.serve.limits import (
    MAX_AXES,
    MAX_AXIS,
    MAX_JSON_BYTES,
    MAX_NAME,
    MAX_PARAMETERS_BYTES,
    MAX_ROWS,
    MAX_TENSORS,
    Refused,
)

Array = npt.NDArray[Any]
Scalar = str | int | float | bool
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Parameters = dict[Name, Scalar | None]
#: -1 is what metadata says of the batch: it comes so far that its refusal can say what is expected.
Axis = Annotated[int, Meta(ge=-1, le=MAX_AXIS)]

DTYPES: dict[str, str] = {
    **{f"INT{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
_NAMES = {np.dtype(code): name for name, code in DTYPES.items()}
_LENGTH = struct.Struct("<I")


class InputTensor(msgspec.Struct, frozen=True):
    """An input tensor of a request; ``data``: its JSON values, if not binary."""

    name: Name
    shape: Annotated[tuple[Axis, ...], Meta(max_length=MAX_AXES)]
    datatype: Name
    parameters: msgspec.Raw = msgspec.Raw(b"")
    data: msgspec.Raw = msgspec.Raw(b"")


class WantedOutput(msgspec.Struct, frozen=True):
    """An output requested by a client."""

    name: Name
    parameters: msgspec.Raw = msgspec.Raw(b"")


class InferRequest(msgspec.Struct, frozen=True):
    """The JSON of a request."""

    inputs: Annotated[list[InputTensor], Meta(max_length=MAX_TENSORS)]
    id: Name | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"")
    outputs: Annotated[list[WantedOutput], Meta(max_length=MAX_TENSORS)] | None = None

    @property
    def options(self) -> Parameters:
        """The request's parameters."""
        return options(self.parameters)


def bad(text: str, remedy: str | None = None) -> Refused:
    """Refusal of a malformed request."""
    return Refused(400, text, remedy)


def options(parameters: msgspec.Raw) -> Parameters:
    """Parse parameters by name. Raises Refused for too many bytes, before parsing."""
    if len(memoryview(parameters)) > MAX_PARAMETERS_BYTES:
        raise bad(f"more than {MAX_PARAMETERS_BYTES} bytes of parameters")
    try:
        return msgspec.json.decode(parameters, type=Parameters | None) or {} if memoryview(parameters) else {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad(f"the request is no inference request: its parameters: {error}") from None


def decode_request(body: bytes, head: int | None) -> tuple[InferRequest, dict[str, Array]]:
    """The request and its inputs by name; ``head``: length of the JSON when binary data follows. Raises Refused."""
    size = len(body) if head is None else head
    if not 0 <= size <= len(body):
        raise bad(f"Inference-Header-Content-Length is {head}, and the body has {len(body)} bytes")
    if size > MAX_JSON_BYTES:
        raise Refused(413, f"{size} bytes of JSON; at most {MAX_JSON_BYTES} are read", "Send tensors as binary data.")
    try:
        request = msgspec.json.decode(memoryview(body)[:size], type=InferRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the request is no inference request: {error}") from None
    for one in (request, *request.inputs, *(request.outputs or ())):
        options(one.parameters)
    return request, _inputs(request, memoryview(body)[size:])


def _inputs(request: InferRequest, rest: memoryview) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for tensor in request.inputs:
        if tensor.name in found:
            raise bad(f"the input '{tensor.name}' is given twice")
        size = options(tensor.parameters).get("binary_data_size")
        if size is None:
            found[tensor.name] = decode_json(tensor)
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(rest):
            raise bad(f"'{tensor.name}': binary_data_size is {size}, and {len(rest)} bytes are left")
        found[tensor.name] = decode_binary(tensor, rest[:size])
        rest = rest[size:]
    if len(rest):
        raise bad(f"{len(rest)} bytes after the last tensor")
    return found


def _count(tensor: InputTensor) -> int:
    if not tensor.shape or any(size < 1 for size in tensor.shape):
        raise bad(f"'{tensor.name}' has the shape {list(tensor.shape)}: one sample or more is expected, and its shape")
    if tensor.shape[0] > MAX_ROWS:
        raise Refused(413, f"'{tensor.name}' has {tensor.shape[0]} samples; a request may have {MAX_ROWS}")
    if tensor.datatype not in DTYPES and tensor.datatype != "BYTES":
        raise bad(f"'{tensor.name}' has the datatype {tensor.datatype!r}", f"Valid: {', '.join(DTYPES)}, BYTES.")
    count = math.prod(tensor.shape)
    if tensor.datatype == "BYTES" and count != tensor.shape[0]:
        raise bad(f"'{tensor.name}' has the shape {list(tensor.shape)}: one text a sample is expected")
    return count


def decode_binary(tensor: InputTensor, data: memoryview) -> Array:
    """The values of binary data. Raises Refused."""
    count = _count(tensor)
    if tensor.datatype == "BYTES":
        return _texts(tensor, _split(tensor, data, count))
    dtype = np.dtype(DTYPES[tensor.datatype])
    if len(data) != count * dtype.itemsize:
        raise bad(
            f"'{tensor.name}' {list(tensor.shape)} of {tensor.datatype} is {count * dtype.itemsize} bytes, not "
            f"{len(data)}"
        )
    return np.frombuffer(data, dtype).reshape(tensor.shape)


def decode_json(tensor: InputTensor) -> Array:
    """The values of a JSON list, flat or nested as the shape is. Raises Refused."""
    if bytes(tensor.data) in {b"", b"null"}:
        raise bad(f"'{tensor.name}' has neither data nor a binary_data_size")
    count, raw = _count(tensor), bytes(tensor.data)
    is_text = tensor.datatype == "BYTES"
    # Numbers become objects of 32 bytes: as many as the shape says, and no more.
    if not is_text and raw.count(b",") != max(0, count - 1):
        raise bad(f"'{tensor.name}' has another number of values than the shape {list(tensor.shape)} says")
    kind: Any = str if is_text else float if tensor.datatype.startswith("FP") else int
    for _ in range(len(tensor.shape) if raw[1:].lstrip()[:1] == b"[" else 1):
        kind = list[kind]
    try:
        values = msgspec.json.decode(raw, type=kind)
        if is_text:
            return _texts(tensor, values)
        array = np.asarray(values, DTYPES[tensor.datatype])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
        raise bad(f"'{tensor.name}': its data is no {tensor.datatype} list of {list(tensor.shape)}: {error}") from None
    if array.size != count or (array.ndim > 1 and array.shape != tensor.shape):
        raise bad(f"'{tensor.name}' has the shape {list(array.shape)}, not {list(tensor.shape)}")
    return array.reshape(tensor.shape)


def _split(tensor: InputTensor, data: memoryview, count: int) -> list[str]:
    texts: list[str] = []
    while len(data) and len(texts) <= count:
        size = _LENGTH.unpack(data[:4])[0] if len(data) >= 4 else -1
        if not 0 <= size <= len(data) - 4:
            raise bad(f"'{tensor.name}': an element is longer than the data")
        try:
            texts.append(str(data[4 : 4 + size], "utf-8"))
        except UnicodeDecodeError:
            raise bad(f"'{tensor.name}' holds bytes that are no UTF-8 text") from None
        data = data[4 + size :]
    return texts


def _texts(tensor: InputTensor, values: object) -> Array:
    flat: list[object] = [values]
    while flat and isinstance(flat[0], list):  # nested no deeper than the shape: the decoder saw to it
        flat = [one for row in flat for one in (row if isinstance(row, list) else [row])]
    count = _count(tensor)
    if len(flat) != count:
        raise bad(f"'{tensor.name}' {list(tensor.shape)}: one text a sample is expected, not {len(flat)} in all")
    if any(len(str(text)) > MAX_TEXT_BYTES for text in flat):
        raise Refused(413, f"'{tensor.name}' has a text of more than {MAX_TEXT_BYTES} characters")
    texts = np.empty(count, object)  # in an array of texts each would take the room of the longest
    texts[:] = flat
    return texts


def datatype(array: Array) -> str:
    """The protocol's name of an array's type."""
    return "BYTES" if array.dtype == object else _NAMES[array.dtype]


def encode(array: Array) -> bytes:
    """An output as binary data."""
    if array.dtype != object:
        return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    texts = [str(text).encode() for text in array.ravel()]
    return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))


class Reply(msgspec.Struct, frozen=True):
    """Response: outputs by name, with parameters beside them."""

    model_name: str
    outputs: dict[str, Array]
    parameters: dict[str, Scalar]
    id: str | None = None


def encode_reply(reply: Reply, request: InferRequest, versions: Sequence[str] = ("1",)) -> tuple[bytes, int | None]:
    """(body of an answer, length of its JSON before binary data or None). Raises Refused.

    Outputs are those asked for, or all; binary where a client asks for it, by output or for all of them.
    """
    every = bool(request.options.get("binary_data_output", False))
    wanted = request.outputs or [WantedOutput(name) for name in reply.outputs]
    asked = {one.name: options(one.parameters) for one in wanted}
    unknown = [name for name in asked if name not in reply.outputs]
    if unknown:
        raise bad(f"there is no output {', '.join(unknown)}", f"Choose from: {', '.join(reply.outputs)}.")
    described: list[dict[str, object]] = []
    blobs: list[bytes] = []
    for name, parameters in asked.items():
        array = reply.outputs[name]
        row: dict[str, object] = {"name": name, "datatype": datatype(array), "shape": list(array.shape)}
        if parameters.get("binary_data", every):
            blobs.append(encode(array))
            row["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            row["data"] = array.ravel().tolist()
        described.append(row)
    head: dict[str, object] = {"model_name": reply.model_name, "model_version": versions[-1]}
    head |= {"id": reply.id} if reply.id else {}
    text = msgspec.json.encode({**head, "parameters": reply.parameters, "outputs": described})
    return b"".join([text, *blobs]), len(text) if blobs else None
