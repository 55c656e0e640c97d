"""Texts in the encodings that spreadsheets and editors write."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.data.encoding import decoded, encoding_of
from edgefl.data.recording import read_csv
from edgefl.errors import DataError
from edgefl.own_data.samples import understand
from edgefl.own_data.table_rows import head_of

ENCODINGS = ["utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-16-le", "utf-16-be"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_text_is_the_same_in_every_encoding(tmp_path: Path, encoding: str):
    (path := tmp_path / "a.csv").write_bytes("Höhe;Straße\n1;2\n1;2\n".encode(encoding))
    assert decoded(path.read_bytes()) == "Höhe;Straße\n1;2\n1;2\n"
    assert path.read_text(encoding_of(path)) == "Höhe;Straße\n1;2\n1;2\n"
    assert read_csv(path).rows.tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_table_has_its_names_and_labels_whatever_its_encoding(tmp_path: Path, encoding: str):
    pytest.importorskip("pandas")
    rows = "".join(f"{i},5\t{('grün', 'weiß')[i % 2]}\n" for i in range(12))
    (tmp_path / "a.csv").write_bytes(f"Größe\tSorte\n{rows}".encode(encoding))
    found = understand(tmp_path / "a.csv")
    assert found.labels == {"grün": 6, "weiß": 6}
    assert found.samples[1].values == {"features": {"Größe": 1.5}}
    assert ("1 file is not in UTF-8, and read as Windows-1252 (Western European)" in found.said) == (
        encoding == "cp1252"
    )


def test_a_letter_far_behind_decides(tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(b"a" * (2**20 - 1) + "üß".encode())
    assert encoding_of(tmp_path / "a.csv") == "utf-8-sig"
    (tmp_path / "a.csv").write_bytes(b"a" * 2**20 + b"\xfc")
    assert encoding_of(tmp_path / "a.csv") == "cp1252"


@pytest.mark.parametrize("data", [b"PK\x03\x04\x14\x00\x06\x00\x08\xff", b"\x89PNG\r\n\x1a\n\xff\x00\x01"])
def test_a_file_of_another_kind_is_no_text(tmp_path: Path, data: bytes):
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(DataError, match="is no text"):
        decoded(data)
    with pytest.raises(DataError, match=r"a\.csv: is no text"):
        understand(tmp_path / "a.csv")


def test_a_file_that_cannot_be_opened_is_an_error_of_the_data(tmp_path: Path):
    with pytest.raises(DataError, match="cannot be opened: Is a directory"):
        read_csv(tmp_path)
    with pytest.raises(DataError, match="cannot be opened: Is a directory"):
        head_of(tmp_path)
