"""Checks of a device before it joins a fleet: each tells what was found and, when it is not good, the way out."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec

from edgefl.errors import BrokerError, install_command

Status = Literal["ok", "warn", "fail"]

_OLDEST_PYTHON = (3, 10)
#: Smallest free memory that is not worth a warning: torch on a CPU takes 0.2 GB before it has trained anything.
_MEMORY_BYTES = 2**30
#: Smallest free disk that is not worth a warning: one published model (426 MiB) and its update.
_DISK_BYTES = 2**30
#: Importing torch from a cold SD card takes most of a minute; a broken driver hangs for ever.
_TORCH_TIMEOUT_S = 180.0

#: Runs where torch may crash the process without harm. Prints device, version and seconds.
_TORCH_SCRIPT = """
import sys, time, torch
wanted = sys.argv[1]
device = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
started = time.perf_counter()
w = torch.randn(256, 256, device=device, requires_grad=True)
loss = (torch.randn(64, 256, device=device) @ w).pow(2).mean()
loss.backward()
assert torch.isfinite(w.grad).all().item(), "gradients are not finite"
name = torch.cuda.get_device_name() if device == "cuda" else device
print(f"torch {torch.__version__} on {name}, {time.perf_counter() - started:.2f} s")
"""


class Check(msgspec.Struct, frozen=True):
    """One finding. ``remedy`` is empty when all is well."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine(*, broker: str = "", directory: Path | None = None, torch_device: str = "auto") -> list[Check]:
    """All checks, in order. ``broker``: an URL to try; ``directory``: where the agent will keep its state."""
    checks = [python(), torch(torch_device), memory(), disk(directory or Path.cwd()), *sensors(torch_device)]
    if broker:
        checks.insert(0, reach(broker))
    return checks


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """The interpreter."""
    text = ".".join(str(number) for number in version)
    if version < _OLDEST_PYTHON:
        return Check("python", "fail", text, "Install Python 3.10 or newer (JetPack 6 and later have it).")
    return Check("python", "ok", text)


def torch(device: str = "auto") -> Check:
    """A matrix product and its gradient in a process of its own: an import alone says nothing of a GPU's fitness."""
    command = [sys.executable, "-c", _TORCH_SCRIPT, device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Check("torch", "fail", f"no answer within {_TORCH_TIMEOUT_S:.0f} s", "Check the GPU driver.")
    if done.returncode == 0:
        return Check("torch", "ok", done.stdout.strip())
    last = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1][:300]
    if "No module named 'torch'" in last:
        remedy = f"{install_command('train')}; on a Jetson with JetPack 6 use NVIDIA's wheel or container instead."
    else:
        remedy = "Install a torch build that fits this device, or set torch_device: cpu in its profile."
    return Check("torch", "fail", last, remedy)


def memory() -> Check:
    """What is free now."""
    from edgefl.resources.machine import capabilities

    found = capabilities()
    detail = f"{_mib(found.memory_free_bytes)} free of {_mib(found.memory_total_bytes)}"
    if found.memory_free_bytes < _MEMORY_BYTES:
        return Check("memory", "warn", detail, "Close other programs, or set budget.memory_bytes in the profile.")
    return Check("memory", "ok", detail)


def disk(directory: Path) -> Check:
    """Whether the state directory can be written, and how much is free there."""
    place = directory
    while not place.exists():
        place = place.parent
    probe = place / f".edgefl-doctor-{secrets.token_hex(4)}"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        return Check("disk", "fail", f"{place}: {error.strerror}", "Give --state a directory this user may write.")
    free = shutil.disk_usage(place).free
    detail = f"{_mib(free)} free in {place}"
    if free < _DISK_BYTES:
        return Check("disk", "warn", detail, "Free space, or set budget.disk_bytes in the profile.")
    return Check("disk", "ok", detail)


def reach(url: str) -> Check:
    """A connection to the broker and back."""
    from edgefl.transport.mqtt import MqttTransport

    async def connect() -> float:
        transport = MqttTransport(url, f"doctor-{secrets.token_hex(4)}", clean_session=True)
        started = time.monotonic()
        try:
            await transport.connect()
            return time.monotonic() - started
        finally:
            await transport.close()

    try:
        seconds = asyncio.run(connect())
    except BrokerError as error:
        return Check("broker", "fail", error.message, error.remedy)
    return Check("broker", "ok", f"answers in {seconds * 1000:.0f} ms")


def sensors(torch_device: str = "auto") -> list[Check]:
    """Energy and temperature: without them the report has null there, which is no fault of the device."""
    from edgefl.resources.energy import EnergyProbe
    from edgefl.resources.machine import capabilities
    from edgefl.resources.temperature import temperature

    gpu = torch_device == "cuda" or (torch_device == "auto" and bool(capabilities().gpu))
    with EnergyProbe("cuda" if gpu else "cpu") as probe:
        time.sleep(0.2)
    found = []
    for name, figure in (("energy sensor", probe.figure()), ("temperature", temperature())):
        if figure.value is None:
            found.append(Check(name, "warn", figure.reason, "None needed: the report shows why there is no figure."))
        else:
            found.append(Check(name, "ok", figure.source))
    return found


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
