"""Check of ONNX files for external data, loops and foreign operators, ahead of onnxruntime. Needs no onnx.

onnxruntime takes weights from any file that a tensor names, computes loops of any length, and finds operators in
libraries; a bundle's sha256 says nothing of these. Hence protobuf's wire format is walked here: of each message the
fields that an export writes, of each node an operator that an export may write, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from edgefl.errors import ExportError

#: Fields of a file, packed numbers as one: a model of the paper's size has some 50,000. A walk of so many takes 2 s.
MAX_FIELDS = 500_000
#: Message -> its fields, by number: the message within, "" for a value that is not looked at. From onnx.proto.
_KNOWN: dict[str, dict[int, str]] = {
    "ModelProto": dict.fromkeys((1, 2, 3, 4, 5, 6, 8, 14), "") | {7: "GraphProto"},
    "GraphProto": dict.fromkeys((2, 10, 11, 12, 13, 14, 16), "") | {1: "NodeProto", 5: "TensorProto"},
    "NodeProto": dict.fromkeys((1, 2, 3, 6, 9), "") | {4: "op_type", 5: "AttributeProto", 7: "domain"},
    "AttributeProto": dict.fromkeys((1, 2, 3, 4, 7, 8, 9, 13, 20), "") | {5: "TensorProto", 10: "TensorProto"},
    "TensorProto": dict.fromkeys((1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16), "") | {14: "data_location"},
}
#: What an export never writes, in words.
_REFUSED: dict[tuple[str, int], str] = {
    ("ModelProto", 20): "instructions for training",
    ("ModelProto", 25): "functions of its own",
    ("GraphProto", 15): "sparse weights",
    ("AttributeProto", 6): "a graph within a node: a loop or a branch",
    ("AttributeProto", 11): "graphs within a node: loops or branches",
    ("AttributeProto", 22): "sparse weights",
    ("AttributeProto", 23): "sparse weights",
    ("TensorProto", 3): "weights in segments",
    ("TensorProto", 13): "weights outside the file",
    ("TensorProto", 14): "weights outside the file",
}
#: Operators of ONNX that compute tensors of tensors in one pass: what torch writes for networks of our own and of
#: other packages. Not here: control flow, sequences, texts, random numbers, images, training, other domains.
OPERATORS = frozenset(
    """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization BitShift
    BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu Clip Compress Concat Constant ConstantOfShape
    Conv ConvInteger ConvTranspose Cos Cosh CumSum DFT DepthToSpace DequantizeLinear Div Dropout DynamicQuantizeLinear
    Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm
    GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid
    HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual
    Log LogSoftmax LpNormalization LpPool MatMul MatMulInteger Max MaxPool Mean MeanVarianceNormalization Min Mish Mod
    Mul Neg NonZero Not OneHot Or PRelu Pad Pow QLinearConv QLinearMatMul QuantizeLinear RMSNormalization RNN Range
    Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    ReduceSumSquare Relu Reshape Resize ReverseSequence RotaryEmbedding Round STFT ScatterElements ScatterND Selu Shape
    Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Swish Tan
    Tanh ThresholdedRelu Tile TopK Transpose Trilu Unique Unsqueeze Where Xor
    """.split()  # noqa: SIM905 - a list of names is read, not one of quotes
)
#: The names of ONNX's own operator set.
_DOMAINS = frozenset({"", "ai.onnx"})
_REMEDY = "Take a bundle that `edgefl export` wrote; others may read files of this machine, or never end."
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


class _Field(NamedTuple):
    """Header of a protobuf field.

    ``value``: a number, or the length of the bytes that end at ``end``.
    """

    number: int
    wire: int
    value: int
    end: int


def check_model(data: bytes) -> None:
    """Raise ExportError for an ONNX file with content beyond an export's."""
    rest = [("ModelProto", 0, len(data))]
    count = 0
    while rest:
        message, start, end = rest.pop()
        operator = {"op_type": [""], "domain": [""]}
        for field in _fields(data, start, end):
            if (count := count + 1) > MAX_FIELDS:
                raise _refused(f"more than {MAX_FIELDS} fields")
            within = _KNOWN[message].get(field.number)
            if within is None or (within == "data_location" and (field.wire, field.value) != (_VARINT, 0)):
                words = _REFUSED.get((message, field.number), f"the unknown field {field.number} in a {message}")
                raise _refused(words)
            if within and within != "data_location":
                if field.wire != _BYTES:
                    raise _refused(f"a damaged {message}")
                if within in operator:
                    text = data[field.end - field.value : field.end].decode("utf-8", "replace")
                    operator[within].append(text)
                else:
                    rest.append((within, field.end - field.value, field.end))
        if message == "NodeProto":
            _check_operator(operator["op_type"][1:], operator["domain"][1:])


def _check_operator(names: list[str], domains: list[str]) -> None:
    if len(names) != 1 or len(domains) > 1:  # of several the last counts, and a parser may think otherwise
        raise _refused("a node without an operator, or with several")
    domain = "".join(domains)
    if names[0] not in OPERATORS or domain not in _DOMAINS:
        raise _refused(f"the operator {names[0]!r:.60}" + (f" of the domain {domain!r:.60}" if domain else ""))


def _refused(what: str) -> ExportError:
    return ExportError(f"the model holds {what}, which no export writes", remedy=_REMEDY)


def _fields(data: bytes, at: int, end: int) -> Iterator[_Field]:
    """Protobuf fields of the message in ``data[at:end]``. Raises ExportError for malformed bytes."""
    while at < end:
        key, at = _varint(data, at, end, 5)
        number, wire, value = key >> 3, key & 7, 0
        if wire == _VARINT:
            value, at = _varint(data, at, end, 10)
        elif wire == _BYTES:
            value, at = _varint(data, at, end, 5)
        if wire not in {_VARINT, _EIGHT, _BYTES, _FOUR} or not 0 < number < 2**29:
            raise _refused("bytes that are no protobuf")
        at += {_VARINT: 0, _EIGHT: 8, _BYTES: value, _FOUR: 4}[wire]
        if at > end:
            raise _refused("a message that is cut off")
        yield _Field(number, wire, value, at)


def _varint(data: bytes, at: int, end: int, longest: int) -> tuple[int, int]:
    value = 0
    for shift in range(min(longest, end - at)):
        byte = data[at + shift]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    raise _refused("a number that never ends")
