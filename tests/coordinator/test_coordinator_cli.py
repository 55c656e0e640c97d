"""The command ``edgefl-coordinator``: errors name the culprit and the way out, with a stable exit code."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.core.moves import SaveEnd
from coordinator.ledger.ledger import Ledger
from coordinator.runtime.fleet_auth import Guard
from coordinator.runtime.start import RunOptions, _reached, planned, write_run_file
from edgefl.cli.control import resume
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, ControlError, IdentityError, StoreError
from edgefl.identity.fleet import Fleet, Record, create_fleet
from edgefl.plan.job import RunPlan
from edgefl.storage.disk import LEDGER, hold_directory

ROOT = Path(__file__).parents[2]

RUN = """
name: tiny
data: {{test: {test}}}
model:
  stages: 2
  encoders: {{acc: {{kind: sensor, size: tiny, depth: 2, patch: 4}}}}
training: {{rounds: [1, 1], batch_size: 2}}
round: {{devices: 1, join_s: 1}}
"""


def coordinator(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "coordinator.cli", "run", *arguments, "--directory", str(tmp_path / "runs")]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    test = tmp_path / "test.npz"
    generator = np.random.default_rng(0)
    Dataset(
        modalities={"acc": generator.normal(size=(8, 16, 3)).astype(np.float32)},
        present={"acc": np.ones(8, bool)},
        labels=np.arange(8, dtype=np.int64) % 2,
        label_names=("sit", "walk"),
        ids=[str(number) for number in range(8)],
    ).save_npz(test)
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(test=test))
    return path


def test_a_faulty_run_file_is_refused_with_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("name: bad\nmodel: {encoders: {}}\ntraining: {rounds: [0, x]}\n")
    result = coordinator(tmp_path, str(path))
    assert result.returncode == 10
    assert result.stderr.startswith("error: ")
    assert "training.rounds" in result.stderr
    assert "what to do: " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_broker_that_is_not_there_is_named(tmp_path: Path, run_file: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = coordinator(tmp_path, str(run_file), "--broker", f"mqtt://u:secret@127.0.0.1:{port}", "--run", "r1")
    assert result.returncode == 14
    assert f"127.0.0.1:{port}" in result.stderr
    assert "secret" not in result.stderr + result.stdout
    assert "Traceback" not in result.stderr


def test_resuming_a_run_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    result = coordinator(tmp_path, "--resume", "nope")
    assert result.returncode == 15
    assert "there is no ledger" in result.stderr


def test_a_run_without_a_test_set_says_how_to_get_one(tmp_path: Path, run_file: Path) -> None:
    result = coordinator(tmp_path, str(run_file), "--set", "data.test=")
    assert result.returncode == 10
    assert "data.test" in result.stderr


def test_a_page_that_can_not_be_shown_leaves_no_directory(
    tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEFL_WEB_TOKEN", "short")
    refused = coordinator(tmp_path, str(run_file), "--run", "r1", "--web")
    assert refused.returncode == ConfigError.exit_code
    assert "EDGEFL_WEB_TOKEN: has 5 characters" in refused.stderr
    monkeypatch.delenv("EDGEFL_WEB_TOKEN")
    assert coordinator(tmp_path, str(run_file), "--run", "r1", "--web-at", "x:port").returncode == 10
    assert not (tmp_path / "runs").exists()


def test_a_run_that_was_ended_before_it_had_begun_goes_on_without_its_run_file(tmp_path: Path, run_file: Path) -> None:
    """It begins by the file in its directory, overrides of its start included."""
    runs = tmp_path / "runs"
    plan, _ = planned(RunOptions(str(run_file), "x9", directory=runs, overrides=["seed=7"]), lambda _: None)
    write_run_file(plan, runs / "x9" / "run.yaml")
    Ledger(runs / "x9" / LEDGER).close()  # as of a coordinator that was making the first weights
    again, _ = planned(RunOptions(resume="x9", directory=runs), lambda _: None)
    assert again == plan
    assert (again.seed, again.run) == (7, "x9")


def test_a_run_that_its_operator_stopped_stays_so_for_its_unit_until_that_is_undone(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "r1"
    place.mkdir(parents=True)
    with Ledger(place / LEDGER) as ledger:
        ledger.create(RunPlan(run="r1"), {}, {}, 1.0)
        ledger.commit("r1", [SaveEnd("stopped")], [], 2.0)
    options = RunOptions(resume="r1", directory=tmp_path / "runs")
    assert planned(options, print)[0].run == "r1", "who names it resumes it on purpose"
    refused = coordinator(tmp_path, "--resume", "r1", "--unless-stopped")
    assert refused.returncode == ControlError.exit_code
    assert "r1 stays stopped" in refused.stderr
    assert "`edgefl runs resume r1` lets it go on" in refused.stderr
    resume("r1", tmp_path / "runs", "terminal")
    with Ledger(place / LEDGER) as ledger:
        (report,) = ledger.runs()
    assert (report.status, report.finished_at) == ("running", None)
    assert planned(options._replace(unless_stopped=True), print)[0].run == "r1"
    with pytest.raises(ControlError, match="r1 is not running"):
        resume("r1", tmp_path / "runs", "terminal")


def test_a_run_started_with_a_brokers_url_does_not_go_on_with_a_broker_of_its_own(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "r1").mkdir(parents=True)
    with Ledger(runs / "r1" / LEDGER) as ledger:
        ledger.create(RunPlan(run="r1", broker_given=True), {}, {}, 1.0)
    refused = coordinator(tmp_path, "--resume", "r1")
    assert refused.returncode == ConfigError.exit_code
    assert "--broker: name the URL" in refused.stderr
    assert "what to do: Resume with the options of the start." in refused.stderr


def test_what_a_run_was_started_with_is_kept(tmp_path: Path) -> None:
    start = RunOptions(broker="mqtt://u:secret@there")
    plan = _reached(RunPlan(run="r1"), start, None, "auto")
    assert (plan.broker_given, plan.fleet) == (True, "")
    assert _reached(plan, RunOptions(resume="r1", broker="auto"), None, "auto").broker_given
    create_fleet(tmp_path, Record("home", ("localhost",)))
    plan = _reached(RunPlan(run="r1"), RunOptions(), Guard(Fleet(tmp_path)), "auto")
    assert (plan.broker_given, plan.fleet) == (False, "home")


def test_a_fleets_run_goes_on_with_its_identity_alone(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "r1").mkdir(parents=True)
    with Ledger(runs / "r1" / LEDGER) as ledger:
        ledger.create(RunPlan(run="r1", fleet="home"), {}, {}, 1.0)
    refused = coordinator(tmp_path, "--resume", "r1")
    assert refused.returncode == IdentityError.exit_code
    assert "the fleet 'home'" in refused.stderr
    assert "--identity DIRECTORY" in refused.stderr


def test_a_fleet_has_one_run_at_a_time_and_the_other_is_named(tmp_path: Path, run_file: Path) -> None:
    create_fleet(tmp_path / "fleet", Record("home", ("localhost",)))
    with hold_directory(tmp_path / "fleet" / "run", by="/elsewhere/runs/r0"):
        refused = coordinator(tmp_path, str(run_file), "--identity", str(tmp_path / "fleet"), "--run", "r1")
    assert refused.returncode == StoreError.exit_code
    assert "/elsewhere/runs/r0" in refused.stderr
    assert "one run at a time" in refused.stderr
    assert "waiting for" not in refused.stderr
    assert not (tmp_path / "runs").exists(), "nothing was made for it"
