"""Paths of the agent's service, and installation steps, to show or carry out."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import typer

from edgefl.errors import ServiceError, StoreError
from edgefl.storage.disk import store_errors, write_new

#: The account of the system that the service runs under.
ACCOUNT = "edgefl"
#: The command that writes units, as they say themselves.
WRITER = "edgefl-agent install"
#: Any of these in a directory says that it is an agent's state, which ``--purge`` may delete.
_STATE_FILES = ("identity.json", "credentials", "status.json")


def booted() -> bool:
    """True if systemd started this machine."""
    return Path("/run/systemd/system").is_dir()


class Place(NamedTuple):
    """Paths of a service. ``system``: the machine's, under ACCOUNT; else a user's own."""

    name: str
    system: bool
    unit: Path
    environment: Path
    state: Path | None  # None: where the agent itself keeps it by default

    def systemctl(self, *words: str) -> tuple[str, ...]:
        """Command line of systemctl for this service's manager."""
        return ("systemctl", *(() if self.system else ("--user",)), *words)

    def as_account(self, *words: str) -> tuple[str, ...]:
        """Command line run under the service's account."""
        return ("runuser", "-u", ACCOUNT, "--", *words) if self.system else words


def place_of(name: str, system: bool) -> Place:
    """Paths of a service by its name, which is checked first."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,60}", name):
        raise typer.BadParameter("letters, digits, - and _ alone, such as edgefl-agent", param_hint="--name")
    if system:
        unit = Path("/etc/systemd/system")
        return Place(name, True, unit / f"{name}.service", Path(f"/etc/edgefl/{name}.env"), Path("/var/lib") / name)
    own = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Place(name, False, own / "systemd/user" / f"{name}.service", own / "edgefl" / f"{name}.env", None)


def check_own(place: Place) -> None:
    """Raise ServiceError if the unit or the state directory is another program's."""
    other = ""
    with store_errors("read", place.unit):
        if place.unit.exists() and f"Written by `{WRITER}`" not in place.unit.read_text("utf-8", "replace"):
            other = f"{place.unit} was not written by `{WRITER}`"
    state = place.state
    if state is not None and not _is_state(state) and _owner(state) != ACCOUNT:
        other = f"{state} does not look like an agent's state"
    if other:
        raise ServiceError(other, remedy="Give this service a --name that nothing else on this machine has.")


def _is_state(path: Path) -> bool:
    """True for an agent's state directory, an empty or an absent one."""
    with store_errors("read", path):
        return not path.is_dir() or not any(path.iterdir()) or any((path / name).exists() for name in _STATE_FILES)


def _owner(path: Path) -> str:
    with store_errors("read", path):
        try:
            return path.owner()
        except KeyError:
            return ""


class Write(NamedTuple):
    """Step: write a file, unless identical already."""

    path: Path
    text: str
    mode: int = 0o644


class Run(NamedTuple):
    """Step: run a program. ``optional``: continue if it fails, with ``remedy`` as a remark."""

    command: Sequence[str]
    remedy: str = ServiceError.remedy
    optional: bool = False


class Remove(NamedTuple):
    """Step: delete a file, or an agent's state directory."""

    path: Path


Step = Write | Run | Remove


def shown(steps: Sequence[Step]) -> str:
    """The steps as shell commands, for a person."""
    lines = []
    for step in steps:
        if isinstance(step, Write):
            lines += [f"# {step.path} (mode {step.mode:04o}):", *(f"    {line}" for line in step.text.splitlines())]
        else:
            lines.append(f"$ {shlex.join(step.command if isinstance(step, Run) else ('rm', '-rf', str(step.path)))}")
    return "\n".join(lines)


def carry_out(steps: Sequence[Step], say: Callable[[str], None]) -> None:
    """Carry out the steps in order. Raises ServiceError or StoreError at the first failure."""
    for step in steps:
        if isinstance(step, Write):
            _write(step, say)
        elif isinstance(step, Remove):
            _remove(step.path, say)
        else:
            fault = run(step.command)
            if fault and not step.optional:
                raise ServiceError(fault, remedy=step.remedy)
            say(f"{fault}: {step.remedy}" if fault else f"ran   {shlex.join(step.command)}")


def run(command: Sequence[str]) -> str:
    """Run a program; "" or how it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return f"cannot run {command[0]}: {error.strerror}"
    last = " ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-3:])[:400]
    return f"`{shlex.join(command)}` failed ({done.returncode}): {last}" if done.returncode else ""


def _write(step: Write, say: Callable[[str], None]) -> None:
    with store_errors("write", step.path):
        step.path.parent.mkdir(parents=True, exist_ok=True)
        there = step.path.is_file() and stat.S_IMODE(step.path.stat().st_mode) == step.mode
        if there and step.path.read_text(encoding="utf-8", errors="replace") == step.text:
            say(f"kept  {step.path}")
            return
        write_new(step.path, step.text.encode(), mode=step.mode)
        step.path.chmod(step.mode)  # whatever the umask
    say(f"wrote {step.path}")


def _remove(path: Path, say: Callable[[str], None]) -> None:
    with store_errors("delete", path):
        if path.is_dir():
            if not _is_state(path):
                raise StoreError(f"{path} does not look like an agent's state", remedy="Delete it yourself.")
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    say(f"deleted {path}")
