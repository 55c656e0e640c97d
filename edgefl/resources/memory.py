"""Peak memory of a piece of work inside this process, from the kernel's own high-water mark.

Collect garbage and give freed memory back (malloc_trim), else memory kept from earlier hides what the work takes; reset
the mark (write 5 to /proc/self/clear_refs); read VmRSS; work; read VmHWM. Where the mark cannot be reset, a thread
samples the resident size, and ``source`` says so. Python's tracemalloc sees nothing of torch.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from edgefl.records import Figure, Figures
from edgefl.resources.procfs import resident_bytes, status_bytes

#: Fallback sampling. 5 ms costs about 1 % of a core; a peak shorter than that can be missed, which ``source`` admits.
SAMPLE_PERIOD_S = 0.005

_CLEAR_REFS = Path("/proc/self/clear_refs")
#: Set in the environment, the mark is left alone and sizes are sampled: for those who read it from outside afterwards.
KEEP_MARK = "EDGEFL_KEEP_HIGH_WATER_MARK"


def settle() -> None:
    """Give memory that is no longer used back to the kernel, as far as the C library can."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # a C library without malloc_trim (musl) gives memory back by itself
        return


def current_rss_bytes() -> int:
    """Resident size of this process now."""
    resident = resident_bytes()
    return int(psutil.Process().memory_info().rss) if resident is None else resident


def idle_rss_bytes() -> int:
    """Resident size of this process when nothing is going on: after giving unused memory back."""
    settle()
    return current_rss_bytes()


def high_water_bytes(pid: int | None = None) -> int | None:
    """Highest resident size since the process started or its mark was reset; None when it is gone or not on Linux."""
    return status_bytes("VmHWM", "self" if pid is None else pid)


class MemoryProbe:
    """Context manager around a piece of work; ``figures()`` afterwards. One at a time per process.

    ``base_bytes``: what the step's peak is measured above; default: the resident size on entering. With ``device``
    "cuda…", the tensors on the GPU count: on a card with its own memory the step peak is the card's, on a machine whose
    processor and GPU share one pool (Jetson) the two peaks are added: never less than what both took at one time.
    """

    def __init__(self, device: str = "cpu", *, base_bytes: int | None = None, clear_refs: Path = _CLEAR_REFS) -> None:
        self._base = base_bytes
        self._clear_refs = clear_refs
        self._sampler: _Sampler | None = None
        self._peak = 0
        self._cuda = _Cuda(device) if device.startswith("cuda") else None

    def __enter__(self) -> MemoryProbe:
        settle()
        try:
            if KEEP_MARK in os.environ:
                raise PermissionError(f"{KEEP_MARK} is set")
            self._clear_refs.write_text("5")
        except OSError:
            self._sampler = _Sampler()
        resident = current_rss_bytes() if self._sampler else status_bytes("VmRSS") or current_rss_bytes()
        self._base = resident if self._base is None else self._base
        self._peak = resident
        if self._cuda is not None:
            self._cuda.start()
        if self._sampler is not None:
            self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seen = self._sampler.stop() if self._sampler is not None else high_water_bytes()
        self._peak = max(self._peak, seen or 0)
        if self._cuda is not None:
            self._cuda.stop()

    def figures(self) -> Figures:
        """``process_peak_bytes`` (the whole process) and ``step_peak_bytes`` (above the base), in bytes."""
        source = "VmRSS sampled every 5 ms (the mark can not be reset)" if self._sampler else "VmHWM after clear_refs"
        step = max(0, self._peak - (self._base or 0))
        process = Figure(value=float(self._peak), source=source)
        if self._cuda is None:
            return {"process_peak_bytes": process, "step_peak_bytes": Figure(value=float(step), source=source)}
        if self._cuda.shared_pool:
            both = f"{source} + {self._cuda.source}: one pool, peaks added"
            return {
                "process_peak_bytes": Figure(value=float(self._peak + self._cuda.reserved_peak), source=both),
                "step_peak_bytes": Figure(value=float(step + self._cuda.step_peak), source=both),
            }
        gpu = Figure(value=float(self._cuda.step_peak), source=self._cuda.source)
        return {"process_peak_bytes": process, "step_peak_bytes": gpu}

    def cuda_figures(self) -> Figures:
        """Peaks of the GPU alone, tensors and allocator; empty without one. Context and workspaces lie outside both."""
        if self._cuda is None:
            return {}
        return {
            "cuda_allocated_peak_bytes": Figure(value=float(self._cuda.allocated_peak), source=self._cuda.source),
            "cuda_reserved_peak_bytes": Figure(
                value=float(self._cuda.reserved_peak), source="torch.cuda.max_memory_reserved"
            ),
        }


class _Sampler:
    """Largest resident size seen by a thread."""

    def __init__(self) -> None:
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self._peak

    def _run(self) -> None:
        while True:
            self._peak = max(self._peak, current_rss_bytes())
            if self._stop.wait(SAMPLE_PERIOD_S):
                return


def shares_pool(properties: Any) -> bool:
    """Whether a GPU, by torch's properties of it, has no memory of its own: processor and GPU share one pool."""
    return bool(getattr(properties, "is_integrated", False))


class _Cuda:
    """torch's own accounting of one GPU. The only place here that imports torch."""

    source = "torch.cuda.max_memory_allocated"

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        properties = torch.cuda.get_device_properties(self._device)
        self.shared_pool = shares_pool(properties)
        self.allocated_peak = 0
        self.reserved_peak = 0
        self.step_peak = 0
        self._base = 0

    def start(self) -> None:
        cuda = self._torch.cuda
        cuda.synchronize(self._device)
        cuda.empty_cache()
        cuda.reset_peak_memory_stats(self._device)
        self._base = cuda.memory_allocated(self._device)

    def stop(self) -> None:
        cuda = self._torch.cuda
        cuda.synchronize(self._device)
        self.allocated_peak = cuda.max_memory_allocated(self._device)
        self.reserved_peak = cuda.max_memory_reserved(self._device)
        self.step_peak = max(0, self.allocated_peak - self._base)
