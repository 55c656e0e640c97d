"""What a device keeps for itself outlives kill -9: private heads, copies and classifiers, in real processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fleet_fixture import Fleet, finish, share

from coordinator.ledger.ledger import Ledger
from device_agent.core.state import Saved
from device_agent.runtime.slots import read_newest
from edgefl.records import Manifest
from edgefl.storage.disk import ledger_of
from edgefl.storage.objects import ObjectStore

pytestmark = pytest.mark.timeout(240)

#: Two rounds of the mappings' training, each long enough for a device to be killed in it.
SETTINGS = {"recipe": "apromfl", "training.epochs": 60, "training.rounds": "[2, 0]", "round.devices": 2}


def last_state(fleet: Fleet, run: str) -> Manifest:
    """Every part after round 2 that a device made: content hashes, equal when all their tensors are."""
    with Ledger(ledger_of(fleet.runs / run), create=False) as ledger:
        return {part: ref for part, ref in ledger.states(run)[1, 2].items() if part.startswith("@") or "head/" in part}


@pytest.mark.slow  # a minute: a device is silent until it is given up
@pytest.mark.parametrize("labelled", [True, False])
def test_what_a_killed_device_keeps_is_used_when_it_trains_again(tmp_path: Path, labelled: bool) -> None:
    """A labelled device keeps its classifier, one without labels its private copies, and both their mappings."""
    its = share(24, "acc", "gyro", seed=2)
    with Fleet(tmp_path) as fleet:
        fleet.agent("left", share(24, "acc", "gyro", seed=1))
        right = fleet.agent("right", its if labelled else replace(its, labels=None, label_names=()))
        finish(fleet.coordinator("undisturbed", SETTINGS | {"round.quorum": 1.0}))
        coordinator = fleet.coordinator("killed", SETTINGS | {"round.quorum": 1.0})
        coordinator.expect("progress", device="right", round=2)
        right.kill()
        directory = fleet.state_of("right")
        (kept,) = read_newest(directory, Saved).retained
        there = {part: ObjectStore(directory / "objects").has(ref.id) for part, ref in kept.manifest.items()}
        again = fleet.agent("right")
        finish(coordinator)
        again.expect("training", attempt="killed/s1/r2/a1")  # the same attempt: it was on the disk
        report = fleet.report("killed")
        alike, other = last_state(fleet, "undisturbed"), last_state(fleet, "killed")
    assert (kept.attempt.run, kept.attempt.round) == ("killed", 1)
    private = ("task",) if labelled else ("twin/acc", "twin/gyro")
    assert there == dict.fromkeys(("head/acc", "head/gyro", *private), True)
    rounds = [(row.round, row.attempt, row.status, row.participants) for row in report.rounds]
    assert rounds == [(number, 1, "done", ("left", "right")) for number in (1, 2)]
    assert {"@left/head/acc", "@right/head/acc", "@right/head/gyro"} <= set(alike)
    assert other == alike
