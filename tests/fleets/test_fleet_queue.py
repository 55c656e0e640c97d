"""A fleet that works through several runs in a night: agents go on, whatever becomes of a run or the coordinator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fleet_fixture import RUN, SHAPES, Fleet, Program, of_kind, share
from test_fleet_control import edgefl, halted

from edgefl.errors import BudgetError, StoreError

pytestmark = pytest.mark.timeout(240)
SETTINGS = "round: {devices: 2, quorum: 1.0}\n"
#: Modalities that no device has.
NOBODYS = RUN.replace("acc:", "lidar:").replace("gyro:", "camera:").replace("test.npz", "nobodys.npz")


def run_file(fleet: Fleet, name: str, text: str = RUN) -> str:
    (fleet.directory / f"{name}.yaml").write_text(text.replace("name: fleet", f"name: {name}") + SETTINGS)
    return f"{name}.yaml"


def coordinator(fleet: Fleet, *words: str) -> Program:
    return fleet._coordinator(["coordinator.cli", "run", *words])


def agents(fleet: Fleet) -> list[Program]:
    return [fleet.agent(name, share(24, "acc", "gyro", seed=len(name))) for name in ("left", "right")]


def queued(fleet: Fleet) -> dict[str, str]:
    """Run file -> status, in the queue's order."""
    runs = json.loads(edgefl(fleet, "runs", "queue", "--format", "json"))["runs"]
    return {Path(one["file"]).stem: one["status"] for one in runs}


def started(program: Program) -> list[str]:
    return [line["data"]["name"] for line in of_kind(program, "run_started")]


@pytest.mark.slow
def test_runs_follow_each_other_with_the_same_agents_past_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fleet(tmp_path) as fleet:
        processes = agents(fleet)
        monkeypatch.setitem(SHAPES, "camera", (8, 2))
        share(30, "lidar", "camera").save_npz(tmp_path / "nobodys.npz")
        queue = coordinator(fleet, run_file(fleet, "a"), run_file(fleet, "b", NOBODYS), run_file(fleet, "c"))
        assert queue.wait() == BudgetError.exit_code, queue.story()
        assert queued(fleet) == {"a": "done", "b": "failed", "c": "done"}
        assert started(queue) == ["a", "b", "c"]
        assert all(agent.alive for agent in processes)
        *_, first, second, third = (line.partition("; ")[0] for line in queue.log.read_text().splitlines())
        a, b, c = sorted(path.name for path in fleet.runs.glob("?-*"))
        assert [first, second, third] == [f"run {a} is done", f"run {b} has failed (code 13)", f"run {c} is done"]
        assert f"{b}: no device can train stage 1" in " ".join(edgefl(fleet, "runs", "queue").split())


@pytest.mark.slow
def test_a_queue_is_edited_killed_in_a_run_gone_on_with_and_stopped_run_by_run(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        left, right = agents(fleet)
        queue = coordinator(fleet, *(run_file(fleet, name) for name in "abcd"))
        queue.expect("run_finished")
        queue.until(lambda _: started(queue)[1:] == ["b"], "the second run")
        with halted(left):  # b stays open
            assert "c-" in edgefl(fleet, "runs", "reorder", "c", "2")
            assert "e-" in edgefl(fleet, "runs", "add", run_file(fleet, "e"))
            edgefl(fleet, "runs", "cancel", "d")
            assert "it has begun" in edgefl(fleet, "runs", "cancel", "b", status=22)
            assert "1 to 2" in edgefl(fleet, "runs", "reorder", "e", "3", status=22)
            edgefl(fleet, "runs", "reorder", "e", "1")
            queue.kill()
            expected = {"a": "done", "b": "interrupted", "d": "cancelled", "e": "waiting", "c": "waiting"}
            assert queued(fleet) == expected
            assert list(queued(fleet)) == list(expected)
            assert "--resume queue" in edgefl(fleet, "runs", "queue")
            assert coordinator(fleet, "a.yaml", "b.yaml").wait() == StoreError.exit_code, "three have not ended"
        queue = coordinator(fleet, "--resume", "queue")
        queue.until(lambda _: started(queue) == ["b", "e"], "the run that was moved forward")
        with halted(right):
            edgefl(fleet, "runs", "stop", next(path.name for path in fleet.runs.glob("e-*")))
        assert queue.wait() == 0, queue.story()
        assert started(queue) == ["b", "e", "c"]
        assert next(of_kind(queue, "run_started"))["data"]["resumed"]
        assert queued(fleet) == {"a": "done", "b": "done", "d": "cancelled", "e": "stopped", "c": "done"}
        assert left.alive
        assert right.alive
        again = coordinator(fleet, "--resume", "queue")
        assert again.wait() == 0
        assert not started(again)
