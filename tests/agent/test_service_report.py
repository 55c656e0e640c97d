"""What `edgefl-agent status` says, for a person and for a program, with and without systemd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from identity_fixture import a_fleet, enrolled
from msgspec.structs import replace

from device_agent.runtime.service_status import Status
from device_agent.runtime.store import AgentStore, Owner
from device_agent.service_commands import service_here
from device_agent.service_report import Certificate, Report, lines, report_of
from device_agent.service_steps import place_of
from edgefl.errors import StoreError
from edgefl.records import Attempt

DAY = 86400
NOW = 1_800_000_000.0
TRAINING = "connected, training run r1, stage 2, round 3, attempt 1"
STATUS = Status(NOW - 5, TRAINING, True, NOW - 3 * DAY, NOW - 7300, "0.1.0", 1, "mqtts://b:8883",
                "/srv/data", {"": 40, "acc": 30})  # fmt: skip
MANAGED = {
    "ActiveState": "active", "SubState": "running", "UnitFileState": "enabled", "MainPID": "431", "NRestarts": "2",
    "Result": "success", "ExecMainStatus": "0", "MemoryCurrent": str(300 * 2**20),
    "ActiveEnterTimestamp": "Mon 2027-01-11 08:00:00 UTC",
}  # fmt: skip
REPORT = Report("cam-07", "lab", "/var/lib/edgefl-agent", True, False, {"edgefl": "0.1.0"}, MANAGED, "",
                Certificate(NOW - 60 * DAY, NOW + 30 * DAY, NOW - DAY), "", STATUS)  # fmt: skip


def said(report: Report) -> dict[str, str]:
    return dict(lines(report, NOW))


def test_a_running_service_in_a_persons_words():
    told = said(REPORT)
    assert told["service"] == (
        "active (running), since Mon 2027-01-11 08:00:00 UTC, process 431, 300 MiB with its trainer, starts at boot, "
        "restarted 2 times"
    )
    assert told["as noted"].endswith(", 5 s ago")  # everything of the note is as old as this
    assert told["doing"] == TRAINING
    assert "last run" not in told
    assert told["broker"].startswith("mqtts://b:8883, connected since ")
    assert told["broker"].endswith(", 3 days ago")
    assert told["last contact"].endswith(", 2 h ago")
    assert told["data"] == "/srv/data (all 40, acc 30)"
    assert told["identity"] == "valid until 2027-02-14, 30 days; renewal due now"
    assert told["device"] == "cam-07 of fleet lab"
    assert "restart" not in told


@pytest.mark.parametrize(
    ("change", "subject", "text"),
    [
        ({"running": False}, "agent", "does not run"),
        ({"hangs": True}, "agent", "hangs: no sign of life"),
        ({"running": False}, "broker", "mqtts://b:8883"),  # that it was connected says nothing now
        ({"service": {}, "no_service": "none: systemd does not run this machine"}, "service", "none: systemd does"),
        ({"service": {**MANAGED, "Result": "exit-code", "ExecMainStatus": "10"}}, "service", "exit-code, exit code 10"),
        ({"service": {**MANAGED, "MemoryCurrent": "[not set]"}}, "service", "process 431, starts at boot"),
        ({"service": {**MANAGED, "MemoryCurrent": str(2**64 - 1)}}, "service", "process 431, starts at boot"),
        (
            {"certificate": Certificate(0.0, NOW - DAY, NOW - 40 * DAY)},
            "identity",
            "expired on 2027-01-14: ask for a new token",
        ),
        (
            {"certificate": Certificate(0.0, NOW + 80 * DAY, NOW + DAY)},
            "identity",
            "80 days; renewal due on 2027-01-16",
        ),
        ({"certificate": None, "no_certificate": "none: not enrolled"}, "identity", "none: not enrolled"),
        ({"status": None}, "last contact", "no agent has run with this state yet"),
        ({"status": replace(STATUS, heard_at=0.0)}, "last contact", "no message since it was started"),
        ({"status": replace(STATUS, ended=Attempt("r0"), ended_at=NOW - 180)}, "last run", ", 3 min ago"),
        ({"status": replace(STATUS, samples={})}, "data", "/srv/data, not read yet"),
        ({"status": replace(STATUS, version="0.0.9")}, "restart", "what ran last is 0.0.9, installed is 0.1.0"),
    ],
)
def test_what_differs_is_said(change, subject, text):
    assert text in said(replace(REPORT, **change))[subject]


def agent(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "device_agent.cli", *arguments]
    known = {name: value for name, value in os.environ.items() if not name.startswith(("EDGEFL_", "XDG_"))}
    return subprocess.run(command, capture_output=True, text=True, env={**known, "HOME": str(home)})


def test_who_holds_the_state_runs(tmp_path):
    state = tmp_path / "state"
    asked = ("status", "--state", str(state), "--format", "json")
    assert "there is no such folder: " + str(state) in agent(*asked, home=tmp_path).stderr
    assert "give it here, too" in agent("status", home=tmp_path).stderr
    state.mkdir()
    assert (done := agent(*asked, home=tmp_path)).returncode == 1
    assert json.loads(done.stdout)["running"] is False
    store = AgentStore(state, Owner("d1", "default"))
    try:
        assert (done := agent(*asked, home=tmp_path)).returncode == 0
        assert json.loads(done.stdout)["running"] is True
        assert json.loads(done.stdout)["device"] == "d1"  # whose it is, not the machine's name
        seen = Status(at=time.time() - 601, connected=True)  # twice as long ago as it is written at least
        (state / "status.json").write_bytes(msgspec.json.encode(seen))
        assert (done := agent(*asked, home=tmp_path)).returncode == 1
        assert json.loads(done.stdout)["hangs"] is True
        (state / "status.json").write_bytes(msgspec.json.encode(replace(seen, at=seen.at + 60, connected=False)))
        assert agent(*asked, home=tmp_path).returncode == 0
    finally:
        store.close()


def test_times_are_of_this_machine(tmp_path):
    told = said(replace(REPORT, status=replace(STATUS, since=time.time())))
    assert time.strftime("%Y-%m-%d") in told["broker"]


def test_a_state_of_another_account_is_named_as_unreadable(tmp_path, monkeypatch):
    """The service's is its account's alone, and status is asked by whoever is logged in."""
    (tmp_path / "state" / "credentials").mkdir(parents=True)
    (tmp_path / "state" / "credentials" / "device.json").touch()
    (tmp_path / "state").chmod(0)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")  # the test's own may not be read either
    service_here("edgefl-agent", tmp_path)  # loads what the other user may not read
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(StoreError, match=f"cannot read {tmp_path / 'state'}: Permission denied"):
            service_here("edgefl-agent", tmp_path / "state")
    finally:
        os.seteuid(user)
        (tmp_path / "state").chmod(0o700)


def test_a_certificates_times_have_names_and_there_is_no_reason_for_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = enrolled(a_fleet(tmp_path / "fleet"), "d1", tmp_path / "state")
    report = report_of(place_of("edgefl-agent", system=False), "default", "d1", Path("state"), NOW)
    begin, end = own.valid()
    assert json.loads(msgspec.json.encode(report.certificate)) == {
        "not_before": begin, "not_after": end, "renewal_due": (begin + end) / 2
    }  # fmt: skip
    assert report.no_certificate == ""
    assert report.state == str(tmp_path / "state")
