"""The five published systems one after the other through a real broker, with the same four agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_fixture import Fleet, finish, share
from transport_fixtures import broker_kinds

pytestmark = pytest.mark.timeout(400)

#: Recipe -> what of it does not fit four devices and two rounds.
SYSTEMS: dict[str, dict[str, object]] = {
    "lw-fedmml": {},
    "prog-fedmml": {},
    "pmcmfl": {"slots.select": "all"},
    "apromfl": {},
    "fedmvp": {"slots.select": "all", "slots.fusion": "{joint: {width: 16, heads: 2, layers: 1}}"},
    "mmic": {"slots.cluster": "{lsh: {clusters: 1}}", "slots.select": "all"},
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory: Path = tmp_path_factory.mktemp("systems")
    with Fleet(directory, broker_kinds()[0]) as fleet:
        fleet.agent("first", share(32, "acc", "gyro", seed=1))
        fleet.agent("second", share(32, "acc", "gyro", seed=2).subset(range(24)))
        fleet.agent("acc-alone", share(24, "acc", seed=3))
        fleet.agent("gyro-alone", share(24, "gyro", seed=4))
        yield fleet


# Half a minute each, by night: with every change recipes train over a broker in test_fleet.py and tests/api, and each
# of them in test_recipes.py.
@pytest.mark.slow
@pytest.mark.parametrize("recipe", SYSTEMS)
def test_a_system_trains_over_mqtt(fleet: Fleet, recipe: str) -> None:
    finish(fleet.coordinator(recipe, {"recipe": recipe, "round.devices": 4, **SYSTEMS[recipe]}))
    report = fleet.report(recipe)
    assert report.status == "done"
    rounds = 3 if recipe == "pmcmfl" else 2  # its matching networks are trained in a closing round
    assert [row.status for row in report.rounds] == ["done"] * rounds
    assert set(report.rounds[-1].participants) == {"first", "second", "acc-alone", "gyro-alone"}
    classifies = {row.metric for row in report.evaluations} >= {"accuracy"}
    assert classifies == (recipe != "apromfl")  # whose classifiers stay on the devices
    if recipe == "mmic":
        told = report.rounds[0].record["repaired"]
        nothing = {"kept": "no batch that lacks modalities came after a complete one"}
        assert told == {"acc-alone": nothing, "gyro-alone": nothing}  # no device has samples of both kinds
    if recipe == "apromfl":
        sent = {part for row in report.rounds for part in row.record["parts"]}
        assert "task" not in sent
        assert "@first/head/acc" in sent
