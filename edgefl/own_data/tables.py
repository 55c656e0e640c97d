"""Tables of a user's own: .csv, .tsv, .parquet, .json and .jsonl as rows of texts, and what their columns are.

A table is one of three things: a *list* of files (a column of paths, with labels, captions or groups beside them), a
*recording* (rows are time steps, columns are the channels of one sensor or several), or *features* (a row is a sample).
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from edgefl.data.recording import TIME, is_number
from edgefl.data.regular_files import regular_file
from edgefl.errors import DataError, MissingDependencyError
from edgefl.records import is_modality

#: Suffixes of files that may be tables.
SUFFIXES = frozenset({".csv", ".tsv", ".parquet", ".json", ".jsonl"})
#: A table is held in memory as texts, some ten times its file.
MAX_TABLE_BYTES = 256 * 2**20
MAX_COLUMNS = 2000
#: Cells of a .parquet, which packs millions of equal ones into a few bytes. In memory a cell takes about 70 bytes, a
#: row as much as four more: 1.4 GB, as of a .csv of the largest size.
MAX_CELLS, _ROW_CELLS = 20_000_000, 4
#: Rows of a .parquet that are unpacked at a time; and bytes, where each row might be its column's longest text.
_BATCH, _BATCH_BYTES = 1024, 16 * 2**20
#: Rows that decide what a column is.
LOOKED_AT = 2000
_LONGEST = 32  # characters of a modality's name

Row = Mapping[str, str]
What = Literal["list", "recording", "features"]

_LABEL = re.compile(r"(class|label|target|category|activity|y|emotion|diagnosis|species|breed)(_?name)?", re.IGNORECASE)
_GROUP = re.compile(
    r"(group|person|people|subject|user|speaker|participant|patient|client|device|vendor|site)(_?id)?", re.IGNORECASE
)
_PART = re.compile(r"(session|recording|record|trial|experiment|segment|sequence|take|run)(_?id)?", re.IGNORECASE)
#: Names of time columns that tables have beside those that the reader of sensors knows, with their unit.
_TIMES = {"seconds": "s", "sec": "s", "ms": "ms", "datetime": "", "date": ""}
_AXES = frozenset("xyzw")
_ID = re.compile(r"(id|index|idx|no|nr|row|number|key|unnamed.*)?", re.IGNORECASE)
#: The channel at the end of a column's name: acc_x, gyro-3, ax is one name.
_CHANNEL = re.compile(r"(?P<sensor>[A-Za-z][\w -]*?)[_.\- ]?(?P<channel>[xyzw]|\d{1,3})$", re.IGNORECASE)


@dataclass
class Table:
    """A table's rows, and the role of each column."""

    path: Path
    rows: list[dict[str, str]]
    columns: list[str]
    what: What = "features"
    label: str = ""
    group: str = ""
    part: str = ""  # which recording of several a row belongs to
    time: str = ""
    files: list[str] = field(default_factory=list)  # columns of paths
    texts: list[str] = field(default_factory=list)  # columns of sentences
    sensors: dict[str, list[str]] = field(default_factory=dict)  # modality -> its channels' columns
    unused: list[str] = field(default_factory=list)

    def key(self, row: Row) -> tuple[str, str, str]:
        """Group, recording and label of a row: where one of them changes another recording begins."""
        return tuple(row.get(name, "") if name else "" for name in (self.group, self.part, self.label))  # type: ignore[return-value]

    @property
    def plain_time(self) -> bool:
        """Whether the reader of sensors finds the time itself: in the first column, by its name; or there is none."""
        return not self.time or (self.time == self.columns[0] and TIME.fullmatch(self.time.lower()) is not None)


def read_table(path: Path, is_file: Callable[[str], bool] = lambda _: False, most: int | None = None) -> Table:
    """A table with the roles of its columns. ``is_file``: whether a text names a file of the data set; ``most``: of a
    .csv only so many rows, which is enough to see what it is.

    Raises DataError (damaged, too large), MissingDependencyError for .parquet without pyarrow.
    """
    regular_file(path, MAX_TABLE_BYTES)
    reader = {".parquet": _parquet, ".json": _json, ".jsonl": _jsonl}.get(path.suffix.lower())
    rows = reader(path) if reader is not None else _csv(path, most)
    columns = list(dict.fromkeys(itertools.chain.from_iterable(rows[:LOOKED_AT])))
    if not rows or not columns:
        raise DataError(f"{path}: holds no rows with named columns", remedy="Write a head line of column names.")
    if len(columns) > MAX_COLUMNS:
        raise DataError(f"{path}: has {len(columns)} columns, more than {MAX_COLUMNS}", remedy="Store arrays as .npz.")
    table = Table(path, rows, columns)
    _find_roles(table, is_file)
    return table


def has_head(path: Path) -> bool:
    """Whether a .csv or .tsv begins with names of columns."""
    first = next(iter(_lines(path)), [])
    return bool(first) and not all(is_number(cell) or not cell.strip() for cell in first)


def _lines(path: Path) -> Iterator[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            sample = file.read(64 * 1024)
            file.seek(0)
            head = sample.splitlines()[0] if sample.splitlines() else ""
            delimiter = max(",;\t", key=head.count)
            yield from csv.reader(file, delimiter=delimiter)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: is no readable table: {error}", remedy="Save it as CSV in UTF-8.") from error


def _csv(path: Path, most: int | None) -> list[dict[str, str]]:
    lines = itertools.islice(_lines(path), None if most is None else most + 1)
    names = [name.strip() for name in next(lines, [])]
    return [{name: cell.strip() for name, cell in zip(names, line, strict=False) if name} for line in lines if line]


def _parquet(path: Path) -> list[dict[str, str]]:
    """Rows of texts; columns that hold lists or tables are empty in each."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise MissingDependencyError("pyarrow", "parquet") from error
    too_large = DataError(
        f"{path}: unpacked it has more than {MAX_TABLE_BYTES} bytes",
        remedy="Split it: a file a recording, in one folder.",
    )
    rows: list[dict[str, str]] = []
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


def _json(path: Path) -> list[dict[str, str]]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is no readable JSON: {error}", remedy="Mend the file.") from error
    if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()):
        return [{"file": key, "text": value} for key, value in found.items()]  # file -> caption
    return _flat(path, found)


def _jsonl(path: Path) -> list[dict[str, str]]:
    try:
        return _flat(path, [json.loads(line) for line in path.read_text("utf-8-sig").splitlines() if line.strip()])
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is no readable JSON: {error}", remedy="Mend the file.") from error


def _flat(path: Path, found: object) -> list[dict[str, str]]:
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise DataError(f"{path}: is no list of objects", remedy='Write [{"file": "a.png", "label": "cat"}, …].')
    return [{_text(name): _text(value) for name, value in row.items()} for row in found]


def _text(value: object) -> str:
    """A cell; halves of no character, which JSON may name, become question marks."""
    return "" if value is None or value != value else str(value).encode("utf-8", "replace").decode()


def _find_roles(table: Table, is_file: Callable[[str], bool]) -> None:
    looked = table.rows[:LOOKED_AT]
    axes = [column for column in table.columns if column.lower() in _AXES]
    if len(axes) > 1:  # y is an axis here, no label
        table.sensors["sensor"] = axes
    for column in (column for column in table.columns if len(axes) < 2 or column not in axes):
        values = [value for row in looked if (value := row.get(column, ""))]
        _give_role(table, column, values, is_file)
    names = distinct({sensor: _sensor_name(sensor) for sensor in table.sensors})
    table.sensors = {names[sensor]: columns for sensor, columns in table.sensors.items()}
    if table.files:
        table.what = "list"
    elif table.time or (table.sensors and _has_recordings(table)):
        table.what = "recording"
    else:
        table.what = "features"


def _give_role(table: Table, column: str, values: Sequence[str], is_file: Callable[[str], bool]) -> None:
    """Decide by the name first, then by the values."""
    numbers = all(map(is_number, values))
    if not values:
        table.unused.append(column)
    elif not numbers and sum(map(is_file, values)) > 0.9 * len(values):
        table.files.append(column)
    elif _LABEL.fullmatch(column) and not table.label:
        table.label = column
    elif _GROUP.fullmatch(column) and not table.group:
        table.group = column
    elif _PART.fullmatch(column) and not table.part:
        table.part = column
    elif time_unit(column) is not None and not table.time:
        table.time = column
    elif _ID.fullmatch(column):
        table.unused.append(column)
    elif numbers:
        match = _CHANNEL.fullmatch(column)
        table.sensors.setdefault((match["sensor"] if match else column).strip("_.- ").lower(), []).append(column)
    elif sum(len(value.split()) for value in values) >= 2 * len(values):
        table.texts.append(column)
    elif not table.label and len(set(values)) <= 50 and len(values) >= 3 * len(set(values)):
        table.label = column
    else:
        table.unused.append(column)


def _sensor_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_")[-_LONGEST:]
    return name if is_modality(name) else f"sensor_{name}".strip("_")[:_LONGEST]


def distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Key -> the name of a modality; those that would have one name are numbered."""
    found: dict[str, str] = {}
    for key, name in names.items():
        number, one = 1, name
        while one in found.values():
            number += 1
            one = f"{name[: _LONGEST - 5]}-{number}"  # of up to four digits: MAX_COLUMNS
        found[key] = one
    return found


def time_unit(column: str) -> str | None:
    """The unit of a time column (s, ms, us, ns), "" where its name has none; None: it is no time column."""
    match = TIME.fullmatch(column.lower())
    return (match[1] or "") if match else _TIMES.get(column.lower())


def _has_recordings(table: Table) -> bool:
    """Whether rows of one label, group and recording stand together, eight or more in the mean.

    A table that is only sorted by its label, each label once, is one of features.
    """
    runs = sum(1 for _ in itertools.groupby(table.rows, table.key))
    if not (table.group or table.part):
        runs = 0 if runs == len({table.key(row) for row in table.rows}) else runs
    return bool(runs) and len(table.rows) / runs >= 8
