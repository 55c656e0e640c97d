"""The memory of the GPU that a trainer computes on: what there is, and a ceiling on what torch's allocator takes of it.

A card has memory of its own, and the allocator's limit is the GPU's budget. Where processor and GPU share one pool
(Jetson) there is one budget for both: what the process holds is not the allocator's, measured again after every step.
Beyond its limit torch raises OutOfMemoryError, which the trainer survives. Outside of any limit is the CUDA context: of
a card it is not counted as free, of a shared pool its size is unknown.

``cuda`` is ``torch.cuda``, or a stand-in for tests: nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from edgefl.records import GPU, GPU_MEMORY, Budget, Refusal
from edgefl.resources.ceiling import ceiling_bytes
from edgefl.resources.memory import current_rss_bytes, shares_pool

#: What torch takes at once for tensors of 1 to 10 MiB (kLargeBuffer in c10/cuda/CUDACachingAllocator): a step that fits
#: may hold at least as much more than its tensors. How much in truth is to be measured on a card (decision 0018).
SEGMENT_BYTES = 20 * 2**20


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


def gpu_of(cuda: Any, device: str) -> Gpu:
    """The GPU now; makes this process' CUDA context if there is none yet."""
    index = index_of(cuda, device)
    properties = cuda.get_device_properties(index)
    free, total = cuda.mem_get_info(index)
    return Gpu(properties.name, total, free + cuda.memory_reserved(index), shares_pool(properties))


def index_of(cuda: Any, device: str) -> int:
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
        cuda: Any,
        device: str,
        budget: Budget,
        base_bytes: int,
        resident: Callable[[], int] = current_rss_bytes,
    ) -> None:
        self._cuda = cuda
        self._index = index_of(cuda, device)
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
