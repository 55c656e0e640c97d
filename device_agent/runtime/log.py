"""One line per event, for people or as JSON; also of what libraries log."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Literal, TextIO

Emit = Callable[..., None]
Format = Literal["text", "json"]

#: Events that are warnings: marked for the eye, and in JSON by their level.
_WARNINGS = frozenset({"declined", "disconnected", "unreachable", "trainer-lost", "warning", "refused", "ignored"})


def line_writer(form: Format = "text", stream: TextIO | None = None) -> Emit:
    """``emit(event, **fields)`` that writes one line: time, event, fields; empty fields are left out."""

    def emit(event: str, **fields: object) -> None:
        out = stream or sys.stderr
        known = {name: value for name, value in fields.items() if value not in (None, "", {}, ())}
        level = "warning" if event in _WARNINGS else "info"
        if form == "json":
            line = json.dumps({"at": round(time.time(), 3), "level": level, "event": event, **known}, default=str)
        else:
            clock = time.strftime("%H:%M:%S")
            mark = "!" if level == "warning" else " "
            line = f"{clock} {mark} {event:<14} {' '.join(f'{name}={_text(value)}' for name, value in known.items())}"
        out.write(line.rstrip() + "\n")
        out.flush()

    return emit


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text or "\n" in text else text


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
