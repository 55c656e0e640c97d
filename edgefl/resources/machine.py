"""What this machine is: memory, cores, GPU, free disk. No torch, no numpy: the supervisor asks this."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import psutil

from edgefl.records import Capabilities
from edgefl.resources.nvml import Nvml, NvmlError


def capabilities(
    disk: Path | None = None,
    *,
    trainer_base_bytes: int = 0,
    root: Path = Path("/"),
    nvml: Callable[[], Nvml] = Nvml,
) -> Capabilities:
    """The machine as it is now. ``disk``: the directory whose free space counts; ``root`` holds proc and sys.

    On a Jetson, ``gpu`` is the board and ``gpu_memory_bytes`` is 0: processor and GPU share one pool. Inside a
    container its memory limit counts, not the host's memory.
    """
    memory = psutil.virtual_memory()
    total, free = within_cgroup(memory.total, memory.available, root / "sys/fs/cgroup")
    gpu, gpu_memory = graphics(root, nvml)
    return Capabilities(
        memory_total_bytes=total,
        memory_free_bytes=free,
        cores=len(os.sched_getaffinity(0)),
        gpu=gpu,
        gpu_memory_bytes=gpu_memory,
        disk_free_bytes=shutil.disk_usage(disk or Path.cwd()).free,
        trainer_base_bytes=trainer_base_bytes,
        machine=platform.machine(),
        runtime=runtime(),
    )


def within_cgroup(total: int, free: int, cgroup: Path) -> tuple[int, int]:
    """Total and free memory after the limit of a version 2 control group, if it has one."""
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" when there is no limit
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return total, free
    return min(total, limit), max(0, min(free, limit - used))


def graphics(root: Path, nvml: Callable[[], Nvml]) -> tuple[str, int]:
    """Name of the GPU and its own memory in bytes; ("", 0) without one."""
    model = jetson_model(root)
    if model:
        return model, 0
    try:
        gpu = nvml()
        name, memory = gpu.name(), gpu.memory_bytes()
    except NvmlError:
        return "", 0
    gpu.close()
    return name, memory


def jetson_model(root: Path = Path("/")) -> str:
    """The board's name from the device tree when it is an NVIDIA Jetson, else ""."""
    try:
        model = (root / "proc/device-tree/model").read_text(errors="replace").strip("\0\n ")
    except OSError:
        return ""
    return model if "jetson" in model.lower() or "nvidia" in model.lower() else ""


def runtime() -> str:
    """The installed training runtime, such as "torch 2.13.0", without loading it; "" when there is none."""
    try:
        return f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        return ""
