"""The unit file: systemd itself reads it; and the datagrams of sd_notify."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess

import pytest

from edgefl.process.notify import Notify
from edgefl.process.service_unit import NO_RESTART, Service, quoted, unit_text

COMMAND = ["/bin/sh", "-c", "exec sleep 100%", "$EDGEFL_RUN_OPTIONS"]
SYSTEM = Service(
    "edgefl-agent",
    "EdgeFL agent",
    COMMAND,
    "/etc/edgefl/agent.env",
    "edgefl-agent install",
    user="root",
    groups=["video", "render"],
    watchdog_s=120,
    memory_bytes=2**30,
    devices=["PrivateDevices=yes"],
)
PERSONAL = SYSTEM._replace(user="", groups=(), watchdog_s=0, memory_bytes=None, devices=())


def systemd_says(text: str, folder) -> str:
    """What systemd's own check finds wrong with a unit; it is required: CI installs systemd where it is missing."""
    assert shutil.which("systemd-analyze"), "apt-get install systemd (.ci/run does)"
    file = folder / "edgefl-agent.service"
    file.write_text(text)
    (folder / "runtime").mkdir(exist_ok=True)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder / "runtime")}
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, env=environment)
    return done.stderr + done.stdout


@pytest.mark.parametrize("service", [SYSTEM, PERSONAL], ids=["system", "personal"])
def test_systemd_finds_nothing_wrong(service, tmp_path):
    assert systemd_says(unit_text(service, 252), tmp_path) == ""


def test_systemd_would_say_what_is_wrong(tmp_path):
    assert "NoNewPrivilege" in systemd_says(unit_text(SYSTEM, 252).replace("Privileges=", "Privilege="), tmp_path)


def lines(service: Service, systemd: int = 252) -> dict[str, str]:
    return dict(line.split("=", 1) for line in unit_text(service, systemd).splitlines() if "=" in line)


def test_it_backs_off_as_the_systemd_can_and_never_gives_up():
    old, new = lines(SYSTEM, 252), lines(SYSTEM, 254)
    assert (old["RestartSec"], new["RestartSec"], new["RestartMaxDelaySec"]) == ("60", "5", "600")
    assert "RestartSteps" not in old
    assert old["StartLimitIntervalSec"] == new["StartLimitIntervalSec"] == "0"


def test_it_stays_stopped_where_no_restart_mends():
    assert NO_RESTART == (2, 10, 19, 21)
    assert lines(SYSTEM)["RestartPreventExitStatus"] == "2 10 19 21"


def test_the_ceiling_is_the_budget_and_the_programs_own():
    own = 128 * 2**20
    assert int(lines(SYSTEM)["MemoryHigh"]) == 2**30 + own
    assert int(lines(SYSTEM)["MemoryMax"]) == round(1.1 * (2**30 + own))
    assert "MemoryMax" not in lines(PERSONAL)


def test_a_personal_service_has_no_account_and_no_sandbox():
    personal = lines(PERSONAL)
    assert not personal.keys() & {"User", "ProtectSystem", "StateDirectory", "WatchdogSec"}
    assert (personal["Type"], personal["WantedBy"]) == ("exec", "default.target")
    assert (lines(SYSTEM)["Type"], lines(SYSTEM)["WatchdogSec"]) == ("notify", "120")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/opt/edge-fl/bin/python3.11", "/opt/edge-fl/bin/python3.11"),
        ("$EDGEFL_RUN_OPTIONS", "$EDGEFL_RUN_OPTIONS"),
        ("a b", '"a b"'),
        ('5% of "$x" \\', '"5%% of \\"$$x\\" \\\\"'),
    ],
)
def test_words_of_a_command_line(word, expected):
    assert quoted(word) == expected


def test_a_datagram_holds_what_is_told_and_no_more(tmp_path):
    for name in (str(tmp_path / "notify"), f"\0edgefl-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(name)
            environment = {"NOTIFY_SOCKET": name.replace("\0", "@"), "WATCHDOG_USEC": "3000000", "HOME": "/"}
            notify = Notify(environment)
            assert environment == {"HOME": "/"}  # no child speaks for the service
            assert notify.watchdog_s == 3
            notify.tell("READY=1", "STATUS=run\nMAINPID=1")
            assert manager.recv(999) == b"READY=1\nSTATUS=run MAINPID=1"


def test_who_was_not_started_by_systemd_tells_nobody():
    assert Notify({}).watchdog_s == 0
    Notify({}).tell("READY=1")
    assert Notify({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}).watchdog_s == 0  # another process is watched
