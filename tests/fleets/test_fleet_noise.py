"""Noise split on the devices, between real processes: one is lost in a round, which is tried again without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_fixture import Fleet, finish, share

from edgefl.methods.privacy.gaussian import epsilon_of

SETTINGS = {
    "recipe": "dp-fedavg",
    "slots.combine": "{gaussian_noise: {noise: 2, epsilon: 8, at: devices}}",
    "training.rounds": "[3, 0]",
    "training.epochs": 40,
    "round": "{devices: 2, quorum: 1.0, deadline_s: 20}",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_who_is_lost_takes_its_share_along_and_the_server_adds_it(tmp_path: Path) -> None:
    """Of two devices one share is the whole, as each knows its own: with both nothing is added, with one all of it."""
    with Fleet(tmp_path) as fleet:
        fleet.agent("left", share(24, "acc", "gyro", seed=1))
        right = fleet.agent("right", share(24, "acc", "gyro", seed=2))
        coordinator = fleet.coordinator("noise", SETTINGS)
        right.expect("training", attempt="noise/s1/r2/a1")
        right.kill()
        finish(coordinator)
        report = fleet.report("noise")
    done = [row for row in report.rounds if row.status == "done"]
    assert [(row.round, row.attempt) for row in done] == [(1, 1), (2, 2), (3, 1)]
    for row, senders in zip(done, (2, 1, 1), strict=True):
        for part, told in row.record["parts"].items():
            assert len(told["devices"]) == senders, part
            assert told["added"] == pytest.approx(2.0 / 2 if senders == 1 else 0.0)
        assert not row.record["screened"]["factors"]
    towards = [row.record["account"]["server"] for row in done]
    assert towards == pytest.approx([epsilon_of(uploads / 4, 1e-5) for uploads in (1, 3, 4)])
    assert done[-1].record["account"]["epsilon"] == pytest.approx(epsilon_of(3 / 4, 1e-5))
    assert done[0].record["noise"]["deviation"] == 1.0
