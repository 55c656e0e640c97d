"""Memory of a process: its size by /proc, what its allocator keeps, and a hard ceiling on it.

glibc serves blocks below a threshold from heaps that can only shrink from their end, and raises that threshold to 32
MiB as larger blocks are freed. A training step then keeps a third more than it uses (measured: 535 MiB for 331 that are
alive, decision 0016). A trainer therefore fixes the threshold: every larger tensor is a mapping of its own, in huge
pages where the kernel allows it, so that mapping it again costs little. A program that moves chunks is the other way
round: its buffers are small beside what it may hold, and glibc maps and zeroes them again for every message (decision
0021: 16,000 page faults for 28 MB received). No torch and no numpy: supervisors import this.

The ceiling is a thread that watches the resident size, with what lies in swap, and kills the process when it is over.
It works without cgroups and without root, on every Linux, and leaves the supervisor with both numbers. A rise faster
than one sampling period is seen late, by at most what the process can touch in that time; so that this is not much, the
kernel is asked to refuse allocations far beyond the ceiling (RLIMIT_DATA), which the process can answer for itself.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import signal
import sys
import threading
from types import TracebackType

import psutil

from edgefl.records import Budget, Refusal

#: Larger blocks are mapped by themselves: what a heap keeps of them is not to be foreseen (decision 0102). Bytes.
MAPPED_BYTES = 2**18
#: The end of the heap that may stay there unused. Bytes.
TRIM_BYTES = 4 * 2**20
#: Both for an agent without torch, in each thread's heap: messages of up to 768 KiB, several in transit at once.
CHUNKS_MAPPED_BYTES = 2 * 2**20
CHUNKS_KEPT_BYTES = 8 * 2**20
#: The same for parts that are added up. The most that glibc does not map by itself.
PARTS_KEPT_BYTES = 32 * 2**20
#: malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: 20 ms: a core touches new memory at about 2 GB/s, so a breach is seen within about 40 MB; costs 0.2 % of one core.
PERIOD_S = 0.02
#: Allocations beyond the ceiling that are still granted: a thread's stack (8 MiB) and a heap's reserve are data that is
#: never touched.
SLACK_BYTES = 64 * 2**20 + 16 * 2**20 * (os.cpu_count() or 1)
#: Set in a process that gives freed memory back at once.
_FRUGAL = threading.Event()
_HELD = re.compile(rb"^Vm(?:RSS|Swap):\s*(\d+) kB", re.MULTILINE)


def status_bytes(field: str, pid: int | str = "self") -> int | None:
    """A memory field of /proc/<pid>/status, such as VmRSS or VmHWM, in bytes; None when there is none."""
    wanted = field.encode()
    for line in _read(pid, "status").splitlines():
        name, _, value = line.partition(b":")
        if name == wanted:
            return int(value.split()[0]) * 1024  # the kernel prints kB
    return None


def resident_bytes(pid: int | str = "self") -> int | None:
    """Resident size with swap; None when the process is gone.

    On a Jetson swap is memory, too (zram).
    """
    sizes = _HELD.findall(_read(pid, "status"))
    return sum(int(kilobytes) * 1024 for kilobytes in sizes) if sizes else None


def peak_bytes(pid: int | str = "self") -> int | None:
    """Largest resident size since the mark was reset, and swap now.

    The kernel has no mark of both together: where swap has changed since, it is neither the most held at one time nor a
    bound of it. None when the process is gone.
    """
    peak = status_bytes("VmHWM", pid)
    return None if peak is None else peak + (status_bytes("VmSwap", pid) or 0)


def started_at(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the pid it names one process for ever. None: gone."""
    after_name = _read(pid, "stat").rpartition(b")")[2].split()  # the name may hold blanks and brackets
    return int(after_name[19]) if len(after_name) > 19 else None


def _read(pid: int | str, file: str) -> bytes:
    """Empty when the process is gone. Without pathlib and codecs: a ceiling reads fifty times a second."""
    try:
        descriptor = os.open(f"/proc/{pid}/{file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def give_back_at_once() -> bool:
    """Have this process give freed memory back; before torch is imported.

    Whether the C library can do it (glibc can, musl not).
    """
    _FRUGAL.set()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for huge pages of what it maps
    return _set_allocator(MAPPED_BYTES, TRIM_BYTES)


def without_caches() -> dict[str, str]:
    """Environment of a process whose allocator joins freed blocks with their neighbours at once.

    torch asks for aligned blocks, whose cut edges glibc puts into caches of small blocks instead: a freed tensor is
    then too small by an edge for the next one of its size, and a step touches up to twice what is alive (decision
    0100). Other C libraries do not read this.
    """
    before = os.environ.get("GLIBC_TUNABLES")
    return {"GLIBC_TUNABLES": ":".join(filter(None, (before, "glibc.malloc.tcache_count=0", "glibc.malloc.mxfast=0")))}


def keep_for_chunks() -> bool:
    """Keep up to CHUNKS_KEPT_BYTES of freed memory for a supervisor's next chunks. Whether the C library can do it."""
    return _set_allocator(CHUNKS_MAPPED_BYTES, CHUNKS_KEPT_BYTES)


def keep_for_parts() -> bool:
    """Keep up to PARTS_KEPT_BYTES of freed memory for a coordinator's next parts. Whether the C library can do it."""
    return _set_allocator(PARTS_KEPT_BYTES, PARTS_KEPT_BYTES)


def _set_allocator(mapped_bytes: int, trim_bytes: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, mapped_bytes), mallopt(_M_TRIM_THRESHOLD, trim_bytes)])


def settle() -> None:
    """Give memory that is no longer used back to the kernel, as far as the C library can."""
    gc.collect()
    _trim_heap()


def trim() -> None:
    """Give pages of the heap's holes back to the kernel, so that what comes next does not come on top of them.

    For between the parts of a trainer's round; in a step it would have pages touched again. Only after
    ``give_back_at_once``: a process that has no budget touches them again in every round.
    """
    if _FRUGAL.is_set():
        _trim_heap()


def _trim_heap() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # a C library without malloc_trim (musl) gives memory back by itself
        return


def current_rss_bytes() -> int:
    """Resident size of this process now, with what lies in swap."""
    resident = resident_bytes()
    return int(psutil.Process().memory_info().rss) if resident is None else resident


def idle_rss_bytes() -> int:
    """Resident size of this process when nothing is going on: after giving unused memory back."""
    settle()
    return current_rss_bytes()


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
    """Watches ``pid`` from entering this context to ``stop``, or to leaving it.

    Over ``limit_bytes`` resident, the process gets SIGKILL. ``refuse``: also let the kernel refuse large allocations;
    not for a process that computes on a GPU, whose driver reserves address space without using it. The thread ends by
    itself when the process is gone. Whoever notices the death first calls ``stop`` and then reads ``refusal``, which is
    settled from then on.
    """

    def __init__(self, pid: int, limit_bytes: int, *, refuse: bool = True) -> None:
        self.pid = pid
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0  # largest resident size seen
        self.breached = False
        self._refuse = refuse
        self._limits: tuple[int, int] | None = None  # what RLIMIT_DATA was
        self._refuses = False
        self._born = started_at(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"ceiling-{pid}", daemon=True)

    def __enter__(self) -> Ceiling:
        if self._refuse:
            self._refuse_beyond()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop watching; returns when the thread has ended."""
        self._stop.set()
        if self._limits is not None:
            self._set_limits(self._limits)
            self._limits = None
        if self._thread.is_alive():
            self._thread.join()

    @property
    def refused_by_kernel(self) -> bool:
        """Whether the kernel was asked to refuse large allocations, and does."""
        return self._refuses

    @property
    def refusal(self) -> Refusal | None:
        """Why the process was killed, with both numbers; None while it was not."""
        if not self.breached:
            return None
        detail = "the trainer was killed when its resident size passed the ceiling; it would have needed more"
        return Refusal("ceiling", float(self.peak_bytes), float(self.limit_bytes), "B", detail)

    def _refuse_beyond(self) -> None:
        """Data may grow by what is left below the ceiling, and the slack. If that can't be set, the watch remains."""
        data, resident = status_bytes("VmData", self.pid), resident_bytes(self.pid)
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
            self._limits, self._refuses = before, True

    def _set_limits(self, limits: tuple[int, int]) -> bool:
        if not self._is_itself():
            return False
        try:
            resource.prlimit(self.pid, resource.RLIMIT_DATA, limits)
        except (OSError, ValueError, OverflowError):  # it has ended, or is not ours to limit
            return False
        return True

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_S):
            resident = resident_bytes(self.pid)
            if not resident:  # gone, or a zombie, which holds no memory
                return
            self.peak_bytes = max(self.peak_bytes, resident)
            if resident > self.limit_bytes:
                self._kill()
                return

    def _kill(self) -> None:
        if not self._is_itself():
            return
        self.breached = True
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.breached = False  # it ended by itself just now

    def _is_itself(self) -> bool:
        """False once the pid belongs to another process."""
        return self._born is not None and started_at(self.pid) == self._born
