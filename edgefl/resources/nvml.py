"""The few calls of NVIDIA's management library (NVML) that EdgeFL needs, through ctypes: no package, no process.

Present wherever the desktop or data-centre driver is; on Jetson it lacks memory and energy and is not used.
"""

from __future__ import annotations

import ctypes
from typing import Any

_SUCCESS = 0
_NAME_BYTES = 96


class NvmlError(Exception):
    """NVML is absent, or refused a call. Never shown to a user: becomes the reason of a null figure."""


class Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """One GPU. Raises NvmlError when there is no driver or no such GPU. ``library``: a stand-in for tests."""

    def __init__(self, index: int = 0, library: Any = None) -> None:
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

    def temperature_c(self) -> float:
        """Temperature of the chip now."""
        celsius = ctypes.c_uint()
        self._call("nvmlDeviceGetTemperature", self._handle, ctypes.c_uint(0), ctypes.byref(celsius))
        return float(celsius.value)

    def close(self) -> None:
        """Release the library."""
        self._library.nvmlShutdown()

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            status = getattr(self._library, function)(*arguments)
        except AttributeError as error:  # an older driver lacks the symbol
            raise NvmlError(f"the driver has no {function}") from error
        if status != _SUCCESS:
            raise NvmlError(f"{function} failed with NVML status {status}")
