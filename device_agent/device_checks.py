"""Checks of a device before it joins a fleet, each with its finding and a remedy.

What may be wrong, with its words, is in ``edgefl.findings``; of torch and onnxruntime, in ``library_checks``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from device_agent import library_checks
from edgefl.errors import BrokerError, EdgeFLError, StoreError
from edgefl.findings import Check, found, of_error, well
from edgefl.protocol import topics
from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES, HEADER_BYTES
from edgefl.records import is_modality
from edgefl.resources.hardware import capabilities
from edgefl.resources.process_memory import Ceiling, resident_bytes
from edgefl.resources.sensors import EnergyProbe, temperature
from edgefl.transport.address import check_protected
from edgefl.transport.interface import Limits, Probe
from edgefl.transport.link import TlsFiles
from edgefl.transport.mqtt import MqttTransport

if TYPE_CHECKING:
    from edgefl.identity.device import Credentials

NO_FILES = TlsFiles()
#: Smallest free memory that is not worth a warning: torch on a CPU takes 0.2 GB before it has trained anything.
_MEMORY_BYTES = 2**30
#: Smallest free disk that is not worth a warning: one published model (426 MiB) and its update.
_DISK_BYTES = 2**30
#: Less is not enough for the agent's own state and one update of the smallest shipped model (6 MiB).
_DISK_LEAST_BYTES = 16 * 2**20
#: What is tried on the disk: work in hand is an offer and an update of 120 KiB each.
_PROBE_BYTES = 256 * 1024
#: 2026-01-01: no clock that is right shows an earlier time to this program.
_WRITTEN = 1_767_225_600.0
#: A certificate is renewed at half its life; whoever has missed that for a quarter more is not heard, or hears nobody.
_UNRENEWED = 0.75
#: No broker worth using takes less; the coordinator does not try smaller chunks either.
_LEAST_CHUNK_BYTES = 8 * 1024
#: A process that takes this in three steps has to be stopped before the end: its ceiling is a sixth above its start.
_TAKEN_BYTES = 48 * 2**20
_GREEDY = f"""
import sys, time
print("ready", flush=True); sys.stdin.readline(); held = []
for _ in range(3): held.append(b"1" * {_TAKEN_BYTES // 3}); time.sleep(0.2)
print("held")
"""
_REFUSALS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "state-permission"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "state-no-directory"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "disk-none"),
    errno.EROFS: "state-read-only",
}


class Device(NamedTuple):
    """Subject of the checks. ``directory``: the agent's state; an identity in it is checked and used.

    ``broker``: an URL to try, else the identity's; ``files``: PEM files for it, else the identity's. ``data``: local
    data to read; ``budget_bytes``: the profile's memory budget; ``unified``: True for a Jetson's profile,
    ``plan_only``: reason that no agent runs on such a device.
    """

    broker: str = ""
    directory: Path | None = None
    torch_device: str = "auto"
    unified: bool = False
    plan_only: str = ""
    data: str = ""
    files: TlsFiles = NO_FILES
    budget_bytes: int | None = None


def examine(device: Device) -> list[Check]:
    """Run all checks, in order. A check that crashes is a finding, too."""
    checks: list[Check] = []

    def add(name: str, check: Callable[[], Check | list[Check]]) -> None:
        try:
            done = check()
        except Exception as error:  # whatever a broken machine makes of a check, the others still tell
            done = found("doctor-failed", f"{name}: {type(error).__name__}: {error}")
        checks.extend(done if isinstance(done, list) else [done])

    own, told = identity(device.directory)
    checks += told
    add("clock", lambda: clock(time.time(), own.valid()[0] if own is not None else None))
    if device.broker or own is not None:
        add("broker", lambda: dial(device, own))
    elif not told:  # else its identity is there and broken
        checks.append(found("identity-none", f"no identity in {(device.directory or Path.cwd()).absolute()}"))
    checks += profile(device.plan_only)
    add("python", library_checks.python)
    add("torch", lambda: library_checks.torch(device.torch_device, unified=device.unified))
    add("onnxruntime", library_checks.runtimes)
    add("memory", lambda: memory(device.budget_bytes))
    add("ceiling", ceiling)
    add("state", lambda: state(device.directory or Path.cwd()))
    if device.data:
        add("data", lambda: local_data(device.data))
    add("sensors", lambda: sensors(device.torch_device))
    return checks


def before_run(directory: Path) -> list[Check]:
    """Checks of `run` before it connects, for faults that time may mend: clock, expired identity, full disk.

    Raises StoreError for a state directory without permission, or one that the disk refuses.
    """
    (own, checks), room = identity(directory), state(directory)
    if room.status == "fail" and room.name == "state":
        raise StoreError(room.detail, remedy=room.remedy, finding=room.id)
    begins = own.valid()[0] if own is not None else None
    told = [*(checks if own is not None else ()), clock(time.time(), begins), room]
    return [check for check in told if check.status == "fail"]


def profile(plan_only: str) -> list[Check]:
    """Fault of a profile for planning alone."""
    return [found("profile-plan-only", plan_only)] if plan_only else []


def identity(directory: Path | None) -> tuple[Credentials | None, list[Check]]:
    """The usable identity in a state directory (None: none), and the checks' findings."""
    from edgefl.identity.device import find

    try:
        own = None if directory is None else find(directory)
        begin, end = own.valid() if own is not None else (0.0, 0.0)
    except EdgeFLError as error:
        return None, [of_error(error, "identity-unusable")]
    if own is None:
        return None, []
    record, now = own.record, time.time()
    detail = f"{record.device!r} of fleet {record.fleet!r}, broker {record.broker}"
    detail += f", valid from {_date(begin)} to {_date(end)}"
    if now >= end:
        return own, [found("identity-expired", f"{detail}: expired")]
    if now >= begin + _UNRENEWED * (end - begin):
        return own, [found("identity-unrenewed", f"{detail}: not renewed, though it is late")]
    return own, [well("identity", detail)]


def clock(now: float, begins: float | None = None) -> Check:
    """Check of the clock against the device's certificate, else this program's release date."""
    text = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if begins is not None and now < begins:
        return found("clock-behind", f"{text} is before this device's certificate begins, {_date(begins)}")
    return found("clock-behind", f"{text} cannot be right") if now < _WRITTEN else well("clock", text)


def memory(budget_bytes: int | None = None) -> Check:
    """Check of free memory, and of the kernel's limits against the budget."""
    has = capabilities()
    most, why = has.memory_total_bytes, "of this machine or its control group"
    for name in ("RLIMIT_AS", "RLIMIT_DATA"):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY and soft < most:
            most, why = soft, f"of {name}"
    free = min(has.memory_free_bytes, most)
    if budget_bytes is not None and budget_bytes > most:
        return found("memory-beyond", f"the budget is {_mib(budget_bytes)}, the limit {why} {_mib(most)}")
    detail = f"{_mib(free)} free of {_mib(most)}"
    return found("memory-little", detail) if free < _MEMORY_BYTES else well("memory", detail)


def ceiling() -> Check:
    """Check of the memory ceiling, with a process that exceeds it on purpose."""
    command = [sys.executable, "-c", _GREEDY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as greedy:
        greedy.stdout.readline()  # type: ignore[union-attr]  # it is a pipe
        limit = (resident_bytes(greedy.pid) or 0) + _TAKEN_BYTES // 6
        with Ceiling(greedy.pid, limit) as watch:
            out, _ = greedy.communicate(b"\n")
            watch.stop()
    detail = f"a process that takes {_mib(_TAKEN_BYTES)} under a ceiling of {_mib(limit)}"
    if b"held" in out:
        return found("ceiling-none", f"{detail}, is not stopped")
    if not watch.refused_by_kernel:
        return found("ceiling-late", f"{detail}, is stopped; prlimit is not permitted")
    return well("ceiling", f"{detail}, is stopped")


def state(directory: Path) -> Check:
    """Check of the state directory: writable (or to be made), and free space."""
    place = directory
    try:
        while not place.exists():
            place = place.parent
        with tempfile.NamedTemporaryFile(dir=place, prefix=".edgefl-doctor-") as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
    except OSError as error:
        return found(_REFUSALS.get(error.errno or 0, "state-broken"), f"{place}: {error.strerror}")
    free = shutil.disk_usage(place).free
    detail = f"{_mib(free)} free in {place}"
    if free < _DISK_LEAST_BYTES:
        return found("disk-none", detail)
    return found("disk-little", detail) if free < _DISK_BYTES else well("state", detail)


def local_data(source: str) -> Check:
    """Check of the local data: readable, and its contents."""
    from edgefl.data.label_sets import plain_names
    from edgefl.data.sources import load

    try:
        data = load(source)
    except EdgeFLError as error:
        return of_error(error, "data-unusable")
    except OSError as error:
        return found("data-unusable", f"{source}: {error.strerror}")
    parts = ", ".join(f"{name} {count}" for name, count in data.samples().items() if is_modality(name))
    detail = f"{len(data)} samples ({parts})"
    if data.labels is None or not (data.labels >= 0).any():
        return found("data-unlabelled", f"{detail}, none has a label")
    return well("data", f"{detail}, labels {', '.join(plain_names(data.label_names))[:200]}")


def dial(device: Device, own: Credentials | None) -> list[Check]:
    """Checks of the broker with the agent's URL and certificates."""
    given, url = device.files, device.broker
    if own is not None:
        url = url or own.record.broker
        given = TlsFiles(given.ca or str(own.authority), given.cert or str(own.certificate), given.key)
    checks = []
    try:
        check_protected(url, insecure=bool(os.environ.get("EDGEFL_INSECURE")))
    except BrokerError as error:
        checks.append(of_error(error, "broker-url"))
    if not checks or checks[0].status != "fail":
        names = (own.record.fleet, own.record.device) if own is not None else ()
        told = reach(url, given, *names)
        for other in own.record.others if own is not None and url == own.record.broker else ():
            if told.status == "fail":  # the agent dials the next as well
                checks.append(replace(told, status="warn"))
                told = reach(other, given, *names)
        idle = told.id == "broker-absent" and own is not None and url == own.record.broker
        checks.append(found("broker-idle", told.detail) if idle else told)
    return checks


def reach(url: str, files: TlsFiles = NO_FILES, fleet: str = "default", device: str = "") -> Check:
    """Check of a connection to the broker: limits, and passage of usual chunks.

    ``fleet``, ``device``: owner of the topics this client may use.
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
        return of_error(error, "broker-refuses")
    return _broker(seconds, transport.limits, fits, reason)


def _broker(seconds: float, limits: Limits, fits: int | None, reason: str) -> Check:
    """Result for a broker that answers. ``fits``: bytes of the largest chunk that passes, None: not known."""
    packet = f"packets of {limits.packet_bytes:,} bytes" if limits.packet_bytes else "no packet limit announced"
    detail = f"answers in {seconds * 1000:.0f} ms; MQTT {limits.version}, {packet}, {limits.receive_maximum} in flight"
    if fits in {None, DEFAULT_CHUNK_BYTES}:
        return well(
            "broker", f"{detail}; " + (f"chunks of {fits:,} bytes pass" if fits else f"chunks not tried: {reason}")
        )
    if fits == 0:
        return found("broker-messages", f"{detail}; not even {_LEAST_CHUNK_BYTES:,} bytes pass: {reason}")
    text = f"{detail}; chunks of {DEFAULT_CHUNK_BYTES:,} bytes do not pass, {fits:,} do"
    return found("broker-chunks", text, fits=fits)


def sensors(torch_device: str = "auto") -> list[Check]:
    """Check of energy and temperature sensors; without them the report has null, which is no fault."""
    gpu = torch_device == "cuda" or (torch_device == "auto" and bool(capabilities().gpu))
    with EnergyProbe("cuda" if gpu else "cpu") as probe:
        time.sleep(0.2)
    pairs = (("energy", probe.figure()), ("temperature", temperature()))
    return [
        found(f"{name}-none", figure.reason) if figure.value is None else well(name, figure.source)
        for name, figure in pairs
    ]


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
