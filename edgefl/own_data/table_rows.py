"""Rows of a table file as texts by column: .csv and .tsv through pandas, .parquet through pyarrow, .json and .jsonl."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from edgefl.data.dates import date_form
from edgefl.data.dialect import BLANKS, MISSING, SAMPLE, Dialect, apart, dialect_of, is_missing, plain
from edgefl.data.encoding import encoding_of
from edgefl.data.label_sets import SEPARATOR
from edgefl.data.recording import TIME, is_number
from edgefl.errors import DataError, MissingDependencyError
from edgefl.records import CLOCK

#: A table is held in memory as texts, some ten times its file.
MAX_TABLE_BYTES = 256 * 2**20
MAX_COLUMNS = 2000
#: Cells of a .parquet, which packs millions of equal ones into a few bytes. In memory a cell takes about 70 bytes, a
#: row as much as four more: 1.4 GB, as of a .csv of the largest size.
MAX_CELLS, _ROW_CELLS = 20_000_000, 4
#: Rows of a .parquet that are unpacked at a time; and bytes, where each row might be its column's longest text.
_BATCH, _BATCH_BYTES = 1024, 16 * 2**20
#: A whole number, also as pandas writes it in a column of which cells are absent.
_WHOLE = re.compile(r"[+-]?\d+(\.0+)?")
#: Levels of objects in JSON that become columns.
_DEPTH = 3
#: Names of columns of days and of times of the day, beside those of time, and of both together.
_DAYS, _CLOCKS, _DATETIME = frozenset({"date", "day", "datum", "tag"}), frozenset({"clock", "uhrzeit"}), "datetime"
#: Rows that decide what a column is.
LOOKED_AT = 2000
#: The way out for a table that is too wide.
AS_ARRAYS = "Store arrays as .npz."
#: Marks for an absent cell in a column of names, where "none" and "-" may be names.
_ABSENT = frozenset({"na", "nan", "n/a", "<na>", "null", *(mark for mark in MISSING if mark.startswith("#"))})

Rows = list[dict[str, str]]


class Read(NamedTuple):
    """Rows of texts, "" where a cell is absent; column -> its unit, by a row below the head line or beside numbers."""

    rows: Rows
    units: dict[str, str]


def read_rows(path: Path, most: int | None = None) -> Read:
    """The rows of a file. ``most``: of a .csv only so many. Raises DataError, MissingDependencyError."""
    reader = {".parquet": _parquet, ".json": _json, ".jsonl": _jsonl}.get(path.suffix.lower())
    rows, dialect = (reader(path), Dialect()) if reader is not None else _csv(path, most)
    beside = _write_plainly(rows, dialect)
    units = _units(rows)
    return Read(_plain(_moments(rows[1:] if units else rows)), beside | units)


def head_of(path: Path) -> Dialect:
    """The dialect of a .csv or .tsv, with the cells of its first line. Raises DataError."""
    with path.open(encoding=_encoding(path), errors="replace") as file:
        sample = file.read(SAMPLE)
    return dialect_of(sample, whole=len(sample) < SAMPLE)


def _encoding(path: Path) -> str:
    try:
        return encoding_of(path)
    except DataError as error:
        raise DataError(f"{path}: {error.message}", remedy=error.remedy) from None


def _csv(path: Path, most: int | None) -> tuple[Rows, Dialect]:
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise MissingDependencyError("pandas", "data") from error
    dialect = head_of(path)
    if len(dialect.head) > MAX_COLUMNS:  # before memory is taken for them
        raise DataError(f"{path}: has {len(dialect.head)} columns, more than {MAX_COLUMNS}", remedy=AS_ARRAYS)
    names = [*([""] if dialect.numbered else []), *dialect.head]
    names += [""] * (dialect.ends and len(names) < dialect.width)
    if names and dialect.width > len(names):
        text = f"{path}: its head line names {len(names)} columns, and most rows have {dialect.width} cells"
        raise DataError(
            text, remedy="Name every column in the first line; put cells with separators in them into quotes."
        )
    unnamed = {f"unnamed {at}" for at, name in enumerate(names) if not name}
    columns = [name or f"unnamed {at}" for at, name in enumerate(names)]
    if not names:
        return [], dialect
    try:
        with path.open(encoding=_encoding(path), errors="replace") as file:
            for _ in range(dialect.above):
                file.readline()
            frame = pd.read_csv(
                file, sep=r"\s+" if dialect.separator == BLANKS else dialect.separator, header=0, names=_once(columns),
                index_col=False, dtype=str, na_filter=False, skipinitialspace=True, nrows=most,
            )  # fmt: skip
    except (ValueError, pd.errors.ParserError) as error:
        if ragged := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error)):
            most_cells, line, count = ragged.groups()
            text = f"{path}: line {int(line) + dialect.above} has {count} cells, the head line {most_cells}"
            raise DataError(text, remedy="Put cells with separators in them into double quotes.") from error
        raise DataError(f"{path}: is no readable table: {error}", remedy="Save it as CSV in UTF-8.") from error
    rows: Rows = [
        {str(name): "" if cell != cell else str(cell).strip() for name, cell in row.items() if name not in unnamed}
        for row in frame.to_dict("records")
    ]
    rows = [row for row in rows if list(row.values()) != [name for name in names if name]]  # heads of files joined
    return rows, dialect


def _write_plainly(rows: Rows, dialect: Dialect) -> dict[str, str]:
    """Write numbers as Python does, in columns of nothing else below a row that may hold units.

    Column -> the unit that stood beside all its numbers, if one did.
    """
    units: dict[str, str] = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(rows[:LOOKED_AT])):
        cells = [row.get(name, "") for row in rows]
        whole = dialect.thousands != "." and any(cell.endswith(".0") for cell in cells)
        if whole and all(is_missing(cell) or _WHOLE.fullmatch(cell) for cell in cells):
            for row, cell in zip(rows, cells, strict=True):
                row[name] = cell.partition(".")[0]
            continue
        if dialect.thousands != "." and all(map(is_number, cells)):
            continue
        parts = [apart(cell) for cell in cells]
        beside = {unit for number, unit in parts[1:] if not is_missing(number) and number != "0"}  # 0 km is 0
        unit = beside.pop() if len(beside) == 1 else ""
        cells = [
            plain(number if one == unit else cell, dialect) for cell, (number, one) in zip(cells, parts, strict=True)
        ]
        if all(is_number(cell) or is_missing(cell) for cell in cells[1:]):
            units |= {name: unit} if unit else {}
            for row, cell in zip(rows, cells, strict=True):
                row[name] = cell
    return units


def _once(names: list[str]) -> list[str]:
    """Names of which none is there twice: a second x is x.2."""
    found: dict[str, None] = {}
    for name in names:
        number, one = 1, name
        while one in found:
            number += 1
            one = f"{name}.{number}"
        found[one] = None
    return list(found)


def _units(rows: Rows) -> dict[str, str]:
    """Units in the first row, where columns that are numbers below it have a text or nothing there; {}: it has none."""
    if len(rows) < 3:
        return {}
    first, below = rows[0], rows[1:50]
    numbers = [
        name
        for name in first
        if (cells := [row.get(name, "") for row in below if not is_missing(row.get(name, ""))])
        and all(map(is_number, cells))
    ]
    units = {name: first[name] for name in numbers if not is_missing(first[name])}
    return units if units and not any(map(is_number, units.values())) else {}


def _moments(rows: Rows) -> Rows:
    """The rows with a column of days and one of times of the day as one, datetime, in the place of the first."""
    names = list(rows[0]) if rows else []
    day = next((name for name in names if name.lower() in _DAYS), "")
    clock = next((name for name in names if TIME.fullmatch(name.lower()) or name.lower() in _CLOCKS), "")
    cells = [(row.get(day, ""), row.get(clock, "")) for row in rows[:LOOKED_AT]] if day and clock else []
    days, clocks = [cell for cell, _ in cells if cell], [cell for _, cell in cells if cell]
    form = None if any(map(is_number, days + clocks)) else date_form(days)
    if _DATETIME in names or form in {None, CLOCK} or any(":" in cell for cell in days) or date_form(clocks) != CLOCK:
        return rows
    first, second = sorted((day, clock), key=names.index)
    made = []
    for row in rows:
        moment = f"{row[day]} {row[clock]}" if row[day] and row[clock] else ""
        cells_left = {name: cell for name, cell in row.items() if name != second}
        made.append(
            {_DATETIME if name == first else name: cell for name, cell in (cells_left | {first: moment}).items()}
        )
    return made


def _plain(rows: Rows) -> Rows:
    """The rows with "" for a mark of an absent cell: any in a column of numbers else, few in a column of names."""
    names = dict.fromkeys(itertools.chain.from_iterable(rows[:LOOKED_AT]))
    for name in names:
        cells = [row.get(name, "") for row in rows]
        marked = {cell for cell in set(cells) if cell and is_missing(cell)}
        if not marked:
            continue
        numbers = all(is_number(cell) for cell in cells if not is_missing(cell))
        absent = marked if numbers else {cell for cell in marked if cell.lower() in _ABSENT}
        for row in rows:
            if row.get(name) in absent:
                row[name] = ""
    return rows


def _parquet(path: Path) -> Rows:
    """Rows of texts; columns that hold lists or tables are empty in each."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise MissingDependencyError("pyarrow", "data") from error
    too_large = DataError(
        f"{path}: unpacked it has more than {MAX_TABLE_BYTES} bytes",
        remedy="Split it: a file a recording, in one folder.",
    )
    rows: Rows = []
    room = MAX_TABLE_BYTES
    try:
        with pq.ParquetFile(path) as file:
            count, columns = file.metadata.num_rows, file.metadata.num_columns
            if columns > MAX_COLUMNS or count * (columns + _ROW_CELLS) > MAX_CELLS:
                raise DataError(
                    f"{path}: has {count} rows of {columns} columns, more than can be held as texts",
                    remedy="Split it: a file a recording, in one folder; or store arrays as .npz.",
                )
            leaves = [file.metadata.schema.column(i) for i in range(columns)]
            flat = [leaf.path for leaf in leaves if leaf.path == leaf.name and not leaf.max_repetition_level]
            empty = dict.fromkeys((_text(name) for name in file.schema_arrow.names if name not in flat), "")
            longest = _longest_row(path, file.metadata, set(flat), too_large)
            for batch in file.iter_batches(max(1, min(_BATCH, _BATCH_BYTES // (longest + 1))), columns=flat):
                plain = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in batch.columns]
                if (room := room - sum(column.nbytes for column in plain)) < 0:
                    raise too_large
                cells = {_text(n): c.to_pylist() for n, c in zip(batch.schema.names, plain, strict=True)}
                rows += [{n: _text(values[i]) for n, values in cells.items()} | empty for i in range(len(batch))]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: is no readable table: {error}", remedy="Save it again, or as CSV.") from error
    return rows


def _longest_row(path: Path, metadata: Any, flat: Collection[str], too_large: DataError) -> int:
    """The most bytes that a row of the columns ``flat`` may unpack to, however small the file is.

    Values of fixed length have it; of texts that a dictionary holds once, the longest of it; of texts that are packed
    by what each has in common with the last, all pages of their column. Other texts lie in the file as they are.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    leaves = {i: leaf for i in range(metadata.num_columns) if (leaf := metadata.schema.column(i)).path in flat}
    chunks = [(leaves[i], metadata.row_group(g).column(i)) for g in range(metadata.num_row_groups) for i in leaves]
    if sum(chunk.total_uncompressed_size for _, chunk in chunks) > MAX_TABLE_BYTES:
        raise too_large
    fronts = {leaf.path for leaf, chunk in chunks if "DELTA_BYTE_ARRAY" in chunk.encodings}
    fixed = sum(max(0, leaf.length) for leaf in leaves.values())
    fixed += sum(chunk.total_uncompressed_size for leaf, chunk in chunks if leaf.path in fronts)
    texts = [
        leaf.path
        for leaf in leaves.values()
        if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type != "DECIMAL" and leaf.path not in fronts
    ]
    longest = 0
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        for group in range(metadata.num_row_groups if texts else 0):
            for first in itertools.islice(file.iter_batches(1, row_groups=[group], columns=texts), 1):
                each = (pc.max(pc.binary_length(one.dictionary.cast("binary"))).as_py() for one in first.columns)
                longest = max(longest, sum(length or 0 for length in each))
    return int(fixed + longest)


def _json(path: Path) -> Rows:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is no readable JSON: {error}", remedy="Mend the file.") from error
    if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()):
        return [{"file": key, "text": value} for key, value in found.items()]  # file -> caption
    return _flat(path, found)


def _jsonl(path: Path) -> Rows:
    try:
        lines = path.read_text(_encoding(path), "replace").split("\n")
        return _flat(path, [json.loads(line) for line in lines if line.strip()])
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is no readable JSON: {error}", remedy="Mend the file.") from error


def _flat(path: Path, found: object) -> Rows:
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise DataError(f"{path}: is no list of objects", remedy='Write [{"file": "a.png", "label": "cat"}, …].')
    return [_leaves(row) for row in found]


def _leaves(row: Mapping[str, object], above: str = "", depth: int = 1) -> dict[str, str]:
    """The cells of an object, of objects in it as acc.x; empty those of what lies deeper, or is a list of other things
    than texts.
    """
    cells: dict[str, str] = {}
    for key, value in row.items():
        name = above + _text(key)
        if isinstance(value, dict) and depth < _DEPTH:
            cells |= _leaves(value, f"{name}.", depth + 1)
        elif isinstance(value, list):
            cells[name] = _text(SEPARATOR.join(value)) if all(isinstance(one, str) for one in value) else ""
        else:
            cells[name] = "" if isinstance(value, dict) else _text(value)
    return cells


def _text(value: object) -> str:
    """A cell; halves of no character, which JSON may name, become question marks."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return "" if value is None or value != value else str(value).encode("utf-8", "replace").decode()
