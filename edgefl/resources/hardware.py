"""Capabilities of this machine: memory, cores, GPU, free disk. No torch, no numpy: the supervisor asks this."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path

from edgefl.records import Capabilities
from edgefl.resources import control_group

_SUCCESS = 0
_NAME_BYTES = 96
#: NVIDIA's own names have up to ten letters, such as MAXN_SUPER.
_MODE_LETTERS = 24


class NvmlError(Exception):
    """NVML is absent, or refused a call. Never shown to a user: becomes the reason of a null figure."""


class Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """One GPU, by the few calls of NVIDIA's management library that EdgeFL needs, through ctypes.

    The library is present wherever the desktop or data-centre driver is; on Jetson it lacks memory and energy and is
    not used. Raises NvmlError when there is no driver or no such GPU. ``library``: a stand-in for tests.
    """

    def __init__(self, index: int = 0, library: ctypes.CDLL | None = None) -> None:
        if library is None:
            try:
                library = ctypes.CDLL("libnvidia-ml.so.1")
            except OSError as error:
                raise NvmlError("libnvidia-ml.so.1 is not installed") from error
        self._library = library
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._handle))

    def name(self) -> str:
        """Product name, such as "NVIDIA A2"."""
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("nvmlDeviceGetName", self._handle, text, ctypes.c_uint(_NAME_BYTES))
        return text.value.decode("utf-8", errors="replace")

    def memory_bytes(self) -> int:
        """Memory of the card, total."""
        memory = Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(memory))
        return int(memory.total)

    def energy_j(self) -> float:
        """Energy since the driver was loaded (Volta and later)."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def power_w(self) -> float:
        """Power draw of the board now."""
        milliwatts = ctypes.c_uint()
        self._call("nvmlDeviceGetPowerUsage", self._handle, ctypes.byref(milliwatts))
        return milliwatts.value / 1e3

    def close(self) -> None:
        """Release the library."""
        self._library.nvmlShutdown()

    def _call(self, function: str, *arguments: object) -> None:
        try:
            status = getattr(self._library, function)(*arguments)
        except AttributeError as error:  # an older driver lacks the symbol
            raise NvmlError(f"the driver has no {function}") from error
        if status != _SUCCESS:
            raise NvmlError(f"{function} failed with NVML status {status}")


def capabilities(disk: Path | None = None) -> Capabilities:
    """The machine as it is now. ``disk``: the directory whose free space counts.

    On a Jetson, ``gpu`` is the board and ``gpu_memory_bytes`` is 0: processor and GPU share one pool. The memory is
    what control groups leave of the machine's.
    """
    memory = control_group.memory()
    gpu, gpu_memory = graphics()
    return Capabilities(
        memory_total_bytes=memory.total_bytes,
        memory_free_bytes=memory.free_bytes,
        cores=len(os.sched_getaffinity(0)),
        gpu=gpu,
        gpu_memory_bytes=gpu_memory,
        disk_free_bytes=shutil.disk_usage(disk or Path.cwd()).free,
        machine=platform.machine(),
        runtime=_torch(),
        power_mode=power_mode(),
    )


@cache
def _torch() -> str:
    try:
        return f"torch {metadata.version('torch')}"  # without loading it
    except metadata.PackageNotFoundError:
        return ""


def power_mode(root: Path = Path("/")) -> str:
    """Name of a Jetson's power mode, else its number; "" where none is set or it cannot be read.

    By the files of NVIDIA's nvpmodel: the program itself asks for root, and writes.
    """
    try:
        status = (root / "var/lib/nvpmodel/status").read_text(errors="replace")
    except OSError:
        return ""
    if (mode := re.search(r"pmode:\s*(\d+)", status)) is None:
        return ""
    number = int(mode[1])
    try:
        models = (root / "etc/nvpmodel.conf").read_text(errors="replace")
    except OSError:
        models = ""
    name = re.search(rf"POWER_MODEL\s+ID=0*{number}\s+NAME=([\w.+-]+)", models)
    return name[1][:_MODE_LETTERS] if name else f"mode {number}"


def graphics(root: Path = Path("/"), nvml: Callable[[], Nvml] = Nvml) -> tuple[str, int]:
    """Name of the GPU and its own memory in bytes; ("", 0) without one. A Jetson is named by its device tree."""
    try:
        model = (root / "proc/device-tree/model").read_text(errors="replace").strip("\0\n ")
    except OSError:
        model = ""
    if "jetson" in model.lower() or "nvidia" in model.lower():
        return model, 0
    try:
        gpu = nvml()
        name, memory = gpu.name(), gpu.memory_bytes()
    except NvmlError:
        return "", 0
    gpu.close()
    return name, memory
