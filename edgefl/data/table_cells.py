"""One row of a table as cells [columns, 2]: the value as a number, and 1 where it is there.

Cells come by the column's name, as numbers or as texts. A cell that is absent, empty, or a usual mark for nothing (NA,
NaN, ?) is missing, and so is a category that the column does not have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from edgefl.data.arrays import Array
from edgefl.data.dataset import Dataset
from edgefl.data.dates import moment_of
from edgefl.data.dialect import apart, is_missing, with_point
from edgefl.data.encoders import Encoders
from edgefl.errors import DataError
from edgefl.records import TableColumn

#: Largest number that float32 has.
_LARGEST = 3e38
_DAY_S = 86400.0


def cells_of(value: object, columns: Sequence[TableColumn], count: int = 0) -> Array:
    """Cells [C, 2] float32 of an object (by name; others are not read) or a list of numbers. Raises DataError.

    ``count``: how many columns there are where they have no description; 0: as many as the list.
    """
    if isinstance(value, Mapping):
        if not columns:
            raise DataError("is an object, and its columns are not described: set model.encoders.<modality>.columns")
        cells = [value.get(column.name) for column in columns]
    elif isinstance(value, list):
        cells = value
        if len(cells) != (len(columns) or count or len(cells)):
            raise DataError(f"has {len(cells)} cells, the table has {len(columns) or count} columns")
    else:
        raise DataError(f"an object of cells by column is expected, not {type(value).__name__}")
    known = columns or [TableColumn(str(number)) for number in range(len(cells))]
    numbers = [number_of(cell, column) for cell, column in zip(cells, known, strict=True)]
    if all(number is None for number in numbers):
        names = ", ".join(column.name for column in known[:5]) + (", …" if len(known) > 5 else "")
        raise DataError(f"has no cell of its {len(known)} columns: {names}")
    return np.array([(0.0, 0.0) if number is None else (number, 1.0) for number in numbers], np.float32)


def without_values(data: Dataset, encoders: Encoders, lacking: Collection[str]) -> list[str]:
    """A sentence on rows without a value in columns but those ``lacking``; [] where there are none."""
    counts: dict[str, int] = {}
    for m, encoder in encoders.items():
        if encoder.kind == "table" and encoder.columns and m in data.modalities:
            empty = (np.asarray(data.modalities[m])[:, :, 1] == 0).sum(axis=0).tolist()
            counts |= {column.name: n for column, n in zip(encoder.columns, empty, strict=True)}
        elif encoder.kind == "text" and m in data.present:
            counts |= {column.name: int((~data.present[m]).sum()) for column in encoder.columns}
    told = [f"{name!r} {n}" for name, n in counts.items() if n and name not in lacking]
    return [f"rows without a value that the model knows: {', '.join(told)} of {len(data)}"] if told else []


def number_of(cell: object, column: TableColumn) -> float | None:
    """The number that stands for a cell; None: it is missing. Raises DataError."""
    if column.kind == "category":
        return _code(cell, column)
    if is_missing(cell):
        return None
    found = _days(str(cell), column.unit) if column.kind == "date" else as_number(_bare(cell, column.unit))
    if found is None:
        what = "date" if column.kind == "date" else "number"
        raise DataError(f"column {column.name}: {str(cell)!r:.60} is no {what}")
    if not abs(found) <= _LARGEST:
        raise DataError(f"column {column.name}: {found} is not finite, or too large for float32")
    return found


def _bare(cell: object, unit: str) -> object:
    """A number without its column's unit beside it."""
    number, beside = apart(cell) if unit and isinstance(cell, str) else ("", "")
    return number if beside == unit and unit else cell


def as_number(cell: object) -> float | None:
    """The number of a cell, of a text also with a decimal comma; None: it is none."""
    if isinstance(cell, int | float):  # True is 1
        return float(cell) if isinstance(cell, float) or abs(cell) < 10**300 else math.inf
    text = with_point(str(cell).strip())
    try:
        return float(text) if isinstance(cell, str) and "_" not in text else None
    except ValueError:
        return None


def text_of(cell: object) -> str:
    """The text of a category's cell: 3 and 3.0 are one."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell).strip()


def _code(cell: object, column: TableColumn) -> float | None:
    text = text_of(cell) if cell is not None else ""
    if text in column.values:
        return float(column.values.index(text))
    number = as_number(cell) if cell is not None else None
    same = [code for code, value in enumerate(column.values) if number is not None and as_number(value) == number]
    return float(same[0]) if same else None


def _days(text: str, form: str) -> float | None:
    moment = moment_of(text, form)
    return None if moment is None else moment.timestamp() / _DAY_S
