"""Real programs through a real broker: what a person who starts them by hand goes through, kill -9 included."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from fleet_fixture import PATIENCE_S, RUN, Fleet, Line, Program, finish, of_kind, share, until
from transport_fixtures import broker_kinds

from coordinator.ledger.ledger import Ledger
from edgefl.errors import RunError
from edgefl.process.parent_death import leashed
from edgefl.records import FIGURES, Manifest
from edgefl.run_records import AssignmentRow, RunReport
from edgefl.storage.disk import ledger_of

pytestmark = pytest.mark.timeout(240)

BOTH = ("acc", "gyro")
#: Round 1 lasts long enough for something to be killed in it, and nobody's update is done without.
LONG = {"training.epochs": 20, "training.rounds": "[2, 0]", "round.devices": 2, "round.quorum": 1.0}


def kinds() -> list[object]:
    """Every broker there is here; the second one only among the slow tests."""
    first, *others = broker_kinds()
    return [first, *(pytest.param(kind, marks=pytest.mark.slow) for kind in others)]


@pytest.fixture(scope="module", params=kinds())
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A run that went well: a device with both sensors, one with the accelerometer alone, one that fits nothing."""
    with Fleet(tmp_path_factory.mktemp("fleet"), request.param) as fleet:
        fleet.agent("whole", share(40, *BOTH, seed=1))
        fleet.agent("half", share(24, "acc", seed=2))
        fleet.agent("stranger", share(24, "lidar", seed=3))
        finish(fleet.coordinator("r1", {"round.devices": 3}))
        yield fleet


def of(report: RunReport, device: str) -> list[AssignmentRow]:
    return [row for row in report.assignments if row.device == device]


def size(manifest: Manifest, parts: set[str], known: Manifest | None = None) -> int:
    """Bytes of the objects of these parts that are not ``known``; what is equal is one object."""
    there = {ref.id for ref in (known or {}).values()}
    return sum({ref.id: ref.size for part, ref in manifest.items() if part in parts and ref.id not in there}.values())


def test_a_fleet_started_by_hand_finishes_its_run(finished: Fleet) -> None:
    report = finished.report("r1")
    assert report.status == "done"
    assert [(row.stage, row.round, row.attempt, row.status) for row in report.rounds] == [
        (1, 1, 1, "done"),
        (2, 1, 1, "done"),
    ]
    assert all(row.participants == ("half", "whole") for row in report.rounds)
    assert {device.device: device.samples[""] for device in report.devices} == {"half": 24, "stranger": 24, "whole": 40}
    masks = {(row.available, row.missing) for row in report.evaluations if row.stage == 2}
    assert masks == {(BOTH, "none"), *(((m,), mask) for m in BOTH for mask in ("zero", "prototype", "oracle"))}
    assert all(row.samples == 30 for row in report.evaluations)


def test_every_assignment_has_every_figure_with_its_origin(finished: Fleet) -> None:
    report = finished.report("r1")
    on_gpu = {d.device for d in report.devices if d.capabilities.torch_device.startswith("cuda")}
    rows = [row for row in report.assignments if row.device != "stranger"]
    assert sorted((row.device, row.stage) for row in rows) == [("half", 1), ("half", 2), ("whole", 1), ("whole", 2)]
    for row in rows:
        assert row.status == "done"
        # A repaired device alone has the one, the first round with a frozen prefix the other, and a GPU its own.
        some = {"layer_up_bytes", "layer_down_bytes", "filling_flops", "signature_up_bytes"}
        gpu = {"cuda_allocated_peak_bytes", "cuda_reserved_peak_bytes"}
        assert set(row.measured) - {"filling_flops"} == set(FIGURES) - some - (set() if row.device in on_gpu else gpu)
        for name, figure in row.measured.items():
            assert figure.kind in {"measured", "counted"}, name
            least = 0 if name.startswith(("resent", "prototypes")) else 1e-9  # nothing is lost here
            assert figure.reason if figure.value is None else figure.value >= least and figure.source, (name, figure)
        absent = {name for name, figure in row.measured.items() if figure.value is None}
        assert absent <= {"energy_j", "temperature_c"}  # which need sensors
        assert set(row.predicted) == {"step_peak_bytes", "flops", "payload_up_bytes", "payload_down_bytes"}
        assert all(f.value and f.kind == "predicted" and f.source for f in row.predicted.values())
        # A batch's prototypes are counted on the device, not priced; everything else is the same arithmetic.
        assert row.measured["flops"].value == pytest.approx(row.predicted["flops"].value, rel=0.05)


def test_the_payload_is_the_objects_that_the_manifests_name(finished: Fleet) -> None:
    with Ledger(ledger_of(finished.runs / "r1"), create=False) as ledger:
        states, stages = ledger.states("r1"), ledger.plan("r1").stages
    before, after, last = states[0, 0], states[1, 1], states[2, 1]
    report = finished.report("r1")
    first, second = of(report, "whole")
    one, two = ({*stage.present, "prototypes"} for stage in stages)
    offered = {part: ref for part, ref in before.items() if part in one}
    assert first.measured["payload_down_bytes"].value == size(before, one)
    # Nobody else trained the gyroscope's parts: their mean is this device's own update, which it still holds.
    own = {part for part in stages[0].trained if "gyro" in part}
    assert second.measured["payload_down_bytes"].value == size(after, two - own, offered)
    assert first.measured["payload_up_bytes"].value == size(after, {*stages[0].trained, "prototypes"})
    assert second.measured["payload_up_bytes"].value == size(last, {*stages[1].trained, "prototypes"})
    for row in (first, second):  # chunks carry a header and a topic each, messages come on top
        for way in ("up", "down"):
            assert row.measured[f"wire_{way}_bytes"].value > row.measured[f"payload_{way}_bytes"].value


def test_a_device_without_a_sensor_trains_what_it_can(finished: Fleet) -> None:
    rows = of(finished.report("r1"), "half")
    assert [row.status for row in rows] == ["done", "done"]
    for row, whole in zip(rows, of(finished.report("r1"), "whole"), strict=True):
        assert set(row.trained) == {part for part in whole.trained if "gyro" not in part}
        assert set(row.samples) <= {*row.trained, "prototypes"}
        assert row.samples["head/acc"] == 24
        for name in ("payload_up_bytes", "payload_down_bytes", "flops"):
            assert row.measured[name].value < whole.measured[name].value


def test_a_device_that_fits_nothing_is_refused_with_the_reason(finished: Fleet) -> None:
    rows = of(finished.report("r1"), "stranger")
    assert [row.status for row in rows] == ["refused", "refused"]
    assert all(row.refusal.reason == "data" and row.refusal.detail for row in rows)
    assert all(row.measured == {} for row in rows)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path) as fleet:
        yield fleet


def in_round(coordinator: Program, device: str) -> Line:
    """Wait until this device is in the middle of its training of round 1."""
    line = coordinator.expect("progress", device=device, round=1)
    assert line["data"]["step"] < line["data"]["steps"] / 2
    return line


@pytest.mark.slow
def test_an_agent_killed_in_a_round_takes_part_again(fleet: Fleet) -> None:
    fleet.agent("left", share(40, *BOTH, seed=1))
    right = fleet.agent("right", share(40, *BOTH, seed=2))
    coordinator = fleet.coordinator("r1", LONG)
    in_round(coordinator, "right")
    identity = (fleet.state_of("right") / "identity.json").read_bytes()
    trainers = psutil.Process(right.pid).children()
    right.kill()
    again = fleet.agent("right")
    finish(coordinator)
    again.expect("training", attempt="r1/s1/r1/a1")  # the same attempt: it was on the disk
    again.expect("delivered", attempt="r1/s1/r2/a1")
    assert (fleet.state_of("right") / "identity.json").read_bytes() == identity
    assert psutil.wait_procs(trainers, timeout=5)[1] == []  # its trainer died with it
    report = fleet.report("r1")
    assert [device.device for device in report.devices] == ["left", "right"]
    assert [(row.round, row.attempt, row.participants) for row in report.rounds] == [
        (1, 1, ("left", "right")),
        (2, 1, ("left", "right")),
    ]
    first, second = of(report, "right")
    assert first.measured["wall_s"].reason == "the agent was restarted during the round"
    assert second.measured["wall_s"].value > 0


@pytest.mark.slow
def test_a_memory_ceiling_is_a_decline_with_both_numbers_not_a_dead_agent(fleet: Fleet) -> None:
    # One step is predicted to need less than 2 MiB, 1 of it libraries'; here it takes 16 MiB more.
    fleet.agent("wide", share(24, *BOTH, seed=1))
    tight = fleet.agent("tight", share(24, *BOTH, seed=2), overrun=str(2**24), step_memory_bytes="3.8 MiB")
    changes = {"round.devices": 2, "training.batch_size": 2, "training.rounds": "[2, 0]"}
    coordinator = fleet.coordinator("r1", {**changes, "slots.schedule": "{layerwise: {embed: frozen}}"})
    coordinator.expect("declined")
    finish(coordinator)
    declines = [line["data"] for line in of_kind(coordinator, "declined", device="tight")]
    # The whole batch of 2, 1 at a time, and so with blocks computed anew; with a stored prefix and then without.
    assert len(declines) == 6
    for data in declines:
        assert (data["reason"], data["unit"]) == ("ceiling", "B")
        assert 0 < data["needed"] - data["allowed"] < 2**29
    again = [line["data"] for line in of_kind(coordinator, "replanned", device="tight")]
    offered = [(data["micro_batch"], data["checkpoint"], data["cache"]) for data in again]
    assert offered == [(1, False, "f16"), (1, True, "f16"), (0, False, ""), (1, False, ""), (1, True, "")]
    assert {(data["depth"], data["reason"], data["lean"]) for data in again} == {(1, "ceiling", "")}
    assert tight.alive
    assert len([line for line in tight.lines if line["event"] == "trainer-lost"]) == 6
    report = fleet.report("r1")
    assert report.status == "done"
    assert [row.participants for row in report.rounds] == [("wide",), ("wide",)]
    for row in of(report, "tight"):
        assert (row.status, row.refusal.reason) == ("refused", "ceiling")
        assert row.refusal.needed > row.refusal.allowed > 0
    assert of(report, "tight")[0].measured["process_peak_bytes"].value > of(report, "tight")[0].refusal.allowed


@pytest.mark.slow
def test_a_trainer_killed_by_its_ceiling_finishes_with_a_new_plan(fleet: Fleet) -> None:
    # The whole batch of 192 is predicted to need 41.5 MiB and takes 16 more: its trainer dies, its half is offered.
    tight = fleet.agent("tight", share(200, *BOTH, seed=2), overrun=f"{2**24}@whole", step_memory_bytes="41.6 MiB")
    encoder = "{kind: sensor, width: 64, depth: 2, heads: 4, patch: 1}"
    changes = {"round.devices": 1, "training.batch_size": 192, "slots.schedule": "end_to_end"}
    coordinator = fleet.coordinator("r1", {**changes, "model.encoders.acc": encoder, "model.encoders.gyro": encoder})
    finish(coordinator)
    (declined,) = (line["data"] for line in of_kind(coordinator, "declined", device="tight"))
    assert declined["reason"] == "ceiling"
    assert declined["needed"] > declined["allowed"] > 0
    (again,) = (line["data"] for line in of_kind(coordinator, "replanned", device="tight"))
    assert (again["micro_batch"], again["reason"]) == (96, "ceiling")
    assert len([line for line in tight.lines if line["event"] == "trainer-lost"]) == 1
    report = fleet.report("r1")
    assert report.status == "done"
    rows = of(report, "tight")
    assert [row.status for row in rows] == ["done", "done"]
    assert rows[-1].micro_batch == 96  # and so in the first round, if it was there that the trainer died
    assert rows[-1].measured["step_peak_bytes"].value < 41.6 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("kind", broker_kinds())
def test_a_broker_killed_in_a_round_costs_no_round(tmp_path: Path, kind: str) -> None:
    with Fleet(tmp_path, kind) as fleet:
        agents = [fleet.agent(name, share(40, *BOTH, seed=i)) for i, name in enumerate(("left", "right"))]
        coordinator = fleet.coordinator("r1", LONG)
        in_round(coordinator, "left")
        fleet.restart_broker()
        finish(coordinator)
        warnings = [line["data"]["text"] for line in coordinator.lines if line["kind"] == "warning"]
        assert any(text.startswith("lost the broker") for text in warnings)
        assert any(text.endswith("answers again") for text in warnings)
        for agent in agents:
            assert [line for line in agent.lines if line["event"] == "disconnected"]
            assert agent.alive
        report = fleet.report("r1")
    assert [(row.round, row.attempt, row.participants) for row in report.rounds] == [
        (1, 1, ("left", "right")),
        (2, 1, ("left", "right")),
    ]


@pytest.mark.slow
def test_a_coordinator_killed_after_a_round_goes_on_with_the_next(fleet: Fleet) -> None:
    for seed, name in enumerate(("left", "right")):
        fleet.agent(name, share(40, *BOTH, seed=seed))
    killed = fleet.coordinator("r1", {"round.devices": 2, "training.rounds": "[2, 1]", "evaluate": "round"})
    killed.expect("round_closed")
    workers = psutil.Process(killed.pid).children()
    killed.kill()
    resumed = fleet.resume("r1")
    finish(resumed)
    begun = [(line["stage"], line["round"]) for line in of_kind(resumed, "round_started")]
    assert begun == [(1, 2), (2, 1)]
    report = fleet.report("r1")
    assert [(row.stage, row.round, row.status) for row in report.rounds] == [
        (1, 1, "done"),
        (1, 2, "done"),
        (2, 1, "done"),
    ]
    assert sorted((row.stage, row.round, row.device) for row in report.assignments if row.status == "done") == [
        (stage, number, device) for stage, number in ((1, 1), (1, 2), (2, 1)) for device in ("left", "right")
    ]
    complete = [(e.stage, e.round) for e in report.evaluations if e.available == BOTH and e.metric == "accuracy"]
    assert complete == [(1, 1), (1, 2), (2, 1)]  # that of the first round was made up for
    assert psutil.wait_procs(workers, timeout=10)[1] == []  # its worker died with it


def local_file(directory: Path) -> Path:
    share(90, *BOTH, seed=5).save_npz(directory / "all.npz")
    values = yaml.safe_load(RUN)
    values["data"] = {"source": str(directory / "all.npz"), "missing": {"rate": 0.2, "keep": "one"}}
    values["fleet"] = [{"name": "one"}, {"name": "two", "budget": {"flops": 1.0e12}}]
    path = directory / "local.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def local(directory: Path, *options: str) -> list[str]:
    command = ["edgefl.cli.main", "run", str(local_file(directory)), "--runs", str(directory / "runs"), *options]
    return leashed([sys.executable, "-m", *command])


TRACKED = importlib.util.find_spec("tensorboard") is not None


@pytest.mark.parametrize(
    ("options", "export", "logged"),
    [
        (("--no-export",), False, {"one", "two"}),
        pytest.param(
            ("--no-export", *["--track=tensorboard"] * TRACKED),
            False,
            {"one", "two", *["track-tensorboard"] * TRACKED},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--no-export", "--no-page", "--trainers", "1"),
            False,
            {"one", "two", "agents", "trainers-1"},
            marks=pytest.mark.slow,  # test_trainer_host.py has the sharing
        ),
        pytest.param((), True, {"one", "two"}, marks=pytest.mark.slow),  # three exports take 30 s
    ],
)
def test_local_mode_trains_and_reports(
    tmp_path: Path, options: tuple[str, ...], export: bool, logged: set[str]
) -> None:
    command = local(tmp_path, "--format", "json", *options)
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S * 1.5)
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert report["status"] == "done"
    assert {row["device"]: row["status"] for row in report["assignments"]} == {"one": "done", "two": "done"}
    directory = tmp_path / "runs" / report["run"]
    assert {tuple(row["modalities"]) for row in report["bundles"]} == ({BOTH, ("acc",), ("gyro",)} if export else set())
    for row in report["bundles"]:
        assert row["max_difference"] <= row["tolerance"]
        assert (directory / row["path"]).is_file()
    page = (directory / "report.html").read_text() if "--no-page" not in options else ""
    assert (directory / "report.html").exists() == bool(page)
    assert not page or ("<svg" in page and report["run"] in page)
    assert any(directory.glob("tensorboard/*tfevents*")) == ("--track=tensorboard" in options)
    logs = {path.stem: path.read_text() for path in (directory / "logs").iterdir()}
    assert set(logs) == {"coordinator", "evaluator", *logged}
    assert "delivered" in logs["one"]
    secret = json.loads((directory / "broker" / "identity.json").read_text())["password"]
    assert not [text for text in (done.stdout.decode(), done.stderr.decode(), page, *logs.values()) if secret in text]


@pytest.mark.slow
def test_local_mode_tells_of_a_coordinator_that_was_killed_and_how_to_go_on(tmp_path: Path) -> None:
    with subprocess.Popen(local(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: any((tmp_path / "runs").glob("*/events.jsonl")))
        family = psutil.Process(process.pid).children(recursive=True)
        next(one for one in family if "coordinator.cli" in one.cmdline()).kill()
        _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == RunError.exit_code
    assert "error: the coordinator was ended by SIGKILL" in told
    assert re.search(r"Go on where it stopped with: edgefl run \S+ --resume \S+", " ".join(told.split()))


@pytest.mark.slow
def test_local_mode_tells_of_a_dead_agent_and_killed_itself_leaves_nothing_running(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(local(tmp_path), stdout=out, stderr=out)
    family: list[psutil.Process] = []
    try:
        runs = tmp_path / "runs"
        until(lambda: any(runs.glob("*/devices/two/lock")) and any(runs.glob("*/events.jsonl")))
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4  # broker, coordinator, two agents; and workers
        next(one for one in family if one.is_running() and "two" in one.cmdline()).kill()
        until(lambda: b"warning: the agent of two has ended" in (tmp_path / "out").read_bytes())
    finally:
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(family, timeout=20)
        for one in left:
            one.kill()
    assert not left
