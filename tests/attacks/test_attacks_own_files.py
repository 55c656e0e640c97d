"""Files of a data set that are none: pipes, devices, sockets, links out of it, and tables that unpack without end.

`python tests/attacks/test_attacks_own_files.py` prints what holds, with the seconds and the memory of each.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edgefl.data.folder import read_manifest
from edgefl.data.sources import check_source, load
from edgefl.errors import DataError
from edgefl.own_data.facts import facts_of
from edgefl.own_data.npz import read_arrays
from edgefl.own_data.samples import understand
from edgefl.own_data.tables import read_table

#: Seconds within which a command has to end here, where a core is shared.
LONGEST_S = 20.0
#: Most memory of a process that refuses a table, GiB 1.
MOST_BYTES = 2**30


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path has 107 characters at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def _link_out(path: Path) -> None:
    other = path.parent.parent / f"outside{path.suffix}"
    other.write_text("a,b\n1,2\n")
    path.symlink_to(other)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": _pipe,
    "device": _device,
    "socket": _socket,
    "link out": _link_out,
    "loop": _loop,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the user's with two texts, labelled by their folders."""
    for label in ("a", "b"):
        (tmp_path / "own" / label).mkdir(parents=True)
        (tmp_path / "own" / label / "1.txt").write_text("a cat on a mat")
    return tmp_path / "own"


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", ["data.csv", "x.parquet", "x.json", "x.jsonl", "x.wav", "x.png", "x.npy", "x.txt"])
def test_what_is_no_file_of_the_folder_is_refused_by_name(folder: Path, kind: str, name: str) -> None:
    NO_FILES[kind](folder / name)
    with pytest.raises(DataError, match=name) as refused:
        understand(folder)
    assert refused.value.exit_code == 11


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "loop"])
@pytest.mark.parametrize("name", ["data.csv", "x.parquet", "x.jsonl", "x.npz"])
def test_what_is_no_file_is_refused_where_it_is_named(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / name
    NO_FILES[kind](path)
    read = (read_arrays, load) if name.endswith(".npz") else (understand, read_table)
    for reader in read:
        with pytest.raises(DataError, match=name):
            reader(path)


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", ["manifest.jsonl", "labels.json", "x.wav", "x.csv", "x.npy", "x.png", "x.txt"])
def test_a_manifest_reads_files_alone(tmp_path: Path, kind: str, name: str) -> None:
    root = tmp_path / "data"
    root.mkdir()
    if name != "manifest.jsonl":
        (root / "manifest.jsonl").write_text(f'{{"m": "{name}"}}\n')
    NO_FILES[kind](root / name)
    with pytest.raises(DataError, match=name):
        read_manifest(root)
    if name == "manifest.jsonl" and kind != "loop":
        with pytest.raises(DataError, match=name):
            load(root)
        check_source(str(root))  # looks at nothing but the name


def test_a_sound_of_0_hz_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.wav"
    path.parent.mkdir()
    with wave.open(str(path), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(b"\0" * 2000)
    data = bytearray(path.read_bytes())
    data[24:28] = bytes(4)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"1 of 1 files of audio cannot be used \(a/x\.wav: "):
        facts_of(understand(tmp_path), "audio")


def _dictionary(path: Path, length: int, text: object = None) -> None:
    """20,000 rows of one text, which the file holds once."""
    rows = pa.array([0] * 20_000, pa.int32())
    values = pa.array(["x" * length if text is None else text])
    table = pa.table({"a": pa.DictionaryArray.from_arrays(rows, values), "b": list(range(20_000))})
    pq.write_table(table, path, compression="zstd")


def _plain(path: Path) -> None:
    table = pa.table({"a": ["x" * 300_000] * 4000})
    pq.write_table(table, path, compression="zstd", store_schema=False)


def _fronts(path: Path) -> None:
    table = pa.table({"a": [f"{'x' * 300_000}{i}" for i in range(1500)]})
    delta = {"a": "DELTA_BYTE_ARRAY"}
    pq.write_table(table, path, use_dictionary=False, column_encoding=delta, compression="zstd")


TABLES: dict[str, Callable[[Path], None]] = {
    "dictionary": lambda path: _dictionary(path, 300_000),
    "bytes": lambda path: _dictionary(path, 0, b"x" * 300_000),
    "30 MB": lambda path: _dictionary(path, 30_000_000),
    "repeated": _plain,
    "fronts": _fronts,
}
_READ = (
    "import sys, resource\nresource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2)\nfrom pathlib import Path\n"
    "from edgefl.errors import DataError\n"
    "from edgefl.own_data.tables import read_table\n"
    "try:\n    read_table(Path(sys.argv[1]))\nexcept DataError as error:\n    print(error.message)\n"
    "status = Path('/proc/self/status').read_text()\n"  # getrusage counts what the parent had before
    "print(1024 * int(status.partition('VmHWM:')[2].split()[0]))\n"
)


def _refused_in(path: Path) -> tuple[str, int]:
    """What a process of its own says of a table, and the most memory that it took."""
    command = [sys.executable, "-c", _READ, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    *told, peak = ended.stdout.splitlines()
    return "\n".join(told), int(peak)


@pytest.mark.parametrize("name", TABLES)
def test_a_small_parquet_that_unpacks_to_gigabytes_is_refused_below_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / "big.parquet"
    TABLES[name](path)
    assert path.stat().st_size < 2_000_000
    told, peak = _refused_in(path)
    assert told.endswith("big.parquet: unpacked it has more than 268435456 bytes")
    assert peak < MOST_BYTES


def test_columns_of_a_parquet_are_read_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    words = pa.array(["u", None, "w"] * 4).dictionary_encode()
    columns = {"v": [1.5, 2.0, 3.0] * 4, "word": words, "acc.x": range(12), "part": pa.array([b"q", b"r", None] * 4)}
    pq.write_table(pa.table(columns | {"list": [[1, 2], [], [3]] * 4, "pair": [{"v": 1}] * 12}), path)
    table = read_table(path)
    first = {"v": "1.5", "word": "u", "acc.x": "0", "part": "q", "list": "", "pair": ""}
    assert table.rows[0] == first
    assert (len(table.rows), table.rows[1]["word"], table.rows[2]["part"]) == (12, "", "")
    assert list(table.unused) == ["list", "pair"]


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_init_ends_with_the_name(folder: Path, tmp_path: Path, kind: str) -> None:
    NO_FILES[kind](folder / "data.csv")
    ended, seconds = _init(folder, tmp_path)
    assert ended.returncode == 11
    assert "data.csv" in ended.stderr
    assert seconds < LONGEST_S


def _init(folder: Path, at: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    begun = time.monotonic()
    command = [sys.executable, "-m", "edgefl.cli.main", "init", str(folder), "--yes"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=at, check=False)
    return ended, time.monotonic() - begun


if __name__ == "__main__":
    for kind_, make in NO_FILES.items():
        with tempfile.TemporaryDirectory() as made:
            (Path(made) / "own").mkdir()
            make(Path(made) / "own/data.csv")
            done, took = _init(Path(made) / "own", Path(made))
            holds = "holds" if done.returncode == 11 and "data.csv" in done.stderr else "BROKEN"
            sys.stdout.write(f"init, {kind_}: {holds}: code {done.returncode} after {took:.1f} s\n")
    for name_, write in TABLES.items():
        with tempfile.TemporaryDirectory() as made:
            write(Path(made) / "big.parquet")
            said, most = _refused_in(Path(made) / "big.parquet")
            holds = "holds" if "unpacked it has more than" in said and most < MOST_BYTES else "BROKEN"
            sys.stdout.write(f"parquet, {name_}: {holds}: {most / 2**20:.0f} MiB\n")
