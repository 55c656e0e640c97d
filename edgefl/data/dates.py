"""Dates of tables, in the forms that ``edgefl.records.DATE_FORMS`` lists."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from edgefl.records import DATE_FORMS


def moment_of(text: str, form: str = "") -> dt.datetime | None:
    """The time of a date in a form of ``DATE_FORMS``, in UTC where it says no zone; None: it is none."""
    text = text.strip()
    try:
        if not form:
            found = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
        else:
            day, _, clock = text.partition(" ") if form.count(" ") == 0 else (text, "", "")
            found = dt.datetime.strptime(day, form).replace(tzinfo=dt.timezone.utc)
            if clock:
                found = dt.datetime.combine(found.date(), dt.time.fromisoformat(clock.strip()))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=dt.timezone.utc)


def date_form(texts: Sequence[str]) -> str | None:
    """The first form in which all of these are dates; None: there is none. ``texts`` are not empty, and no numbers."""
    return next((form for form in DATE_FORMS if texts and all(moment_of(text, form) for text in texts)), None)
