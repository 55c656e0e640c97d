"""A fleet of several releases, in real processes: one minor apart trains, two apart is refused with both numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_fixture import Fleet, finish, of_kind, share

from edgefl import PROTOCOL_VERSION, __version__
from edgefl.protocol.releases import mismatch

pytestmark = pytest.mark.timeout(240)


@pytest.mark.slow
def test_agents_one_minor_release_apart_train_and_one_two_apart_is_told_what_to_upgrade(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        fleet.agent("before", share(24, "acc", "gyro", seed=2), release=f"0.0.9:{PROTOCOL_VERSION - 1}")
        fleet.agent("after", share(24, "acc", "gyro", seed=3), release=f"0.2.0:{PROTOCOL_VERSION + 1}")
        far = fleet.agent("far", share(24, "acc", "gyro", seed=4), release=f"0.3.0:{PROTOCOL_VERSION + 2}")
        coordinator = fleet.coordinator("r1", {"round.devices": 2})
        reason = mismatch("this coordinator", "its agent", "0.3.0", PROTOCOL_VERSION + 2)
        warned = coordinator.expect("warning", device="far")
        assert warned["data"]["text"] == f"far is refused: {reason}"
        assert far.expect("drained")["reason"] == reason
        assert "upgrade this coordinator to 0.3.0" in reason
        finish(coordinator)
        report = fleet.report("r1")
        assert {row.participants for row in report.rounds} == {("after", "before")}
        assert not list(of_kind(coordinator, "device_joined", device="far"))
        assert __version__ in reason
