"""Upgrade of this environment to another release, with a rollback of all packages until it is tested."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from device_agent.service_steps import run
from edgefl.errors import DISTRIBUTION, ServiceError, StoreError
from edgefl.storage.disk import store_errors

#: Checks of the doctor that another release has no part in.
_ELSEWHERE = frozenset({"broker", "clock", "identity", "memory"})


def find_wheel(given: Path) -> Path:
    """The wheel at ``given``, or this project's wheel in that folder. Raises StoreError."""
    pattern = f"{DISTRIBUTION.replace('-', '_')}-*.whl"
    there = [given] if given.is_file() else sorted(given.glob(pattern))
    if len(there) != 1:
        remedy = "Name one of them." if there else "`make wheel` builds it; `make wheels` brings what it needs along."
        raise StoreError(f"{given} holds {len(there)} files {pattern}", remedy=remedy)
    return there[0]


class Upgrade:
    """One upgrade. ``doctor``: check command, under the service's account; ``restart``: returns "" or its failure."""

    def __init__(self, doctor: Sequence[str], restart: Callable[[], str], say: Callable[[str], None]) -> None:
        self._doctor, self._restart, self._say = doctor, restart, say
        if sys.prefix == sys.base_prefix:
            remedy = "Make one (python3 -m venv /opt/edgefl), install there, then `edgefl-agent install` again."
            raise ServiceError("this Python is the system's, not an environment that could be put back", remedy=remedy)
        self._packages = Path(sysconfig.get_path("purelib"))
        self._saved = self._packages.with_name(f"{self._packages.name}.before")  # whole, wherever it is there
        self._part = self._packages.with_name(f"{self._packages.name}.part")  # may be deleted at any time

    def install(self, wheel: Path, online: bool) -> None:
        """Install, check and restart; on any fault roll back. Raises ServiceError with the fault."""
        if self._saved.exists():
            self._say("an earlier upgrade was cut off: the packages of before are put back first")
            self._put_back()
        failed_before, _ = self._failing()
        with store_errors("copy", self._packages):  # as hard links: pip replaces files instead of writing to them
            self._clear()
            shutil.copytree(self._packages, self._part, symlinks=True, copy_function=os.link)
            os.sync()  # before its name says that it is whole
            self._part.rename(self._saved)
        hint = "What it needs must lie beside the wheel (make wheels), or come by --online. "
        fault = run(_pip(wheel, online))
        if not fault:
            hint, fault = "", self._tried(failed_before)
        if not fault:
            self._say("the new release passes its checks; starting the service again")
            fault = self._restart()
        if fault:
            self._say("going back to the packages of before")
            self._put_back()
            again = self._restart()
            raise ServiceError(f"not upgraded: {fault}", remedy=f"{hint}The old release is back. {again}".strip())
        with store_errors("delete", self._saved):
            self._saved.rename(self._part)
            self._clear()

    def _tried(self, failed_before: frozenset[str]) -> str:
        if fault := run([sys.executable, "-m", "device_agent.cli", "--version"]):
            return fault
        failing, fault = self._failing()
        worse = ", ".join(sorted(failing - failed_before - _ELSEWHERE))
        return fault or (f"`edgefl-agent doctor` now fails: {worse}" if worse else "")

    def _failing(self) -> tuple[frozenset[str], str]:
        """(names of failing doctor checks, error text if doctor itself fails)."""
        done = subprocess.run([*self._doctor, "--format", "json"], capture_output=True, check=False)
        try:
            checks = msgspec.json.decode(done.stdout, type=list[dict[str, str]])
        except msgspec.MsgspecError:
            return frozenset(), f"`edgefl-agent doctor`: {done.stderr.decode(errors='replace').strip()[-300:]}"
        return frozenset(check["name"] for check in checks if check["status"] == "fail"), ""

    def _put_back(self) -> None:
        with store_errors("put back", self._packages):
            self._clear()
            if self._packages.exists():
                self._packages.rename(self._part)
            self._saved.rename(self._packages)
            self._clear()

    def _clear(self) -> None:
        if self._part.exists():
            shutil.rmtree(self._part)


def _pip(wheel: Path, online: bool) -> list[str]:
    """pip command that installs the wheel and only its unmet requirements: the vendor's torch stays."""
    extra = "[train]" if importlib.util.find_spec("torch") else ""
    index = [] if online else ["--no-index"]
    source = f"{DISTRIBUTION}{extra} @ {wheel.resolve().as_uri()}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--find-links", str(wheel.parent)]
    return [*command, *index, source]
