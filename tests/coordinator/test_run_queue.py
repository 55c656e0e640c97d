"""The queue of runs: its order on disk, what is refused before its first run, and faults that all runs share."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from test_coordinator_cli import coordinator, run_file

from coordinator.ledger.ledger import Ledger
from coordinator.runtime.queue import _begun, add, execute_queue
from coordinator.runtime.queue_file import QUEUE, Entry, Queue, cancelled, edit, read, reordered, taken
from coordinator.runtime.start import RunOptions, planned
from edgefl.cli.main import main
from edgefl.console import INTERRUPTED
from edgefl.errors import BrokerError, ConfigError, ControlError, EdgeFLError, StoreError
from edgefl.run_records import RunReport
from edgefl.storage.disk import hold_directory, store_errors

__all__ = ["run_file"]
FULL = Queue(
    "auto", (Entry("a", "a.yaml", "done"), *(Entry(run, f"{run}.yaml") for run in ("b", "c", "day-1", "day-2")))
)


def order(queue: Queue) -> str:
    return " ".join(f"{entry.run}:{entry.status}" for entry in queue.entries)


def edgefl(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return ended.value.code


def test_the_next_run_is_the_interrupted_one_else_the_first_that_waits() -> None:
    queue = taken(FULL)
    assert order(queue) == "a:done b:running c:waiting day-1:waiting day-2:waiting"
    assert taken(queue) == queue
    assert taken(Queue()) == Queue()


def test_a_waiting_run_is_moved_among_those_that_wait() -> None:
    queue = reordered(taken(FULL), "day-2", 1)
    assert order(queue) == "a:done b:running day-2:waiting c:waiting day-1:waiting"
    assert reordered(queue, "day-2", 3).entries == taken(FULL).entries
    for place in (0, 4):
        with pytest.raises(ControlError, match=f"no place {place}"):
            reordered(queue, "c", place)


@pytest.mark.parametrize(
    ("run", "text", "remedy"),
    [
        ("b", "it has begun", "`edgefl runs stop b` ends it"),
        ("a", "it is done", "nothing to do"),
        ("day", "fits 2 runs", "These are: day-1, day-2"),
        ("x", "has no run 'x'", "Waiting runs are: c, day-1, day-2"),
    ],
)
def test_what_does_not_wait_is_not_cancelled(run: str, text: str, remedy: str) -> None:
    with pytest.raises(ControlError, match=text) as refused:
        cancelled(taken(FULL), run, live=True)
    assert remedy in refused.value.remedy


def test_an_interrupted_run_is_cancelled_where_no_coordinator_works(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    edit(tmp_path, lambda _: taken(FULL))
    with hold_directory(tmp_path / QUEUE):
        assert edgefl("runs", "cancel", "b", "--runs", str(tmp_path)) == ControlError.exit_code
    assert "`edgefl runs stop b` ends it" in " ".join(capfd.readouterr().err.split())
    assert edgefl("runs", "cancel", "b", "--runs", str(tmp_path)) == 0
    assert order(taken(read(tmp_path))) == "a:done b:cancelled c:running day-1:waiting day-2:waiting"
    with pytest.raises(ControlError, match="it is done"):
        cancelled(FULL, "a", live=False)


def test_what_another_terminal_cancels_meanwhile_is_not_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(tmp_path, lambda _: FULL)

    def late(runs: Path, change: Callable[[Queue], Queue]) -> Queue:
        edit(runs, lambda queue: cancelled(queue, "c", live=True))
        return edit(runs, change)

    monkeypatch.setattr("edgefl.cli.queue.edit", late)
    assert edgefl("runs", "cancel", "b", "--runs", str(tmp_path)) == 0
    assert capfd.readouterr().out.startswith("b is cancelled\n")


def broken(directory: Path, how: str) -> EdgeFLError:
    """What a run's own directory, or what all runs share, raises."""
    try:
        if how == "damaged":
            (directory / "ledger.sqlite").write_bytes(b"no ledger" * 200)
            Ledger(directory / "ledger.sqlite").close()
        elif how == "held":
            with hold_directory(directory), hold_directory(directory):
                pass
        elif how == "identity":
            with (
                hold_directory(directory.parent / "fleet", by=str(directory)),
                hold_directory(directory.parent / "fleet"),
            ):
                pass
        else:
            with store_errors("write", directory / "events.jsonl"):
                raise OSError(getattr(errno, how), os.strerror(getattr(errno, how)))
    except StoreError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("how", "statuses"),
    [
        ("damaged", ["failed", "done"]),
        ("held", ["failed", "done"]),
        ("ENOENT", ["failed", "done"]),
        ("ENOSPC", ["running", "waiting"]),
        ("EROFS", ["running", "waiting"]),
        ("identity", ["running", "waiting"]),
    ],
)
def test_what_is_one_runs_own_fault_does_not_keep_the_next_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, statuses: list[str]
) -> None:
    (tmp_path / "a-1").mkdir()
    error = broken(tmp_path / "a-1", how)

    def execute(options: RunOptions, emit: object, say: object) -> object:
        if options.resume == "a-1":
            raise error
        return RunReport(run=options.resume, status="done")

    edit(tmp_path, lambda _: Queue("mqtt://127.0.0.1:1", (Entry("a-1", "a.yaml"), Entry("b-1", "b.yaml"))))
    monkeypatch.setattr("coordinator.runtime.queue.execute", execute)
    options, quiet = RunOptions(resume=QUEUE, directory=tmp_path), (lambda text: None)
    with contextlib.suppress(StoreError):
        execute_queue([], options, contextlib.nullcontext, quiet, quiet)
    assert [entry.status for entry in read(tmp_path).entries] == statuses


def test_a_defect_is_told_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(*_: object) -> object:
        raise ZeroDivisionError("a defect")

    edit(tmp_path, lambda _: Queue("mqtt://127.0.0.1:1", (Entry("a-1", "a.yaml"),)))
    monkeypatch.setattr("coordinator.runtime.queue.execute", execute)
    said = list[str]()
    options = RunOptions(resume=QUEUE, directory=tmp_path)
    assert execute_queue([], options, contextlib.nullcontext, said.append, lambda text: None) == 1
    assert "ZeroDivisionError: a defect" in read(tmp_path).entries[0].error
    assert "Traceback" in "".join(said)


def test_a_run_that_is_added_while_a_new_queue_is_admitted_is_kept(
    tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def slow(options: RunOptions, say: Callable[[str], None]) -> object:
        calls.append(1)
        if len(calls) == 1:
            add(str(run_file), RunOptions(directory=tmp_path))
        return planned(options, say)

    monkeypatch.setattr("coordinator.runtime.queue.planned", slow)
    edit(tmp_path, lambda _: Queue("auto", (Entry("old", "old.yaml", "done"),)))
    queue = _begun([str(run_file), str(run_file)], RunOptions(directory=tmp_path), lambda text: None)
    assert len(queue.of("waiting")) == 3
    assert not queue.of("done")
    assert {entry.run for entry in queue.entries} == {path.name for path in tmp_path.glob("*-*")}


def test_run_files_given_beside_resume_are_used_or_told(tmp_path: Path, run_file: Path) -> None:
    other, said = tmp_path / "other.yaml", list[str]()
    other.write_text(run_file.read_text())
    options = RunOptions(resume=QUEUE, directory=tmp_path / "runs")
    first = _begun([str(run_file)], options, said.append)
    assert _begun([str(run_file)], options, said.append) == first
    assert not said, "a unit that is started again"
    assert _begun([str(other)], options, said.append) == first
    assert f"{other} is not used" in said[0]
    ended = edit(options.directory, lambda queue: queue.noted(queue.entries[0].run, status="done"))
    assert _begun([str(run_file)], options, said.append) == ended, "a unit after a reboot"
    assert f"{run_file} is not used" in said[1]
    assert "edgefl runs add" in said[1]
    fresh = _begun([str(other), str(run_file)], options, said.append)
    assert [entry.file for entry in fresh.of("waiting")] == [str(other), str(run_file)]
    assert len(said) == 2


def test_a_signal_before_the_first_run_tells_the_way_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def admitted(*_: object, **__: object) -> Queue:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5.0)
        raise AssertionError

    monkeypatch.setattr("coordinator.runtime.queue._admitted", admitted)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt, match="--resume queue"):
            execute_queue(["a.yaml"], RunOptions(directory=tmp_path), contextlib.nullcontext, str, str)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_edits_of_several_programs_are_all_kept_and_whole(tmp_path: Path) -> None:
    def append(run: str, queue: Queue) -> Queue:
        time.sleep(0.01)
        return Queue(queue.broker, (*queue.entries, Entry(run)))

    threads = [threading.Thread(target=edit, args=(tmp_path, partial(append, str(n)))) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {entry.run for entry in read(tmp_path).entries} == {str(n) for n in range(12)}
    assert (tmp_path / QUEUE / "queue.json").stat().st_mode & 0o777 == 0o600
    for damaged in (b'{"entries": [{}]}', b'{"broker": "\xff"}'):
        (tmp_path / QUEUE / "queue.json").write_bytes(damaged)
        with pytest.raises(StoreError, match=r"queue\.json is damaged"):
            read(tmp_path)


def test_all_run_files_are_checked_before_the_first_begins(tmp_path: Path, run_file: Path) -> None:
    bad, elsewhere = tmp_path / "bad.yaml", tmp_path / "elsewhere.yaml"
    bad.write_text(run_file.read_text().replace("stages: 2", "stages: 0"))
    elsewhere.write_text(run_file.read_text() + "broker: mqtt://u:secret@127.0.0.1:1\n")
    refused = coordinator(tmp_path, str(run_file), str(bad))
    assert refused.returncode == ConfigError.exit_code
    assert f"error: {bad}: " in refused.stderr
    refused = coordinator(tmp_path, str(run_file), str(elsewhere))
    assert refused.returncode == ConfigError.exit_code
    assert f"error: {elsewhere}: " in refused.stderr
    assert "its runs share one" in refused.stderr
    assert "secret" not in refused.stderr
    refused = coordinator(tmp_path, str(run_file), str(tmp_path / "nothing.yaml"))
    assert "nothing.yaml" in refused.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [QUEUE], "nothing is left of those before it"
    assert "--run" in coordinator(tmp_path, str(run_file), str(run_file), "--run", "r1").stderr
    assert "there is no queue" in coordinator(tmp_path, "--resume", QUEUE).stderr


def test_no_broker_ends_the_queue_and_leaves_it_to_go_on_with(tmp_path: Path, run_file: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended = coordinator(tmp_path, str(run_file), str(run_file), "--broker", f"mqtt://u:secret@127.0.0.1:{port}")
    assert ended.returncode == BrokerError.exit_code
    first, second = (entry.run for entry in read(tmp_path / "runs").entries)
    assert [line.partition(";")[0] for line in ended.stdout.splitlines()[-2:]] == [
        f"run {first} is interrupted",
        f"run {second} is waiting",
    ]
    assert b"secret" not in (tmp_path / "runs" / QUEUE / "queue.json").read_bytes()
    again = coordinator(tmp_path, "--resume", QUEUE)
    assert again.returncode == ConfigError.exit_code
    assert "--broker: name the URL that the queue was started with" in again.stderr
    edit(tmp_path / "runs", lambda queue: Queue())
    coordinator(tmp_path, str(run_file), str(run_file), "--broker", f"mqtt://127.0.0.1:{port}")
    again = coordinator(tmp_path, "--resume", QUEUE)
    assert again.returncode == BrokerError.exit_code, "the URL is on record; nobody listens there"
    assert f"127.0.0.1:{port}" in again.stderr
    kept = read(tmp_path / "runs")
    assert (kept.broker, kept.given) == (f"mqtt://127.0.0.1:{port}", True)
    assert edgefl("runs", "add", str(elsewhere(run_file)), "--runs", str(tmp_path / "runs")) == 0
    assert read(tmp_path / "runs").broker == kept.broker, "what a run file says does not count where a URL was given"


def elsewhere(run_file: Path) -> Path:
    file = run_file.with_name("elsewhere.yaml")
    file.write_text(run_file.read_text() + "broker: mqtt://127.0.0.1:2\n")
    return file


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_whole_queue_whose_broker_comes_back_under_its_url(
    tmp_path: Path, run_file: Path, number: signal.Signals
) -> None:
    words, urls = [str(run_file), str(run_file)], []
    for _ in range(2):
        command = [sys.executable, "-m", "coordinator.cli", "run", *words, "--events", "--directory", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert "run_started" in process.stdout.readline()
            urls.append((tmp_path / QUEUE / "broker" / "url").read_text())
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == INTERRUPTED
        assert "same options and --resume queue" in errors
        assert [entry.status for entry in read(tmp_path).entries] == ["running", "waiting"]
        words = ["--resume", QUEUE]
    assert urls[0] == urls[1]


def test_terminals_edit_a_queue_that_nobody_works_through(
    tmp_path: Path, run_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    assert edgefl("runs", "queue", "--runs", str(runs)) == 0
    assert "There is no queue" in capfd.readouterr().out
    for _ in range(2):
        assert edgefl("runs", "add", str(run_file), "--runs", str(runs)) == 0
    assert "waits, at place 2\nby its file alone: --set " in (told := capfd.readouterr().out)
    assert "\nIt stands still" in told
    first, second = (entry.run for entry in read(runs).entries)
    assert edgefl("runs", "reorder", second, "--runs", str(runs)) == 2
    assert "at which place? 1 is the next" in " ".join(capfd.readouterr().err.split())
    assert edgefl("runs", "reorder", second, "1", "--runs", str(runs)) == 0
    assert edgefl("runs", "cancel", first, "--runs", str(runs)) == 0
    assert order(read(runs)) == f"{second}:waiting {first}:cancelled"
    with hold_directory(runs / QUEUE):
        capfd.readouterr()
        assert edgefl("runs", "queue", "--runs", str(runs)) == 0
        assert "It stands still" not in capfd.readouterr().out
        assert "`edgefl runs add FILE` appends" in coordinator(tmp_path, str(run_file), str(run_file)).stderr
    assert edgefl("runs", "add", "--runs", str(runs)) == 2
    for path in runs.glob("*/*"):
        os.utime(path, (0, 0))
    assert edgefl("runs", "prune", "--keep", "0", "--runs", str(runs)) == 0
    assert "the queue has it" in capfd.readouterr().out
    assert {path.name for path in runs.iterdir()} == {QUEUE, second}, "what was cancelled goes"
