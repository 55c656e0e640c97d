"""Dates of tables, in the forms that ``edgefl.records.DATE_FORMS`` lists, each with or without a time of the day."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence

from edgefl.records import CLOCK, DATE_FORMS

_CLOCK = re.compile(
    r"(\d{1,2}):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?(?: ?([ap])\.?m\.?)?(?: ?(?:utc|gmt|z))?", re.IGNORECASE
)


def moment_of(text: str, form: str = "") -> dt.datetime | None:
    """The time of a date in a form of ``DATE_FORMS``, in UTC where it says no zone; None: it is none."""
    text = text.strip()
    try:
        if not form:
            return _iso(text)
        if form == CLOCK:
            return _at(dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc), text)
        words = text.split(" ", form.count(" ") + 1)
        day, clock = words[: form.count(" ") + 1], words[form.count(" ") + 1 :]
        found = dt.datetime.strptime(" ".join(day), form).replace(tzinfo=dt.timezone.utc)
        return _at(found, clock[0]) if clock else found
    except ValueError:
        return None


def _iso(text: str) -> dt.datetime:
    """A time in ISO 8601, or a day of it with a time in another form. Raises ValueError."""
    day, blank, clock = text.partition(" ")
    if blank and _CLOCK.fullmatch(clock):
        return _at(dt.datetime.fromisoformat(day).replace(tzinfo=dt.timezone.utc), clock)
    found = dt.datetime.fromisoformat(re.sub(r" ?(Z|UTC|GMT)$", "+00:00", text))
    return found if found.tzinfo else found.replace(tzinfo=dt.timezone.utc)


def _at(day: dt.datetime, clock: str) -> dt.datetime:
    """A time of a day. Raises ValueError."""
    if (match := _CLOCK.fullmatch(clock.strip())) is None:
        raise ValueError(clock)
    hour, minute, second, part, half = match.groups()
    if half:
        hour = int(hour) % 12 + 12 * (half in "pP")
    return day.replace(
        hour=int(hour), minute=int(minute), second=int(second or 0), microsecond=int((part or "0").ljust(6, "0")[:6])
    )


def date_form(texts: Sequence[str]) -> str | None:
    """The first form in which all of these are dates; None: there is none. ``texts`` are not empty, and no numbers."""
    return next((form for form in DATE_FORMS if texts and all(moment_of(text, form) for text in texts)), None)
