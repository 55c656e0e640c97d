"""Bad input through the real commands: the culprit is named, there is a way out, the exit code is its own.

What single modules refuse is tested beside them; here is what a person sees, and what is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.cli import showing
from coordinator.runtime.record import Journal
from coordinator.runtime.start import RunOptions, execute, write_run_file
from edgefl.cli import main
from edgefl.config.profiles import load_run
from edgefl.console import INTERRUPTED, guarded
from edgefl.errors import (
    BudgetError,
    ConfigError,
    DataError,
    EdgeFLError,
    MissingDependencyError,
    ModelError,
    RunError,
    StoreError,
)
from edgefl.plan.compile import compile_run
from edgefl.process.worker import WorkerFailedError, WorkerProcess
from edgefl.run_records import EventRow
from edgefl.storage.objects import ObjectStore
from edgefl.transport import broker as broker_module

RUN = """
name: tiny
recipe: lw-prototypes
data: {source: good}
model:
  stages: 2
  encoders:
    acc: {kind: sensor, size: tiny, patch: 4}
    gyro: {kind: sensor, size: tiny, patch: 4}
  head: {width: 8, out: 4}
  fusion_width: 8
training: {rounds: [1, 1], batch_size: 4}
round: {join_s: 60}
fleet: [{name: left}, {name: right}]
"""
Sample = dict[str, Any]


def samples(count: int = 30) -> list[Sample]:
    draw = np.random.default_rng(0)
    modalities = {name: draw.normal(size=(count, 8, 2)).round(3).tolist() for name in ("acc", "gyro")}
    return [
        {"id": f"s{i}", "label": "ab"[i % 2], **{m: rows[i] for m, rows in modalities.items()}} for i in range(count)
    ]


def folder(path: Path, lines: list[Sample | str]) -> None:
    path.mkdir()
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (path / "manifest.jsonl").write_text(text)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a run file and its data, which is where the command is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EDGEFL_RUNS", raising=False)
    monkeypatch.delenv("EDGEFL_BROKER", raising=False)
    (tmp_path / "run.yaml").write_text(RUN)
    folder(tmp_path / "good", list(samples()))
    return tmp_path


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def told(error: type[EdgeFLError], *arguments: str) -> str:
        """What the command says when it ends with this error's exit code."""
        with pytest.raises(SystemExit) as ended:
            main.main(list(arguments))
        said = capsys.readouterr().err
        assert ended.value.code == error.exit_code, said
        assert said.startswith("error: ")
        assert "\nwhat to do: " in said
        assert "Traceback" not in said
        return said

    return told


# Run files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name: x\n  foo: [1,\n", "line 2, YAML"),
        (b"- 1\n- 2\n", "must hold a mapping"),
        (b"", "must hold a mapping"),
        (b"\xff\xfename: x", "cannot be read"),
    ],
)
def test_a_file_that_is_no_yaml_is_named_with_its_line(
    told: Callable[..., str], workplace: Path, content: bytes, words: str
) -> None:
    (workplace / "bad.yaml").write_bytes(content)
    said = told(ConfigError, "run", "bad.yaml")
    assert "bad.yaml" in said
    assert words in said


def test_all_wrong_names_of_a_run_file_are_told_at_once(told: Callable[..., str], workplace: Path) -> None:
    text = RUN.replace("lw-prototypes", "lw-protoypes").replace("fusion_width", "fusion_widht")
    (workplace / "bad.yaml").write_text(text.replace("{name: right}", "{name: right, profile: jetson-nan}"))
    said = told(ConfigError, "plan", "bad.yaml")
    for meant in ("'lw-prototypes'", "'fusion_width'", "'jetson-nano'"):
        assert f"did you mean {meant}?" in said


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("training.epoch=2", "did you mean 'epochs'?"),
        ("fleet.9.name=x", "not an index below 2"),
        ("seed", "not of the form"),
        ("training.rounds=[0,0]", "are all zero"),
        ("training.rounds=[1]", "has 1 entries and model.stages is 2"),
        ("data.source=", "is needed"),
    ],
)
def test_an_override_is_checked_like_the_file(told: Callable[..., str], option: str, words: str) -> None:
    assert words in told(ConfigError, "run", "run.yaml", "--set", option)


def test_a_checkpoint_that_can_not_be_is_told_by_the_plan(told: Callable[..., str]) -> None:
    words = "checkpoint 'some/name' for modality 'acc' cannot be used: our own sensor encoder has no public checkpoints"
    assert words in told(ModelError, "plan", "run.yaml", "--set", "model.encoders.acc.pretrained=some/name")


# Data


def test_every_bad_sample_is_named_and_no_run_is_left_behind(told: Callable[..., str], workplace: Path) -> None:
    rows: list[Any] = samples()
    rows[0]["acc"] = "acc/none.npy"
    rows[1]["gyro"] = [[1, 2, 3]] * 8
    rows[2]["label"] = -4
    rows[3]["acc"][0][0] = 1e39  # infinite as float32
    rows[4] = "{not json"
    rows[5]["acc"] = "../../secret.npy"
    folder(workplace / "bad", rows)
    said = told(DataError, "run", "run.yaml", "--set", "data.source=bad")
    assert "6 problems" in said
    for line, words in enumerate(("no such file", "has shape", "-4", "not finite", "JSON", "leads out"), start=1):
        assert any(f":{line}:" in one and words in one for one in said.splitlines()), words
    assert not (workplace / "runs").exists()


def test_an_empty_share_names_its_device(told: Callable[..., str]) -> None:
    devices = [word for i in range(40) for word in ("--device", f"d{i}")]
    assert "'d24' would be empty" in told(DataError, "data", "run.yaml", *devices)  # 30 samples, 6 of them held out


def test_a_test_set_of_another_shape_is_refused_before_anything_is_written(
    told: Callable[..., str], workplace: Path
) -> None:
    folder(workplace / "other", [{**row, "acc": [[0.0, 1.0, 2.0]] * 8} for row in samples()])
    said = told(DataError, "data", "run.yaml", "--set", "data.test=other", "--out", "shares")
    assert "'acc' have shape [8, 2]" in said
    assert "[8, 3]" in said
    assert not (workplace / "shares").exists()


def test_a_damaged_npz_is_to_be_written_anew(told: Callable[..., str], workplace: Path) -> None:
    (workplace / "bad.npz").write_bytes(b"PK\x03\x04 and no more")
    assert "Write the file anew" in told(DataError, "data", "run.yaml", "--set", "data.source=bad.npz")


# Places that cannot be written


def test_a_file_where_a_directory_is_wanted_is_named(told: Callable[..., str], workplace: Path) -> None:
    (workplace / "taken").write_text("mine")
    assert "taken" in told(StoreError, "data", "run.yaml", "--out", "taken")
    assert "taken" in told(StoreError, "run", "run.yaml", "--runs", "taken")
    assert (workplace / "taken").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_is_no_fault_of_the_broker(workplace: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(broker_module, "write_new", refuse)
    with pytest.raises(StoreError, match=f"{workplace}.*{os.strerror(code)}"):
        broker_module.start_broker(workplace / "broker", "amqtt")


def test_an_event_is_told_although_the_disk_is_full(workplace: Path) -> None:
    told: list[EventRow] = []
    with (
        contextlib.closing(Journal(Path("/dev/full"), told.append)) as journal,
        pytest.raises(StoreError, match="No space left"),
    ):
        journal.append(EventRow(kind="run_failed"))
    assert [row.kind for row in told] == ["run_failed"]


@pytest.mark.parametrize("torn", [b"", b'{"at":3.0,"ki', b'{"at":3.0,"kind":"stage_finished"}', b"x" * 5000])
def test_a_torn_line_of_events_is_cut_off_and_the_next_one_whole(workplace: Path, torn: bytes) -> None:
    file = workplace / "events.jsonl"
    for number, kind in enumerate(("run_started", "run_resumed")):
        with contextlib.closing(Journal(file, lambda row: None)) as journal:
            journal.append(EventRow(float(number), kind))
        if number == 0:
            file.write_bytes(file.read_bytes() + torn)
    rows = [msgspec.json.decode(line, type=EventRow) for line in file.read_bytes().splitlines()]
    assert [row.kind for row in rows] == ["run_started", "run_resumed"]


def test_the_exit_code_survives_a_log_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    with pytest.raises(SystemExit) as ended, guarded():
        raise StoreError("the disk is full")
    assert ended.value.code == StoreError.exit_code


def test_an_error_is_no_order_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), guarded():
        raise DataError("a.jsonl:1: \x1b[2J\nb.jsonl:2", remedy="\x9b2J")
    assert capsys.readouterr().err == "error: a.jsonl:1: \ufffd[2J\nb.jsonl:2\nwhat to do: \ufffd2J\n"


def test_who_reads_events_hears_why_a_run_did_not_begin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StoreError), showing(events=True):
        raise StoreError("another coordinator runs here", remedy="End it.")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["data"] == {"text": "another coordinator runs here", "remedy": "End it."}


def test_a_damaged_or_missing_object_is_named(workplace: Path) -> None:
    ref = ObjectStore(workplace / "objects").put(b"weights")
    store = ObjectStore(workplace / "objects")
    store.path(ref.id).write_bytes(b"weighty")
    with pytest.raises(StoreError, match=f"{ref.id} is damaged"):
        store.read(ref.id)
    store.path(ref.id).unlink()
    with pytest.raises(StoreError, match=f"{ref.id}: No such file") as error:
        store.read(ref.id)
    assert "is not whole" in error.value.remedy


@pytest.mark.parametrize(("content", "words"), [(b"garbage" * 1000, "is damaged"), (b"", "before it had begun")])
def test_a_damaged_ledger_says_what_to_do(
    told: Callable[..., str], workplace: Path, content: bytes, words: str
) -> None:
    (workplace / "runs" / "old").mkdir(parents=True)
    (workplace / "runs" / "old" / "ledger.sqlite").write_bytes(content)
    for verb in ("report", "export", "devices"):
        assert words in told(StoreError, verb, "old")


# Going on with a run


def begun(directory: Path) -> Path:
    """What a run leaves that was killed before its first round."""
    place = directory / "runs" / "tiny-1"
    (place / "shares").mkdir(parents=True)
    (place / "run.yaml").write_text(RUN)
    for name in ("left", "right", "test"):
        (place / "shares" / f"{name}.npz").write_bytes(b"as it was")
    return place


def test_a_run_that_is_not_there_can_not_be_resumed(told: Callable[..., str], workplace: Path) -> None:
    assert "no run in runs" in told(RunError, "run", "run.yaml", "--resume", "nope")
    (workplace / "runs" / "old").mkdir(parents=True)
    (workplace / "runs" / "old" / "ledger.sqlite").touch()
    for name in ("nope", "../old"):
        assert "Runs there: old" in told(RunError, "run", "run.yaml", "--resume", name)
    with pytest.raises(StoreError, match="no run 'nope' in runs") as error:
        execute(RunOptions("run.yaml", resume="nope"), emit=print, say=print)
    assert error.value.remedy == "Runs there are: old."
    assert [path.name for path in (workplace / "runs").iterdir()] == ["old"]


def test_a_run_goes_on_with_the_file_it_was_started_with(told: Callable[..., str], workplace: Path) -> None:
    place = begun(workplace)
    said = told(ConfigError, "run", "run.yaml", "--set", "name=other", "--resume", "tiny-1")
    assert "is 'other', and tiny-1 is a run of 'tiny'" in said
    assert (place / "run.yaml").read_text() == RUN
    assert (place / "shares" / "left.npz").read_bytes() == b"as it was"


def test_two_can_not_run_in_one_directory(
    told: Callable[..., str], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = begun(workplace)
    (place / "broker").mkdir()
    (place / "broker" / "url").write_text("mqtt://the-first")
    with (place / "broker" / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as ended:
            main.main(["run", "run.yaml", "--set", "training.epochs=7", "--resume", "tiny-1"])
    shown = capsys.readouterr()
    assert ended.value.code == StoreError.exit_code
    assert "another coordinator runs in" in shown.err
    events = " ".join(shown.out.split())
    assert "not used from the run file given: training" in events  # no silent change of a run that is under way
    assert (place / "broker" / "url").read_text() == "mqtt://the-first"


def test_a_run_file_as_resolved_can_be_read_again(workplace: Path) -> None:
    config, recipe = load_run("run.yaml")
    plan = compile_run(config, recipe, run="r", shapes={"acc": (8, 2), "gyro": (8, 2)}, label_names=("a", "b"))
    write_run_file(plan, workplace / "resolved.yaml")
    assert load_run("resolved.yaml") == (config, recipe)


# Worker processes


async def _call(worker: WorkerProcess) -> None:
    try:
        await worker.call("work", None)
    finally:
        await worker.stop()


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("raise errors.StoreError('the disk is full')", StoreError),
        ("raise errors.ModelError('the checkpoint does not fit')", ModelError),
        ("raise ModuleNotFoundError('No module named torch', name='torch')", MissingDependencyError),
    ],
)
def test_a_worker_s_error_keeps_its_exit_code(workplace: Path, statement: str, error: type[EdgeFLError]) -> None:
    source = (
        "from edgefl import errors\nfrom edgefl.process import worker\n"
        f"def work(body, note):\n    {statement}\nworker.serve({{'work': work}})\n"
    )
    (workplace / "failing.py").write_text(source)
    worker = WorkerProcess("failing", [], workplace / "log", {"PYTHONPATH": str(workplace)})
    with pytest.raises(WorkerFailedError) as failed:
        asyncio.run(_call(worker))
    assert failed.value.exit_code == error.exit_code
    if error is MissingDependencyError:
        assert "edgefl-toolkit[train]" in failed.value.remedy


def test_an_agent_that_ends_at_once_says_only_why(workplace: Path) -> None:
    options = ["--broker", "mqtts://127.0.0.1:9", "--data", "basic_motions", "--device", "d", "--state", "s"]
    options += ["--ca", "no.pem"]
    done = subprocess.run(
        [sys.executable, "-m", "device_agent.cli", "run", *options], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 14
    assert done.stderr.splitlines()[-2:] == [
        "error: cannot load the authority's certificate no.pem: No such file or directory",
        "what to do: Give the path of a readable PEM file.",
    ]


# Whole runs


class Local:
    """``edgefl run`` as a process of its own group, whose descendants can be found by a mark."""

    def __init__(self, *arguments: str, before: Callable[[], None] | None = None) -> None:
        self.mark = f"edgefl-test-{os.urandom(8).hex()}"
        command = [sys.executable, "-m", "edgefl.cli.main", "run", "run.yaml", "--no-export", *arguments]

        def begin() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a script's background job, as these tests may be, ignores it
            if before is not None:
                before()

        self.process = subprocess.Popen(
            command, env={**os.environ, "EDGEFL_TEST": self.mark}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=begin,  # noqa: PLW1509 - limits one
        )  # fmt: skip

    def end(self, seconds: float = 100.0) -> tuple[int, str]:
        """(exit code, stderr) when it has ended by itself."""
        try:
            self.shown, said = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            raise
        assert "Traceback" not in said
        return self.process.returncode, said

    def descendants(self) -> list[str]:
        """Command lines of what still runs of it."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (path / "environ").read_bytes():
                    found.append((path / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # ended meanwhile, or another user's
        return [line for line in found if line]


def wait_for(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def events(directory: Path) -> str:
    return "".join(file.read_text() for file in directory.glob("runs/*/events.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_every_process_and_the_run_can_be_resumed(workplace: Path) -> None:
    first = Local("--set", "training.rounds=[1,10]")
    wait_for(lambda: '"stage_finished"' in events(workplace))
    os.killpg(first.process.pid, signal.SIGINT)
    code, said = first.end(30)
    assert code == INTERRUPTED
    (place,) = (workplace / "runs").iterdir()
    assert f"edgefl run run.yaml --resume {place.name}" in said
    wait_for(lambda: not first.descendants(), 10)
    rounds = events(workplace).count('"round_closed"')
    second = Local("--set", "training.rounds=[1,2]", "--resume", place.name)
    code, said = second.end(200)
    assert code == 0, said
    assert "not used from the run file given: training" in " ".join(second.shown.split())
    assert events(workplace).count('"round_closed"') == 11  # as it was started, and no round twice
    assert 1 <= rounds < 11


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_with_its_own_code(workplace: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, 120_000))

    run = Local(before=limit)
    code, said = run.end()
    assert code == StoreError.exit_code
    assert "runs/tiny-" in said
    assert os.strerror(errno.EFBIG) in said or "ledger" in said
    wait_for(lambda: not run.descendants(), 10)


@pytest.mark.slow
def test_a_budget_nobody_fits_names_the_nearest_device_with_both_numbers(workplace: Path) -> None:
    sizes = ("fleet.0.budget.step_memory_bytes=20000", "fleet.1.budget.step_memory_bytes=10000")
    run = Local(*[word for size in sizes for word in ("--set", size)])
    code, said = run.end()
    assert code == BudgetError.exit_code
    assert "the nearest, 'left', needs" in said
    assert "allowed 0.0191 MiB" in said
    wait_for(lambda: not run.descendants(), 10)
