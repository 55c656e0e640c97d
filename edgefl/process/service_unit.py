"""The systemd unit of a long-running program: restarts, watchdog, memory ceiling, sandbox."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from edgefl.errors import ConfigError, IdentityError, MissingDependencyError

#: Exit codes that no restart mends, so that systemd leaves the program stopped: usage, configuration, a package that is
#: missing, an identity that is unfit. A broker that refuses, a full disk and absent data may be mended elsewhere.
NO_RESTART = (2, ConfigError.exit_code, MissingDependencyError.exit_code, IdentityError.exit_code)
#: The first systemd whose RestartSteps makes the wait longer from restart to restart.
_STEPS_SINCE = 254
#: A program's own memory beside what it was given a budget for.
_OWN_BYTES = 128 * 2**20
#: Times what it may use, where the kernel ends it; from once on it takes pages back and slows the program down.
#: A trainer watches its budget itself and ends before: this is for what it does not see.
_MAX = 1.1

_UNIT = """\
# Written by `{written_by}`, which overwrites it: put changes into a drop-in (systemctl {own}edit {name}).
[Unit]
Description={description}
After=network.target
# Never given up for good: a device that waits in the field is not visited to be started by hand.
StartLimitIntervalSec=0

[Service]
Type={kind}
ExecStart={command}
EnvironmentFile={environment}
{restart}
RestartPreventExitStatus={no_restart}
TimeoutStartSec=120
TimeoutStopSec=45
KillMode=mixed
# When the ceiling is hit the kernel ends the largest process, a trainer; the rest goes on and says so.
OOMPolicy=continue
SyslogIdentifier={name}
LogRateLimitIntervalSec=30s
LogRateLimitBurst=500
LimitCORE=0
UMask=0077
NoNewPrivileges=yes
{more}
[Install]
WantedBy={target}
"""
#: Of system services alone: a user's manager may not make these. Absent, since they break CUDA or sensors:
#: MemoryDenyWriteExecute (code is written at run time), ProcSubset (files in /proc are read), ProtectClock (it closes
#: every device that is not named).
_SANDBOX = (
    "ProtectSystem=strict",
    "PrivateTmp=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectControlGroups=yes",
    "ProtectKernelTunables=yes",
    "ProtectHostname=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "SystemCallArchitectures=native",
    "CapabilityBoundingSet=",
)


class Service(NamedTuple):
    """Settings of one service. ``watchdog_s`` 0: the program does not speak sd_notify.

    ``user``: an account of the system that it runs under, with ``groups`` besides; "" makes it a service of the person
    who installs it. ``devices``: lines of the unit about devices. ``memory_bytes``: what it may use; None: no limit.
    ``reads_home``: the program or its data lie in a home directory.
    """

    name: str
    description: str
    command: Sequence[str]
    environment: str
    written_by: str
    user: str = ""
    groups: Sequence[str] = ()
    watchdog_s: int = 0
    memory_bytes: int | None = None
    devices: Sequence[str] = ()
    reads_home: bool = False


def unit_text(service: Service, systemd: int) -> str:
    """The unit file, for this major version of systemd."""
    more = [f"WatchdogSec={service.watchdog_s}"] if service.watchdog_s else []
    if service.memory_bytes is not None:
        enough = service.memory_bytes + _OWN_BYTES
        more += [f"MemoryHigh={enough}", f"MemoryMax={round(_MAX * enough)}"]
    if service.user:
        more += [f"User={service.user}", f"Group={service.user}", f"StateDirectory={service.name}"]
        more += [
            "StateDirectoryMode=0700",
            *([f"SupplementaryGroups={' '.join(service.groups)}"] * bool(service.groups)),
        ]
        more += [*_SANDBOX, f"ProtectHome={'read-only' if service.reads_home else 'yes'}", *service.devices]
    return _UNIT.format(
        name=service.name,
        own="" if service.user else "--user ",
        description=service.description,
        kind="notify" if service.watchdog_s else "exec",
        command=" ".join(quoted(word) for word in service.command),
        environment=service.environment.replace("%", "%%"),
        written_by=service.written_by,
        restart="\n".join(_restart(systemd)),
        no_restart=" ".join(map(str, NO_RESTART)),
        more="".join(f"{line}\n" for line in more),
        target="multi-user.target" if service.user else "default.target",
    )


def _restart(systemd: int) -> list[str]:
    """Back-off: from five seconds to ten minutes; one a minute where systemd has no growing waits (Debian 12)."""
    if systemd < _STEPS_SINCE:
        return ["Restart=on-failure", "RestartSec=60"]
    return ["Restart=on-failure", "RestartSec=5", "RestartSteps=7", "RestartMaxDelaySec=600"]


def quoted(word: str) -> str:
    """A word of a command line as systemd reads it; ``$NAME`` alone stays a variable, split at blanks."""
    if re.fullmatch(r"[\w./:=@+-]+|\$\w+", word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
