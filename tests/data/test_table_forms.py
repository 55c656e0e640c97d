"""Two readers of one thing: a table and a recording read alike whatever separator, numbers, encoding and lines."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from edgefl.data.recording import read_csv
from edgefl.own_data.table_rows import read_rows

ROWS = [(i * 20, 1.25 - i / 8, 1137.5 * i) for i in range(12)]
FORMS = list(itertools.product((",", ";", "\t", "|"), (".", ","), (False, True)))
TEXTS = [
    ("utf-8", "\n", ""),
    ("utf-8-sig", "\r\n", "# x\n# y\n"),
    ("cp1252", "\r\n", "Gerät 7\n\n"),
    ("utf-16", "\r", ""),
]


def written(number: float, comma: str, separator: str, *, grouped: bool) -> str:
    text = f"{number:,.3f}" if grouped else f"{number:.3f}"
    text = text.translate({ord(","): ".", ord("."): ","}) if comma == "," else text
    return f'"{text}"' if separator in text else text


@pytest.mark.parametrize(("encoding", "end", "above"), TEXTS)
def test_a_table_and_a_recording_are_read_alike(tmp_path: Path, encoding: str, end: str, above: str):
    pytest.importorskip("pandas")
    path = tmp_path / "a.csv"
    for (separator, comma, grouped), units in itertools.product(FORMS, (False, True)):
        lines = [["time", "Höhe", "T"], *([["ms", "g", "°C"]] if units else [])]
        lines += [[str(t), *(written(x, comma, separator, grouped=grouped) for x in row)] for t, *row in ROWS]
        text = above + "".join(separator.join(line) + "\n" for line in lines)
        path.write_bytes(text.replace("\n", end).encode(encoding))
        found, form = read_csv(path), f"{separator!r} {comma} {grouped} {units}"
        np.testing.assert_allclose(found.rows, np.array(ROWS)[:, 1:], err_msg=form)
        assert found.times is not None
        np.testing.assert_allclose(found.times[-1], 0.22 if units else 220, err_msg=form)
        assert [tuple(map(float, row.values())) for row in read_rows(path).rows] == ROWS, form
