"""Long ("tidy") tables, a row a value of one channel at one time, as rows of all channels."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edgefl.data.recording import is_number
from edgefl.errors import DataError
from edgefl.records import MAX_COLUMNS

_VALUE = re.compile(r"(value|reading|measurement|amplitude|wert)s?", re.IGNORECASE)
_CHANNEL = re.compile(
    r"(channel|sensor|variable|axis|signal|feature|dimension|kanal|metric|parameter)s?(_?(name|id|no))?", re.IGNORECASE
)
Rows = list[dict[str, str]]


def wide(rows: Rows, columns: Sequence[str], time: str) -> Rows | None:
    """The rows of a long table with a column a channel, in their first order; None: it is none.

    It has a column of values, one of channels' names, and each time stamp comes once a channel. ``time``: its column,
    or "". Raises DataError for a channel that has two values at one time.
    """
    values = [name for name in columns if _VALUE.fullmatch(name)]
    channels = [name for name in columns if _CHANNEL.fullmatch(name)]
    if len(values) != 1 or len(channels) != 1 or not time:
        return None
    (value,), (channel,) = values, channels
    names = dict.fromkeys(row.get(channel, "") for row in rows)
    if not 2 <= len(names) <= MAX_COLUMNS or not all(is_number(row.get(value, "") or "0") for row in rows):
        return None
    as_column = {name: f"{value}_{name}" if is_number(name) else name for name in names}
    others = [name for name in columns if name not in (value, channel)]
    made: dict[tuple[str, ...], dict[str, str]] = {}
    for number, row in enumerate(rows, start=1):
        key = tuple(row.get(name, "") for name in others)
        here = made.setdefault(key, {name: row.get(name, "") for name in others})
        column = as_column[row.get(channel, "")]
        if column in here:
            raise DataError(
                f"row {number}: the channel {row.get(channel, '')!r:.60} has two values at {time} {row.get(time, '')}",
                remedy="Add a column that says which recording a row is of, such as session.",
            )
        here[column] = row.get(value, "")
    return list(made.values())
