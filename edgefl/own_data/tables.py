"""Tables of a user's own: .csv, .tsv, .parquet, .json and .jsonl as rows of texts, and what their columns are.

A table is one of three things: a *list* of files (a column of paths, with labels, captions or groups beside them), a
*recording* (rows are time steps, columns are the channels of one sensor or several), or *features* (a row is a sample).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from edgefl.data.dates import date_form
from edgefl.data.labels import class_name
from edgefl.data.recording import TIME, is_number
from edgefl.data.regular_files import regular_file
from edgefl.errors import DataError
from edgefl.own_data.code_columns import is_code
from edgefl.own_data.label_columns import Guess, best_label, is_quantity
from edgefl.own_data.several_labels import columns_in, joined, merged, parts
from edgefl.own_data.table_rows import AS_ARRAYS, LOOKED_AT, MAX_COLUMNS, MAX_TABLE_BYTES, head_of, read_rows
from edgefl.own_data.text_columns import are_names, is_text
from edgefl.own_data.tidy_tables import wide
from edgefl.own_data.wishes import NO_ROLES, Roles, to_use
from edgefl.records import MAX_CATEGORIES, MAX_CELL_NAME, TableColumn, is_modality

#: Suffixes of files that may be tables.
SUFFIXES = frozenset({".csv", ".tsv", ".parquet", ".json", ".jsonl"})
_LONGEST = 32  # characters of a modality's name
#: Rows of one recording, in the mean: fewer, and a column of dates is a number of each sample. ``_ALONE``: of days, or
#: where no column of times, groups or recordings tells recordings apart.
_STEPS, _ALONE = 2, 8
#: Correlation of a sensor's value with the one before; of rows without order it is below 0.
_GOES_ON = 0.2

Row = Mapping[str, str]
What = Literal["list", "recording", "features"]

_GROUP = re.compile(
    r"(group|person|people|subject|user|speaker|participant|patient|client|device|vendor|site)(_?id)?", re.IGNORECASE
)
_PART = re.compile(
    r"(session|recording|record|trial|experiment|segment|sequence|take|run|utterance|clip|episode|series)(_?id)?",
    re.IGNORECASE,
)
#: Names of time columns that tables have beside those that the reader of sensors knows, with their unit.
_TIMES = {"seconds": "s", "sec": "s", "ms": "ms", "seconds_elapsed": "s", "datetime": "", "date": ""}
_AXES = frozenset("xyzw")
#: Words for tables that leave columns out.
_FORMS = {"list": "list of files", "recording": "recording"}
_ID = re.compile(r"(id|index|idx|no|nr|row|number|key|rownames|unnamed.*)?", re.IGNORECASE)
#: A unit at the end of a column's name, such as (m/s^2).
_UNIT = re.compile(r" *(\[[^\]]*\]|\([^)]*\))$")
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
    guess: Guess = field(default_factory=Guess)  # how the label was chosen
    group: str = ""
    part: str = ""  # which recording of several a row belongs to
    time: str = ""
    files: list[str] = field(default_factory=list)  # columns of paths
    texts: list[str] = field(default_factory=list)  # columns of sentences
    sensors: dict[str, list[str]] = field(default_factory=dict)  # modality -> its channels' columns
    cells: list[TableColumn] = field(default_factory=list)  # of features: numbers, categories and dates
    unused: dict[str, str] = field(default_factory=dict)  # column -> why
    units: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)  # about columns that are not what they seem

    def key(self, row: Row) -> tuple[str, str, str]:
        """Group, recording and label of a row: where one of them changes another recording begins."""
        label = "" if self.guess.numeric else self.label
        return tuple(row.get(name, "") if name else "" for name in (self.group, self.part, label))  # type: ignore[return-value]

    @property
    def plain_time(self) -> bool:
        """Whether the reader of sensors finds the time itself: in the first column, by its name; or there is none."""
        return not self.time or (self.time == self.columns[0] and TIME.fullmatch(self.time.lower()) is not None)


def read_table(
    path: Path, is_file: Callable[[str], bool] = lambda _: False, most: int | None = None, roles: Roles = NO_ROLES
) -> Table:
    """A table with the roles of its columns. ``is_file``: whether a text names a file of the data set; ``most``: of a
    .csv only so many rows, which is enough to see what it is; ``roles``: those that are known.

    Raises DataError (damaged, too large, no such column), MissingDependencyError for .csv without pandas, .parquet
    without pyarrow.
    """
    regular_file(path, MAX_TABLE_BYTES)
    rows, units = read_rows(path, most)
    columns = list(dict.fromkeys(itertools.chain.from_iterable(rows[:LOOKED_AT])))
    if not rows or not columns:
        raise DataError(f"{path}: holds no rows with named columns", remedy="Write a head line of column names.")
    if len(columns) > MAX_COLUMNS:
        raise DataError(f"{path}: has {len(columns)} columns, more than {MAX_COLUMNS}", remedy=AS_ARRAYS)
    merges = columns_in(roles.label, columns)
    if unknown := [name for name in roles.named if name not in columns and not (merges and name == roles.label)]:
        raise DataError(f"{path}: has no column {', '.join(unknown)}", remedy=f"Its columns: {', '.join(columns)}.")
    if most is None and (made := widened(path, rows, columns)) is not None:
        rows, columns = made, list(dict.fromkeys(itertools.chain.from_iterable(made[:LOOKED_AT])))
    if merges:
        columns = merged(rows, columns, merges)
    table = Table(path, rows, columns, units=units)
    _find_roles(table, is_file, roles._replace(task="multilabel") if merges else roles)
    if table.guess.several:
        for row in rows:
            if row.get(table.label, "").strip():
                row[table.label] = joined(parts(row[table.label], table.guess.separator))
    return table


def widened(path: Path, rows: list[dict[str, str]], columns: Sequence[str]) -> list[dict[str, str]] | None:
    """The rows of a long table with a column a channel; None: it is none. Raises DataError."""
    clock = next((column for column in columns if time_unit(column) is not None), "")
    try:
        return wide(rows, columns, clock)
    except DataError as error:
        raise DataError(f"{path}: {error.message}", remedy=error.remedy) from None


def has_head(path: Path) -> bool:
    """Whether a .csv or .tsv begins with names of columns."""
    first = head_of(path).head
    return bool(first) and not all(is_number(cell.replace(",", ".")) or not cell.strip() for cell in first)


def _find_roles(table: Table, is_file: Callable[[str], bool], roles: Roles) -> None:
    values = {
        column: [value for row in table.rows[:LOOKED_AT] if (value := row.get(column, ""))] for column in table.columns
    }
    free = [column for column in table.columns if column not in roles.drop]
    axes = [column for column in free if column.lower() in _AXES and all(map(is_number, values[column]))]
    if len(axes) > 1:  # y is an axis here, no label
        table.sensors["sensor"] = axes
    else:
        axes = []
    table.group = roles.group if roles.group in free else ""
    timed = any(time_unit(column) is not None for column in free)
    open_columns = {column: values[column] for column in free if column not in axes and column != roles.group}
    if not roles.label:
        open_columns = {
            column: cells
            for column, cells in open_columns.items()
            if not (time_unit(column) is not None or any(p.fullmatch(column) for p in (_GROUP, _PART, _ID)))
            and not _is_files(cells, is_file)
        }
    table.guess = best_label(open_columns, roles.label, numbers=not timed and not axes, task=roles.task)
    table.label = table.guess.column
    for column in free:
        if column not in (*axes, table.label, table.group):
            _give_role(table, column, values[column], is_file, roles)
    spell_alike(table)
    names = distinct({sensor: _sensor_name(_whole_word(sensor, columns)) for sensor, columns in table.sensors.items()})
    table.sensors = {names[sensor]: columns for sensor, columns in table.sensors.items()}
    _choose_what(table, values, roles)


def _choose_what(table: Table, values: Mapping[str, Sequence[str]], roles: Roles) -> None:
    """Choose the table's form by the roles of its columns, and give the last roles."""
    if table.time:
        untangle(table)
    if table.files:
        table.what = "list"
    elif table.time and _is_dated(table):
        table.what = "features"
        add_cell(table, table.time, values[table.time])
        table.time = ""
    elif table.time or (table.sensors and _has_recordings(table)):
        table.what = "recording"
        for sensor, columns in list(table.sensors.items()):
            clocks = [column for column in columns if time_unit(column) is not None]
            table.unused |= dict.fromkeys(clocks, f"the time is that of {table.time}" if table.time else "is a time")
            table.sensors[sensor] = [column for column in columns if column not in clocks]
        table.sensors = {sensor: columns for sensor, columns in table.sensors.items() if columns}
    if table.what == "features":
        order = {column: at for at, column in enumerate(table.columns)}
        for column in (*itertools.chain.from_iterable(table.sensors.values()), *filter(None, [table.part])):
            add_cell(table, column, values[column])
        table.part = ""  # of customers, a segment is no piece of a recording
        table.cells.sort(key=lambda cell: order[cell.name])
        for column in [
            c for c in table.texts if table.cells and roles.kinds.get(c) != "text" and are_names(c, values[c])
        ]:
            table.texts.remove(column)
            table.unused[column] = f"names, which a model learns by heart; {to_use(column, 'text')}"
    else:  # a recording or a list has no use for them
        table.unused |= {cell.name: f"a {_FORMS[table.what]} has no use for it" for cell in table.cells}
        table.cells = []


def spell_alike(table: Table) -> None:
    """Bring labels and groups into their one spelling, in which a change begins another recording."""
    for row, column in itertools.product(table.rows, filter(None, (table.label, table.group))):
        row[column] = class_name(row.get(column, ""))


def name_columns(table: Table) -> None:
    """The group, recording and time of a table by their columns' names alone."""
    for column in table.columns:
        if _GROUP.fullmatch(column) and not table.group:
            table.group = column
        elif _PART.fullmatch(column) and not table.part:
            table.part = column
        elif time_unit(column) is not None and not table.time:
            table.time = column


def _is_files(values: Sequence[str], is_file: Callable[[str], bool]) -> bool:
    return not all(map(is_number, values)) and sum(map(is_file, values)) > 0.9 * len(values)


def _give_role(table: Table, column: str, values: Sequence[str], is_file: Callable[[str], bool], roles: Roles) -> None:
    """Decide by the user's word, then by the name, then by the values."""
    kind = roles.kinds.get(column, "")
    if not values:
        if not _ID.fullmatch(column):
            table.unused[column] = "is empty"
    elif kind == "text":
        table.texts.append(column)
    elif kind in {"number", "category", "date"}:
        add_cell(table, column, values, kind)
    elif _is_files(values, is_file):
        table.files.append(column)
    elif _GROUP.fullmatch(column) and not table.group and not roles.group:
        table.group = column
    elif _PART.fullmatch(column) and not table.part:
        table.part = column
    elif time_unit(column) is not None and not table.time:
        table.time = column
    elif _ID.fullmatch(column):
        table.unused[column] = "its name is that of a row number"
    elif all(map(is_number, values)):
        plain = _UNIT.sub("", column)
        match = _CHANNEL.fullmatch(plain)
        table.sensors.setdefault((match["sensor"] if match else plain).strip("_.- ").lower(), []).append(column)
    elif is_text(values):
        table.texts.append(column)
    else:
        add_cell(table, column, values)


def add_cell(table: Table, column: str, values: Sequence[str], kind: str = "") -> None:
    """A column of features: numbers, dates, or a category; one of too many values is of no use."""
    code = not kind and is_code(column, values)
    numbers = all(map(is_number, values)) or (not kind and _are_mostly_numbers(values))
    if len(column) > MAX_CELL_NAME:
        table.unused[column] = f"its name has more than {MAX_CELL_NAME} characters"
    elif numbers and not code and kind in {"", "number"}:
        table.cells.append(TableColumn(column, unit=table.units.get(column, "")[:MAX_CELL_NAME]))
    elif not numbers and kind in {"", "date"} and (form := date_form(values)) is not None:
        table.cells.append(TableColumn(column, "date", unit=form))
    elif len(set(values)) > MAX_CATEGORIES or (not kind and 9 < len(set(values)) > len(values) / 2):
        rows = f"{len(values)} of the first {LOOKED_AT}" if len(values) < LOOKED_AT else f"the first {LOOKED_AT}"
        count = f"{len(set(values))} values in {rows if len(table.rows) > LOOKED_AT else len(values)} rows"
        kin = f" of a code; {to_use(column, 'number')}" if code else f"; {to_use(column, 'text')}"
        table.unused[column] = f"{count} are too many{kin}"
    else:
        every = sorted({value for row in table.rows if (value := row.get(column, ""))})
        if len(every) > MAX_CATEGORIES or max(map(len, every)) > MAX_CELL_NAME:
            table.unused[column] = f"over {MAX_CATEGORIES} categories, or one of over {MAX_CELL_NAME} characters"
        else:
            table.cells.append(TableColumn(column, "category", tuple(every)))
            if code:
                table.said.append(f"{column} is a category, as its name is that of a code; {to_use(column, 'number')}")


def _are_mostly_numbers(values: Sequence[str]) -> bool:
    """Whether four of five cells are numbers of a quantity, the others such as "[98]" or "unknown"."""
    numbers = [value for value in values if is_number(value)]
    return len(numbers) >= 0.8 * len(values) and is_quantity(numbers)


def _whole_word(sensor: str, columns: Sequence[str]) -> str:
    """A sensor's name with the last letter of its only column: TMAX is no axis x of TMA."""
    alone = len(columns) == 1 and re.search(r"[a-z]{2}[xyz]$", columns[0], re.IGNORECASE)
    return columns[0].lower() if alone else sensor


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


def _is_dated(table: Table) -> bool:
    """Whether a column of time only dates samples, one a row: the label is a quantity, or changes from row to row."""
    if not table.label:
        return False
    runs = sum(1 for _ in itertools.groupby(table.rows, table.key))
    least = _STEPS if table.group or table.part or _has_clock(table) else _ALONE
    return table.guess.numeric or len(table.rows) / runs < least


def _has_clock(table: Table) -> bool:
    """Whether times are of a clock, not days of a calendar."""
    first = table.rows[0].get(table.time, "")
    return is_number(first) or ":" in first


def untangle(table: Table) -> None:
    """Bring rows of one group and recording together, where several were written at a time, by a clock."""
    runs = sum(1 for _ in itertools.groupby(table.rows, table.key))
    kinds = len({table.key(row) for row in table.rows})
    if (
        (table.group or table.part)
        and _has_clock(table)
        and len(table.rows) / runs < _STEPS
        and len(table.rows) >= 8 * kinds
    ):
        table.rows.sort(key=table.key)  # stable: in each by time, as before


def _has_recordings(table: Table) -> bool:
    """Whether rows of one label, group and recording stand together, eight or more in the mean, and are steps in time.

    A table that is only sorted, by its label or a person, is one of features: rows beside each other are not alike.
    """
    runs = [list(rows) for _, rows in itertools.groupby(table.rows, table.key)]
    if not (table.group or table.part) and len(runs) == len({table.key(row) for row in table.rows}):
        return False
    return len(table.rows) / len(runs) >= _ALONE and _is_smooth(table, runs)


def _is_smooth(table: Table, runs: Sequence[Sequence[Row]]) -> bool:
    """Whether a number goes on from row to row: half of the columns have a correlation of 0.2 with the row before."""
    found = []
    for column in itertools.chain.from_iterable(table.sensors.values()):
        products = squares = 0.0
        for run in runs:
            values = np.array([float(row[column]) for row in run if is_number(row.get(column, ""))])
            z = values - values.mean() if len(values) else values
            products, squares = products + float(z[1:] @ z[:-1]), squares + float(z @ z)
        if squares:
            found.append(products / squares)
    return not found or float(np.median(found)) >= _GOES_ON
