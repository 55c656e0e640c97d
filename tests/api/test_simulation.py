"""Fleets drawn for a simulation, and the forecast of a real one."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from report_fixture import run_report

from edgefl.api.simulation import DeviceKind, drawn_fleet, kinds_of
from edgefl.config.settings import SizedFleet
from edgefl.errors import ConfigError
from edgefl.records import Capabilities, Figure, Speed
from edgefl.report.forecast import basis, forecast, sentence
from edgefl.run_records import RunReport


def timed(report: RunReport, seconds: dict[str, float], joules: float | None = 2.0) -> RunReport:
    """The report with these predicted seconds by device."""
    rows = []
    for row in report.assignments:
        known = {n: f for n, f in row.predicted.items() if n not in {"wall_s", "energy_j"}}
        known |= {"wall_s": Figure(seconds[row.device], "predicted")} if row.device in seconds else {}
        known |= {"energy_j": Figure(joules, "predicted")} if joules is not None else {}
        rows.append(msgspec.structs.replace(row, predicted=known))
    return msgspec.structs.replace(report, assignments=tuple(rows))


def test_kinds_of_devices_by_weight() -> None:
    assert kinds_of(["jetson-nano:3", "cpu"]) == [DeviceKind("jetson-nano", 3.0), DeviceKind("cpu")]
    assert kinds_of([]) == [DeviceKind("cpu")]
    for wrong in ("cpu:0", "cpu:-1", "cpu:many", "cpu:inf", "cpu:nan"):
        with pytest.raises(ConfigError, match=wrong):
            kinds_of([wrong])


def test_a_fleet_has_its_kinds_in_proportion_and_evenly_spread() -> None:
    fleet = SizedFleet.model_validate(drawn_fleet(100, kinds_of(["jetson-nano:3", "raspberry-pi-5"])))
    assert [fleet[0].name, fleet[99].name, len(fleet)] == ["device-00", "device-99", 100]
    profiles = [one.profile for one in fleet]
    assert Counter(profiles) == {"jetson-nano": 75, "raspberry-pi-5": 25}
    assert Counter(profiles[:8]) == {"jetson-nano": 6, "raspberry-pi-5": 2}
    assert fleet[0].budget == {"memory_bytes": None}  # the profile's, which nothing would hold it to
    assert SizedFleet.model_validate(drawn_fleet(1, [DeviceKind("cpu")])).kinds[0].budget == {}


def test_a_profile_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="jetson-mano"):
        drawn_fleet(3, kinds_of(["jetson-mano:3"]))


def test_rounds_last_as_long_as_their_slowest_device() -> None:
    report = run_report()
    done = [row for row in report.assignments if row.status == "done"]
    seconds = {row.device: 10.0 + 5 * n for n, row in enumerate(sorted(done, key=lambda row: row.device))}
    found = forecast(timed(report, seconds))
    by_round: dict[tuple[int, int], float] = {}
    for row in done:
        place = row.stage, row.round
        by_round[place] = max(by_round.get(place, 0.0), seconds[row.device])
    assert found.seconds == pytest.approx(sum(by_round.values()))
    assert found.rounds == len(by_round) == sum(found.slowest.values())
    assert found.energy_j == 2.0 * len(done)
    assert f"{found.rounds} rounds take" in sentence(found)
    assert basis(found).rows[0][2].text.startswith("each as long as its slowest device")


def test_rates_that_profiles_lack_are_named() -> None:
    report = timed(run_report(), {row.device: 1.0 for row in run_report().assignments})
    speed = Speed(1e10, 1e6, 1e6, operation_s=1e-5)
    rows = [msgspec.structs.replace(one, capabilities=Capabilities(speed=speed)) for one in report.devices]
    found = forecast(msgspec.structs.replace(report, devices=tuple(rows)))
    assert found.unknown == ("written_bytes",)
    assert "lacks speed.written_bytes." in basis(found).notes[-1]


def test_what_is_not_known_is_said() -> None:
    found = forecast(timed(run_report(), {}, None))
    assert (found.seconds, found.energy_j) == (None, None)
    assert f"{found.untimed} device rounds have no predicted time" in sentence(found)
    empty = forecast(msgspec.structs.replace(run_report(), assignments=()))
    assert "no device trained" in sentence(empty)
