"""Parts: equal bytes for equal tensors, exact round trips, and no bytes that are believed unchecked."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgefl.errors import ProtocolError
from edgefl.protocol.tensors import ENCODINGS, MAX_HEADER_BYTES, decode_part, encode_part, object_id
from edgefl.resources.memory_probe import MemoryProbe

FLOATS = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 4, "bias": np.array([-1.5, 2], np.float32)}
BUFFERS = {"num_batches_tracked": np.array(2**40, np.int64), "mask": np.array([True, False])}


def blob(header: object, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def described(dtype="F32", shape=(1,), offsets=(0, 4), encoding="f32", name="w") -> dict:
    return {
        "__metadata__": {"encoding": encoding},
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)},
    }


@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
def test_every_encoding_returns_float32_and_keeps_integers(encoding):
    decoded = decode_part(encode_part({**FLOATS, **BUFFERS}, encoding))
    assert list(decoded) == ["bias", "mask", "num_batches_tracked", "weight"]
    for name, tensor in {**FLOATS, **BUFFERS}.items():  # these values are exact in f16 also
        np.testing.assert_array_equal(decoded[name], tensor, strict=True)
        assert decoded[name].flags.writeable


def test_the_blob_is_plain_safetensors_that_names_its_encoding():
    data = encode_part(FLOATS, "f16")
    plain = safetensors.numpy.load(data)
    assert {tensor.dtype for tensor in plain.values()} == {np.dtype("float16")}
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"encoding": "f16"}


def test_the_bytes_are_known():
    """One f32 tensor [1.0]: 8 bytes length, the header padded to 8, then 00 00 80 3f."""
    data = encode_part({"w": np.ones(1)})
    header = b'{"__metadata__":{"encoding":"f32"},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    padded = header + b" " * (-len(header) % 8)
    assert data == len(padded).to_bytes(8, "little") + padded + b"\x00\x00\x80\x3f"
    assert object_id(data) == hashlib.sha256(data).hexdigest()


ANY_TENSOR = st.sampled_from(["f4", "i8", "i4", "i2", "i1", "u1", "?"]).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3))
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), ANY_TENSOR))
def test_the_bytes_are_those_of_safetensors(tensors):
    for encoding in ("f32", "f16"):
        kept = {"f32": np.float32, "f16": np.float16}[encoding]
        stored = {n: np.asarray(t.clip(-9, 9), kept) if t.dtype.kind == "f" else t for n, t in tensors.items()}
        expected = safetensors.numpy.save(stored, metadata={"encoding": encoding})
        assert encode_part(stored, encoding) == expected


def test_a_part_is_in_memory_once_more_while_it_is_encoded():
    tensors = {name: np.ones(2**23, np.float32) for name in "abc"}
    with MemoryProbe() as probe:
        encode_part(tensors)
    assert probe.figures()["step_peak_bytes"].value < 1.3 * sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
def test_order_memory_layout_and_byte_order_do_not_change_the_bytes(encoding):
    tensors = {**FLOATS, **BUFFERS}
    expected = encode_part(tensors, encoding)
    shuffled = {name: tensors[name] for name in sorted(tensors, reverse=True)}
    shuffled["weight"] = np.asfortranarray(shuffled["weight"]).astype(">f4")
    shuffled["bias"] = np.repeat(shuffled["bias"].astype(np.float64), 2)[::2]
    assert encode_part(shuffled, encoding) == expected


def test_f16_rounds_to_nearest():
    tensor = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    decoded = decode_part(encode_part({"w": tensor}, "f16"))["w"]
    np.testing.assert_array_equal(decoded, tensor.astype(np.float16).astype(np.float32))
    assert np.abs(decoded - tensor).max() <= np.abs(tensor).max() * 2**-11


def test_f16_refuses_what_would_become_infinite_and_passes_what_is():
    with pytest.raises(ProtocolError, match=r"'w' has values beyond float16's range: the largest is 7e\+04"):
        encode_part({"w": np.array([1, -7e4], np.float32)}, "f16")
    tensor = np.array([np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(decode_part(encode_part({"w": tensor}, "f16"))["w"], tensor)


def test_finite_is_checked_when_asked():
    data = encode_part({"good": np.ones(2), "bad": np.array([1, np.nan])})
    assert np.isnan(decode_part(data)["bad"][1])
    with pytest.raises(ProtocolError, match="'bad' has values that are not finite"):
        decode_part(data, finite=True)


def test_views_cost_nothing_and_can_not_be_written():
    data = encode_part({**FLOATS, **BUFFERS})
    decoded = decode_part(data, copy=False)
    assert not any(tensor.flags.writeable or tensor.flags.owndata for tensor in decoded.values())


def test_no_tensors_and_empty_tensors():
    assert decode_part(encode_part({})) == {}
    assert decode_part(encode_part({"w": np.zeros((0, 3))}))["w"].shape == (0, 3)


@pytest.mark.parametrize(
    ("tensor", "encoding", "message"),
    [
        (np.ones(1), "int3", "unknown encoding 'int3'; there are f16, f32"),
        (np.array(["a"]), "f32", "'w' has dtype <U1"),
        (np.ones(1, np.complex64), "f32", "'w' has dtype complex64"),
        (np.ones(1, object), "f32", "'w' has dtype object"),
    ],
)
def test_what_can_not_be_encoded(tensor, encoding, message):
    with pytest.raises(ProtocolError, match=message):
        encode_part({"w": tensor}, encoding)


WRONG = {
    "empty": (b"", "truncated"),
    "length only": (bytes(7), "truncated"),
    "header longer than the file": (blob(b"{}", length=3), "truncated"),
    "header longer than allowed": (blob(b" " * (MAX_HEADER_BYTES + 1)), "truncated or not"),
    "huge header length": (blob(b"{}", length=2**63), "truncated"),
    "no JSON": (blob(b"{nope"), "not JSON"),
    "no UTF-8": (blob(b'"\xff"'), "not JSON"),
    "nested without end": (blob(b"[" * 100_000), "not JSON"),
    "no object": (blob([1]), "not a JSON object"),
    "a name twice": (blob(b'{"a":1,"a":2}'), "twice"),
    "no metadata": (blob({}), "names no encoding"),
    "encoding is no text": (blob({"__metadata__": {"encoding": 1}}), "names no encoding"),
    "unknown encoding": (blob(described(encoding="zip"), bytes(4)), "unknown encoding 'zip'"),
    "entry is no object": (blob({**described(), "v": 1}, bytes(4)), "'v': malformed entry"),
    "dtype unknown": (blob(described("F8"), bytes(4)), "dtype 'F8'"),
    "dtype is a list": (blob(described(["F32"]), bytes(4)), "dtype"),
    "dtype of another encoding": (blob(described("F16", (2,)), bytes(4)), "dtype 'F16'"),
    "negative size": (blob(described(shape=(-1,)), bytes(4)), "malformed shape"),
    "fractional size": (blob(described(shape=(1.0,)), bytes(4)), "malformed shape"),
    "boolean size": (blob(described(shape=(True,)), bytes(4)), "malformed shape"),
    "too many dimensions": (blob(described(shape=(1,) * 33), bytes(4)), "malformed shape"),
    "three offsets": (blob(described(offsets=(0, 4, 4)), bytes(4)), "malformed shape"),
    "shape too large": (blob(described(shape=(2,)), bytes(4)), "does not fill"),
    "shape overflows 64 bits": (blob(described(shape=(2**33, 2**33, 4)), bytes(4)), "does not fill"),
    "offsets backwards": (blob(described(offsets=(4, 0)), bytes(4)), "does not fill"),
    "gap": (blob(described(offsets=(4, 8)), bytes(8)), "begins at byte 4 where 0 is due"),
    "overlap": (blob({**described(), **described(name="v")}, bytes(8)), "begins at byte 0 where 4 is due"),
    "rest": (blob(described(), bytes(5)), "fill 4 bytes, 5 are there"),
    "body missing": (blob(described()), "fill 4 bytes, 0 are there"),
    "boolean of 2": (blob(described("BOOL", (4,)), b"\x00\x01\x02\x00"), "neither 0 nor 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_bytes_are_named(case):
    data, message = WRONG[case]
    with pytest.raises(ProtocolError, match=message):
        decode_part(data)


def test_the_limit_counts_decoded_bytes_before_anything_is_made():
    data = encode_part({"w": np.ones(1000)}, "f16")
    assert decode_part(data, limit=4000)["w"].nbytes == 4000
    with pytest.raises(ProtocolError, match="part of 4000 bytes once decoded exceeds the limit of 3999"):
        decode_part(data, limit=3999)
    with pytest.raises(ProtocolError, match="exceeds the limit of 5"):
        decode_part(bytes(MAX_HEADER_BYTES + 6), limit=5)


TENSORS = st.dictionaries(
    st.text(max_size=12).filter(lambda name: name != "__metadata__"),
    st.one_of(
        hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)),
        hnp.arrays(st.sampled_from([np.int64, np.int32, np.int8, np.uint8, np.bool_]), hnp.array_shapes(min_dims=0)),
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=25)
@given(TENSORS)
def test_round_trip_is_exact_and_reads_as_the_library_reads_it(tensors):
    data = encode_part(tensors)
    decoded = decode_part(memoryview(bytearray(data)))
    library = safetensors.numpy.load(data)
    assert sorted(decoded) == sorted(tensors) == sorted(library)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(decoded[name], tensor, strict=True)
        np.testing.assert_array_equal(library[name], tensor, strict=True)
    assert encode_part(decoded) == data


@settings(deadline=None)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=4))
def test_damaged_bytes_are_an_error_or_tensors_never_anything_else(position, damage):
    data = bytearray(encode_part({**FLOATS, **BUFFERS}))
    position %= len(data)
    data[position : position + len(damage)] = damage
    try:
        decode_part(data, limit=10_000)
    except ProtocolError as error:
        assert error.message  # noqa: PT017  either outcome is right
