"""Scalars for TensorBoard and MLflow, read back by the libraries' own readers; a writer that fails fails nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
from coordinator_fixture import a_plan

from coordinator.ledger.ledger import Ledger
from coordinator.runtime import observers
from coordinator.runtime.observers import tracked
from edgefl.errors import ConfigError, MissingDependencyError
from edgefl.report import track
from edgefl.report.track import scalars
from edgefl.run_records import EventRow

UPDATE = {"loss": 0.5, "step_peak_bytes": 900, "flops": 7.0, "payload_up_bytes": 10, "payload_down_bytes": 20}
VALUES = [
    {"available": ["acc", "gyro"], "missing": "none", "metric": "accuracy", "value": 0.75},
    {"available": ["acc"], "missing": "prototype", "metric": "accuracy", "value": 0.5},
]
EVENTS = [
    EventRow(1.0, "run_started", data={"name": "x"}),
    EventRow(10.0, "update", 1, 1, "a", UPDATE),
    EventRow(11.0, "round_closed", 1, 1, data={"loss": 0.5, "participants": ["a"], "payload_bytes": 30, "seconds": 2}),
    EventRow(12.0, "evaluated", 1, 1, data={"values": VALUES}),
    EventRow(20.0, "update", 2, 2, "a", {"loss": float("nan"), "seconds": 3}),
    EventRow(22.0, "round_closed", 2, 2, data={"loss": 0.25, "participants": ["a", "b"]}),
    EventRow(23.0, "run_finished", data={"status": "done"}),
]
#: Stage 1 has one round, so round 2 of stage 2 is the third.
WANTED = {
    "device/a/loss": [(1, 0.5)],
    "device/a/step_memory_bytes": [(1, 900.0)],
    "device/a/flops": [(1, 7.0)],
    "device/a/sent_bytes": [(1, 10.0)],
    "device/a/received_bytes": [(1, 20.0)],
    "device/a/seconds": [(3, 3.0)],
    "round/loss": [(1, 0.5), (3, 0.25)],
    "round/devices": [(1, 1.0), (3, 2.0)],
    "round/payload_bytes": [(1, 30.0)],
    "round/seconds": [(1, 2.0)],
    "test/accuracy/acc_and_gyro": [(1, 0.75)],
    "test/accuracy/acc/prototype": [(1, 0.5)],
}


def written(kind: str, target: str, events: list[EventRow] = EVENTS) -> None:
    lines = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
    command = [sys.executable, "-m", "edgefl.report.track", kind, target, "r1", "[1, 2]"]
    subprocess.run(command, input=lines, check=True)


def test_the_scalars_of_events() -> None:
    found = defaultdict(list)
    for event in EVENTS:
        for name, value in scalars(event):
            found[name].append(value)
    assert found == {name: [value for _, value in points] for name, points in WANTED.items()}


def from_tensorboard(target: Path) -> dict[str, list[tuple[int, float]]]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = defaultdict(list)
    for file in sorted(target.iterdir()):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
                found[value.tag].append((event.step, number))
    return found


def from_mlflow(target: Path) -> tuple[dict[str, list[tuple[int, float]]], str]:
    pytest.importorskip("mlflow")
    program = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("edgefl").experiment_id])
names = list(run.data.metrics)
points = {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in names}
print(json.dumps([points, run.info.status, run.info.run_name]))
"""
    told = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    command = [sys.executable, "-W", "ignore", "-c", program, f"file:{target}"]
    out = subprocess.run(command, env=told, capture_output=True, check=True).stdout
    points, status, name = msgspec.json.decode(out.splitlines()[-1])
    assert name == "r1"
    return {name: [tuple(point) for point in series] for name, series in points.items()}, status


def test_tensorboard_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    written("tensorboard", str(tmp_path / "tb"))
    assert from_tensorboard(tmp_path / "tb") == WANTED


@pytest.mark.slow
def test_mlflow_reads_them_and_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    written("mlflow", f"file:{tmp_path / 'ml'}", EVENTS[:3])
    assert from_mlflow(tmp_path / "ml")[1] == "KILLED"  # broken off
    written("mlflow", f"file:{tmp_path / 'ml'}", EVENTS[3:])
    found, status = from_mlflow(tmp_path / "ml")
    assert (found, status) == (WANTED, "FINISHED")


def test_a_run_feeds_a_writer_and_does_not_wait_for_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    shown = list[EventRow]()
    with tracked(shown.append, ["tensorboard"], a_plan(), tmp_path) as take:
        began = time.monotonic()
        for event in EVENTS:
            take(event)
        assert time.monotonic() - began < 0.5  # its process has not even imported its library
    assert shown == EVENTS
    assert from_tensorboard(tmp_path / "tensorboard")["round/loss"] == [(1, 0.5), (3, 0.25)]


def test_a_writer_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("in the way")
    with tracked(lambda _: None, [f"tensorboard:{tmp_path / 'file'}"], a_plan(), tmp_path) as take:
        for event in EVENTS:
            take(event)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.name.startswith("coordinator")
    assert "nothing more is written for tensorboard" in record.getMessage()
    assert (tmp_path / "logs" / "track-tensorboard.log").read_text()


def test_one_that_does_not_keep_up_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(observers, "_MOST_WAITING", 3)
    monkeypatch.setattr(observers.Tracker, "_feed", lambda self: self._process.stdin.close())
    with tracked(lambda _: None, ["tensorboard"], a_plan(), tmp_path) as take:
        for event in EVENTS * 3:
            take(event)
    assert ["does not keep up" in record.getMessage() for record in caplog.records] == [True]


def test_what_can_not_be_written_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="none of tensorboard, mlflow"), tracked(print, ["wandb"], a_plan(), tmp_path):
        pass
    monkeypatch.setitem(track.WRITERS, "mlflow", (track._mlflow, "absent_package"))
    with pytest.raises(MissingDependencyError) as missing, tracked(print, ["mlflow"], a_plan(), tmp_path):
        pass
    assert missing.value.extra == "mlflow"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fleet_s_run_is_in_its_folder_and_a_broken_writer_on_record(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from fleet_fixture import RUN, Fleet, share

    with Fleet(tmp_path) as fleet:
        fleet.agent("whole", share(24, "acc", "gyro", seed=1))
        (tmp_path / "r1.yaml").write_text(RUN)
        (tmp_path / "file").write_text("in the way")
        words = ["coordinator.cli", "run", "r1.yaml", "--run", "r1", "--set", "round.devices=1"]
        words += ["--track", "tensorboard", "--track", "tensorboard:file"]
        program = fleet._coordinator(words)
        assert program.wait() == 0, program.story()
        report = fleet.report("r1")
    found = from_tensorboard(fleet.runs / "r1" / "tensorboard")
    losses = [row.metrics["loss"] for row in report.rounds]
    assert [step for step, _ in found["round/loss"]] == [1, 2]
    assert [value for _, value in found["round/loss"]] == pytest.approx(losses)
    accuracy = next(row.value for row in report.evaluations if row.stage == 2 and row.metric == "accuracy")
    assert found["test/accuracy/acc_and_gyro"][-1] == pytest.approx((2, accuracy))
    with Ledger(fleet.runs / "r1" / "ledger.sqlite") as ledger:
        told = [row.data["text"] for row in ledger.report("r1").events if row.kind == "warning"]
    assert any("nothing more is written for tensorboard" in text for text in told), told
