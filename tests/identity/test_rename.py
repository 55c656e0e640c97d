"""Another name for a device: runs, reports and commands have it, while topics and certificate stay as they were."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from coordinator_fixture import a_plan
from identity_fixture import a_fleet, enrolled
from test_coordinator_runner import Scene, played
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.core.moves import Replaced
from coordinator.core.state import Device
from coordinator.runtime.fleet_auth import Guard
from coordinator.runtime.start import RunOptions, planned
from edgefl.errors import IdentityError
from edgefl.identity.fleet import Fleet, id_of
from edgefl.identity.groups import add_to_group
from edgefl.identity.issued_tokens import issue_token
from edgefl.identity.names import rename
from edgefl.identity.token import decode_token
from edgefl.protocol.messages import Hello
from edgefl.report import story
from edgefl.run_records import RunReport


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    made = a_fleet(tmp_path / "fleet")
    for name in ("cam-a", "cam-b"):
        enrolled(made, name, tmp_path / name)
    return made


def test_a_run_knows_a_renamed_device_by_its_new_name_alone(tmp_path: Path) -> None:
    """The device speaks on the topics of ``a`` throughout: offers, chunks and updates reach it and come from it."""
    reports: list[RunReport] = []

    async def script(scene: Scene) -> None:
        await scene.device("a", add=1.0)
        await scene.device("b", add=1.0)
        reports.append(await scene.coordinator(a_plan(names={"a": "door"})))
        await scene.until(lambda: all(d.drained.is_set() for d in scene.devices.values()))

    scene = played(tmp_path, script)
    (report,) = reports
    assert report.status == "done"
    assert all(row.participants == ("b", "door") for row in report.rounds)
    assert {row.device for row in report.assignments if row.status == "done"} == {"b", "door"}
    assert {event.device for event in scene.events} == {"", "b", "door"}
    assert story.renamed(report) == "Renamed: door, formerly a."
    assert len(scene.devices["a"].offers) == len(scene.devices["b"].offers) == 3


def test_plans_commands_and_groups_have_the_new_name(fleet: Fleet, tmp_path: Path) -> None:
    add_to_group(fleet, "night", ["cam-a", "cam-b"])
    done = CliRunner().invoke(app, ["rename", "cam-a", "door", "--identity", str(fleet.directory)])
    assert (done.exit_code, done.stdout) == (0, "cam-a is door from the next run on\n")
    assert fleet.groups() == {"night": ("cam-b", "door")}
    plan, _ = planned(RunOptions("demo", directory=tmp_path / "runs", identity=fleet.directory), lambda line: None)
    assert (plan.names, plan.groups) == ({"cam-a": "door"}, {"night": ("cam-b", "door")})
    token = decode_token(issue_token(fleet, "door", time.time(), replace=True))
    assert token.name == "cam-a", "the next machine has the topics of the one before"
    enrolled_again = fleet.devices()["cam-a"].successor("id", time.time())
    assert enrolled_again.shown == "door"
    rename(fleet, "door", "gate")
    assert id_of(fleet.devices(), "gate") == "cam-a"
    rename(fleet, "gate", "cam-a")
    assert fleet.devices()["cam-a"].shown == ""
    assert fleet.groups() == {"night": ("cam-a", "cam-b")}


def test_a_name_belongs_to_one_device_for_good(fleet: Fleet) -> None:
    rename(fleet, "cam-a", "gate")
    rename(fleet, "gate", "door")
    for taken in ("cam-a", "door", "gate", "coordinator"):
        with pytest.raises(IdentityError, match="is another's name"):
            rename(fleet, "cam-b", taken)
    with pytest.raises(IdentityError, match="is its name already"):
        rename(fleet, "cam-b", "cam-b")
    fleet.write_groups({"night": ("typo",)})
    with pytest.raises(IdentityError, match="in group 'night'"):
        rename(fleet, "cam-b", "typo")
    assert {id_of(fleet.devices(), name) for name in ("cam-a", "gate", "door")} == {"cam-a"}
    with pytest.raises(IdentityError, match="no device 'cam-9' is enrolled"):
        rename(fleet, "cam-9", "hall")
    for taken in ("door", "gate", "cam-a"):
        with pytest.raises(IdentityError):
            issue_token(fleet, taken, time.time())


def test_a_renamed_device_that_enrols_again_is_told_by_both_names(fleet: Fleet) -> None:
    rename(fleet, "cam-a", "door")
    guard, told = Guard(fleet), list[str]()
    guard.start(lambda *_: None, told.append)
    for name in ("cam-a", "cam-b", "cam-new"):
        guard._welcome(name)
    assert told == [
        "device door (cam-a at the broker) has enrolled",
        "device cam-b has enrolled",
        "device cam-new has enrolled",
    ]


def test_a_replaced_machine_of_a_renamed_device_is_told_to_the_run_by_the_runs_name(fleet: Fleet) -> None:
    rename(fleet, "cam-a", "door")
    with fleet.changing() as devices:
        devices["cam-a"] = devices["cam-a"].successor("id", time.time())
    known = {"door": Device(Hello("door")), "cam-b": Device(Hello("cam-b"))}
    (event,) = Guard(fleet).decided(known, {"cam-a": "door"})
    assert isinstance(event, Replaced)
    assert event.device == "door"
