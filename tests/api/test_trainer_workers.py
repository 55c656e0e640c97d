"""A simulated fleet on several trainer processes: the same states, scores and bills as in one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from memory_fleet import share
from test_in_process import Ended, bill, ended, fields, scores

import edgefl
from device_agent.runtime.trainer_process import TrainRequest
from edgefl.api.local_run import LocalOptions, LocalRun
from edgefl.api.simulated_trainers import HANDED, SimulatedTrainers
from edgefl.api.simulation import drawn_fleet, kinds_of
from edgefl.errors import ConfigError
from edgefl.process.worker import Note
from edgefl.report.forecast import forecast

#: Of two rounds a stage: prefixes of the first are kept for the second.
ROUNDS: dict[str, Any] = {"training": {"rounds": [2, 2], "batch_size": 6, "holdout": 0.2}}
CROWD: dict[str, Any] = {
    "fleet": drawn_fleet(60, kinds_of(["cpu"])),
    "data": {"partition": {"drawn": {"each": 12}}},
    "slots": {"select": {"random": {"share": 0.1}}},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("workers")
    share(110, {"a": 1.0, "b": 1.0}, seed=5).save_npz(place / "all.npz")
    return place


def run_in(place: Path, source: Path, workers: int, more: dict[str, Any], **options: Any) -> Ended:
    given = fields(source, **more)
    if "data" in more:
        given["data"] = {"source": source / "all.npz", **more["data"]}
    return ended(
        edgefl.run(given, directory=place, in_process=True, workers=workers, export=False, page=False, **options)
    )


@pytest.fixture(scope="module")
def inline(source: Path) -> Ended:
    return run_in(source / "inline", source, 0, {"recipe": "lw-fedmml", **ROUNDS})


@pytest.mark.timeout(180)
def test_a_process_that_is_killed_in_a_round_starts_again_and_changes_nothing(
    source: Path, inline: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first note of a training, which has steps to go, of the third round."""
    killed: list[int] = []
    processes: list[SimulatedTrainers] = []
    call = SimulatedTrainers.call

    async def noted(self: SimulatedTrainers, method: str, body: object, on_note: Note | None = None) -> object:
        def kill(said: object) -> None:
            processes.append(self)
            if not killed and isinstance(body, TrainRequest) and body.offer.attempt.stage == 2 and self.pid:
                killed.append(self.pid)
                os.kill(self.pid, signal.SIGKILL)

        return await call(self, method, body, kill)

    monkeypatch.setattr(SimulatedTrainers, "call", noted)
    told: list[str] = []

    def seen(event: edgefl.EventRow) -> None:
        if event.kind == "warning":
            told.append(str(event.data["text"]))

    run = run_in(source / "killed", source, 2, {"recipe": "lw-fedmml", **ROUNDS}, on_event=seen)
    assert run.states == inline.states
    assert scores(run.report) == scores(inline.report)
    assert [row.status for row in run.report.assignments] == ["done"] * 12
    assert len(killed) == 1
    assert len(set(processes)) == 2, "both trained"
    assert ["killed by signal 9" in text for text in told] == [True]
    assert not (run.directory / HANDED).exists()


PACKED = {"up": "delta+int8", "down": "delta+int8"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "more",
    [
        {"recipe": "lw-fedmml", **ROUNDS},
        {"recipe": "mmic"},
        {"recipe": "pmcmfl"},
        {"recipe": "apromfl", "data": {"missing": {"unlabelled": ["patchy"]}}, **ROUNDS},  # and its private mapping
        {"recipe": "fedmvp"},
        {"recipe": "mmic-layer", "training": {"rounds": [5, 0], "batch_size": 6}},  # devices retain parts and more
        {"recipe": "end_to_end", "transfer": PACKED, "training": {"rounds": [0, 3], "batch_size": 6}},  # residuals
        {"recipe": "end_to_end", **CROWD, **ROUNDS},
    ],
    ids=lambda more: "-".join([more["recipe"], *(more.keys() & {"transfer", "fleet"})]),
)
def test_any_number_of_processes_gives_what_one_gives(source: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    alone, *others = (run_in(tmp_path / str(workers), source, workers, more) for workers in (0, 1, 2, 4))
    assert len(alone.states) > 1
    assert scores(alone.report)
    for one in others:
        assert one.states == alone.states
        assert scores(one.report) == scores(alone.report)
        assert bill(one.report) == bill(alone.report)
        assert forecast(one.report) == forecast(alone.report)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_a_device_refuses_it_refuses_in_another_process_too(source: Path, tmp_path: Path) -> None:
    """Its disk takes what is offered, and not what it has trained."""
    full = {"name": "full", "budget": {"disk_bytes": "40 KiB"}}
    more = {"recipe": "end_to_end", "training": {"rounds": [0, 1], "batch_size": 6}, "fleet": [{"name": "whole"}, full]}
    more["data"] = {}

    def told(run: Ended) -> list[tuple[object, ...]]:
        return sorted((row.device, row.status, str(row.refusal)) for row in run.report.assignments)

    alone, other = (run_in(tmp_path / str(workers), source, workers, more) for workers in (0, 2))
    assert told(alone)[0][1] == "refused"
    assert "disk" in str(told(alone)[0][2])
    assert told(other) == told(alone)
    assert other.states == alone.states


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_was_cut_off_ends_its_processes_and_goes_on_with_others(source: Path, inline: Ended) -> None:
    class CutError(Exception):
        pass

    def cut(event: edgefl.EventRow) -> None:
        if event.kind == "update" and event.stage == 2:
            raise CutError

    place, more = source / "cut", {"recipe": "lw-fedmml", **ROUNDS}
    with pytest.raises(CutError):
        run_in(place, source, 2, more, on_event=cut)
    (begun,) = place.iterdir()
    assert not (begun / HANDED).exists()
    children = [Path(f"/proc/self/task/{task.name}/children") for task in Path("/proc/self/task").iterdir()]
    assert not "".join(file.read_text() for file in children if file.exists()).split()
    went_on = run_in(place, source, 1, more, resume=begun.name)
    assert went_on.states == inline.states


@pytest.mark.parametrize(
    ("more", "options", "told"),
    [
        ({}, {"in_process": False}, "--workers: is of a fleet in one process"),
        ({"rounds": "async", "round": {"devices": 3, "buffer": 2}}, {}, "rounds: async takes updates as they come"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    source: Path, tmp_path: Path, more: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    asked = LocalOptions(fields(source, **more), runs=tmp_path, workers=2, **{"in_process": True, **options})
    with pytest.raises(ConfigError, match=told):
        LocalRun(asked, lambda _: None)
    assert not list(tmp_path.iterdir())
