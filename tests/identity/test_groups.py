"""Groups of devices: kept by the operator, named in run files, recorded with the run, totalled in its report."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import pytest
from coordinator_fixture import a_plan
from identity_fixture import a_fleet, enrolled
from test_coordinator_runner import Scene, played
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.runtime.start import RunOptions, planned
from edgefl.cli.main import main
from edgefl.config.settings import FleetDevice, MissingConfig, RunConfig
from edgefl.errors import ConfigError, IdentityError
from edgefl.groups import groups_of, members
from edgefl.identity.fleet import Fleet
from edgefl.identity.groups import add_to_group, remove_from_group
from edgefl.identity.issued_tokens import issue_token, issue_tokens
from edgefl.plan.compile import ungrouped
from edgefl.plan.job import RoundPolicy
from edgefl.report import tables
from edgefl.run_records import RunReport

GROUPS = {"night": ("a", "b"), "roof": ("b",)}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    made = a_fleet(tmp_path / "fleet")
    for name in ("cam-a", "cam-b", "cam-c"):
        enrolled(made, name, tmp_path / name)
    return made


def test_a_group_is_its_devices_and_a_name_is_one() -> None:
    assert members(["group:night", "c"], GROUPS) == {"a", "b", "c"}
    assert members(["group:nobody"], GROUPS) == frozenset()
    assert [groups_of(name, GROUPS) for name in "abc"] == [("night",), ("night", "roof"), ()]


def test_groups_are_added_to_listed_and_removed(fleet: Fleet) -> None:
    def says(*words: str) -> str:
        done = CliRunner().invoke(app, ["group", *words, "--identity", str(fleet.directory)])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert says("add", "night", "cam-b", "cam-a") == "night: cam-a, cam-b\n"
    says("add", "roof", "cam-c", "cam-b")
    assert says("list") == "night: cam-a, cam-b\nroof: cam-b, cam-c\n"
    assert says("remove", "night", "cam-a") == "night: cam-b\n"
    assert says("remove", "night") == "night: no device\n"
    assert says("list") == "roof: cam-b, cam-c\n"


def test_a_device_that_nobody_knows_is_in_no_group(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no device 'cam-9' is enrolled or has a token") as caught:
        add_to_group(fleet, "night", ["cam-a", "cam-9"])
    assert "There are: cam-a, cam-b, cam-c." in caught.value.remedy
    file = tmp_path / "names.txt"
    file.write_text("\n".join(f"dev-{n:02d}" for n in range(47)))
    issue_tokens(fleet, file, tmp_path / "tokens", time.time())
    with pytest.raises(IdentityError) as caught:
        add_to_group(fleet, "night", ["typo"])
    assert caught.value.remedy.endswith("dev-15, dev-16 and 30 more.")
    assert fleet.groups() == {}
    issue_token(fleet, "cam-9", time.time())
    add_to_group(fleet, "night", ["cam-9"])
    with pytest.raises(IdentityError, match="cam-a is not in group 'night'"):
        remove_from_group(fleet, "night", ["cam-a"])
    with pytest.raises(IdentityError, match="there is no group 'day'"):
        remove_from_group(fleet, "day")


def test_a_list_of_names_has_a_column_of_groups(fleet: Fleet, tmp_path: Path) -> None:
    add_to_group(fleet, "night", ["cam-a"])
    file = tmp_path / "names.csv"
    file.write_text("# of the new hall\n\nname,place,groups\ncam-1,hall,night; roof\ncam-2,door,\ncam-3,door,roof\n")
    issue_tokens(fleet, file, tmp_path / "tokens", time.time())
    assert fleet.groups() == {"night": ("cam-1", "cam-a"), "roof": ("cam-1", "cam-3")}
    file.write_text("name,groups\ncam-4,a/b\n")
    with pytest.raises(ConfigError, match="a/b"):
        issue_tokens(fleet, file, tmp_path / "more", time.time())
    assert "cam-4" not in str(fleet.groups())


def test_only_eligible_devices_train_and_the_report_has_the_groups_of_the_start(tmp_path: Path) -> None:
    reports: list[RunReport] = []
    policy = RoundPolicy(devices=1, join_s=2.0, deadline_s=20.0, eligible=("group:night",), excluded=("group:roof",))

    async def script(scene: Scene) -> None:
        for name in "bca":
            await scene.device(name)
        reports.append(await scene.coordinator(a_plan(policy=policy, groups=GROUPS)))
        await scene.until(lambda: all(d.drained.is_set() for d in scene.devices.values()))

    scene = played(tmp_path, script)
    (report,) = reports
    assert {row.device for row in report.assignments} == {"a"}
    assert [scene.devices[name].offers for name in "bc"] == [[], []]
    assert report.groups == GROUPS
    names, rows = list(tables.table(report, "groups").types), tables.table(report, "groups").rows
    assert {row[names.index("group")] for row in rows} == {"night"}, "no device of the run is on the roof"
    by_figure = {row[names.index("figure")]: row[names.index("measured")] for row in rows}
    whole = {row[1]: row[3] for row in tables.table(report, "totals").rows}
    assert by_figure == whole, "one device: the group's totals are the fleet's"
    devices = tables.table(report, "devices")
    assert devices.rows[0][list(devices.types).index("groups")] == "night"


def test_totals_of_a_group_are_its_devices_alone(tmp_path: Path) -> None:
    reports: list[RunReport] = []

    async def script(scene: Scene) -> None:
        for name in "ab":
            await scene.device(name)
        reports.append(await scene.coordinator(a_plan(groups=GROUPS)))

    played(tmp_path, script)
    rows = tables.table(reports[0], "groups").rows
    bytes_of = {row[1]: row[6] for row in rows if row[4] == "payload_bytes"}
    assert bytes_of["night"] == 2 * bytes_of["roof"] > 0
    assert {row[1]: row[2:4] for row in rows} == {"night": (2, 6), "roof": (1, 3)}


def test_an_unknown_group_is_refused_with_the_way_out() -> None:
    policy = RoundPolicy(eligible=("group:day", "a"))
    (problem,) = ungrouped(a_plan(policy=policy, groups=GROUPS))
    assert problem.path == "round.eligible"
    assert "no group 'day'; there are: night, roof" in problem.message
    assert "--identity" in problem.message
    (empty,) = ungrouped(a_plan(policy=RoundPolicy(eligible=("group:roof",), excluded=("b",)), groups=GROUPS))
    assert "no device is left" in empty.message


def test_without_an_identity_groups_are_those_of_the_run_files_devices() -> None:
    fleet = [FleetDevice(name="a", groups=["night"]), FleetDevice(name="b", groups=["night", "roof"])]
    config = RunConfig.model_construct(fleet=[*fleet, FleetDevice(name="c")])
    assert config.groups == GROUPS
    lacking = MissingConfig(devices={"group:night": ["acc"]}, complete=["group:roof", "c"])
    assert lacking.by_device(config.groups).devices == {"a": ["acc"], "b": ["acc"]}
    assert lacking.by_device(config.groups).complete == ["b", "c"]


def test_a_run_with_an_identity_has_the_groups_of_the_fleets_directory(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    add_to_group(fleet, "night", ["cam-a", "cam-b"])
    options = RunOptions("demo", overrides=["round.eligible=[group:night]"], identity=fleet.directory)
    plan, _ = planned(options, lambda line: None)
    assert plan.groups == {"night": ("cam-a", "cam-b")}
    assert [plan.takes(name) for name in ("cam-a", "cam-b", "cam-c")] == [True, True, False]
    with pytest.raises(ConfigError, match="no group 'night'"):
        planned(options._replace(identity=None), lambda line: None)
    arguments = ["devices", "--identity", str(fleet.directory), "--format", "json", "--group"]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "night"])
    assert "cam-c" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "day"])
    assert caught.value.code == ConfigError.exit_code
    assert "has no group 'day'; it has: night" in " ".join(capsys.readouterr().err.split())


def test_every_table_of_a_report_is_written_with_groups(tmp_path: Path) -> None:
    from edgefl.report import writers

    assert "group" in next(csv.reader([writers.to_csv(RunReport(groups=GROUPS), "groups")]))
