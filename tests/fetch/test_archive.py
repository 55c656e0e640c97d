"""Zip archives that are hostile or damaged: refused, and nothing is written anywhere."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from edgefl.errors import DataError
from edgefl.fetch import archive as module
from edgefl.fetch.archive import Archive

PATTERN = r"[a-z]+\.txt"


def zipped(path: Path, members: dict[str, bytes], **infos: int) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = infos.get("attributes", 0)
            file.writestr(info, data)
    return path


def test_wanted_members_are_read_wherever_they_lie(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", {"Data Set/Raw/a.txt": b"1", "b.txt": b"2", "c.png": b"3", "Raw/": b""})
    with Archive(path, PATTERN) as opened:
        assert list(opened) == ["a.txt", "b.txt"]
        assert opened.read("a.txt") == b"1"
        assert "c.png" not in opened
        with pytest.raises(DataError, match=r"it has no z\.txt"):
            opened.read("z.txt")
    assert [one.name for one in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize("name", ["../a.txt", "x/../../a.txt", "/etc/a.txt", "C:/a.txt", "..\\a.txt"])
def test_a_name_that_leaves_its_folder_refuses_the_archive(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="leaves its folder"):
        Archive(zipped(tmp_path / "a.zip", {"good.txt": b"1", name: b"2"}), PATTERN)


def test_links_and_encryption_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a link"):
        Archive(zipped(tmp_path / "a.zip", {"a.txt": b"/etc/passwd"}, attributes=0o120777 << 16), PATTERN)
    data = bytearray(zipped(tmp_path / "b.zip", {"a.txt": b"1"}).read_bytes())
    at = data.index(b"PK\x01\x02") + 8
    data[at : at + 2] = struct.pack("<H", 1)
    (tmp_path / "b.zip").write_bytes(data)
    with pytest.raises(DataError, match="is encrypted"):
        Archive(tmp_path / "b.zip", PATTERN)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(tmp_path / "a.zip", {"a.txt": bytes(module.MAX_MEMBER_BYTES + 1)})
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match="more than the limit"):
        Archive(path, PATTERN)
    monkeypatch.setattr(module, "MAX_TOTAL_BYTES", 10)
    with pytest.raises(DataError, match="11 bytes unpacked, more than the limit of 10"):
        Archive(zipped(tmp_path / "b.zip", {"a.txt": b"123456", "b.txt": b"12345"}), PATTERN)


def test_a_directory_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", {f"{number}.png": b"" for number in range(45_000)})
    tracemalloc.start()
    with pytest.raises(DataError, match=f"its directory has [0-9]+ bytes, more than the limit of {2 * 2**20}"):
        Archive(path, PATTERN)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_member_packed_in_a_rare_way_is_refused_where_it_is_wanted(tmp_path: Path, method: int) -> None:
    for name in ("a.txt", "a.png"):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w", method) as file:
            file.writestr(name, b"1" * 1000)
    with pytest.raises(DataError, match=r"a\.txt is packed in another way than deflate"):
        Archive(tmp_path / "a.txt.zip", PATTERN)
    with Archive(tmp_path / "a.png.zip", PATTERN) as opened:
        assert list(opened) == []


def test_large_members_that_are_not_read_do_no_harm(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", {"X.csv": bytes(module.MAX_MEMBER_BYTES + 1), "a.txt": b"1"})
    with Archive(path, PATTERN) as opened:
        assert opened.read("a.txt") == b"1"


def test_a_member_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    data = bytearray(zipped(tmp_path / "a.zip", {"a.txt": b"1" * 1000}).read_bytes())
    at = data.index(b"PK\x01\x02") + 24
    data[at : at + 4] = struct.pack("<I", 10)
    (tmp_path / "a.zip").write_bytes(data)
    with Archive(tmp_path / "a.zip", PATTERN) as opened, pytest.raises(DataError, match=r"a\.txt"):
        opened.read("a.txt")


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is in it twice"):
        Archive(zipped(tmp_path / "a.zip", {"x/a.txt": b"1", "y/a.txt": b"2"}), PATTERN)


@pytest.mark.parametrize("cut", [0, 10, 60])
def test_what_is_no_archive_is_refused(tmp_path: Path, cut: int) -> None:
    whole = io.BytesIO(zipped(tmp_path / "a.zip", {"a.txt": b"1"}).read_bytes()).getvalue()
    (tmp_path / "a.zip").write_bytes(whole[:cut])
    with pytest.raises(DataError, match="is no readable zip archive"):
        Archive(tmp_path / "a.zip", PATTERN)
