"""A sensor's recording: the rows of a .csv or an array, at one rate, cut into windows that touch no gap.

Window k covers the time steps  k * step … k * step + window - 1  of the recording at its rate. A gap is a row with an
absent value (NaN, an empty cell), or time stamps that jump by more than ``GAP_PERIODS`` of the recording's own periods
(their median): windows that touch one are left out, nothing is made up for it. Between neighbouring time stamps values
are interpolated linearly, behind a low-pass filter where the rate is lower than the recording's own.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from edgefl.data.arrays import MAX_FILE_BYTES, Array
from edgefl.data.dataset import Flags
from edgefl.data.dates import date_form, moment_of
from edgefl.data.dialect import SAMPLE, Dialect, dialect_of, is_missing, plain, split
from edgefl.data.encoding import encoding_of
from edgefl.data.low_pass import ALIKE, low_passed
from edgefl.errors import DataError

GAP = "windows touch a gap and are left out"
MAX_LINE = 2**20  # characters of a .csv: a row of some 100,000 numbers
GAP_PERIODS = 3.0  # jitter and one lost row are below, two lost rows are not
#: Times the recording's own rate to which it may be resampled: beyond, the time column is in another unit.
MOST_UPSAMPLING = 16.0
#: Times what its rows take that a recording may last: gaps cost memory, too. Five minutes with a pause of a day: 288.
MOST_GAPS = 1000
#: No time stamp in any unit since any day is larger; sums and products of those that are smaller are finite.
_MOST_STAMP = 1e30
#: Rows resampled at a time: bounds what that takes beside its result.
_BLOCK = 2**16
#: Seconds of a unit of the time column.
UNITS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    "ms": 1e-3,
    "us": 1e-6,
    "\u00b5s": 1e-6,
    "\u03bcs": 1e-6,
    "ns": 1e-9,
    "min": 60.0,
    "h": 3600.0,
}
#: The name of a time column, in small letters, with its unit; t_min is a lowest temperature.
TIME = re.compile(rf"(?:t(?![ _]?(?:min|h)$)|time|timestamp|zeit|zeitstempel)(?:[ _]?[\[(]?({'|'.join(UNITS)})[\])]?)?")
#: Names of a column that numbers the rows, and is no channel.
_ROW_NUMBERS = frozenset({"", "index", "idx", "id", "no", "nr", "row", "rownames", "unnamed: 0"})
#: Without a unit: seconds, but for numbers that as seconds since 1970 would lie beyond the year 5000.
_EPOCH_MS = 1e11
#: Seconds since 1970 in the years 1990 and 2100.
_SINCE_1970 = (6.3e8, 4.1e9)


class Recording(NamedTuple):
    """Rows [T, C], NaN where a value is absent; ``times`` [T] seconds from the first, None: it has none of its own."""

    rows: Array
    times: Array | None = None


class Windows(NamedTuple):
    """A recording cut into windows [K, window, C], views of it; ``whole`` [K]: which touch no gap."""

    values: Array
    whole: Flags


def is_number(text: str) -> bool:
    """True for a number, NaN and infinities; False for 1_000, which Python alone reads."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def read_csv(path: Path) -> Recording:
    """One row a time step, float64. A head line may name the columns; a first one that is time is no channel, nor is
    one that numbers the rows.

    A first line with a number and a cell that is none is a bad row, unless its first cell names the time; a second one
    without any number, below a head line, has units, that of time among them. Raises DataError.
    """
    rows, named, unit = _rows_of(path)
    if 1 < len(named) == rows.shape[1] and named[0] in _ROW_NUMBERS and (np.diff(rows[:, 0]) == 1).all():
        named, rows = named[1:], rows[:, 1:]
    time = TIME.fullmatch(named[0]) if named else None
    if time is None or rows.shape[1] < 2:
        return Recording(rows)
    return Recording(rows[:, 1:], _seconds(rows[:, 0], time.group(1) or unit))


def _rows_of(path: Path) -> tuple[Array, list[str], str]:
    """The rows below a head line, its names ([]: there is none), and the unit of time in a row of units."""
    cells, width, number, head, unit, clock = array("d"), 0, 0, list[str](), "", -1
    with path.open(encoding=encoding_of(path), errors="replace") as file:
        dialect = _dialect(file)
        form = date_form([text for text in dialect.first if text[:1].isdigit() and not is_number(text)])
        for _ in range(dialect.above):
            file.readline()
        while line := file.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE:
                raise DataError(f"row {number + 1} has more than {MAX_LINE} characters")
            line = line.strip(" \r\n" if dialect.separator == "\t" else None)
            if not line.strip():
                continue
            number += 1
            names = split(line, dialect)
            try:
                if number == 2 and head and not any(map(is_number, names)) and all(map(is_missing, names)):
                    raise ValueError  # units of quantities that have none
                row = [_number(cell, dialect, form if at == clock else None) for at, cell in enumerate(names)]
            except ValueError:
                unit = unit or unit_named("".join(names[clock : clock + 1]))
                head = _head(names, head, number, line)
                clock = next((at + dialect.numbered for at, name in enumerate(head[:2]) if TIME.fullmatch(name)), -1)
                continue
            if width and len(row) != width:
                raise DataError(f"row {number} has {len(row)} values, the rows above {width}")
            width = len(row)
            cells.extend(row)
    rows = np.frombuffer(cells, np.float64).reshape(-1, width or 1) if cells else np.empty((0, 1))
    return rows, ["", *head] if dialect.numbered else head, unit


def _head(names: list[str], head: list[str], number: int, line: str) -> list[str]:
    """The names of a head line; below one the row of units is passed over. Raises DataError for any other line."""
    first = [name.strip("#\"' ").lower() for name in names]
    named = TIME.fullmatch(first[0]) is not None or not any(map(is_number, names))
    if head and len(names) == 1 < (count := len(line.split(","))):
        raise DataError(f"its head line names 1 column, and row {number} has {count} values")
    if head and first == head:  # of files that were joined
        return head
    if number > 2 or not named or (number == 2 and not head):
        raise DataError(f"row {number} is not a row of numbers: {line[:60]!r}")
    return head or first


def _dialect(file: IO[str]) -> Dialect:
    """The dialect of a file's beginning; the file stands at its start again."""
    sample = file.read(SAMPLE)
    file.seek(0)
    return dialect_of(sample, whole=len(sample) < SAMPLE)


def _number(cell: str, dialect: Dialect, form: str | None) -> float:
    """A cell as a number, NaN where none is there; a date of a ``form`` as seconds since 1970. Raises ValueError."""
    text = cell.strip().strip("\"'")
    if dialect.thousands == "." or not is_number(text):
        text = plain(text, dialect)
    if is_number(text):
        return float(text)
    if is_missing(text):
        return math.nan
    if form is not None and (moment := moment_of(text, form)) is not None:
        return moment.timestamp()
    raise ValueError(text)


def _seconds(stamps: Array, unit: str) -> Array:
    """Time stamps as seconds from the first. Raises DataError for stamps that are absent or go back."""
    if (wrong := np.flatnonzero(~(np.abs(stamps) < _MOST_STAMP))).size:
        row, stamp = int(wrong[0]) + 2, stamps[wrong[0]]
        raise DataError(f"row {row}: {stamp:g} is no time" if np.isfinite(stamp) else f"row {row} has no time")
    if (back := np.flatnonzero(np.diff(stamps) < 0)).size:
        raise DataError(f"row {int(back[0]) + 3}: its time lies before the row above; sort the rows by time")
    return np.asarray((stamps - stamps[0]) * UNITS[unit or unit_of(stamps)])


def unit_named(text: str) -> str:
    """The unit of time that a cell of units names; "": none."""
    name = text.strip(" []().\"'").lower()
    return name if name in UNITS else ""


def unit_of(stamps: Array) -> str:
    """The unit of time stamps that say none: seconds, unless they are too large for that.

    Then that in which they lie within 130 years of 1970 and beyond 1990, else (a clock since it was switched on) the
    first in which rows come once a second or more.
    """
    if stamps[0] < _EPOCH_MS:
        return "s"
    period = float(np.median(np.diff(stamps))) if len(stamps) > 1 else 0.0
    since = [unit for unit in ("ms", "us", "ns") if _SINCE_1970[0] <= stamps[0] * UNITS[unit] <= _SINCE_1970[1]]
    often = [unit for unit in ("ms", "us", "ns") if period * UNITS[unit] <= 1.0]
    return next(iter([*since, *often]), "ms")


def regular(recording: Recording, rate: float = 0.0, source_rate: float = 0.0) -> tuple[Array, Flags]:
    """Rows [T, C] float32 at ``rate`` Hz (0: as they are), and cuts [T]: where a gap lies between a row and the last.

    ``source_rate``: Hz of a recording without times. Raises DataError, before memory is taken where it would not do.
    """
    rows, times = recording
    if times is None and rate and rate != source_rate:
        if not source_rate:
            raise DataError(f"has no time column, and {rate:g} Hz are asked for: set source_rate to what it is at")
        times = np.arange(len(rows)) / source_rate
    if times is None or len(rows) < 2:
        return _f32(rows), np.zeros(len(rows), np.bool_)
    steps = np.diff(times)
    period = float(np.median(steps))
    if period <= 0:
        raise DataError("more than half of its time stamps are equal")
    gaps = steps > GAP_PERIODS * period
    if rate:
        return _resampled(rows, times, rate, gaps, period)
    return _f32(rows), np.concatenate(([False], gaps))


def _resampled(rows: Array, times: Array, rate: float, gaps: Flags, period: float) -> tuple[Array, Flags]:
    if rate * period > MOST_UPSAMPLING:
        text = f"its time stamps make it {1 / period:.3g} Hz, and {rate:g} Hz are asked for"
        raise DataError(f"{text}: if they are milliseconds, call the column time_ms")
    if times[-1] > MOST_GAPS * period * len(rows):
        text = f"lasts {times[-1]:g} s, and its {len(rows)} rows take {period * len(rows):g} s"
        raise DataError(f"{text}: its gaps are too long; split it into files")
    count = math.floor(float(times[-1]) * rate + 1e-6) + 1
    if count * rows.shape[1] * 4 > MAX_FILE_BYTES:
        raise DataError(f"at {rate:g} Hz it has {count} rows, more than {MAX_FILE_BYTES} bytes; split it into files")
    new = np.empty((count, rows.shape[1]), np.float32)
    for channel, column in enumerate(rows.T):
        values = low_passed(column, times, gaps, period, rate) if rate * period < ALIKE else column
        for start in range(0, count, _BLOCK):
            grid = np.arange(start, min(start + _BLOCK, count)) / rate
            with np.errstate(over="ignore", invalid="ignore"):
                new[start : start + _BLOCK, channel] = np.interp(grid, times, values)  # of an absent value: absent
    for start in range(0, count, _BLOCK):
        grid = np.arange(start, min(start + _BLOCK, count)) / rate
        block = new[start : start + _BLOCK]
        before = np.clip(np.searchsorted(times, grid, "right") - 1, 0, len(gaps) - 1)
        block[gaps[before] & (grid > times[before]) & (grid < times[before + 1])] = np.nan
    return new, np.zeros(count, np.bool_)


def _f32(rows: Array) -> Array:
    with np.errstate(over="ignore"):  # what is too large becomes infinite and is reported as not finite
        return rows.astype(np.float32)


def cut(rows: Array, cuts: Flags, window: int, step: int) -> Windows:
    """Windows of a recording; ``rows`` and ``cuts`` as ``regular`` gives them. Raises DataError (too short)."""
    if len(rows) < window:
        raise DataError(f"has {len(rows)} time steps, fewer than one window of {window}")
    values = np.lib.stride_tricks.sliding_window_view(rows, window, axis=0)[::step].transpose(0, 2, 1)
    last = len(rows) - window + 1  # start of the last window, plus one
    absent = _running(np.asarray(np.isnan(rows).any(axis=1)))
    touched = absent[window::step] > absent[:last:step]
    if cuts.any():
        jumps = _running(cuts)
        touched |= jumps[window::step] > jumps[1 : last + 1 : step]
    return Windows(values, ~touched)


def _running(flags: Flags) -> Array:
    """[T + 1] how many of the first t flags are set."""
    counts = np.zeros(len(flags) + 1, np.int32)  # a file of 64 MiB has fewer rows than 2**31
    np.cumsum(flags, out=counts[1:])
    return counts


def joined(values: Mapping[str, Array], windows: Mapping[str, Windows]) -> Iterator[tuple[int, dict[str, Array]]]:
    """(k, modality -> value) of the samples that one line or request gives: ``values`` alone, or in every window.

    As many as the modality with the fewest windows has. A window that touches a gap is absent; a sample of which
    nothing else is left is left out.
    """
    count = least(windows)
    some = np.full(count, bool(values))
    for each in windows.values():
        some |= each.whole[:count]
    for k in np.flatnonzero(some).tolist():
        whole = {m: each.values[k] for m, each in windows.items() if each.whole[k]}
        yield k, {**values, **whole}


def least(windows: Mapping[str, Windows]) -> int:
    """Windows of the modality with the fewest; 1 where nothing is cut."""
    return min((len(each.whole) for each in windows.values()), default=1)
