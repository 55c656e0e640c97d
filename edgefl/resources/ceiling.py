"""A hard ceiling on a process's memory: a thread that watches its resident size and kills it when it is over.

It works without cgroups and without root, on every Linux, and leaves the supervisor with both numbers. A rise faster
than one sampling period is seen late, by at most what the process can touch in that time; so that this is not much, the
kernel is asked to refuse allocations far beyond the ceiling (RLIMIT_DATA), which the process can answer for itself.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from edgefl.records import Budget, Refusal
from edgefl.resources.procfs import resident_bytes, started_at, status_bytes

#: 20 ms: a core touches new memory at about 2 GB/s, so a breach is seen within about 40 MB; costs 0.1 % of one core.
PERIOD_S = 0.02
#: Allocations beyond the ceiling that are still granted: a thread's stack (8 MiB) and a heap's reserve are data that is
#: never touched.
SLACK_BYTES = 64 * 2**20 + 16 * 2**20 * (os.cpu_count() or 1)


def ceiling_bytes(budget: Budget, base_bytes: int, *, card: bool = False) -> int | None:
    """Largest size the trainer may have, in bytes; None: no limit. A step limit counts from the idle trainer's size.

    Where processor and GPU share one pool, that is with what it holds on the GPU. ``card``: the step is in a GPU's own
    memory, where torch's allocator holds it to its limit.
    """
    limits = [] if budget.memory_bytes is None else [budget.memory_bytes]
    if budget.step_memory_bytes is not None and base_bytes and not card:
        limits.append(base_bytes + budget.step_memory_bytes)
    return min(limits, default=None)


class Ceiling:
    """Watches ``pid`` from ``start`` to ``stop`` (or as a context manager).

    Over ``limit_bytes`` resident, the process gets SIGKILL and ``on_breach`` is called once, in the watching thread:
    hand it over with ``loop.call_soon_threadsafe``. ``refuse``: also let the kernel refuse large allocations; not for a
    process that computes on a GPU, whose driver reserves address space without using it. The thread ends by itself when
    the process is gone. Whoever notices the death first calls ``stop`` and then reads ``refusal``, which is settled
    from then on.
    """

    def __init__(
        self,
        pid: int,
        limit_bytes: int,
        on_breach: Callable[[Ceiling], None] | None = None,
        *,
        refuse: bool = True,
        period_s: float = PERIOD_S,
        proc: Path = Path("/proc"),
    ) -> None:
        self.pid = pid
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0  # largest resident size seen
        self.breached = False
        self._on_breach = on_breach
        self._refuse = refuse
        self._limits: tuple[int, int] | None = None  # what RLIMIT_DATA was
        self._period_s = period_s
        self._proc = proc
        self._born = started_at(pid, proc)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"ceiling-{pid}", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        if self._refuse:
            self._refuse_beyond()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; returns when the thread has ended (at once when called from ``on_breach``)."""
        self._stop.set()
        if self._limits is not None:
            self._set_limits(self._limits)
            self._limits = None
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

    def _refuse_beyond(self) -> None:
        """Data may grow by what is left below the ceiling, and the slack. If that can't be set, the watch remains."""
        data, resident = status_bytes("VmData", self.pid, self._proc), resident_bytes(self.pid, self._proc)
        if data is None or resident is None:
            return
        try:
            before = resource.prlimit(self.pid, resource.RLIMIT_DATA)
        except (OSError, ValueError):
            return
        hard = before[1]
        soft = data + max(0, self.limit_bytes - resident) + SLACK_BYTES
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        if self._set_limits((soft, hard)):
            self._limits = before

    def _set_limits(self, limits: tuple[int, int]) -> bool:
        if self._born is None or started_at(self.pid, self._proc) != self._born:
            return False  # the pid belongs to another process by now
        try:
            resource.prlimit(self.pid, resource.RLIMIT_DATA, limits)
        except (OSError, ValueError, OverflowError):  # it has ended, or is not ours to limit
            return False
        return True

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
