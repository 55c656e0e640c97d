"""Doctor on memory, disk and data, made bad on purpose; the command's output; and the table of all findings."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from device_agent import device_checks as doctor
from device_agent.cli import _shown
from device_agent.device_checks import Device
from edgefl.errors import StoreError
from edgefl.findings import FINDINGS, found
from edgefl.resources import process_memory

Usage = namedtuple("Usage", "total used free")
ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else or to mount")

#: A check in a process of its own, which is somebody else's or has limits of its own.
CHECK = "import os, sys; from pathlib import Path; from device_agent.device_checks import *; print({}.id)"


def in_process(check: str, before: str = "", **options: object) -> str:
    """The id of what ``check`` finds; ``before``: shell commands in a mount namespace of their own."""
    command = [sys.executable, "-c", CHECK.format(check)]
    if before:
        command = ["unshare", "-m", "sh", "-ec", f'{before}; exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# State and disk


def test_a_state_directory_is_tried_and_not_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert doctor.state(tmp_path / "file").id == doctor.state(tmp_path / "file" / "deep").id == "state-no-directory"
    assert doctor.state(tmp_path / "new" / "deep").id in {"state-ok", "disk-little"}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@as_root
def test_a_directory_of_another_user_is_told() -> None:
    place = Path(os.path.realpath("/var/tmp")) / f"edgefl-{os.getpid()}"  # pytest's own directories are all private
    place.mkdir(mode=0o700)
    become = f"(os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})) and "
    try:
        for directory in (place, place / "inside"):
            assert in_process(f"({become}state(Path({str(directory)!r})))") == "state-permission"
    finally:
        place.rmdir()


@as_root
@pytest.mark.parametrize(
    ("options", "finding"), [("size=100k", "disk-none"), ("size=4m", "disk-none"), ("ro", "state-read-only")]
)
def test_a_full_and_a_read_only_file_system_are_told(options: str, finding: str, tmp_path: Path) -> None:
    assert in_process(f"state(Path({str(tmp_path)!r}))", f"mount -t tmpfs -o {options} none {tmp_path}") == finding


def test_a_limit_on_files_is_a_disk_that_is_full(tmp_path: Path) -> None:
    def little() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    assert in_process(f"state(Path({str(tmp_path)!r}))", preexec_fn=little) == "disk-none"


@pytest.mark.parametrize(("free", "finding"), [(0, "disk-none"), (100 * 2**20, "disk-little"), (2**31, "state-ok")])
def test_room_is_judged(free: int, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**32, 0, free))
    assert doctor.state(tmp_path).id == finding


def test_a_disk_that_refuses_for_another_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "open", broken)
    assert doctor.state(tmp_path).id == "state-broken"


def test_run_ends_where_the_state_can_not_be_written_in_doctors_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = doctor.state(tmp_path / "file")
    np.savez(tmp_path / "data.npz", acc=np.ones((8, 4, 2), np.float32), label=np.arange(8) % 2)
    given = ["--broker", "mqtt://127.0.0.1:9", "--data", str(tmp_path / "data.npz"), "--state", str(tmp_path / "file")]
    command = [sys.executable, "-m", "device_agent.cli", "run", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == StoreError.exit_code
    assert done.stderr == f"error: {check.detail}\nwhat to do: {check.remedy}\n"


@as_root
def test_run_says_that_the_disk_is_full_before_it_dials(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=4m none "$1"; "$0" -m device_agent.cli run --broker "$2" --data d.npz --state "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, tmp_path, "mqtt://127.0.0.1:9"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "finding=disk-none" in done.stderr
    assert "data source 'd.npz'" in done.stderr or "d.npz: there is no such file" in done.stderr


# Memory


def test_a_limit_of_the_kernel_below_the_budget_is_told() -> None:
    def little() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))

    assert in_process(f"memory({4 * 2**30})", preexec_fn=little) == "memory-beyond"
    assert doctor.memory(2**60).id == "memory-beyond"
    assert doctor.memory(1).id in {"memory-ok", "memory-little"}


def test_a_process_that_grows_is_stopped_here() -> None:
    check = doctor.ceiling()
    assert check.id in {"ceiling-ok", "ceiling-late"}, check


def test_a_ceiling_that_sees_nothing_or_may_not_limit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(process_memory.resource, "prlimit", forbidden)  # as a sandbox's filter does
    assert doctor.ceiling().id == "ceiling-late"
    monkeypatch.setattr(process_memory, "resident_bytes", lambda _: None)  # as where /proc shows no process
    assert doctor.ceiling().id == "ceiling-none"


def test_little_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.capabilities()
    poor = type(real)(memory_total_bytes=2**31, memory_free_bytes=2**28)
    monkeypatch.setattr(doctor, "capabilities", lambda: poor)
    assert doctor.memory().id == "memory-little"


# Data and sensors


def test_local_data_is_read_and_counted(tmp_path: Path) -> None:
    acc = np.ones((4, 5, 3), np.float32)
    np.savez(tmp_path / "good.npz", acc=acc, label=np.array([0, 1, 1, 0]))
    np.savez(tmp_path / "bare.npz", acc=acc)
    good, bare = (doctor.local_data(str(tmp_path / f"{name}.npz")) for name in ("good", "bare"))
    assert (good.id, good.detail) == ("data-ok", "4 samples (acc 4), labels 0, 1")
    assert (bare.id, bare.detail) == ("data-unlabelled", "4 samples (acc 4), none has a label")
    nothing = doctor.local_data(str(tmp_path / "nothere"))
    assert (nothing.id, "does not exist" in nothing.detail) == ("data-unusable", True)


def test_sensors_that_are_not_there_are_no_fault() -> None:
    checks = doctor.sensors("cpu")
    assert [check.name for check in checks] == ["energy", "temperature"]
    assert {check.status for check in checks} <= {"ok", "warn"}
    assert {check.id for check in checks} <= {"energy-ok", "energy-none", "temperature-ok", "temperature-none"}


# The command


def test_a_check_that_fails_itself_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("no /proc here")

    for name in ("memory", "ceiling", "sensors"):
        monkeypatch.setattr(doctor, name, broken)
    monkeypatch.setattr(doctor.library_checks, "torch", lambda *_, **__: doctor.well("torch", ""))
    monkeypatch.setattr(doctor.library_checks, "runtimes", list)
    checks = doctor.examine(Device())
    failed = [check.detail for check in checks if check.id == "doctor-failed"]
    assert failed[0] == "memory: RuntimeError: no /proc here"
    names = [check.name for check in checks if check.id != "doctor-failed"]
    assert names[:4] == ["clock", "identity", "python", "torch"]
    assert ("identity-none", "warn") in {(check.id, check.status) for check in checks}  # `run` would refuse


def test_each_line_fits_the_terminal_and_has_the_id_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = _shown(found("broker-chunks", "chunks do not pass, " * 8, fits=49_152))
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("warn  broker       chunks do not pass")
    assert "[broker-chunks]" in text
    assert "-> Raise the broker's limit" in text


# The table


def test_every_finding_is_made_by_a_test() -> None:
    files = [
        *HERE.glob("test_*doctor*.py"),
        HERE / "test_board.py",
        ROOT / "tests/transport/test_transport_failures.py",
    ]
    texts = "".join(path.read_text() for path in files)
    assert [name for name in FINDINGS if f'"{name}"' not in texts] == []


def test_every_finding_has_its_own_words_and_is_in_the_docs() -> None:
    page = (ROOT / "docs/doctor.md").read_text()
    assert len({fault.means for fault in FINDINGS.values()}) == len(FINDINGS) > 40
    for name, fault in FINDINGS.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+", name)
        assert f"| `{name}` | {fault.status} | {fault.means} |" in page


def test_the_command_tells_ids_as_json_and_fails_with_what_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "device_agent.cli", "doctor", "--format", "json", "--state", str(tmp_path)]
    done = subprocess.run([*command, "--broker", "mqtt://127.0.0.1:9"], capture_output=True, text=True, timeout=60)
    said = {check["name"]: check for check in json.loads(done.stdout)}
    assert list(said) == [
        *("clock", "broker", "python", "torch", "onnxruntime", "memory", "ceiling", "state", "energy", "temperature")
    ]
    assert (done.returncode, said["broker"]["id"]) == (1, "broker-absent")
    assert all(check["remedy"] for check in said.values() if check["status"] != "ok")
