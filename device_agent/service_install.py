"""Installation of the agent as a systemd service: unit, environment file and steps, from ``run``'s options."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from device_agent.service_steps import ACCOUNT, WRITER, Place, Remove, Run, Step, Write, check_own
from edgefl.config.settings import DeviceProfile
from edgefl.errors import ConfigError, Problem, ServiceError
from edgefl.process.service_unit import Service, unit_text

#: Longest silence of a healthy agent: its loop writes small files, and an SD card that erases takes seconds for one.
WATCHDOG_S = 120
_TEGRA = Path("/etc/nv_tegra_release")  # a Jetson
_IN_TMP = "is in a directory for temporary files, and the service has one of its own"
_UNREADABLE = f"Let the account {ACCOUNT} read it, such as: setfacl -R -m u:{ACCOUNT}:rX PATH (and x on what is above)."
_PYTHON = f"Install EdgeFL where the account {ACCOUNT} may read it: python3 -m venv /opt/edgefl."


def systemd_version() -> int:
    """Major version of this machine's systemd. Raises ServiceError if absent or not running."""
    remedy = "Start `edgefl-agent run` by what starts this machine's programs; in a container: a restart policy."
    program = shutil.which("systemctl")
    found = program and subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    number = re.match(r"systemd (\d+)", found or "")
    if number is None:
        raise ServiceError("this machine has no systemd", remedy=remedy)
    return int(number.group(1))


def check_lasting(place: Place, options: Sequence[str]) -> None:
    """Raise ConfigError for files of a machine's service in a directory for temporary files."""
    if place.system and (hidden := [path for path in _needed(options) if path.startswith(("/tmp/", "/var/tmp/"))]):  # noqa: S108
        raise ConfigError("install", [Problem(path, _IN_TMP) for path in hidden], remedy="Move it, to /srv or /opt.")


def _paths(options: Sequence[str]) -> list[str]:
    return [word for word in options if word.startswith("/")]


def _needed(options: Sequence[str]) -> list[str]:
    """Paths that the service reads: its options', and Python's."""
    return [*_paths(options), sys.prefix, os.path.realpath(sys.executable)]


def install_steps(
    place: Place, options: Sequence[str], broker: str, profile: DeviceProfile, systemd: int
) -> list[Step]:
    """Steps that install the service or change it to these options.

    Raises ServiceError where another program has its name. ``options``: of ``edgefl-agent run``, paths absolute.
    ``broker``: its URL, "" for an enrolled device's own.
    """
    check_own(place)
    command = [sys.executable, "-m", "device_agent.cli", "run", "$EDGEFL_RUN_OPTIONS"]
    command += ["--state", str(place.state)] if place.state else []
    service = Service(
        name=place.name,
        description="EdgeFL agent: trains parts of models on this device's data",
        command=command,
        environment=str(place.environment),
        written_by=WRITER,
        user=ACCOUNT if place.system else "",
        groups=[name for name in ("video", "render") if _is_group(name)],
        watchdog_s=WATCHDOG_S,
        memory_bytes=profile.budget.record().memory_bytes,
        devices=_devices(profile),
        reads_home=any(path.startswith(("/home/", "/root/", "/run/user/")) for path in _needed(options)),
    )
    steps = _account_steps(place, _paths(options)) if place.system else []
    steps += [
        Write(place.environment, environment_text(options, broker), 0o600),
        Write(place.unit, unit_text(service, systemd)),
        Run(place.systemctl("daemon-reload")),
        Run(place.systemctl("enable", place.name)),
        Run(place.systemctl("restart", place.name)),
    ]
    if not place.system:
        remark = "without it the service ends when you log out; as root: loginctl enable-linger USER"
        steps.insert(-1, Run(("loginctl", "enable-linger"), remark, optional=True))
    return steps


def _account_steps(place: Place, paths: Sequence[str]) -> list[Step]:
    """Steps that make account and state directory, and test the account's access to Python and ``paths``."""
    state = str(place.state)
    make = ("useradd", "--system", "--user-group", "--no-create-home", "--home-dir", state)
    steps: list[Step] = [] if _is_account() else [Run((*make, "--shell", "/usr/sbin/nologin", ACCOUNT))]
    owner = ("-o", ACCOUNT, "-g", ACCOUNT)
    steps += [
        Run(("install", "-d", "-m", "0700", *owner, state)),
        Run(("chown", "-R", "-h", f"{ACCOUNT}:{ACCOUNT}", state)),  # enrolled as root, before
        Run(place.as_account(sys.executable, "-m", "device_agent.cli", "--version"), _PYTHON),
    ]
    return steps + [Run(place.as_account("test", "-r", path), _UNREADABLE.replace("PATH", path)) for path in paths]


def uninstall_steps(place: Place, state: Path, purge: bool) -> list[Step]:
    """Steps that remove the service; with ``purge`` also its options and the state: identity, unsent work.

    Raises ServiceError if either is another program's.
    """
    check_own(place)
    steps: list[Step] = []
    if place.unit.exists():
        steps += [
            Run(place.systemctl("disable", "--now", place.name), optional=True),
            Remove(place.unit),
            Run(place.systemctl("daemon-reload")),
        ]
    return steps + ([Remove(place.environment), Remove(state)] if purge else [])


def environment_text(options: Sequence[str], broker: str) -> str:
    """Text of the service's environment file. Raises ConfigError for characters special to systemd."""
    for word in (*options, broker):
        if not word.isprintable() or set(word) & set("'\"\\`"):
            raise ConfigError(
                "install", [Problem(word, "quotes, backslashes and line breaks do not work in a service")]
            )
    words = " ".join(word if re.fullmatch(r"[\w./:=@+,-]+", word) else f"'{word}'" for word in options)
    lines = [
        "# Written by `edgefl-agent install`, which overwrites it. Holds a password where the broker's URL has one."
    ]
    lines += [f'EDGEFL_RUN_OPTIONS="{words}"'] + ([f'EDGEFL_BROKER="{broker}"'] if broker else [])
    return "\n".join([*lines, ""])


def _devices(profile: DeviceProfile) -> list[str]:
    """Unit lines on device access for training. A Jetson gets none: its devices' names vary by release."""
    if profile.torch_device == "cpu":
        return ["PrivateDevices=yes"]
    if _TEGRA.exists():
        return []
    # A card's files are made by a program with rights that the service does not have; none are there before first use.
    maker = shutil.which("nvidia-modprobe")
    return [*([f"ExecStartPre=+-{maker} -c 0 -u"] * bool(maker)), "DevicePolicy=closed", "DeviceAllow=char-nvidia* rw"]


def _is_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _is_account() -> bool:
    try:
        pwd.getpwnam(ACCOUNT)
    except KeyError:
        return False
    return True
