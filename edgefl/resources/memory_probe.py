"""Peak memory of a piece of work inside this process, from the kernel's own high-water mark."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

from edgefl.records import Figure, Figures, Kind
from edgefl.resources.process_memory import current_rss_bytes, peak_bytes, settle, status_bytes

#: Fallback sampling. 5 ms costs about 1 % of a core; a peak shorter than that can be missed, which ``source`` admits.
SAMPLE_PERIOD_S = 0.005
#: Set in the environment, the mark is left alone and sizes are sampled: for those who read it from outside afterwards.
KEEP_MARK = "EDGEFL_KEEP_HIGH_WATER_MARK"
_CLEAR_REFS = Path("/proc/self/clear_refs")


class MemoryProbe:
    """Peak memory of the work inside this context; ``figures()`` afterwards. One at a time per process.

    The kernel's own high-water mark (VmHWM) is reset on entering, after unused memory was given back, else what earlier
    work left would hide what this takes. Where the mark cannot be reset, a thread samples the resident size, and
    ``source`` says so. What lies in swap counts, since on a Jetson it is memory as well (zram); the mark does not hold
    it, so peaks are doubtful where pages went to swap or came back meanwhile. Python's tracemalloc sees nothing of
    torch. The step's peak is what comes on top of the size on entering. With ``device`` "cuda…", the
    tensors on the GPU count: on a card with its own memory the step peak is the card's, on a machine whose processor
    and GPU share one pool (Jetson) the two peaks are added: never less than what both took at one time.
    """

    def __init__(self, device: str = "cpu", *, clear_refs: Path = _CLEAR_REFS) -> None:
        self._clear_refs = clear_refs
        self._base = self._peak = 0
        self._swap = self._swap_before = 0
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None
        self._gpu = _GpuPeaks(device) if device.startswith("cuda") else None

    def __enter__(self) -> MemoryProbe:
        settle()
        try:
            if KEEP_MARK in os.environ:
                raise PermissionError(f"{KEEP_MARK} is set")
            self._clear_refs.write_text("5")
        except OSError:
            self._sampler = threading.Thread(target=self._sample, name="memory-sampler", daemon=True)
        self._swap_before = status_bytes("VmSwap") or 0
        self._base = self._peak = current_rss_bytes()
        if self._gpu is not None:
            self._gpu.start()
        if self._sampler is not None:
            self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sampler is not None:
            self._stop.set()
            self._sampler.join()
        else:
            self._peak = max(self._peak, peak_bytes() or 0)
            self._swap = status_bytes("VmSwap") or 0
        if self._gpu is not None:
            self._gpu.stop()

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, current_rss_bytes())
            if self._stop.wait(SAMPLE_PERIOD_S):
                return

    def figures(self) -> Figures:
        """``process_peak_bytes`` (the whole process), ``step_peak_bytes``, and those of a GPU alone, in bytes.

        The CUDA context and workspaces lie outside of what torch counts.
        """
        kind: Kind = "measured"
        source = "VmHWM after clear_refs" + (" + VmSwap" if self._swap else "")
        if self._sampler:
            source = "VmRSS + VmSwap sampled every 5 ms (the mark cannot be reset)"
        elif self._swap != self._swap_before:
            source, kind = f"{source}: swap changed meanwhile, and is not that of the peak's moment", "doubtful"
        gpu, process, step = self._gpu, self._peak, self._peak - self._base
        figures = {"process_peak_bytes": Figure(float(process), kind, source)}
        if gpu is None:
            return figures | {"step_peak_bytes": Figure(float(step), kind, source)}
        if gpu.shared_pool:
            both = f"{source} + {gpu.source}: one pool, peaks added"
            figures["process_peak_bytes"] = Figure(float(process + gpu.reserved), kind, both)
            figures["step_peak_bytes"] = Figure(float(step + gpu.step), kind, both)
        else:
            figures["step_peak_bytes"] = Figure(float(gpu.step), source=gpu.source)
        return figures | {
            "cuda_allocated_peak_bytes": Figure(float(gpu.allocated), source=gpu.source),
            "cuda_reserved_peak_bytes": Figure(float(gpu.reserved), source="torch.cuda.max_memory_reserved"),
        }


class NotMeasured:
    """In place of a probe where the process holds more than this work, so that its size is not the work's."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __enter__(self) -> NotMeasured:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def figures(self) -> Figures:
        """Both peaks without a value, and the reason."""
        return dict.fromkeys(("process_peak_bytes", "step_peak_bytes"), self.figure())

    def figure(self) -> Figure:
        """A figure without a value, and the reason."""
        return Figure(reason=self._reason)


def shares_pool(properties: object) -> bool:
    """Whether a GPU is integrated: one memory pool with the processor.

    ``properties``: torch's properties of the device.
    """
    return bool(getattr(properties, "is_integrated", False))


class _GpuPeaks:
    """torch's own accounting of one GPU. The only place here that imports torch."""

    source = "torch.cuda.max_memory_allocated"

    def __init__(self, device: str) -> None:
        import torch

        self._cuda, self._device = torch.cuda, torch.device(device)
        self.shared_pool = shares_pool(self._cuda.get_device_properties(self._device))
        self.allocated = self.reserved = self.step = self._base = 0

    def start(self) -> None:
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(self._device)
        self._base = self._cuda.memory_allocated(self._device)

    def stop(self) -> None:
        self._cuda.synchronize(self._device)
        self.allocated = self._cuda.max_memory_allocated(self._device)
        self.reserved = self._cuda.max_memory_reserved(self._device)
        self.step = max(0, self.allocated - self._base)
