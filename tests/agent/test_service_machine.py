"""The agent as a service of a real systemd: in a container with a root, a /tmp and a network of its own.

Slow, as root, with systemd-nspawn and debootstrap: EDGEFL_MACHINE names a directory (not in /tmp) where a Debian is
made once, and `make wheels` has to have been run. A systemd must never be started in this file system: it cleans /tmp.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINE = os.environ.get("EDGEFL_MACHINE", "")
WHEELS = ROOT / "dist" / "x86_64-3.11"
AGENT = "/opt/edgefl/bin/edgefl-agent"
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv,mosquitto,procps"
DATA = "/srv/my data"  # with a blank, which systemd splits at

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not MACHINE, reason="EDGEFL_MACHINE names no directory for a Debian (docs/install.md)"),
]


class Machine:
    """A booted container. ``do`` runs a command in it, as root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        command = ["systemd-nspawn", "-q", "-D", str(root), "--register=no", "--keep-unit", "--private-network"]
        command += ["--hostname=box", "--console=read-only", "--boot"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._first = 0
        until(self._booted, 120)

    def _booted(self) -> bool:
        assert self._process.poll() is None, "systemd-nspawn ended"
        if not self._first:
            children = psutil.Process(self._process.pid).children()
            self._first = children[0].pid if children else 0
        return bool(self._first) and self.do("systemctl", "is-active", "multi-user.target").stdout.strip() == "active"

    def do(self, *command: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        """With the rights, files and network of the container alone."""
        enter = ["nsenter", "-t", str(self._first), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w"]
        clean = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*enter, *command], capture_output=True, text=True, env=clean, timeout=900)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def show(self, name: str, unit: str = "edgefl-agent") -> str:
        """A property of a unit."""
        return self.do("systemctl", "show", unit, "-P", name).stdout.strip()

    def off(self) -> None:
        """As by the power switch."""
        if self._process.poll() is None and self._first:
            os.kill(self._first, signal.SIGKILL)
        self._process.wait(60)


def until(holds, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, holds
        time.sleep(0.2)


@pytest.fixture(scope="module")
def debian() -> Path:
    """A Debian with the agent installed from a folder of wheels, without a network."""
    root = Path(MACHINE)
    assert not root.is_relative_to("/tmp"), "a /tmp is cleaned"
    if not (root / "bin").exists():
        mirror = "http://deb.debian.org/debian"
        make = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root), mirror]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    for old in ("opt/edgefl", "srv/wheels", "srv/my data", "var/lib/edgefl-agent"):
        shutil.rmtree(root / old, ignore_errors=True)
    shutil.copytree(WHEELS, root / "srv" / "wheels")
    (root / "srv" / "my data").mkdir()
    (root / "srv" / "my data" / "manifest.jsonl").write_text('{"acc": [[1, 2, 3], [4, 5, 6]], "label": "rest"}\n' * 3)
    (root / "etc" / "mosquitto" / "conf.d" / "test.conf").write_text("listener 1883 127.0.0.1\nallow_anonymous true\n")
    return root


@pytest.fixture
def machine(debian: Path) -> Iterator[list[Machine]]:
    """Filled by the test; what runs at its end is switched off."""
    machines = [Machine(debian)]
    yield machines
    for one in machines:
        one.off()


def status(machine: Machine) -> dict:
    return json.loads(machine.do(AGENT, "status", "--format", "json").stdout)


def test_installed_from_a_folder_it_survives_what_happens_to_devices(machine: list[Machine], debian: Path):
    box = machine[0]
    box.do("systemctl", "stop", "mosquitto")
    box.do("python3", "-m", "venv", "/opt/edgefl", check=True)
    pip = ["/opt/edgefl/bin/python", "-m", "pip", "install", "--no-index", "--find-links", "/srv/wheels"]
    box.do(*pip, "edgefl-toolkit[train]", check=True)

    # Installed while the broker is away: it starts, and says that it waits. Twice is as once.
    options = ["--data", DATA, "--device", "d1", "--broker", "mqtt://127.0.0.1:1883"]
    options += ["--set", "budget.memory_bytes='2 GiB'"]
    assert "quotes" in box.do(AGENT, "install", *options).stderr
    options[-1] = "budget.memory_bytes=2 GiB"
    first = box.do(AGENT, "install", *options, check=True)
    second = box.do(AGENT, "install", *options, check=True)
    assert "wrote /etc/systemd/system/edgefl-agent.service" in first.stderr
    assert "kept  /etc/systemd/system/edgefl-agent.service" in second.stderr
    assert (box.show("ActiveState"), box.show("User"), box.show("NRestarts")) == ("active", "edgefl", "0")
    assert box.show("StatusText").startswith("broker away")
    assert int(box.show("MemoryMax")) == round(1.1 * (2 * 2**30 + 128 * 2**20))
    assert (debian / "var/lib/edgefl-agent").stat().st_mode & 0o777 == 0o700

    # The broker comes: it connects. What it sees of the machine is what its sandbox leaves.
    box.do("systemctl", "start", "mosquitto", check=True)
    until(lambda: status(box)["status"]["connected"], 90)
    until(lambda: status(box)["status"]["text"] == "connected, waiting for the next run", 90)
    assert status(box)["status"]["samples"] == {"": 3, "acc": 3}
    text = box.do(AGENT, "status", check=True).stdout
    assert "starts at boot" in text
    assert "NoNewPrivs:\t1" in box.do("cat", f"/proc/{box.show('MainPID')}/status").stdout

    # It hangs: the watchdog ends it, and it is started again. (In seconds here, by a drop-in.)
    drop = debian / "etc/systemd/system/edgefl-agent.service.d"
    drop.mkdir(exist_ok=True)
    (drop / "quick.conf").write_text("[Service]\nWatchdogSec=6\nRestartSec=1\n")
    box.do("systemctl", "daemon-reload", check=True)
    box.do("systemctl", "restart", "edgefl-agent", check=True)
    hung = box.show("MainPID")
    box.do("kill", "-STOP", hung, check=True)
    until(lambda: box.show("NRestarts") == "1", 60)
    until(lambda: box.show("ActiveState") == "active", 60)
    assert box.show("MainPID") != hung
    assert "Watchdog timeout" in box.do("journalctl", "-u", "edgefl-agent", "--no-pager").stdout

    # It is killed: again. The machine loses power: after the boot it runs, and knows who it is.
    box.do("kill", "-KILL", box.show("MainPID"), check=True)
    until(lambda: box.show("NRestarts") == "2" and box.show("ActiveState") == "active", 60)
    box.off()
    box = Machine(debian)
    machine.append(box)
    until(lambda: box.show("ActiveState") == "active", 60)
    until(lambda: status(box)["status"]["connected"], 90)

    # What no restart mends is left stopped, with the reason in the log.
    environment = debian / "etc/edgefl/edgefl-agent.env"
    options_there = environment.read_text()
    environment.write_text(options_there.replace("--device d1", "--device d1 --profile no-such"))
    box.do("systemctl", "restart", "edgefl-agent")
    until(lambda: box.show("ActiveState") == "failed", 60)
    time.sleep(3)  # longer than RestartSec
    assert (box.show("ActiveState"), box.show("ExecMainStatus")) == ("failed", "10")
    assert "no-such" in box.do("journalctl", "-u", "edgefl-agent", "-n", "20", "--no-pager").stdout
    assert "exit code 10" in box.do(AGENT, "status").stdout
    environment.write_text(options_there)

    # Removed: the state stays; purged: it does not.
    box.do(AGENT, "uninstall", check=True)
    assert box.show("LoadState") == "not-found"
    assert (debian / "var/lib/edgefl-agent/identity.json").exists()
    box.do(AGENT, "uninstall", "--purge", check=True)
    assert not (debian / "var/lib/edgefl-agent").exists()
    assert not environment.exists()
    shutil.rmtree(drop)
