"""Lengths, counts and shapes that somebody else wrote are refused before memory is taken for what they claim.

Each claim here is of gigabytes, in a few bytes: refused, with at most ``ROOM`` allocated on the way, as tracemalloc
sees it (numpy's arrays count when they are made, touched or not).
"""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import wave
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fuzz.table import TARGETS
from fuzz.target import MIB, attempt, measured

from coordinator.runtime.validate_update import check_sizes
from edgefl.config.profiles import load_run
from edgefl.config.slots import parse_slot
from edgefl.config.yaml_files import MAX_DEPTH, MAX_FIELDS, read_yaml
from edgefl.data.arrays import read_npy, read_npz
from edgefl.data.dataset import Dataset
from edgefl.data.folder import read_manifest
from edgefl.data.sounds import MAX_RATE_HZ, read_sound
from edgefl.errors import ConfigError, DataError, EdgeFLError, ProtocolError, StoreError
from edgefl.plan.job import Transfer
from edgefl.protocol.bits import to_gaps
from edgefl.protocol.messages import MAX_MESSAGE_BYTES, Need, decode_up
from edgefl.protocol.packing import decompress
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import ObjectRef
from edgefl.storage.disk import read_at_most
from edgefl.storage.objects import ObjectStore
from edgefl.transfer.receiver import MAX_CHUNKS, ChunkIndex
from edgefl.transfer.sender import Sender

ROOM = 2 * MIB
HUGE = 2**40


def part(shape: list[int], code: str = "F32", encoding: str = "f32", name: str = "w", end: int = 0) -> bytes:
    entry = {"dtype": code, "shape": shape, "data_offsets": [0, end]}
    header = json.dumps({"__metadata__": {"encoding": encoding}, name: entry}).encode()
    return len(header).to_bytes(8, "little") + header


def npy(shape: str, descr: str = "<f4", body: bytes = b"", version: int = 1, length: int | None = None) -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}\n".encode()
    size = struct.pack("<H" if version == 1 else "<I", len(header) if length is None else length)
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + body


def npz(how: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return out.getvalue()


def claiming(archive: bytes, size: int) -> bytes:
    """The same .npz, whose directory says that its first member is ``size`` bytes long."""
    at = archive.index(b"PK\x01\x02")
    return archive[: at + 24] + struct.pack("<I", size) + archive[at + 28 :]


def wav(rate: int, frames: int = 100) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(b"\1\2" * frames)
    data = bytearray(out.getvalue())
    data[24:28] = struct.pack("<I", rate)
    return bytes(data)


def png(width: int, height: int) -> bytes:
    def block(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + block(b"IHDR", head) + block(b"IDAT", zlib.compress(bytes(1000))) + block(b"IEND", b"")
    )


def laughs(levels: int, line: str) -> bytes:
    """Anchors that stand for ten of the one before."""
    names = "abcdefghijklmnop"
    lines = [f"a: &a {line.replace('*', '1')}"]
    lines += [f"{names[n]}: &{names[n]} {line.replace('*', '*' + names[n - 1])}" for n in range(1, levels)]
    return "\n".join(lines).encode()


ONE, LARGE = npy("1, 1", body=bytes(4)), npy("805306368, 1", body=bytes(4))
BOMB = 3 * 2**30 + 128
TEN = "[*, *, *, *, *, *, *, *, *, *]"
TEN_OF_ONE_NAME = "{x: *, x: *, x: *, x: *, x: *, x: *, x: *, x: *, x: *, x: *}"
MERGED = laughs(9, f"{{<<: {TEN}, y: 1}}").replace(b"1, ", b"{}, ").replace(b"1]", b"{}]")
TWICE = part([300, 300], "I16", "packed", "w|f16", 180_000) + bytes(180_000)
#: (target, what is claimed): the bytes that claim it.
CLAIMS: dict[tuple[str, str], bytes] = {
    ("message_up", "a list of 4 billion counts"): b"\x82\xa1t\xa5hello\xacclass_counts\xdd\xff\xff\xff\xff",
    ("message_up", "a map of 4 billion parts"): b"\x82\xa1t\xa6update\xa8manifest\xdf\xff\xff\xff\xff",
    ("message_up", "a text of 4 GB"): b"\x82\xa1t\xa5hello\xa6device\xdb\xff\xff\xff\xff",
    ("message_up", "a bitmap of 4 GB"): b"\x82\xa1t\xa4need\xa7missing\x81\xa1a\xc6\xff\xff\xff\xff",
    ("message_down", "a manifest of 4 billion parts"): b"\x82\xa1t\xa5offer\xa8manifest\xdf\xff\xff\xff\xff",
    ("message_down", "nested for ever"): b"\x82\xa1t\xa5offer\xa1x" + b"\x91" * 50_000,
    ("message_up", "more than a message may have"): b"\x81\xa1t\xa5hello" + bytes(MAX_MESSAGE_BYTES),
    ("chunk", "more data than a chunk may have"): b"EFC\1" + bytes(1_100_000),
    ("part", "a header of 2^63 bytes"): (2**63).to_bytes(8, "little") + b"{}",
    ("part", "a tensor of 2^47 values"): part([2**47], end=2**49),
    ("part", "rows of nothing"): part([HUGE, 0]),
    ("part", "nothing of many axes"): part([0, 2**47, 2**47]),
    ("part", "an overflowing shape"): part([2**40, 2**40, 2**40], end=4),
    ("part", "a header nested for ever"): (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ("part", "a dimension with 5,000 digits"): part([1]).replace(b"[1]", b"[" + b"9" * 5000 + b"]"),
    ("packed", "rows of nothing that unpack to a scale each"): b"\x81" + part([HUGE, 0], "I16", "packed", "w|f16"),
    ("packed", "f16 that unpacks to twice its size"): b"\x81" + TWICE,
    ("update", "rows of nothing"): b"\0" + part([HUGE, 0]),
    ("frames", "a frame of 4 GB"): b"\xff\xff\xff\xff" + b"\x80",
    ("npy", "a million million values"): npy("1000000000000,"),
    ("npy", "a million million texts of no letter"): npy("1000000000000,", "<U0"),
    ("npy", "one text of 4 GB"): npy("1,", "<U1000000000"),
    ("npy", "rows of nothing"): npy("1000000000000, 0"),
    ("npy", "a header of 4 GB"): npy("1,", version=2, length=2**32 - 1),
    ("npy", "a header that is Python"): b"\x93NUMPY\1\0" + struct.pack("<H", 9001) + b"-" * 9000 + b"1",
    ("npz", "a million million names of no letter"): npz(acc=ONE, label_names=npy("1000000000000,", "<U0")),
    ("npz", "a stored member of 3 GiB"): claiming(npz(acc=LARGE), BOMB),
    ("npz", "a deflated member of 3 GiB"): claiming(npz(zipfile.ZIP_DEFLATED, acc=LARGE), BOMB),
    ("npz", "a dictionary of 4 GB"): npz(zipfile.ZIP_LZMA, acc=ONE),
    ("wav", "windows of an hour"): wav(2**31),
    ("png", "16 gigapixels"): png(131_072, 131_072),
    ("run_file", "a billion fields by anchors"): laughs(9, TEN),
    ("run_file", "a billion fields of one name"): laughs(9, TEN_OF_ONE_NAME),
    ("run_file", "a billion fields in a name"): laughs(9, TEN) + b"\n? *i\n: 1",
    ("run_file", "a billion fields by merging"): MERGED,
    ("run_file", "anchors in themselves"): b"a: &a [*a, *a]",
    ("run_file", "nested for ever"): b"a: " + b"[" * 200,
    ("run_file", "a number of 5,000 digits to the base of 60"): b"seed: 1" + b":00" * 5_000,
    ("run_file", "a number with 5,000 hexadecimal digits"): b"seed: 0x" + b"f" * 5000,
    ("override", "nested for ever"): b"x=" + b"[" * 200,
    ("labels_json", "nested for ever"): b"[" * 100_000,
    ("bundle", "nested for ever"): b"\0" + b'{"x":' + b"[" * 100_000,
}  # fmt: skip
#: YAML nodes take about two kilobytes each, and here there may be this many.
FIELDS = 5000
LARGER = {"run_file": 16 * MIB}


@pytest.mark.parametrize(("target", "claim"), CLAIMS, ids=[f"{target}: {claim}" for target, claim in CLAIMS])
def test_a_claim_of_gigabytes_is_refused_before_memory_is_taken(target, claim, monkeypatch):
    monkeypatch.setattr("edgefl.config.yaml_files.MAX_FIELDS", FIELDS)
    attempt(TARGETS[target], b"")
    data = CLAIMS[target, claim]
    refused, peak = measured(TARGETS[target], data)
    assert isinstance(refused, EdgeFLError)
    assert peak < LARGER.get(target, ROOM) + 8 * len(data)


def allocated(call: Callable[[], object], error: type[EdgeFLError], match: str) -> int:
    """Peak bytes of a call that has to be refused."""
    tracemalloc.start()
    try:
        with pytest.raises(error, match=match):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def line(**values: object) -> str:
    return json.dumps(values) + "\n"


def test_one_long_text_among_numbers_takes_no_room_for_each(tmp_path: Path) -> None:
    cells = [["x" * 500_000], *[[""]] * 50_000]  # as texts of one width: 93 GiB
    (tmp_path / "manifest.jsonl").write_text(line(acc=cells))
    assert allocated(lambda: read_manifest(tmp_path), DataError, "str are not numbers") < 40 * MIB


def test_samples_that_lack_a_large_modality_count_as_if_they_had_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.data.folder.MAX_DATASET_BYTES", 100 * MIB)
    rows = line(acc=[[0.0] * 50_000]) + "".join(line(id=str(i), gyro=[[0]]) for i in range(1_000))
    (tmp_path / "manifest.jsonl").write_text(rows)  # 200 kB once; in an array 191 MiB
    assert allocated(lambda: read_manifest(tmp_path), DataError, "1001 samples take") < 10 * MIB


def test_small_integers_count_as_what_they_become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.data.dataset.MAX_DATASET_BYTES", 4 * MIB)
    np.savez(tmp_path / "x.npz", words=np.zeros((2**10, 2**10), np.int8))
    with pytest.raises(DataError, match="8388608 bytes of samples in memory"):
        Dataset.load_npz(tmp_path / "x.npz")


def test_what_fits_is_still_read(tmp_path: Path) -> None:
    arrays = [np.zeros((0, 224, 224, 3), np.float32), np.array(["a", "é"]), np.array([[1, 2]], ">i2"), np.array(3.5)]
    arrays += [np.asfortranarray(np.arange(6).reshape(2, 3)), np.array([True, False]), np.zeros((2, 0))]
    for array in arrays:
        np.save(tmp_path / "x.npy", array)
        found = read_npy(tmp_path / "x.npy")
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert (found == array).all()
        np.savez_compressed(tmp_path / "x.npz", array=array)
        assert (read_npz(tmp_path / "x.npz")["array"] == array).all()
    (tmp_path / "x.npy").write_bytes(npy("2,", "|b1", b"\2\0"))
    assert read_npy(tmp_path / "x.npy").view(np.uint8).tolist() == [1, 0]
    for letter in (0x110000, 0xD800):
        (tmp_path / "x.npy").write_bytes(npy("1,", "<U1", letter.to_bytes(4, "little")))
        with pytest.raises(DataError, match="no character"):
            read_npy(tmp_path / "x.npy")


def test_a_rate_no_microphone_has_is_refused(tmp_path: Path) -> None:
    for rate, fits in ((MAX_RATE_HZ, True), (MAX_RATE_HZ + 1, False)):
        (tmp_path / "x.wav").write_bytes(wav(rate))
        if fits:
            assert read_sound(tmp_path / "x.wav")[1] == rate
        else:
            assert allocated(lambda: read_sound(tmp_path / "x.wav"), DataError, "at most 384000 Hz") < MIB


def test_a_row_of_a_csv_has_a_length_and_no_number_is_kept_twice(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "manifest.jsonl").write_text(line(acc="x.csv"))
    (folder / "x.csv").write_bytes(b"0," * 2**20)
    assert allocated(lambda: read_manifest(folder), DataError, "has more than 1048576 characters") < 8 * MIB
    (folder / "x.csv").write_bytes(b"0,1\n" * 2**16)
    assert read_manifest(folder).modalities["acc"].shape == (1, 2**16, 2)


def test_a_device_that_never_ends_is_not_read_to_its_end(tmp_path: Path) -> None:
    endless = tmp_path / "run.yaml"
    endless.symlink_to("/dev/zero")
    assert allocated(lambda: read_yaml(endless), ConfigError, "larger than") < 8 * MIB
    with pytest.raises(ValueError, match="larger than 10 bytes"):
        read_at_most(Path("/dev/zero"), 10)


@pytest.mark.parametrize("name", ["a/" + "x" * 300, "a/\0", "x" * 300, "a/\ud800"])
def test_a_recipe_of_an_impossible_name_is_a_problem_of_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.yaml").write_text(f"recipe: {json.dumps(name)}\n")
    with pytest.raises(ConfigError, match=r"recipe: .*(cannot be read|no file and no shipped)"):
        load_run(str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    "text", ['!!int ""', "!!bool x", "!!timestamp x", "!!binary eA==", "!!set {a}", "!!python/name:os.system"]
)
def test_a_tag_is_not_taken(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(f"a: {text}")
    with pytest.raises(ConfigError, match="line 1, YAML: has the tag"):
        read_yaml(tmp_path / "x.yaml")


def test_yaml_has_a_depth_and_a_number_of_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_FIELDS == 100_000
    monkeypatch.setattr("edgefl.config.yaml_files.MAX_FIELDS", FIELDS)
    file = tmp_path / "x.yaml"
    file.write_text("a: " + "[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2))
    read_yaml(file)
    file.write_text("a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_yaml(file)
    file.write_text("a: [" + ",".join("1" for _ in range(FIELDS)) + "]")
    with pytest.raises(ConfigError, match=f"more than {FIELDS} fields"):
        read_yaml(file)


def test_a_number_beyond_any_is_told_of_a_slot() -> None:
    with pytest.raises(ValueError, match="not a number"):
        parse_slot("optimise", {"fedadam": {"lr": 2**2000}})


def test_a_transfer_of_more_chunks_than_can_be_asked_for_is_refused() -> None:
    sizes = {"a" * 64: 2**62}
    assert allocated(lambda: ChunkIndex(sizes, 1000), ProtocolError, f"at most {MAX_CHUNKS}") < MIB
    sender = Sender("t", {"a" * 64: 2**30})
    assert sender.on_need("cam-07", Need("cam-07", "t", 1 << 32 | 1, 1, 16, 0, {"a" * 64: b"\xff"}), 0.0) == []
    assert sender.dropped == {"chunk_bytes": 1}


def test_an_update_s_sizes_are_checked_before_anything_is_fetched() -> None:
    model = {"task": ObjectRef("a" * 64, 1000)}
    for size in (0, -1, 999, 1001, 2**63):
        refusal = check_sizes({"task": ObjectRef("b" * 64, size)}, model, Transfer())
        assert refusal is not None
        assert (refusal.reason, refusal.detail) == (
            "size",
            f"part task: {size} bytes announced, exactly 1000 can be right",
        )


def test_a_negative_object_takes_no_place_in_the_store(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    for size, chunk_bytes in ((-1, 100), (100, 0), (100, -5)):
        with pytest.raises(ProtocolError, match="bytes in chunks of"):
            store.partial(ObjectRef("a" * 64, size), chunk_bytes)
    assert list((tmp_path / "partial").iterdir()) == []


def test_an_object_larger_than_the_device_s_room_is_refused_before_it_is_made(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path, limit_bytes=10_000)
    assert allocated(lambda: store.partial(ObjectRef("a" * 64, 2**40), 96 * 1024), StoreError, "10000 allowed") < MIB


def test_half_a_character_in_a_tensor_s_name_never_reaches_a_message() -> None:
    with pytest.raises(ProtocolError, match="half a character"):
        decode_part(part([0], name="\ud800"))


def test_gaps_beyond_their_tensor_are_refused_before_they_are_taken_apart() -> None:
    top = {"w|top": np.ones(4, np.int8), "w|scale": np.ones(1, np.float32)}
    base = {"w": np.zeros((32, 40), np.float32)}

    def unpack(gaps: np.ndarray) -> None:
        decompress(encode_part({**top, "w|gaps": gaps}, "packed"), base, "delta+top")

    long = to_gaps(np.array([0, 7, 2**22, 2**22 + 5]), 1280)  # quotients of half a million zeros
    assert allocated(lambda: unpack(long), ProtocolError, "bytes of gaps between 4 places of 1280") < MIB
    with pytest.raises(ProtocolError, match="a place beyond 1280"):
        unpack(to_gaps(np.array([0, 7, 1200, 1280]), 1280))


def test_a_count_beyond_64_bits_is_malformed() -> None:
    data = msgspec.msgpack.encode({"t": "hello", "samples": {"": 1.5e300}})
    with pytest.raises(ProtocolError):
        decode_up(data)
