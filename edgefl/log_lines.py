"""Log lines of both programs, one an event: key=value for the eye, or a JSON object whose first keys are the same.

In JSON these are ts (UTC), level, event, program, fleet, and where they are known device, run, stage, round, attempt.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Protocol

Emit = Callable[..., None]
#: Events that are warnings: marked for the eye, and in JSON by their level.
_WARNINGS = frozenset(
    (
        *("declined", "disconnected", "unreachable", "trainer-lost", "warning", "rejected", "ignored"),
        *("quarantined", "device_left"),
    )
)
#: Event -> fields of its line as text, where it has them all; in JSON, and with ``--debug``, a line has every field.
_BRIEF = {"trained": ("attempt", "loss"), "unreachable": ("finding", "retry_s")}
_ERRORS = frozenset({"error", "run_failed"})
#: An attempt in words: run, stage, round, its number.
_ATTEMPT = re.compile(r"(?P<run>.+)/s(?P<stage>\d+)/r(?P<round>\d+)/a\d+")


class Lines(Protocol):
    """Where lines go: a stream, or something that also keeps them."""

    def write(self, text: str, /) -> object:
        """Take a line with its end."""
        ...

    def flush(self) -> object:
        """Let it out."""
        ...


def line_writer(form: str = "text", stream: Lines | None = None, *, whole: bool = False, **always: str) -> Emit:
    """``emit(event, **fields)`` that writes one line: time, event, fields; empty fields are left out.

    ``whole``: text with every field, also of events with many. ``always``: fields of every line in JSON, which a person
    who reads text knows. The field ``at`` is when it was, in seconds since the epoch, default now.
    """

    def emit(event: str, **fields: object) -> None:
        out = stream or sys.stderr
        at = fields.pop("at", None)
        now = float(at) if isinstance(at, (int, float)) else time.time()
        known = {name: value for name, value in fields.items() if value not in (None, "", {}, (), [])}
        level = "error" if event in _ERRORS else "warning" if event in _WARNINGS else "info"
        if form == "json":
            stamp = datetime.fromtimestamp(now, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            first = {"ts": stamp, "at": round(now, 3), "level": level, "event": event, **always}
            line = _to_json({**first, **_place(known), **known, **first})
        else:
            clock = time.strftime("%H:%M:%S", time.localtime(now))
            brief = _BRIEF.get(event, ())
            if not whole and brief and known.keys() >= set(brief):
                known = {name: known[name] for name in brief}
            mark = " " if level == "info" else "!"
            line = f"{clock} {mark} {event:<14} {' '.join(f'{name}={_text(value)}' for name, value in known.items())}"
        out.write(line.rstrip() + "\n")
        out.flush()

    return emit


def _place(fields: dict[str, object]) -> dict[str, object]:
    """Run, stage and round of an attempt that is among the fields."""
    if not (found := _ATTEMPT.fullmatch(str(fields.get("attempt", "")))):
        return {}
    return {"run": found["run"], "stage": int(found["stage"]), "round": int(found["round"])}


def _to_json(line: dict[str, object]) -> str:
    try:
        return json.dumps(line, default=str, allow_nan=False)
    except ValueError:  # NaN and infinity: JSON has neither
        return json.dumps(json.loads(json.dumps(line, default=str), parse_constant=lambda _: None))


def _text(value: object) -> str:
    text = value if isinstance(value, str) else _plain(value)
    if text.isprintable() and " " not in text:
        return text
    return json.dumps(
        text, ensure_ascii=not text.replace("\n", "").isprintable()
    )  # what a terminal would obey, as codes


def _plain(value: object) -> str:
    """Numbers in four digits, mappings as "a:1,b:2" without what they lack, sequences by commas."""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"
    if isinstance(value, Mapping):
        known = {key: one for key, one in value.items() if one not in (None, "", {}, (), [])}
        return ",".join(f"{key or 'all'}:{_plain(one)}" for key, one in known.items())
    if isinstance(value, (list, tuple)):
        return ("; " if any(isinstance(one, Mapping) for one in value) else ",").join(map(_plain, value))
    return str(value)


class LineHandler(logging.Handler):
    """Carries ``logging`` records of libraries (warnings and worse) into the same lines."""

    def __init__(self, emit: Emit) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(message)s"))  # the line has level and source in fields of their own
        self._line = emit

    def emit(self, record: logging.LogRecord) -> None:
        """One record as a ``warning`` line, with its traceback if it has one."""
        try:
            self._line("warning", source=record.name, text=self.format(record))
        except Exception:
            self.handleError(record)
