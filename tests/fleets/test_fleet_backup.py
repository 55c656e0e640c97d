"""A copy of a run of real programs, taken while it goes on, restored elsewhere, ends with the same weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fleet_fixture import Fleet, finish, share

from coordinator.ledger.ledger import Ledger
from edgefl.records import Manifest
from edgefl.storage.disk import ledger_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
SETTINGS = {"training.epochs": 12, "training.rounds": "[2, 1]", "round.devices": 2, "round.quorum": 1.0}


def last_state(directory: Path) -> Manifest:
    with Ledger(ledger_of(directory), create=False) as ledger:
        return ledger.states(directory.name)[2, 1]


def coordinator(fleet: Fleet, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "coordinator.cli", *words], cwd=fleet.directory, check=True)


def test_a_copy_goes_on_elsewhere_to_the_same_weights(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        for seed, name in enumerate(("left", "right"), 1):
            fleet.agent(name, share(24, "acc", "gyro", seed=seed))
        finish(fleet.coordinator("undisturbed", SETTINGS))
        running = fleet.coordinator("copied", SETTINGS)
        running.expect("update", stage=1, round=2)  # of one of two devices: the round is open
        coordinator(fleet, "backup", "copied", "--directory", str(fleet.runs), "--out", "copy.tar")
        running.expect("update", stage=2, round=1)  # the devices have closed the attempt that is open in the copy
        running.kill()
        wanted = last_state(fleet.runs / "undisturbed")
        fleet.runs.rename(tmp_path / "lost")
        coordinator(fleet, "restore", "copy.tar", "--into", str(fleet.runs))
        finish(fleet.resume("copied"))
        assert last_state(fleet.runs / "copied") == wanted
        report = fleet.report("copied")
    assert [(row.stage, row.round, row.status) for row in report.rounds] == [
        (1, 1, "done"),
        (1, 2, "done"),
        (2, 1, "done"),
    ]
