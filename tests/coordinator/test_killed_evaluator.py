"""The coordinator's worker ended by SIGKILL, as the kernel ends processes where memory runs out: the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
from coordinator_fixture import a_plan
from test_coordinator_runner import Scene, played

from coordinator.runtime.model_tasks import TRIES
from edgefl.errors import WorkerError
from edgefl.process.worker import WorkerProcess
from edgefl.run_records import RunReport

TESTS = Path(__file__).parents[1]


def a_worker(place: Path) -> WorkerProcess:
    env = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "OMP_NUM_THREADS": "1"}
    return WorkerProcess("stub_evaluator", [str(place)], place / "evaluator.log", env)


async def kill_one(place: Path, number: int = signal.SIGKILL) -> int:
    """End the process that evaluates, by its id."""
    while not (place / "evaluating").exists():
        await asyncio.sleep(0.01)
    pid = int((place / "evaluating").read_text())
    (place / "evaluating").unlink()
    os.kill(pid, number)
    return pid


@pytest.mark.parametrize("deaths", [1, TRIES])
def test_a_run_outlives_its_evaluator(tmp_path: Path, deaths: int) -> None:
    killed: list[int] = []
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        scene.worker = a_worker(tmp_path)  # type: ignore[assignment]
        for name in ("a", "b"):
            await scene.device(name)

        async def kill() -> None:
            killed.extend([await kill_one(tmp_path) for _ in range(deaths)])
            (tmp_path / "go").touch()

        report, _ = await scene.both(scene.coordinator(a_plan()), kill())
        warnings = [str(one.data["text"]) for one in scene.events if one.kind == "warning"]
        assert len(warnings) == deaths
        assert warnings[0].startswith("the evaluator was killed (SIGKILL) while it did 'evaluate', as the kernel does")
        if deaths == TRIES:
            (last,) = [one for one in scene.events if one.kind == "warning"][-1:]
            assert (last.stage, last.round) == (1, 1)
            assert "this round has no evaluation: the evaluator was killed 3 times (SIGKILL)" in warnings[-1]
            assert "memory" in warnings[-1]

    played(tmp_path, script)
    assert len(set(killed)) == deaths, "another process each time"
    assert report.status == "done"
    assert len(report.rounds) == 3
    evaluated = sorted({(row.stage, row.round) for row in report.evaluations})
    every = [(1, 1), (2, 2)] if a_plan().evaluate_every == "stage" else [(1, 1), (2, 1), (2, 2)]
    assert evaluated == every[deaths == TRIES :]


def test_an_evaluator_that_is_killed_between_two_requests_is_started_again(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        worker = a_worker(tmp_path)
        scene.worker = worker  # type: ignore[assignment]
        (tmp_path / "go").touch()
        pids = []

        async def call(method: str, body: object) -> object:
            if (pid := worker.pid) is not None:  # its end is not known yet when it is asked
                os.kill(pid, signal.SIGKILL)
                pids.append(pid)
            return await WorkerProcess.call(worker, method, body)

        worker.call = call  # type: ignore[method-assign]
        for name in ("a", "b"):
            await scene.device(name)
        report = await scene.coordinator(a_plan())
        assert len(set(pids)) > 2
        assert report.status == "done"

    played(tmp_path, script)


def test_a_plan_that_kills_the_evaluator_each_time_ends_the_run_and_names_memory(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        worker = a_worker(tmp_path)
        scene.worker = worker  # type: ignore[assignment]
        asked = 0

        async def call(method: str, body: object) -> object:
            nonlocal asked
            task = asyncio.ensure_future(WorkerProcess.call(worker, method, body))
            if method == "plan_stage":
                asked += 1
                while worker.pid is None:
                    await asyncio.sleep(0.001)
                os.kill(worker.pid, signal.SIGKILL)
            return await task

        worker.call = call  # type: ignore[method-assign]
        for name in ("a", "b"):
            await scene.device(name)
        with pytest.raises(WorkerError, match=r"was killed \(SIGKILL\) while it did 'plan_stage', 3 times") as caught:
            await scene.coordinator(a_plan())
        assert asked == TRIES
        assert "memory" in caught.value.remedy
        assert "--resume" in caught.value.remedy
        assert f"See {worker.log}." in caught.value.remedy
        with contextlib.suppress(AssertionError):
            assert scene.kinds()[-1] == "run_failed"

    played(tmp_path, script)


def test_an_evaluator_that_crashes_ends_the_run_and_names_the_log(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        scene.worker = worker = a_worker(tmp_path)  # type: ignore[assignment]
        for name in ("a", "b"):
            await scene.device(name)

        async def crash() -> None:
            await kill_one(tmp_path, signal.SIGSEGV)
            (tmp_path / "go").touch()

        with pytest.raises(WorkerError, match="was killed by signal 11 while it did 'evaluate'") as caught:
            await scene.both(scene.coordinator(a_plan()), crash())
        assert caught.value.remedy == f"See {worker.log}."
        assert not [one for one in scene.events if one.kind == "warning"]

    played(tmp_path, script)
