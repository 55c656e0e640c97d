"""Report on the agent of this machine: service, broker, last contact, data, identity, versions."""

from __future__ import annotations

import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

import msgspec

import edgefl
from device_agent.runtime.service_status import WRITE_S, Status, read_status
from device_agent.runtime.store import Owner, owner_of
from device_agent.service_steps import Place, booted
from edgefl.errors import IdentityError
from edgefl.records import is_modality
from edgefl.storage.disk import is_held, store_errors

_PACKAGES = ("torch", "onnxruntime-gpu", "onnxruntime")
_SHOW = "ActiveState,SubState,UnitFileState,MainPID,NRestarts,Result,ExecMainStatus,MemoryCurrent,ActiveEnterTimestamp"
_DAY_S = 86400
_UNITS = ((_DAY_S, "days"), (3600, "h"), (60, "min"), (1, "s"))


class Certificate(msgspec.Struct, frozen=True):
    """Times of a device's certificate in seconds since the epoch; ``renewal_due``: begin of its renewal."""

    not_before: float
    not_after: float
    renewal_due: float


class Report(msgspec.Struct, frozen=True):
    """Report on an agent and its service; times in seconds since the epoch.

    ``hangs``: runs without signs of life. ``service``: systemd's properties, empty with ``no_service``, the
    reason. ``certificate``: None with ``no_certificate``, the reason.
    """

    device: str
    fleet: str
    state: str
    running: bool
    hangs: bool
    versions: dict[str, str]
    service: dict[str, str]
    no_service: str
    certificate: Certificate | None
    no_certificate: str
    status: Status | None


def report_of(place: Place, fleet: str, device: str, state: Path, now: float) -> Report:
    """The agent of a state directory and its service. Raises StoreError for a directory this user may not read."""
    from edgefl.identity.device import find

    with store_errors("read", state):
        if state.exists():
            list(state.iterdir())
    service, no_service = _service(place)
    certificate, no_certificate = None, "none: not enrolled"
    try:
        if (own := find(state)) is not None:
            certificate, no_certificate = Certificate(*own.valid(), own.renewal_due()), ""
    except IdentityError as error:
        no_certificate = error.message
    versions = {"edgefl": edgefl.__version__, "protocol": str(edgefl.PROTOCOL_VERSION)}
    versions["Python"] = platform.python_version()
    versions |= {found.metadata["Name"]: found.version for found in metadata.distributions() if found.name in _PACKAGES}
    status, running, owner = read_status(state), is_held(state), owner_of(state) or Owner(device, fleet)
    hangs = running and status is not None and now - status.at > 2 * WRITE_S
    return Report(
        owner.device,
        owner.fleet,
        str(state.absolute()),
        running,
        hangs,
        versions,
        service,
        no_service,
        certificate,
        no_certificate,
        status,
    )


def lines(report: Report, now: float) -> list[tuple[str, str]]:
    """(subject, text) lines of the report for a person."""
    found = [
        ("agent", "hangs: no sign of life" if report.hangs else "running" if report.running else "does not run"),
        ("service", report.no_service or _managed(report.service)),
    ]
    if (seen := report.status) is None:
        found.append(("last contact", "no agent has run with this state yet"))
    else:
        link = f"{'connected' if seen.connected else 'away'} since {_when(seen.since, now)}"
        samples = ", ".join(
            f"{name or 'all'} {count}" for name, count in seen.samples.items() if not name or is_modality(name)
        )
        found += [
            ("as noted", _when(seen.at, now)),
            ("doing" if report.running else "did last", seen.text),
            ("broker", f"{seen.broker}, {link}" if report.running else seen.broker),
            (
                "last contact",
                _when(seen.heard_at, now) if seen.heard_at else "no message since it was started",
            ),
            ("data", f"{seen.data} ({samples})" if samples else f"{seen.data}, not read yet"),
        ]
        if seen.ended_at:
            found.append(("last run", f"{seen.ended.run}, ended {_when(seen.ended_at, now)}"))
        if seen.version != report.versions["edgefl"]:
            found.append(("restart", f"due: what ran last is {seen.version}, installed is {report.versions['edgefl']}"))
    return [
        *found,
        ("device", f"{report.device} of fleet {report.fleet}"),
        ("identity", _certificate(report.certificate, now) if report.certificate else report.no_certificate),
        ("state", report.state),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
    ]


def _service(place: Place) -> tuple[dict[str, str], str]:
    """(systemd's properties of the service, reason for their absence or "")."""
    if not booted():
        return {}, "none: systemd does not run this machine"
    if not place.unit.exists():
        return {}, "none: not installed (edgefl-agent install)"
    command = place.systemctl("show", place.name, "--property", _SHOW)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"systemd does not answer: {error}"
    if done.returncode:
        return {}, f"systemd does not answer: {done.stderr.strip()[:200]}"
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line), ""


def _managed(known: dict[str, str]) -> str:
    parts = [f"{known['ActiveState']} ({known['SubState']})"]
    if known["ActiveState"] == "active":
        parts.append(f"since {known['ActiveEnterTimestamp']}, process {known['MainPID']}")
    if known["MemoryCurrent"].isdecimal() and int(known["MemoryCurrent"]) < 2**63:  # else: it is not counted here
        parts.append(f"{int(known['MemoryCurrent']) / 2**20:,.0f} MiB with its trainer")
    parts.append("starts at boot" if known["UnitFileState"] == "enabled" else "does not start at boot")
    if known["NRestarts"] != "0":
        parts.append(f"restarted {known['NRestarts']} times")
    if known["Result"] != "success":
        parts.append(f"last end: {known['Result']}, exit code {known['ExecMainStatus']}")
    return ", ".join(parts)


def _certificate(known: Certificate, now: float) -> str:
    until, renewal = known.not_after, known.renewal_due
    if until <= now:
        return f"expired on {_day(until)}: ask for a new token"
    due = "due now" if renewal <= now else f"due on {_day(renewal)}"
    return f"valid until {_day(until)}, {(until - now) / _DAY_S:.0f} days; renewal {due}"


def _when(at: float, now: float) -> str:
    """A time by this machine's clock, and how long ago it was."""
    ago = max(0.0, now - at)
    size, unit = next((step for step in _UNITS if ago >= 2 * step[0]), _UNITS[-1])
    return f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(at))}, {ago / size:.0f} {unit} ago"


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))
