"""The trainer's memory: the ceiling of a round on a GPU, memory given back, and the refusal when it runs out.

Where a card has memory of its own, a refusal names which of the two was short: the plan answers them differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.records import GPU, GPU_MEMORY, HOST, Budget, Refusal

if TYPE_CHECKING:
    from edgefl.resources.cuda import CudaCeiling

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


def gpu_ceiling(device: str, budget: Budget, base_bytes: int) -> CudaCeiling | None:
    """Holds torch's allocator on the GPU to the budget; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    from edgefl.resources.cuda import CudaCeiling

    return CudaCeiling(torch.cuda, device, budget, base_bytes)


def give_back(device: str) -> None:
    """Give memory that is free in this process back: to the kernel, and of a GPU to its driver."""
    from edgefl.resources.memory import settle

    settle()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """torch raises OutOfMemoryError on a GPU and a plain RuntimeError from its CPU allocator."""
    text = str(error)
    return isinstance(error, MemoryError) or _by_type(error) or any(words in text for words in _MEMORY_WORDS)


def memory_refusal(error: BaseException, ceiling: CudaCeiling | None, *, card: bool) -> Refusal:
    """Of the memory that ran out: the process', a card's own or, of a pool, both together.

    ``ceiling``: the round's, None if it could not be made; ``card``: whether the trainer found a GPU's own memory.
    """
    from edgefl.resources.memory import high_water_bytes

    text = str(error)
    detail = f"out of memory: {(text.splitlines() or [''])[0][:300]}"
    if ceiling is not None and (ceiling.gpu.shared or _of_gpu(error)):
        return ceiling.refusal(detail)
    if card and _of_gpu(error):
        return Refusal("memory", None, None, "B", f"{GPU_MEMORY}: {detail}", GPU)
    return Refusal("memory", float(high_water_bytes() or 0), None, "B", detail, HOST if card else "")


def _of_gpu(error: BaseException) -> bool:
    """By its type; words decide where torch and CUDA's libraries raise a plain RuntimeError."""
    plain = not isinstance(error, MemoryError) and any(word in str(error) for word in _GPU_WORDS)
    return _by_type(error) or plain


def _by_type(error: BaseException) -> bool:
    import torch

    from edgefl.resources.cuda import GpuMemoryError

    return isinstance(error, (GpuMemoryError, torch.OutOfMemoryError))
