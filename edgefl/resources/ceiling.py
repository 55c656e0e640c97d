"""A hard ceiling on a process's memory: a thread that watches its resident size and kills it when it is over.

It works without cgroups and without root, on every Linux, and leaves the supervisor with both numbers. A rise faster
than one sampling period is seen late, by at most what the process can touch in that time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from edgefl.records import Refusal
from edgefl.resources.procfs import resident_bytes, started_at

#: 20 ms: a core touches new memory at about 2 GB/s, so a breach is seen within about 40 MB; costs 0.1 % of one core.
PERIOD_S = 0.02


class Ceiling:
    """Watches ``pid`` from ``start`` to ``stop`` (or as a context manager).

    Over ``limit_bytes`` resident, the process gets SIGKILL and ``on_breach`` is called once, in the watching thread:
    hand it over with ``loop.call_soon_threadsafe``. The thread ends by itself when the process is gone. Whoever notices
    the death first calls ``stop`` and then reads ``refusal``, which is settled from then on.
    """

    def __init__(
        self,
        pid: int,
        limit_bytes: int,
        on_breach: Callable[[Ceiling], None] | None = None,
        *,
        period_s: float = PERIOD_S,
        proc: Path = Path("/proc"),
    ) -> None:
        self.pid = pid
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0  # largest resident size seen
        self.breached = False
        self._on_breach = on_breach
        self._period_s = period_s
        self._proc = proc
        self._born = started_at(pid, proc)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"ceiling-{pid}", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; returns when the thread has ended (at once when called from ``on_breach``)."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Ceiling:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def refusal(self) -> Refusal | None:
        """Why the process was killed, with both numbers; None while it was not."""
        if not self.breached:
            return None
        return Refusal(
            reason="ceiling",
            needed=float(self.peak_bytes),
            allowed=float(self.limit_bytes),
            unit="B",
            detail="the trainer was killed when its resident size passed the ceiling; it would have needed more",
        )

    def _watch(self) -> None:
        while not self._stop.wait(self._period_s):
            resident = resident_bytes(self.pid, self._proc)
            if not resident:  # gone, or a zombie, which holds no memory
                return
            self.peak_bytes = max(self.peak_bytes, resident)
            if resident > self.limit_bytes:
                self._kill()
                return

    def _kill(self) -> None:
        if self._born is None or started_at(self.pid, self._proc) != self._born:
            return  # the pid belongs to another process by now
        self.breached = True
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.breached = False  # it ended by itself just now
            return
        if self._on_breach is not None:
            self._on_breach(self)
