"""Plan of an upgrade for the operator to run: commands or an Ansible playbook. No code travels with a run.

The release of a device is what it reports: text that is no version counts as unknown, and all is quoted for the shell.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer

from edgefl.api.runs import read_runs
from edgefl.cli.options import show
from edgefl.console import safe_text
from edgefl.errors import DISTRIBUTION, ConfigError, Problem

#: The agent's program where docs/install.md puts it, and where a wheel is copied to.
AGENT, PLACE = "/opt/edgefl/bin/edgefl-agent", "/tmp"  # noqa: S108  # the wheel's owner is the account that logs in
#: A release as Python writes it (PEP 440); the longest of ours has 12 characters.
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!]{0,39}")
_WHEEL = re.compile(rf"{DISTRIBUTION.replace('-', '_')}-([^-]+)-py3-none-any\.whl")


#: Ansible's own names of hosts.
_PATTERNS = frozenset({"all", "ungrouped", "localhost"})


class Plan(NamedTuple):
    """Devices to upgrade with their releases, "" for unknown, in waves; those that have the release, and the wheel."""

    version: str
    wheel: str
    waves: tuple[dict[str, str], ...]
    done: tuple[str, ...]


def wheel_of(version: str) -> str:
    """File name of a release's wheel."""
    return f"{DISTRIBUTION.replace('-', '_')}-{version}-py3-none-any.whl"


def planned(releases: Mapping[str, str], to: str, sure: Collection[str]) -> Plan:
    """The plan: one device first, one whose release is known if there is one, then the rest. Raises ConfigError.

    ``sure``: devices that say their release now. Of the others it is of an earlier run, perhaps of another fleet: they
    are not left out by it.
    """
    named = _WHEEL.fullmatch(Path(to).name)
    version, wheel = (named[1], to) if named else (to, f"dist/{wheel_of(to)}")
    if not _VERSION.fullmatch(version):
        text = f"{to!r} is neither a version, such as 0.2.0, nor a wheel {wheel_of('VERSION')}"
        raise ConfigError("upgrade-plan", [Problem("--to", text)], remedy="`make wheel` builds one into dist.")
    known = {name: said if _VERSION.fullmatch(said) else "" for name, said in sorted(releases.items())}
    known |= {name: "" for name, said in known.items() if said == version and name not in sure}
    left = {name: said for name, said in known.items() if said != version}
    first = next((name for name, said in left.items() if said), next(iter(left), ""))
    rest = {name: said for name, said in left.items() if name != first}
    waves = tuple(wave for wave in ({first: left[first]} if first else {}, rest) if wave)
    return Plan(version, wheel, waves, tuple(name for name in known if name not in left))


def commands(plan: Plan) -> list[str]:
    """Lines of a shell script; it ends at the first device that does not take the release, and has gone back."""
    lines = ["set -eu  # `edgefl-agent upgrade` goes back by itself and fails where the new release does not start"]
    for number, wave in enumerate(plan.waves, start=1):
        lines += ["", f"# wave {number}: {len(wave)} device{'' if len(wave) == 1 else 's'}"]
        for device, release in wave.items():
            lines += [f"# {device} has {release or 'an unknown release'}", *_upgrade(device, plan.wheel)]
    back = [
        line for wave in plan.waves for device, release in wave.items() if release for line in _back(device, release)
    ]
    return [*lines, "", "# back to the releases of before, by hand:", *(f"# {line}" for line in back)]


def _upgrade(device: str, wheel: str) -> list[str]:
    there = f"{PLACE}/{Path(wheel).name}"
    remote = shlex.join(["sudo", AGENT, "upgrade", there])
    return [shlex.join(["scp", wheel, f"{device}:{PLACE}/"]), shlex.join(["ssh", device, remote])]


def _back(device: str, release: str) -> list[str]:
    return _upgrade(device, f"dist/{wheel_of(release)}")


def playbook(plan: Plan) -> str:
    """The same as an Ansible playbook; `--tags rollback` goes back to the releases of before."""
    import msgspec

    if meant := sorted(_PATTERNS & {name for wave in plan.waves for name in wave}):
        text = f"{meant[0]!r} means other machines to Ansible than the device"
        raise ConfigError(
            "upgrade-plan", [Problem("--format playbook", text)], remedy="Leave it out, for the commands."
        )
    plays = [_play(f"wave {number}", [*wave], plan.wheel) for number, wave in enumerate(plan.waves, start=1)]
    before = {release for wave in plan.waves for release in wave.values() if release}
    for release in sorted(before):
        devices = [name for wave in plan.waves for name, said in wave.items() if said == release]
        play = _play(f"back to {release}", devices, f"dist/{wheel_of(release)}")
        # What a device says it had may be no release at all: that stops no other's way back.
        plays.append({**play, "tags": ["never", "rollback"], "any_errors_fatal": False})
    return msgspec.yaml.encode(plays).decode()


def _play(what: str, devices: Sequence[str], wheel: str) -> dict[str, Any]:
    there = f"{PLACE}/{Path(wheel).name}"
    return {
        "name": f"EdgeFL {Path(wheel).name}: {what}",
        "hosts": ",".join(devices),
        "become": True,
        "gather_facts": False,
        "any_errors_fatal": True,
        "tasks": [
            {"name": "copy the wheel", "ansible.builtin.copy": {"src": wheel, "dest": there}},
            {"name": "upgrade, or go back", "ansible.builtin.command": {"argv": [AGENT, "upgrade", there]}},
        ],
    }


def upgrade_plan(directory: Path, group: str, to: str, runs: Path, form: str) -> None:
    """Print the plan for a group of the fleet's devices, by their releases now, else in their newest run."""
    import asyncio

    from edgefl.cli.connected import connected
    from edgefl.errors import BrokerError
    from edgefl.identity.fleet import Fleet

    fleet, now = Fleet(directory), time.time()
    if group not in (groups := fleet.groups()):
        text = f"no group {group!r}; there are: {', '.join(groups) or 'none'}"
        remedy = "Make one: edgefl-coordinator group add GROUP DEVICE..."
        raise ConfigError("upgrade-plan", [Problem("GROUP", text)], remedy=remedy)
    valid = {name for name, one in fleet.devices().items() if one.is_valid(now)}
    releases = {shown: "" for name, shown in fleet.shown().items() if name in valid and shown in groups[group]}
    for report in reversed(read_runs(runs)[0]):  # oldest first
        rows = [row for row in report.devices if row.agent_version and row.device in releases]
        releases |= {row.device: row.agent_version for row in rows}
    try:
        answers = asyncio.run(connected(fleet))
    except BrokerError as error:
        typer.echo(f"releases are those of the newest runs: {error.message}", err=True)
        answers = {}
    shown = fleet.shown()
    now_said = {shown[name]: one.release for name, one in answers.items() if one.release and shown[name] in releases}
    plan = planned(releases | now_said, to, now_said)
    if plan.done:
        typer.echo(
            f"{', '.join(plan.done)} {'has' if len(plan.done) == 1 else 'have'} {plan.version} already", err=True
        )
    if form == "json":
        show(form, plan._asdict())
    elif form == "playbook":
        typer.echo(playbook(plan), nl=False)
    else:
        typer.echo("\n".join(map(safe_text, commands(plan))) if plan.waves else "nothing is left to upgrade")
