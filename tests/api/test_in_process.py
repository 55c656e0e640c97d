"""A run in one process and the same run as processes over a broker: the same states to the last bit."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from memory_fleet import share
from transport_fixtures import broker_kinds

import edgefl
from coordinator.ledger.ledger import Ledger
from device_agent.trainer.process import Trainers
from edgefl.api.local_run import LocalOptions, LocalRun
from edgefl.api.simulation import drawn_fleet, kinds_of
from edgefl.data.dataset import Dataset
from edgefl.data.population import Population
from edgefl.errors import ConfigError, DataError, StoreError
from edgefl.records import Manifest
from edgefl.report.decisions import not_offered
from edgefl.run_records import RunReport
from edgefl.storage.disk import LEDGER
from edgefl.transport import memory_broker

#: One device with both sensors, one that lacks some of b, one that has a alone.
FLEET = [{"name": "whole"}, {"name": "patchy"}, {"name": "only-a"}]
FIELDS: dict[str, Any] = {
    "name": "same",
    "seed": 3,
    "broker": broker_kinds()[0],
    "data": {"missing": {"rate": 0.3, "keep": "one", "devices": {"only-a": ["b"]}}},
    "model": {
        "stages": 2,
        "encoders": {m: {"kind": "sensor", "width": 8, "depth": 2, "heads": 2, "patch": 4} for m in "ab"},
        "head": {"width": 12, "out": 8, "dropout": 0.1},
        "fusion_width": 8,
    },
    "training": {"rounds": [1, 1], "batch_size": 6, "holdout": 0.2},
    "round": {"devices": 3, "join_s": 60, "quorum": 0.5},
    "fleet": FLEET,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("in-process")
    share(110, {"a": 1.0, "b": 1.0}, seed=5).save_npz(place / "all.npz")
    return place


def fields(source: Path, **more: object) -> dict[str, Any]:
    return {**FIELDS, "data": {**FIELDS["data"], "source": source / "all.npz"}, **more}


class Ended(NamedTuple):
    states: dict[tuple[int, int], Manifest]
    report: RunReport
    directory: Path


def ended(run: edgefl.Run) -> Ended:
    with Ledger(run.directory / LEDGER, create=False) as ledger:
        return Ended(ledger.states(run.id), run.report.record, run.directory)


def scores(report: RunReport) -> list[object]:
    return [msgspec.structs.replace(row, run="") if hasattr(row, "run") else row for row in report.evaluations]


def bill(report: RunReport) -> list[tuple[object, ...]]:
    """What was counted of each attempt."""
    counted = ("flops", "payload_up_bytes", "payload_down_bytes")
    return sorted(
        (row.device, row.stage, row.round, row.status, *(row.measured[name].value for name in counted))
        for row in report.assignments
    )


def check_same(source: Path, recipe: str) -> Ended:
    """Every state's object ids, every evaluation, what was counted of each attempt; the run in one process."""
    kinds = ("processes", "one")
    processes, one = (
        ended(
            edgefl.run(
                fields(source, recipe=recipe),
                directory=source / recipe / kind,
                in_process=kind == "one",
                export=False,
                page=False,
            )
        )
        for kind in kinds
    )
    assert one.states == processes.states
    assert len({ref.id for ref in one.states[max(one.states)].values()}) > 3
    assert scores(one.report) == scores(processes.report)
    assert scores(one.report)
    assert bill(one.report) == bill(processes.report)
    assert {"broker", "logs", "objects", "shares", "devices"} <= {path.name for path in processes.directory.iterdir()}
    left = {path.name for path in processes.directory.iterdir()} - {path.name for path in one.directory.iterdir()}
    assert left in ({"broker"}, {"broker", "devices"})  # where a device has left nothing there
    return one


@pytest.fixture(scope="module")
def one(source: Path) -> Ended:
    return check_same(source, "lw-fedmml")


@pytest.mark.timeout(120)
def test_one_process_gives_what_processes_give_and_says_what_it_has_not_measured(one: Ended) -> None:
    for row in one.report.assignments:
        for name, reason in (
            ("step_peak_bytes", "the whole fleet is in one process"),
            ("process_peak_bytes", "the process holds the data of other devices, too"),
            ("wire_up_bytes", "messages do not leave this process"),
            ("wire_down_bytes", "messages do not leave this process"),
        ):
            assert (row.measured[name].value, row.measured[name].reason) == (None, reason)
        assert row.measured["compute_s"].value > 0
    assert all(row.capabilities.trainer_base_bytes == 0 for row in one.report.devices)
    logs = one.directory / "logs"
    assert all("training" in (logs / f"{device['name']}.log").read_text("utf-8") for device in FLEET)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("recipe", ["mmic", "pmcmfl"])
def test_one_process_gives_what_processes_give_of_other_recipes(source: Path, recipe: str) -> None:
    check_same(source, recipe)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["round_started", "update"])
def test_a_run_that_was_cut_off_goes_on_in_one_process(source: Path, one: Ended, kind: str) -> None:
    """The error of whoever looks on ends it, between two rounds or within one; the whole is what it would be."""

    class CutError(Exception):
        pass

    def cut(event: edgefl.EventRow) -> None:
        if event.kind == kind and event.stage == 2:
            raise CutError

    place, given = source / f"cut-{kind}", fields(source, recipe="lw-fedmml")
    with pytest.raises(CutError):
        edgefl.run(given, directory=place, in_process=True, on_event=cut, export=False, page=False)
    (begun,) = place.iterdir()
    assert edgefl.load_report(begun).status == "failed"
    assert bool(list((begun / "objects" / "packs").glob("*"))) == (kind == "update"), "what the record has is written"
    went_on = ended(edgefl.run(given, directory=place, in_process=True, resume=begun.name, export=False, page=False))
    assert went_on.states == one.states
    assert went_on.report.status == "done"


#: Runs FIELDS (JSON) in a directory until the second update of stage 2 has come, and is then gone.
KILLED = """
import json, os, signal, sys
import edgefl

updates = []

def seen(event):
    if event.kind == "update" and event.stage == 2:
        updates.append(event.device)
        if len(updates) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

edgefl.run(json.loads(sys.argv[1]), directory=sys.argv[2], in_process=True, on_event=seen, export=False, page=False)
"""


@pytest.mark.timeout(180)
def test_a_process_that_was_killed_within_a_round_goes_on_from_its_begin(source: Path, one: Ended) -> None:
    """What it held in memory is trained again, to the same end and the same bill."""
    place, given = source / "killed", fields(source, recipe="lw-fedmml")
    words = [sys.executable, "-c", KILLED, json.dumps(given, default=str), str(place)]
    assert subprocess.run(words, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    (begun,) = place.iterdir()
    with Ledger(begun / LEDGER, create=False) as ledger:
        rows = [row for row in ledger.report().assignments if row.stage == 2]
    assert len(rows) == 3
    assert not [row for row in rows if row.status == "done"], "no record says that what was in memory alone is there"
    assert not list((begun / "objects" / "packs").glob("*"))
    went_on = ended(edgefl.run(given, directory=place, in_process=True, resume=begun.name, export=False, page=False))
    assert went_on.states == one.states
    assert bill(went_on.report) == bill(one.report)


@pytest.mark.timeout(120)
def test_a_disk_that_does_not_keep_the_shares_is_told(
    source: Path, one: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(folder: Path) -> None:
        raise StoreError(f"{folder}: cannot be synced", remedy="Look after the disk.")

    monkeypatch.setattr(Population, "sync", staticmethod(lost))
    told: list[str] = []
    given = fields(source, recipe="lw-fedmml")
    options: dict[str, Any] = {"in_process": True, "export": False, "page": False}
    run = edgefl.run(
        given, directory=tmp_path, on_event=lambda event: told.append(str(event.data.get("text"))), **options
    )
    assert [text for text in told if "may not outlast a power cut" in text and "shares: cannot be synced" in text]
    assert ended(run).states == one.states
    (run.directory / "shares" / "all.npz").write_bytes(b"")
    with pytest.raises(DataError, match="not a readable") as caught:
        edgefl.run(given, directory=tmp_path, resume=run.directory.name, **options)
    assert "start the run again" in str(caught.value.remedy)


@pytest.mark.timeout(120)
def test_a_busy_machine_changes_nothing(
    source: Path, one: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device takes longer to join, and to train, than the run file waits for all of them."""
    warm, train = Trainers.warm, Trainers.train
    calls: list[str] = []

    def slow(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def late(*given: object) -> object:
            calls.append(name)
            time.sleep(0.6)
            return work(*given)

        return late

    monkeypatch.setattr(Trainers, "warm", slow("warm", warm))
    monkeypatch.setattr(Trainers, "train", slow("train", train))
    hurried = {"devices": 3, "join_s": 0.5, "deadline_s": 0.5, "quorum": 0.5}
    given = fields(source, recipe="lw-fedmml", round=hurried)
    run = ended(edgefl.run(given, directory=tmp_path, in_process=True, export=False, page=False))
    assert {"warm", "train"} <= set(calls)
    assert run.states == one.states
    assert not [event for event in run.report.events if event.kind in {"device_left", "warning"}]
    assert [row.status for row in run.report.assignments] == ["done"] * 6


@pytest.mark.timeout(60)
def test_the_first_round_does_not_wait_for_an_agent_that_has_ended(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = fields(source, recipe="lw-fedmml", round={"devices": 3, "join_s": 1.0, "quorum": 0.5})
    local = LocalRun(LocalOptions(given, runs=tmp_path, in_process=True), lambda _: None)
    share = Population.share

    def damaged(self: Population, device: str) -> Dataset:
        if device == "only-a":
            raise DataError("no archive")
        return share(self, device)

    monkeypatch.setattr(Population, "share", damaged)
    asyncio.run(local.train())
    with Ledger(local.directory / LEDGER, create=False) as ledger:
        report = ledger.report(local.run)
    assert report.status == "done"
    assert {row.device for row in report.assignments} == {"whole", "patchy"}


def test_a_fleet_that_was_simulated_goes_on_in_one_process(tmp_path: Path) -> None:
    """Its devices are those of the run, not of the run file, whose own have budgets of memory."""
    fleet = {"fleet": drawn_fleet(3, kinds_of(["jetson-nano"]))}
    local = LocalRun(LocalOptions("demo", fleet, tmp_path, in_process=True), lambda _: None)
    local._prepare()
    words = shlex.split(local.way_on().partition("with: ")[2])
    assert "--in-process" in words
    again = LocalOptions(words[2], runs=tmp_path, resume=words[words.index("--resume") + 1], in_process=True)
    went_on = LocalRun(again, lambda event: pytest.fail(str(event.data)))
    went_on._prepare()
    assert [one.name for one in went_on.config.fleet] == ["device-0", "device-1", "device-2"]


@pytest.mark.parametrize(
    ("more", "options", "told"),
    [
        ({"broker": "mqtt://elsewhere:1883"}, {}, "names a broker, and a run in one process has none"),
        ({"fleet": [{"name": "only-a", "budget": {"step_memory_bytes": "1 MiB"}}]}, {}, "shares its trainer's process"),
        ({"fleet": [{"name": "only-a", "budget": {"memory_bytes": "1 GiB"}}]}, {}, "shares its trainer's process"),
        ({"fleet": [{"name": "only-a", "profile": "jetson-nano"}]}, {}, "shares its trainer's process"),
        ({}, {"trainers": 2}, "--trainers: needs the coordinator's own process"),
        ({}, {"more": ["--web-at=127.0.0.1:1"]}, "--web-at: needs the coordinator's own process"),
    ],
)
def test_what_takes_processes_is_refused_before_anything_starts(
    tmp_path: Path, source: Path, more: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    asked = LocalOptions(fields(source, **more), runs=tmp_path / "runs", in_process=True, **options)
    with pytest.raises(ConfigError, match=told) as caught:
        LocalRun(asked, lambda _: None)
    assert "--in-process" in caught.value.remedy
    assert not (tmp_path / "runs").exists()


@pytest.mark.timeout(60)
def test_of_a_large_fleet_nothing_is_synced_for_a_device_and_no_pattern_looked_at(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of three of 30 devices. The coordinator has the disk write the run's states and record alone."""
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    looked: list[str] = []
    matches = memory_broker.topic_matches_sub
    monkeypatch.setattr(
        memory_broker, "topic_matches_sub", lambda pattern, topic: looked.append(topic) or matches(pattern, topic)
    )
    committed: list[list[object]] = []
    commit = Ledger.commit

    def counted(self: Ledger, run: str, saves: Sequence[Any], *given: Any) -> None:
        committed.append([type(one).__name__ for one in saves])
        commit(self, run, saves, *given)

    monkeypatch.setattr(Ledger, "commit", counted)
    names = [f"device-{n:02}" for n in range(30)]
    run = edgefl.run(
        fields(
            source,
            name="large",
            recipe="end_to_end",
            slots={"select": {"random": {"share": 0.1}}},
            data={"source": source / "all.npz", "partition": {"uniform": {}}},
            training={"rounds": [0, 1], "batch_size": 2},
            round={"join_s": 60},
            fleet=[{"name": name} for name in names],
        ),
        directory=source / "large",
        in_process=True,
        export=False,
        page=False,
    )
    report = run.report.record
    assert [len(row.participants) for row in report.rounds] == [3]
    assert not [event for event in report.events if event.kind == "device_left"]
    assert str(run.directory / "shares" / "all.npz") in synced
    assert not [path for path in synced if "/devices/" in path or "/packs" in path or "/partial/" in path]
    assert [names.count("AssignmentRow") > 1 for names in committed].count(True) <= 2, "one by one they would be twelve"
    assert len(looked) == 0
    firsts = {"device-00", "device-28"}  # of each size of share
    assert {row.device for row in report.devices} == {*firsts, *report.rounds[0].participants}, "nobody else came"
    rows = [[cell.text for cell in row[:3]] for row in not_offered(report).rows]
    assert rows == [[name, "not chosen (select: random)", "1 / 1"] for name in sorted(firsts)]
