"""The memory of the GPU that a trainer computes on: what there is, a ceiling on it, and the refusal when it runs out.

A card has memory of its own, and the allocator's limit is the GPU's budget; a refusal names which of the two memories
was short, since the plan answers them differently. Where processor and GPU share one pool (Jetson) there is one budget
for both: what the process holds is not the allocator's, measured again after every step. Beyond its limit torch raises
OutOfMemoryError, which the trainer survives. Outside of any limit is the CUDA context: of a card it is not counted as
free, of a shared pool its size is unknown. Importing this loads no torch; ``cuda`` is ``torch.cuda``, or a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import psutil

from edgefl.records import GPU, GPU_MEMORY, HOST, Budget, Refusal
from edgefl.resources.memory_probe import shares_pool
from edgefl.resources.process_memory import ceiling_bytes, current_rss_bytes, peak_bytes, settle

#: What torch takes at once for tensors of 1 to 10 MiB (kLargeBuffer in c10/cuda/CUDACachingAllocator): a step that fits
#: may hold at least as much more than its tensors. How much in truth is to be measured on a card (decision 0018).
SEGMENT_BYTES = 20 * 2**20
#: Words of errors of failed allocations: on a GPU (by its allocator, by CUDA's libraries), by its own CPU
#: allocator, inside other libraries; the last is oneDNN's, of the room for a product, which the step before had.
_MEMORY_WORDS = (
    "out of memory",
    "_ALLOC_FAILED",
    "DefaultCPUAllocator",
    "bad_alloc",
    "Cannot allocate memory",
    "could not create a primitive",
)
#: And where it is a GPU's and has no type of its own: "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED".
_GPU_WORDS = ("CUDA", "CUBLAS", "CUDNN")


class GpuMemoryError(MemoryError):
    """Tensors hold more of a GPU than its budget leaves them."""


class Gpu(NamedTuple):
    """A GPU as its driver tells it.

    ``free_bytes``: what this process' allocator could hold, without the CUDA context and what others use.
    """

    name: str
    total_bytes: int
    free_bytes: int
    shared: bool  # one pool with the processor


def gpu_of(cuda: ModuleType, device: str) -> Gpu:
    """The GPU now; makes this process' CUDA context if there is none yet."""
    index = _index_of(cuda, device)
    properties = cuda.get_device_properties(index)
    free, total = cuda.mem_get_info(index)
    shared = shares_pool(properties)
    if shared:  # the driver tells the kernel's MemFree, which leaves out the page cache that the kernel gives back
        free = max(free, available_bytes())
    return Gpu(properties.name, total, min(total, free + cuda.memory_reserved(index)), shared)


def available_bytes() -> int:
    """MemAvailable: what processes of this machine could take. Not a control group's: it does not count a GPU's."""
    return int(psutil.virtual_memory().available)


def _index_of(cuda: ModuleType, device: str) -> int:
    """Number of the GPU that "cuda" or "cuda:1" means: not every function of ``torch.cuda`` takes the former."""
    return int(device.partition(":")[2] or cuda.current_device())


def allocator_bytes(budget: Budget, *, shared: bool, base_bytes: int, host_bytes: int, idle_bytes: int) -> int | None:
    """Most bytes that the allocator may hold; None: no limit. Below 0 where the process alone is over its budget.

    ``base_bytes``: the idle trainer (of a shared pool with what its allocator held), ``host_bytes``: the process now,
    ``idle_bytes``: what the allocator held before the round.
    """
    limits = [] if budget.gpu_memory_bytes is None else [budget.gpu_memory_bytes]
    if shared:
        whole = ceiling_bytes(budget, base_bytes)
        limits += [] if whole is None else [whole - host_bytes]
    elif budget.step_memory_bytes is not None:
        limits.append(idle_bytes + budget.step_memory_bytes + SEGMENT_BYTES)
    return min(limits, default=None)


class CudaCeiling:
    """Holds the allocator of this process below the device's budget, once ``hold`` is called.

    Made when a round begins, one at a time. ``base_bytes``: the idle trainer; ``resident``: size of the process now.
    """

    def __init__(
        self,
        cuda: ModuleType,
        device: str,
        budget: Budget,
        base_bytes: int,
        resident: Callable[[], int] = current_rss_bytes,
    ) -> None:
        self._cuda = cuda
        self._index = _index_of(cuda, device)
        self._budget = budget
        self._base = base_bytes
        self._resident = resident
        cuda.empty_cache()
        cuda.reset_peak_memory_stats(self._index)  # else a refusal would tell the round before's
        self._idle = self._held()
        self.gpu = gpu_of(cuda, device)
        self.limit_bytes: int | None = None

    def hold(self) -> None:
        """Set the limit; after a step again, for on a shared pool it depends on what the process has taken by then.

        Blocks that no tensor uses go back before they break it. Raises GpuMemoryError when that is not enough.
        """
        if self.limit_bytes is not None and not self.gpu.shared:
            return  # a card's does not change
        self.limit_bytes = limit = self._limit(self._resident())
        if limit is None:
            return
        if self._held() > limit:
            self._cuda.empty_cache()
        if self._held() > limit:
            raise GpuMemoryError(f"tensors on the GPU hold {self._held()} B, of {limit} that the budget leaves them")
        self._cuda.set_per_process_memory_fraction(min(1.0, limit / self.gpu.total_bytes), self._index)

    def refusal(self, detail: str) -> Refusal:
        """Why the round did not fit, as the refusal of a breached budget; where it broke, before memory is given back.

        What was refused was never held: ``needed`` is None unless more was.
        """
        host = self._resident() if self.gpu.shared else 0
        limit, free = self._limit(host), gpu_of(self._cuda, f"cuda:{self._index}").free_bytes
        peak = host + int(self._cuda.max_memory_reserved(self._index))
        allowed = host + (free if limit is None else min(limit, free))
        words, where = ("one pool of processor and GPU", "") if self.gpu.shared else (GPU_MEMORY, GPU)
        needed = float(peak) if peak > allowed else None
        return Refusal("memory", needed, float(allowed), "B", f"{words}: {detail}", where)

    def _limit(self, host_bytes: int) -> int | None:
        shared, base, idle = self.gpu.shared, self._base, self._idle
        return allocator_bytes(self._budget, shared=shared, base_bytes=base, host_bytes=host_bytes, idle_bytes=idle)

    def _held(self) -> int:
        return int(self._cuda.memory_reserved(self._index))


def gpu_ceiling(device: str, budget: Budget, base_bytes: int) -> CudaCeiling | None:
    """Holds torch's allocator on the GPU to the budget; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return CudaCeiling(torch.cuda, device, budget, base_bytes)


def give_back(device: str) -> None:
    """Give memory that is free in this process back: to the kernel, and of a GPU to its driver."""
    settle()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """torch raises OutOfMemoryError on a GPU and a plain RuntimeError from its CPU allocator."""
    text = str(error)
    return isinstance(error, MemoryError) or _by_type(error) or any(words in text for words in _MEMORY_WORDS)


def memory_refusal(error: BaseException, ceiling: CudaCeiling | None, *, card: bool) -> Refusal:
    """Refusal for memory that ran out: the process', a card's own or, of a pool, both together.

    ``ceiling``: the round's, None if it could not be made; ``card``: whether the trainer found a GPU's own memory.
    """
    text = str(error)
    detail = f"out of memory: {(text.splitlines() or [''])[0][:300]}"
    # Words decide where torch and CUDA's libraries raise a plain RuntimeError.
    plain = not isinstance(error, MemoryError) and any(word in text for word in _GPU_WORDS)
    of_gpu = plain or _by_type(error)
    if ceiling is not None and (ceiling.gpu.shared or of_gpu):
        return ceiling.refusal(detail)
    if card and of_gpu:
        return Refusal("memory", None, None, "B", f"{GPU_MEMORY}: {detail}", GPU)
    return Refusal("memory", float(peak_bytes() or 0), None, "B", detail, HOST if card else "")


def _by_type(error: BaseException) -> bool:
    import torch

    return isinstance(error, (GpuMemoryError, torch.OutOfMemoryError))
