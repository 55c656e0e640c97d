"""What doctor finds of a device: identity, clock, its broker dialled as the agent does, disk, data, onnxruntime."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from identity_fixture import a_fleet, enrolled
from transport_fixtures import mosquitto_wanted, run

from device_agent import device_checks as doctor
from edgefl.export import session
from edgefl.identity.fleet import fleet_broker

Usage = namedtuple("Usage", "total used free")
DAY = 86_400.0


def found(checks: list[doctor.Check]) -> dict[str, doctor.Check]:
    return {check.name: check for check in checks}


# Identity and clock


def test_an_identity_is_told_with_name_fleet_broker_and_dates(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path / "fleet")
    own = enrolled(fleet, "cam-01", tmp_path / "state")
    credentials, checks = doctor.identity(tmp_path / "state")
    (check,) = checks
    assert credentials is not None
    assert check.status == "ok"
    for words in ("'cam-01'", "'default'", own.record.broker, time.strftime("%Y-%m-%d", time.gmtime(own.valid()[1]))):
        assert words in check.detail
    assert doctor.identity(tmp_path / "other") == (None, [])


def test_an_identity_that_has_expired_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = enrolled(a_fleet(tmp_path / "fleet"), "cam-01", tmp_path / "state")
    later = own.valid()[1] + DAY
    monkeypatch.setattr(doctor.time, "time", lambda: later)
    (check,) = doctor.identity(tmp_path / "state")[1]
    assert (check.status, check.detail.endswith("expired")) == ("fail", True)
    assert "edgefl-agent enroll TOKEN" in check.remedy


def test_a_key_that_others_can_read_fails(tmp_path: Path) -> None:
    own = enrolled(a_fleet(tmp_path / "fleet"), "cam-01", tmp_path / "state")
    own.certificate.chmod(0o644)
    credentials, (check,) = doctor.identity(tmp_path / "state")
    assert (credentials, check.status) == (None, "fail")


def test_a_clock_before_the_certificate_or_before_this_program_fails() -> None:
    now = time.time()
    assert doctor.clock(now).status == "ok"
    assert doctor.clock(now, now - DAY).status == "ok"
    behind = doctor.clock(now - 3 * DAY, now)
    assert behind.status == "fail"
    assert "before this device's certificate begins" in behind.detail
    assert "timedatectl" in behind.remedy
    assert doctor.clock(0.0).status == "fail"


@pytest.mark.skipif(not mosquitto_wanted(), reason="the fleet's broker is mosquitto; it is not installed")
def test_the_broker_of_an_enrolled_device_is_dialled_with_its_identity(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path / "fleet")
    own = enrolled(fleet, "cam-01", tmp_path / "state")
    broker = fleet_broker(fleet)

    async def scene() -> None:
        await broker.start()
        try:
            given = [sys.executable, "-m", "device_agent.cli", "doctor", "--state", str(tmp_path / "state")]
            command = [*given, "--format", "json"]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
            said = {check["name"]: check for check in json.loads(done.stdout)}
            assert (said["identity"]["status"], said["broker"]["status"]) == ("ok", "ok"), done.stdout
            without = await asyncio.to_thread(doctor.reach, own.record.broker)
            assert without.status == "fail"
        finally:
            await broker.stop()

    run(scene(), 60)


# Disk and data


@pytest.mark.parametrize(("free", "status"), [(0, "fail"), (2**20, "fail"), (100 * 2**20, "warn"), (2**31, "ok")])
def test_no_disk_fails_and_little_warns(
    free: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**32, 0, free))
    assert doctor.disk(tmp_path).status == status


def test_local_data_is_read_and_counted(tmp_path: Path) -> None:
    acc = np.ones((4, 5, 3), np.float32)
    np.savez(tmp_path / "good.npz", acc=acc, label=np.array([0, 1, 1, 0]))
    np.savez(tmp_path / "bare.npz", acc=acc)
    good, bare = (doctor.local_data(str(tmp_path / f"{name}.npz")) for name in ("good", "bare"))
    assert (good.status, good.detail) == ("ok", "4 samples (acc 4), labels 0, 1")
    assert (bare.status, bare.detail) == ("warn", "4 samples (acc 4), none has a label")
    nothing = doctor.local_data(str(tmp_path / "nothere"))
    assert (nothing.status, "does not exist" in nothing.detail) == ("fail", True)


# onnxruntime


def test_two_onnxruntimes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}
    monkeypatch.setattr(session, "installed", lambda: both)
    assert "are both installed" in session._remedy("cuda")
    (check,) = doctor.runtimes()
    assert check.status == "warn"
    assert check.detail.startswith("onnxruntime 1.32.0 and onnxruntime-gpu 1.31.1 are both installed")
    assert "pip uninstall onnxruntime onnxruntime-gpu" in check.remedy


@pytest.mark.parametrize(
    ("name", "providers", "status"),
    [
        ("onnxruntime", "CPUExecutionProvider", "ok"),
        ("onnxruntime-gpu", "CUDAExecutionProvider, CPUExecutionProvider", "ok"),
        ("onnxruntime-gpu", "AzureExecutionProvider, CPUExecutionProvider", "warn"),
    ],
)
def test_a_runtime_that_lacks_what_it_was_built_for_is_told(
    name: str, providers: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "installed", lambda: {name: "1.31.1"})
    assert "install onnxruntime-gpu" not in session._remedy("cuda")
    done = subprocess.CompletedProcess([], 0, providers + "\n", "")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
    (check,) = doctor.runtimes()
    assert (check.status, providers in check.detail) == (status, True)


def test_without_onnxruntime_there_is_no_such_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "installed", dict)
    assert doctor.runtimes() == []
