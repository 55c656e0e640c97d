"""`edgefl devices`: who is there, since when and by what; with a fleet's identity and without."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from coordinator_fixture import a_plan
from identity_fixture import a_fleet, enrolled
from test_coordinator_runner import Scene, one_stage, played

from coordinator.ledger.ledger import Ledger
from coordinator.runtime.inbound import Inbound
from edgefl.cli.main import main
from edgefl.errors import RunError
from edgefl.plan.job import RoundPolicy
from edgefl.records import Capabilities
from edgefl.report.presence import Enrolled, Live, presences
from edgefl.run_records import DeviceRow, EventRow, RunReport, SightingRow
from edgefl.storage.disk import hold_directory

NOW = 1_790_000_000.0
DAY = 86_400.0
ORIN = Capabilities(machine="aarch64", gpu="NVIDIA Jetson Orin Nano")
REPORT = RunReport(
    run="r1",
    status="running",
    devices=(
        DeviceRow("cam-01", capabilities=ORIN, agent_version="0.1.0"),
        DeviceRow("cam-02", capabilities=Capabilities(machine="x86_64"), agent_version="0.10.0"),
        DeviceRow("cam-03", agent_version="0.2.1"),
        DeviceRow("cam-04"),
        DeviceRow("cam-05"),
    ),
    sightings=(
        SightingRow("cam-01", NOW - 30, "heartbeat"),
        SightingRow("cam-02", NOW - 3600, "last will", online=False),
        SightingRow("cam-03", NOW - 600, "update"),
        SightingRow("cam-05", NOW - 5, "hello"),
    ),
    events=(EventRow(NOW - 7200, "device_joined", device="cam-04"), EventRow(NOW - 9, "quarantined", device="cam-05")),
)
FLEET = {"cam-01": Enrolled(NOW + 40 * DAY, False), "cam-03": Enrolled(NOW - DAY, False), "cam-09": Enrolled(NOW, True)}


def states(report: RunReport, enrolled_: dict[str, Enrolled] | None = None) -> dict[str, str]:
    return {one.device: one.state for one in presences(report, enrolled_ or {}, NOW)}


def test_each_device_has_a_state_and_the_age_and_kind_of_its_last_sign_of_life() -> None:
    assert states(REPORT) == {
        "cam-01": "online",
        "cam-02": "offline",
        "cam-03": "offline",  # its last sign of life is too old to be on record as the last
        "cam-04": "offline",
        "cam-05": "quarantined",
    }
    seen = {one.device: (one.seen_at, one.seen_by) for one in presences(REPORT, {}, NOW)}
    assert seen["cam-01"] == (NOW - 30, "heartbeat")
    assert seen["cam-02"] == (NOW - 3600, "last will")
    assert seen["cam-04"] == (NOW - 7200, "ledger")


@pytest.mark.parametrize("kind", ["left_out", "taken_in", "readmitted", "device_left"])
def test_what_others_do_with_a_device_is_no_sign_of_its_life(kind: str) -> None:
    report = msgspec.structs.replace(REPORT, events=(*REPORT.events, EventRow(NOW - 1, kind, device="cam-04")))
    assert {one.device: one.seen_at for one in presences(report, {}, NOW)}["cam-04"] == NOW - 7200
    live = {"cam-04": Live(True, "web", NOW - 3, "accept"), "cam-05": Live(True, "")}
    seen = {one.device: (one.seen_at, one.seen_by) for one in presences(report, {}, NOW, live=live)}
    assert seen["cam-04"] == (NOW - 3, "accept")
    assert seen["cam-05"] == (NOW - 5, "hello")  # its coordinator has heard nothing of it since it was started


def test_a_device_that_is_out_of_the_run_is_revoked_or_left_out() -> None:
    live = {
        "cam-02": Live(False, "", revoked=True),
        "cam-03": Live(False, "web", revoked=True),
        "cam-04": Live(True, "web"),
    }
    found = {one.device: one.state for one in presences(REPORT, {}, NOW, live=live)}
    assert [found[name] for name in live] == ["revoked", "revoked", "left out"]


def test_a_sign_that_the_coordinator_has_counts_before_the_ledgers_record_of_it() -> None:
    """The record is written a moment after the message came."""
    report = msgspec.structs.replace(REPORT, events=(EventRow(NOW - 2.9, "accepted", device="cam-04"),))
    (seen,) = presences(report, {}, NOW, live={"cam-04": Live(True, "", NOW - 3, "accept")})[3:4]
    assert (seen.device, seen.seen_at, seen.seen_by) == ("cam-04", NOW - 3, "accept")


def test_a_fleets_identity_adds_certificates_and_devices_that_never_came() -> None:
    assert states(REPORT, FLEET) | {} == {
        **states(REPORT),
        "cam-03": "expired",
        "cam-09": "revoked",
    }
    last = presences(REPORT, {"new": Enrolled(NOW + DAY, False)}, NOW)[-1]
    assert (last.device, last.state, last.seen_at, last.seen_by) == ("new", "never seen", None, "")


def test_of_a_run_that_is_over_nobody_knows_who_is_there() -> None:
    from msgspec.structs import replace

    assert states(replace(REPORT, status="done"))["cam-01"] == "run is over"


@pytest.mark.parametrize(
    ("by", "first"), [("device", "cam-01"), ("seen", "cam-05"), ("release", "cam-04"), ("identity", "cam-09")]
)
def test_it_is_sorted(by: str, first: str) -> None:
    fleet = FLEET | {"cam-09": Enrolled(NOW - 9 * DAY, True)}
    found = presences(REPORT, fleet, NOW, by)  # type: ignore[arg-type]
    assert found[0].device == first
    releases = [one.release for one in presences(REPORT, {}, NOW, "release")]
    assert releases == ["", "", "0.1.0", "0.2.1", "0.10.0"]


# What the coordinator records


def test_what_was_heard_is_recorded_once_with_its_kind() -> None:
    inbound = Inbound(10.0, 1.0)
    inbound.heard("a", 1.0, "heartbeat")
    inbound.heard("b", 2.0, "update")
    inbound.heard("stranger", 2.0, "hello")
    rows = inbound.sightings(1000.0, {"a", "b"})
    assert rows == [SightingRow("a", 1001.0, "heartbeat"), SightingRow("b", 1002.0, "update")]
    assert inbound.sightings(1000.0, {"a", "b"}) == []
    inbound.silent(11.5)
    assert inbound.sightings(1000.0, {"a", "b"}) == [SightingRow("a", 1001.0, "silence since", online=False)]


def test_a_second_reader_of_signs_takes_nothing_from_the_first() -> None:
    inbound, page = Inbound(10.0, 1.0), {}
    inbound.signs.append(page)
    inbound.heard("a", 1.0, "heartbeat")
    assert page.popitem() == ("a", (1.0, "heartbeat", True))
    assert inbound.sightings(1000.0, {"a"}) == [SightingRow("a", 1001.0, "heartbeat")]
    inbound.heard("a", 2.0, "update")
    assert inbound.sightings(1000.0, {"a"}) == [SightingRow("a", 1002.0, "update")]
    assert page == {"a": (2.0, "update", True)}


def test_a_run_leaves_each_devices_last_sign_of_life_and_release(tmp_path: Path) -> None:
    reports: list[RunReport] = []

    async def script(scene: Scene) -> None:
        await scene.device("a")
        reports.append(await scene.coordinator(one_stage(RoundPolicy(devices=1, join_s=5.0), 1)))

    began = time.time()
    played(tmp_path, script)
    (sighting,) = reports[0].sightings
    assert sighting.device == "a"
    assert began <= sighting.at <= time.time()
    assert sighting.source in {"hello", "update", "upload", "need", "accept"}


# The command


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command prints on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["devices", *arguments])
        assert end.value.code == 0
        return capsys.readouterr().out

    return show


def test_a_fleet_without_a_run_shows_its_devices(tmp_path: Path, shown: Callable[..., str]) -> None:
    enrolled(a_fleet(tmp_path / "fleet"), "cam-01", tmp_path / "state")
    given = ["--identity", str(tmp_path / "fleet"), "--runs", str(tmp_path / "runs")]
    (row,) = json.loads(shown(*given, "--format", "json"))["presence"]
    assert (row["device"], row["state"], row["seen_at"]) == ("cam-01", "unknown", None)
    text = shown(*given)
    assert max(map(len, text.splitlines())) <= 80
    assert time.strftime("%Y-%m", time.localtime(row["certificate_until"])) in text


def test_a_run_that_waits_for_its_devices_is_no_run_that_ended(
    tmp_path: Path, shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, place = tmp_path / "runs", tmp_path / "runs" / "by-hand"
    place.mkdir(parents=True)
    given = ["by-hand", "--runs", str(runs), "--identity", str(tmp_path / "none")]
    (place / "ledger.sqlite").touch()  # no table is in it yet
    with hold_directory(place):
        assert shown(*given) == "run by-hand waits for devices; none has joined\n"
    with hold_directory(place), Ledger(place / "ledger.sqlite") as ledger:
        assert shown(*given) == "run by-hand waits for devices; none has joined\n"
        assert json.loads(shown(*given, "--format", "json")) == {"run": "by-hand", "presence": [], "devices": []}
        with pytest.raises(SystemExit) as end:
            main(["report", "by-hand", "--runs", str(runs)])
        assert end.value.code == RunError.exit_code
        assert "run by-hand has not begun" in capsys.readouterr().err
        plan = msgspec.structs.replace(a_plan(), run="by-hand")
        ledger.create(plan, {}, {}, time.time())
        assert "waits for devices" not in shown(*given), "no coordinator says so"
        status = {"phase": "joining", "devices": {}}
        monkeypatch.setattr("edgefl.cli.control.standing", lambda _: status)
        assert shown(*given) == "run by-hand waits for devices; none has joined\n"
        ledger.commit("by-hand", [DeviceRow("left"), DeviceRow("right")], [], time.time())
        there = {"online": True, "left_out_by": ""}
        status["devices"] = {"left": there, "right": {**there, "online": False}}
        text = shown(*given)
        assert text.startswith("run by-hand waits for devices; left has joined\n")
        assert "Who is there" in text
    with pytest.raises(SystemExit):
        main(["devices", "other", "--runs", str(runs)])


def test_a_run_without_a_fleet_is_shown_from_its_ledger(tmp_path: Path, shown: Callable[..., str]) -> None:
    directory = tmp_path / "runs" / "r1"
    directory.mkdir(parents=True)
    with Ledger(directory / "ledger.sqlite") as ledger:
        ledger.create(a_plan(), {}, {}, time.time())
        seen = SightingRow("cam-01", time.time() - 200, "heartbeat")
        ledger.commit("r1", [DeviceRow("cam-01", capabilities=ORIN, agent_version="0.1.0"), seen], [], 1.0)
    text = shown("r1", "--runs", str(tmp_path / "runs"), "--identity", str(tmp_path / "none"))
    first = text[: text.index("may spend")]
    for words in ("cam-01", "3 min ago", "heartbeat", "0.1.0", "aarch64"):
        assert words in first
    assert max(map(len, first.splitlines())) <= 80
