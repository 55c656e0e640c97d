"""A fleet that is controlled from another process: paused, killed in the pause, resumed, without a device, stopped."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_fixture import PATIENCE_S, Fleet, Program, finish, of_kind, share

pytestmark = pytest.mark.timeout(240)
SETTINGS = {"training.epochs": 4, "training.rounds": "[4, 0]", "round.devices": 2, "round.quorum": 1.0}


@contextlib.contextmanager
def halted(agent: Program) -> Iterator[None]:
    """Nothing of this device arrives meanwhile, so that its round stays open."""
    agent.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        agent.process.send_signal(signal.SIGCONT)


def edgefl(fleet: Fleet, *words: str, status: int = 0) -> str:
    """A command in a process of its own: what it prints, its errors too."""
    command = [sys.executable, "-m", "edgefl.cli.main", *words, "--runs", str(fleet.runs)]
    done = subprocess.run(command, cwd=fleet.directory, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_is_paused_killed_resumed_left_by_a_device_stopped_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fleet(tmp_path) as fleet:
        left = fleet.agent("left", share(24, "acc", "gyro", seed=1))
        monkeypatch.setenv("EDGEFL_NO_LOGS", "1")
        fleet.agent("right", share(24, "acc", "gyro", seed=2))
        coordinator = fleet.coordinator("r1", SETTINGS)
        coordinator.expect("round_started")
        with halted(left):
            assert "r1 pauses when round 1 of stage 1 is over" in edgefl(fleet, "runs", "pause", "latest")
        paused = coordinator.expect("paused")
        assert paused["data"]["by"] == "terminal"
        assert "paused already (terminal)" in edgefl(fleet, "runs", "pause", "r1", status=22)
        coordinator.kill()
        assert "r1 is not running" in edgefl(fleet, "runs", "resume", "r1", status=22)

        coordinator = fleet.resume("r1")
        coordinator.expect("paused")
        for name in ("left", "right"):
            coordinator.expect("device_joined", device=name)
        assert not list(of_kind(coordinator, "round_started")), "still paused"
        log = edgefl(fleet, "logs", "latest", "left", "--lines", "3").splitlines()
        assert len(log) == 3
        assert {json.loads(line)["event"] for line in log} <= {line["event"] for line in left.lines}
        assert "--no-logs" in edgefl(fleet, "logs", "latest", "right", status=22)
        assert "the run is paused (terminal)" in edgefl(fleet, "logs", "latest", "--lines", "200")
        assert "Did you mean right?" in edgefl(fleet, "devices", "drop", "r1", "rigth", status=22)
        edgefl(fleet, "devices", "drop", "r1", "right")
        with halted(left):
            status = json.loads(edgefl(fleet, "runs", "resume", "r1", "--format", "json"))
            assert status["devices"]["right"]["left_out_by"] == "terminal"
            assert coordinator.expect("round_started")["data"]["participants"] == ["left"]
            assert "r1 is stopped" in edgefl(fleet, "runs", "stop", "r1")
            coordinator.expect("run_stopped")
        assert coordinator.wait() == 0, coordinator.story()
        assert "The run was stopped (terminal) after stage 1, round 1" in edgefl(fleet, "report", "r1")
        assert fleet.report("r1").status == "stopped"

        coordinator = fleet.resume("r1")
        assert coordinator.expect("round_started", round=3)["data"]["participants"] == ["left"]
        with halted(left):
            edgefl(fleet, "devices", "restore", "r1", "right")
        finish(coordinator)
        report = fleet.report("r1")
        assert report.status == "done"
        assert [(row.round, row.status) for row in report.rounds] == [(n, "done") for n in range(1, 5)]
        assert [row.participants for row in report.rounds[:2]] == [("left", "right"), ("left",)]
        asked = [(e.kind, e.device) for e in report.events if "by" in e.data and e.kind != "paused"]
        assert asked == [
            ("pausing", ""),
            ("left_out", "right"),
            ("resumed", ""),
            ("run_stopped", ""),
            ("taken_in", "right"),
        ]
        assert not (fleet.runs / "r1" / "control.sock").exists()
