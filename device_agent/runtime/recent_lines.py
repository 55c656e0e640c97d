"""The agent's last log lines, kept in memory for a coordinator that asks; bounded in lines, bytes and rate."""

from __future__ import annotations

from collections import deque
from typing import Final

from edgefl.log_lines import Lines
from edgefl.protocol.messages import MOST_LOG_BYTES, MOST_LOG_LINES, LogLines, LogRequest

#: Characters kept of a line: a traceback's longest lines are shorter. With ``MOST_LOG_LINES`` 100 KB of memory.
LINE_CHARS: Final = 500
#: At most one answer in this time, whoever asks how often: 32 KiB a second is little beside an update.
PAUSE_S: Final = 1.0


class RecentLines:
    """Line stream to ``stream`` with a buffer of the last lines. Not ``shared``: requests are refused."""

    def __init__(self, stream: Lines | None = None, *, shared: bool = True) -> None:
        self._stream = stream
        self._shared = shared
        self._lines: deque[str] = deque(maxlen=MOST_LOG_LINES)
        self._count = 0
        self._answered_at = -PAUSE_S

    def write(self, line: str) -> None:
        """Keep a line, and pass it on."""
        self._count += 1
        self._lines.append(line.rstrip("\n")[:LINE_CHARS])
        if self._stream is not None:
            self._stream.write(line)

    def flush(self) -> None:
        """Flush the stream behind."""
        if self._stream is not None:
            self._stream.flush()

    def answer(self, device: str, asked: LogRequest, now: float) -> LogLines | None:
        """Answer to a request for lines after ``asked.after``; None: too soon after the last answer."""
        if now - self._answered_at < PAUSE_S:
            return None
        self._answered_at = now
        if not self._shared:
            return LogLines(device, asked.request, refusal="this device keeps its log to itself (--no-logs)")
        known = asked.after if asked.after <= self._count else 0  # of an earlier start of this agent
        wanted = min(asked.lines, self._count - known, len(self._lines))
        found: list[str] = []
        room = MOST_LOG_BYTES
        for line in list(self._lines)[::-1][: max(0, wanted)]:
            room -= len(line.encode("utf-8", "replace"))
            if room < 0:
                break
            found.append(line.encode("utf-8", "replace").decode())
        return LogLines(device, asked.request, self._count, tuple(found[::-1]))
