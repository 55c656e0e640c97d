"""Recordings in a table, cut into one .csv a sensor and recording, as the reader of sensors takes them."""

from __future__ import annotations

import csv
import datetime as dt
import itertools
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from edgefl.data.recording import is_number
from edgefl.errors import DataError
from edgefl.own_data.tables import Row, Table, time_unit
from edgefl.storage.disk import store_errors


class Recording(NamedTuple):
    """One recording: its files below the data set's folder, by sensor."""

    id: str
    files: Mapping[str, str]
    label: str
    group: str


def write_recordings(table: Table, root: Path, folder: str) -> list[Recording]:
    """Write ``root``/``folder``/<id>_<sensor>.csv for each stretch of rows of one label, group and recording.

    A row in which a sensor has no value at all is none of that sensor's, which so keeps its own rate; single empty
    cells stay empty. Raises DataError (a time that is none), StoreError.
    """
    time = _with_stamps(table)
    place = _place(table.path.relative_to(root) if table.path.is_relative_to(root) else Path(table.path.name))
    made = []
    with store_errors("write", root / folder):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number, ((group, _, label), rows) in enumerate(itertools.groupby(table.rows, table.key), start=1):
            whole = list(rows)
            name = f"{place}-{number:04d}"
            files = {}
            for sensor, columns in table.sensors.items():
                kept = [row for row in whole if any(row.get(column) for column in columns)]
                if kept:
                    files[sensor] = f"{folder}/{name}_{sensor}.csv"
                    _write(
                        root / files[sensor], time | {column: re.sub(r"\W+", "_", column) for column in columns}, kept
                    )
            if files:
                made.append(Recording(name, files, label, group))
    return made


def _write(path: Path, names: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Some columns of rows, under ``names`` in the file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(names.values())
        out.writerows([row.get(column, "") for column in names] for row in rows)


def _with_stamps(table: Table) -> dict[str, str]:
    """Make the time stamps of rows with values numbers; time column -> its name in the files. Raises DataError."""
    if not table.time:
        return {}
    columns = list(itertools.chain.from_iterable(table.sensors.values()))
    numbers = False
    for number, row in enumerate(table.rows, start=1):
        if any(row.get(column) for column in columns):
            numbers |= is_number(row.get(table.time, ""))
            row[table.time] = _stamp(row.get(table.time, ""), f"{table.path}: row {number}")
    unit = time_unit(table.time) if numbers else "s"  # dates become seconds
    return {table.time: f"time_{unit}" if unit else "time"}


def _stamp(text: str, where: str) -> str:
    """A time stamp as a number; a date and time become seconds since 1970. Raises DataError."""
    if is_number(text):
        return text
    try:
        moment = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise DataError(
            f"{where}: {text!r:.60} is no time",
            remedy="Write times as numbers of seconds, or as 2026-05-01 12:00:00.25.",
        ) from None
    return repr((moment if moment.tzinfo else moment.replace(tzinfo=dt.timezone.utc)).timestamp())


def _place(path: Path) -> str:
    """The beginning of a table's recordings: its name, with a checksum where others could come to the same one."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", "-".join(path.with_suffix("").parts)).strip("_")[-100:] or "table"
    return name if f"{name}.csv" == path.as_posix() else f"{name}-{zlib.crc32(os.fsencode(path)):08x}"
