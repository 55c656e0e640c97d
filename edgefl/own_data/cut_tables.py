"""Recordings in a table, cut into one .csv a sensor and recording, as the reader of sensors takes them."""

from __future__ import annotations

import csv
import itertools
import math
import os
import re
import statistics
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgefl.data.dates import date_form, moment_of
from edgefl.data.recording import UNITS, is_number, unit_named, unit_of
from edgefl.errors import DataError
from edgefl.own_data.tables import Row, Table, time_unit
from edgefl.storage.disk import store_errors

#: A jump of the time by more seconds, and by more of the usual periods, begins another recording.
PAUSE_S, PAUSE_PERIODS = 30.0, 20.0
#: Rows of a recording, in the mean; with fewer between jumps the rows are in no order.
_SHORTEST = 8
_LOOKED_AT = 2000


class Recording(NamedTuple):
    """One recording: its files below the data set's folder, by sensor."""

    id: str
    files: Mapping[str, str]
    label: str
    group: str


def write_recordings(table: Table, root: Path, folder: str) -> list[Recording]:
    """Write ``root``/``folder``/<id>_<sensor>.csv for each stretch of rows of one label, group and recording without a
    jump of the time.

    A row in which a sensor has no value at all is none of that sensor's, which so keeps its own rate; single empty
    cells stay empty. Raises DataError (a time that is none), StoreError.
    """
    time = _with_stamps(table)
    scale = _seconds_of(table, time)
    place = _place(table.path.relative_to(root) if table.path.is_relative_to(root) else Path(table.path.name))
    made = []
    with store_errors("write", root / folder):
        (root / folder).mkdir(parents=True, exist_ok=True)
        stretches = (
            (key, rows)
            for key, stretch in itertools.groupby(table.rows, table.key)
            for rows in _at_jumps(list(stretch), table.time, scale)
        )
        for number, ((group, _, label), whole) in enumerate(stretches, start=1):
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


def _at_jumps(rows: list[Row], time: str, scale: float) -> list[list[Row]]:
    """Rows cut where the time jumps on by more than a pause, or goes back as of a device that was switched on again.

    ``scale``: seconds of the time's unit; 0: there is no time. Rows in no order of time at all stay together.
    """
    stamps = [float(row[time]) * scale if is_number(row.get(time, "")) else math.nan for row in rows] if scale else []
    steps = [after - before for before, after in itertools.pairwise(stamps)]
    forward = [step for step in steps if step > 0]
    if not forward:
        return [rows]
    pause = max(PAUSE_S, PAUSE_PERIODS * statistics.median(forward))
    cuts = [at for at, step in enumerate(steps, start=1) if step > pause or step < 0]
    if len(cuts) * _SHORTEST > len(rows):
        return [rows]
    return [rows[first:last] for first, last in itertools.pairwise([0, *cuts, len(rows)])]


def _seconds_of(table: Table, names: Mapping[str, str]) -> float:
    """Seconds of the unit of a table's time stamps; 0: it has none."""
    if not table.time:
        return 0.0
    unit = time_unit(names[table.time])
    stamps = [float(text) for row in table.rows[:_LOOKED_AT] if is_number(text := row.get(table.time, ""))]
    return UNITS[unit or unit_of(np.array(stamps))] if stamps else 0.0


def _with_stamps(table: Table) -> dict[str, str]:
    """Make the time stamps of rows with values numbers; time column -> its name in the files. Raises DataError."""
    if not table.time:
        return {}
    columns = list(itertools.chain.from_iterable(table.sensors.values()))
    texts = [text for row in table.rows[:_LOOKED_AT] if (text := row.get(table.time, "")) and not is_number(text)]
    form, numbers = date_form(texts) or "", False
    for number, row in enumerate(table.rows, start=1):
        if any(row.get(column) for column in columns):
            numbers |= is_number(row.get(table.time, ""))
            row[table.time] = _stamp(row.get(table.time, ""), form, f"{table.path}: row {number}")
    named = time_unit(table.time) or unit_named(table.units.get(table.time, ""))
    unit = named if numbers else "s"  # dates become seconds
    return {table.time: f"time_{unit}" if unit else "time"}


def _stamp(text: str, form: str, where: str) -> str:
    """A time stamp as a number; a date and time become seconds since 1970. Raises DataError."""
    if is_number(text):
        return text
    moment = moment_of(text, form)
    if moment is None:
        raise DataError(
            f"{where}: {text!r:.60} is no time",
            remedy="Write times as numbers of seconds, or as 2026-05-01 12:00:00.25.",
        )
    return repr(moment.timestamp())


def _place(path: Path) -> str:
    """The beginning of a table's recordings: its name, with a checksum where others could come to the same one."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", "-".join(path.with_suffix("").parts)).strip("_")[-100:] or "table"
    return name if f"{name}.csv" == path.as_posix() else f"{name}-{zlib.crc32(os.fsencode(path)):08x}"
