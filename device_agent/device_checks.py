"""Checks of a device before it joins a fleet: each tells what was found and, when it is not good, the way out."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from edgefl.errors import TORCH_FIRST, BrokerError, EdgeFLError, IdentityError, install_command
from edgefl.protocol import topics
from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES, HEADER_BYTES
from edgefl.resources.hardware import capabilities
from edgefl.resources.sensors import EnergyProbe, temperature
from edgefl.transport.interface import Limits, Probe
from edgefl.transport.link import TlsFiles
from edgefl.transport.mqtt import MqttTransport

if TYPE_CHECKING:
    from edgefl.identity.device import Credentials

Status = Literal["ok", "warn", "fail"]

NO_FILES = TlsFiles()
_OLDEST_PYTHON = (3, 10)
#: Smallest free memory that is not worth a warning: torch on a CPU takes 0.2 GB before it has trained anything.
_MEMORY_BYTES = 2**30
#: Smallest free disk that is not worth a warning: one published model (426 MiB) and its update.
_DISK_BYTES = 2**30
#: Less is not enough for the agent's own state and one update of the smallest shipped model (6 MiB).
_DISK_LEAST_BYTES = 16 * 2**20
#: 2026-01-01: no clock that is right shows an earlier time to this program.
_WRITTEN = 1_767_225_600.0
#: No broker worth using takes less; the coordinator does not try smaller chunks either.
_LEAST_CHUNK_BYTES = 8 * 1024
#: Importing torch from a cold SD card takes most of a minute; a broken driver hangs for ever.
_TORCH_TIMEOUT_S = 180.0
_SILENT = f"no answer within {_TORCH_TIMEOUT_S:.0f} s"

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


def examine(
    *,
    broker: str = "",
    directory: Path | None = None,
    torch_device: str = "auto",
    data: str = "",
    files: TlsFiles = NO_FILES,
) -> list[Check]:
    """All checks, in order. ``broker``: an URL to try; ``directory``: where the agent will keep its state.

    An identity in the directory is checked too, and its broker dialled with it. ``data``: local data to read;
    ``files``: PEM files for the broker, instead of those of the identity.
    """
    own, checks = identity(directory)
    if own is not None:
        broker = broker or own.record.broker
        files = TlsFiles(files.ca or str(own.authority), files.cert or str(own.certificate), files.key)
    checks.append(clock(time.time(), own.valid()[0] if own is not None else None))
    if broker:
        whose = (own.record.fleet, own.record.device) if own is not None else ()
        checks.append(reach(broker, files, *whose))
    checks += [python(), torch(torch_device), *runtimes(), memory(), disk(directory or Path.cwd())]
    return checks + ([local_data(data)] if data else []) + sensors(torch_device)


def identity(directory: Path | None) -> tuple[Credentials | None, list[Check]]:
    """The identity in a state directory, if there is one and it can be used, and what is found of it."""
    from edgefl.identity.device import find

    try:
        own = None if directory is None else find(directory)
        begin, end = own.valid() if own is not None else (0.0, 0.0)
    except IdentityError as error:
        return None, [Check("identity", "fail", error.message, error.remedy)]
    if own is None:
        return None, []
    record = own.record
    detail = f"{record.device!r} of fleet {record.fleet!r}, broker {record.broker}"
    detail += f", valid from {_date(begin)} to {_date(end)}"
    if time.time() >= end:
        remedy = "If the clock is right: get a new token (edgefl-coordinator enroll), then edgefl-agent enroll TOKEN."
        return own, [Check("identity", "fail", f"{detail}: expired", remedy)]
    return own, [Check("identity", "ok", detail)]


def clock(now: float, begins: float | None = None) -> Check:
    """This device's clock against its own certificate, else against when this program was written."""
    text = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    remedy = "Set it: timedatectl set-ntp true, or timedatectl set-time 'YYYY-MM-DD hh:mm'."
    if begins is not None and now < begins:
        return Check("clock", "fail", f"{text} is before this device's certificate begins, {_date(begins)}", remedy)
    if now < _WRITTEN:
        return Check("clock", "fail", f"{text} can not be right", remedy)
    return Check("clock", "ok", text)


def runtimes() -> list[Check]:
    """onnxruntime, where it is installed: that there is one build of it, and that it can use what it was built for."""
    from edgefl.export import session

    there = session.installed()
    if not there:
        return []
    told = " and ".join(f"{name} {version}" for name, version in there.items())
    if len(there) > 1:
        names = " ".join(there)
        remedy = f"Keep one: pip uninstall {names}, then install onnxruntime-gpu (with a GPU) or onnxruntime."
        return [Check("onnxruntime", "warn", f"{told} are both installed and overwrite each other's files", remedy)]
    providers, fault = _printed("import onnxruntime; print(', '.join(onnxruntime.get_available_providers()))")
    if fault:
        remedy = "Check the driver." if fault == _SILENT else "Install it again."
        return [Check("onnxruntime", "fail", f"{told}: {fault}", remedy)]
    if "onnxruntime-gpu" in there and "CUDAExecutionProvider" not in providers:
        remedy = "Another build's files lie over it: pip install --force-reinstall --no-deps onnxruntime-gpu."
        return [Check("onnxruntime", "warn", f"{told} offers {providers}, and no CUDA", remedy)]
    return [Check("onnxruntime", "ok", f"{told}: {providers}")]


def local_data(source: str) -> Check:
    """Whether the local data can be read, and what it holds."""
    from edgefl.data.sources import load

    try:
        data = load(source)
    except EdgeFLError as error:
        return Check("data", "fail", error.message, error.remedy)
    parts = ", ".join(f"{name} {count}" for name, count in data.samples().items() if name)
    detail = f"{len(data)} samples ({parts})"
    if data.labels is None or not (data.labels >= 0).any():
        remedy = "Recipes that learn from labels can not use them; `edgefl recipes` lists those that need none."
        return Check("data", "warn", f"{detail}, none has a label", remedy)
    return Check("data", "ok", f"{detail}, labels {', '.join(data.label_names)[:200]}")


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """The interpreter."""
    text = ".".join(str(number) for number in version)
    if version < _OLDEST_PYTHON:
        return Check("python", "fail", text, "Install Python 3.10 or newer (JetPack 6 and later have it).")
    return Check("python", "ok", text)


def torch(device: str = "auto") -> Check:
    """A matrix product and its gradient in a process of its own: an import alone says nothing of a GPU's fitness."""
    found, fault = _printed(_TORCH_SCRIPT, device)
    if not fault:
        return Check("torch", "ok", found)
    if fault == _SILENT:
        remedy = "Check the GPU driver."
    elif "No module named 'torch'" in fault:
        remedy = f"{install_command('train')} ({TORCH_FIRST})."
    else:
        remedy = "Install a torch build that fits this device, or set torch_device: cpu in its profile."
    return Check("torch", "fail", fault, remedy)


def memory() -> Check:
    """Check of the memory that is free now."""
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
    if free < _DISK_LEAST_BYTES:
        return Check("disk", "fail", detail, "Free space, or give --state a directory on another disk.")
    if free < _DISK_BYTES:
        return Check("disk", "warn", detail, "Free space, or set budget.disk_bytes in the profile.")
    return Check("disk", "ok", detail)


def reach(url: str, files: TlsFiles = NO_FILES, fleet: str = "default", device: str = "") -> Check:
    """A connection to the broker, its limits, and whether chunks of the usual size come through it.

    ``fleet``, ``device``: whose topics this client may use.
    """
    name = f"doctor-{secrets.token_hex(4)}"

    async def connect() -> tuple[float, MqttTransport, int | None, str]:
        transport = MqttTransport(url, name, tls=files, clean_session=True)
        probe = Probe(transport, topics.build("probe", fleet, device or name))
        transport.on_message = lambda topic, payload: probe.heard(payload)
        started = time.monotonic()
        try:
            await transport.connect()
            seconds = time.monotonic() - started
            fits = await probe.largest(DEFAULT_CHUNK_BYTES, _LEAST_CHUNK_BYTES, HEADER_BYTES)
            return seconds, transport, fits, probe.reason
        finally:
            await transport.close()

    try:
        seconds, transport, fits, reason = asyncio.run(connect())
    except BrokerError as error:
        return Check("broker", "fail", error.message, error.remedy)
    return _broker(seconds, transport.limits, fits, reason)


def _broker(seconds: float, limits: Limits, fits: int | None, reason: str) -> Check:
    """Result for a broker that answers. ``fits``: bytes of the largest chunk that passes, None: not known."""
    packet = f"packets of {limits.packet_bytes:,} bytes" if limits.packet_bytes else "no packet limit announced"
    detail = f"answers in {seconds * 1000:.0f} ms; MQTT {limits.version}, {packet}, {limits.receive_maximum} in flight"
    if fits is None:
        return Check("broker", "ok", f"{detail}; chunks were not tried: {reason}")
    if fits == DEFAULT_CHUNK_BYTES:
        return Check("broker", "ok", f"{detail}; chunks of {fits:,} bytes pass")
    remedy = "Raise the broker's limit (mosquitto: message_size_limit, max_packet_size)"
    if fits == 0:
        return Check("broker", "fail", f"{detail}; not even {_LEAST_CHUNK_BYTES:,} bytes pass: {reason}", f"{remedy}.")
    return Check(
        "broker",
        "warn",
        f"{detail}; chunks of {DEFAULT_CHUNK_BYTES:,} bytes do not pass, {fits:,} do",
        f"{remedy}, or run with --set transfer.chunk_bytes={fits}; runs find it by themselves, a little later.",
    )


def sensors(torch_device: str = "auto") -> list[Check]:
    """Energy and temperature: without them the report has null there, which is no fault of the device."""
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


def _printed(*script: str) -> tuple[str, str]:
    """Output of a script in a process of its own, and its last words where it failed."""
    try:
        command = [sys.executable, "-c", *script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "", _SILENT
    last = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1][:300]
    return done.stdout.strip(), last if done.returncode else ""


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
