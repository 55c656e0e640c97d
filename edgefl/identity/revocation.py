"""Revocation of a device: effective at the coordinator at its next tick, at the broker once that reloads its files."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from edgefl.errors import BrokerError, IdentityError
from edgefl.identity.fleet import Fleet

#: Time limit of a command that reloads a broker elsewhere: a login over a slow line.
RELOAD_S = 60.0


class Revoked(NamedTuple):
    """Outcome of a revocation. ``reloaded``: the broker reads its files again; ``dropped``: the connection was cut."""

    name: str
    reloaded: bool
    dropped: bool
    trouble: str = ""


async def revoke(fleet: Fleet, name: str, now: float) -> Revoked:
    """Revoke a device; a second time only reloads the broker. Raises IdentityError for one that is not enrolled."""
    with fleet.changing() as devices:
        if name not in devices:
            there = ", ".join(sorted(devices)[:20]) or "none"
            raise IdentityError(f"no device {name!r} is enrolled", remedy=f"Enrolled are: {there}.")
        device = devices[name]
        if device.revoked_at is None:
            device = devices[name] = replace(device, revoked_at=now)
        fleet.write_rules(now, devices)  # before anybody else can change them
    try:
        reloaded = reload_broker(fleet)
    except IdentityError as error:
        return Revoked(name, False, False, error.message)
    if not reloaded:
        return Revoked(name, False, False)
    trouble = await _drop(fleet, device.client_id)
    return Revoked(name, True, not trouble, trouble)


def reload_broker(fleet: Fleet) -> bool:
    """Have the broker read its access rules and revoked certificates again; False when none is found.

    That is the mosquitto whose process id lies beside its configuration, or the command in ``fleet.json``. Raises
    IdentityError when the command fails.
    """
    command = list(fleet.record.reload)
    if command:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RELOAD_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise IdentityError(f"the broker's reload command {command[0]!r} failed: {error}") from error
        if done.returncode != 0:
            words = done.stderr.strip()[-300:]
            raise IdentityError(f"the broker's reload command {command[0]!r} ended with {done.returncode}: {words}")
        return True
    pid = running(fleet.directory / "broker" / "mosquitto.pid")
    if pid is None:
        return False
    os.kill(pid, signal.SIGHUP)
    return True


def running(pid_file: Path) -> int | None:
    """The process id in a file, if that process is a mosquitto: after a crash, the number may be another's."""
    try:
        pid = int(pid_file.read_text())
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, ValueError):
        return None
    return pid if name == "mosquitto" else None


async def _drop(fleet: Fleet, client_id: str) -> str:
    """Cut a device's connection by taking over its client id, which only it and this directory know.

    Returns the reason why not, "" when it was cut. A device that stays connected has no topic left.
    """
    taking = fleet.transport(client_id=client_id)
    try:
        await taking.connect()
    except BrokerError as error:
        return f"its connection could not be cut: {error.message}"
    await taking.close()
    return ""
