"""Worker processes: answers, notes, errors, prints, and every way to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import msgspec
import pytest

from edgefl.errors import WorkerError
from edgefl.process.worker import MAX_FRAME_BYTES, WorkerFailedError, WorkerProcess, _frame, understood
from edgefl.records import ObjectRef

HERE = Path(__file__).parents[1]


def scene(tmp_path, play, module: str = "echo_worker"):
    """Run ``play(worker)`` and end the worker, whatever happens."""

    async def run():
        env = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
        worker = WorkerProcess(module, [], tmp_path / "logs" / "worker.log", env)
        try:
            return await asyncio.wait_for(play(worker), 60)
        finally:
            await worker.stop()
            assert worker.pid is None

    return asyncio.run(run())


def log(tmp_path) -> str:
    return (tmp_path / "logs" / "worker.log").read_text()


def test_calls_are_answered_in_turn_by_one_process(tmp_path):
    async def play(worker):
        assert worker.pid is None
        body = {"text": "grüße", "list": [1, 2.5, None, True]}
        assert await worker.call("echo", body) == body
        pids = await asyncio.gather(*(worker.call("pid", None) for _ in range(3)))
        assert set(pids) == {worker.pid}
        assert await worker.call("echo", "x" * 3_000_000) == "x" * 3_000_000  # more than any pipe holds

    scene(tmp_path, play)


@pytest.mark.parametrize(("given", "has"), [(None, "1000"), ("0", "0")])
def test_threads_of_a_worker_spin_for_a_moment_unless_told(tmp_path, monkeypatch, given, has):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if given is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", given)

    async def play(worker):
        assert await worker.call("variable", "GOMP_SPINCOUNT") == has

    scene(tmp_path, play)


def test_notes_come_in_order_before_the_reply(tmp_path):
    async def play(worker):
        notes = []
        assert await worker.call("count", 5, notes.append) == 5
        assert notes == [{"i": i} for i in range(5)]
        assert await worker.call("count", 2) == 2  # nobody listens: nothing breaks

    scene(tmp_path, play)


def test_an_error_keeps_its_kind_and_remedy_and_the_child_lives(tmp_path):
    async def play(worker):
        with pytest.raises(WorkerFailedError, match="sample 3 is bad") as raised:
            await worker.call("fail", "data")
        assert (raised.value.kind, raised.value.remedy, raised.value.status) == ("DataError", "Mend it.", None)
        assert isinstance(raised.value, WorkerError)
        pid = worker.pid
        with pytest.raises(WorkerFailedError, match="KeyError") as raised:
            await worker.call("fail", "surprise")
        assert raised.value.kind == "KeyError"
        assert "worker.log" in raised.value.remedy
        with pytest.raises(WorkerFailedError, match="no_such_method"):
            await worker.call("no_such_method", None)
        with pytest.raises(WorkerFailedError, match="object"):
            await worker.call("odd", None)  # a reply that cannot be sent
        assert worker.pid == pid

    scene(tmp_path, play)
    assert "Traceback" in log(tmp_path)
    assert "surprise" in log(tmp_path)


def test_what_the_child_prints_goes_to_the_log_and_its_questions_to_nobody(tmp_path):
    async def play(worker):
        assert await worker.call("chat", None) == {"answer": ""}
        assert await worker.call("echo", 1) == 1

    scene(tmp_path, play)
    assert "a library says hello" in log(tmp_path)
    assert "so does its C half" in log(tmp_path)


def test_a_child_that_is_killed_during_a_call_tells_by_which_signal_and_the_next_call_starts_another(tmp_path):
    async def play(worker):
        with pytest.raises(WorkerFailedError, match="killed by signal 9 while it did 'hang'") as raised:
            await worker.call("hang", None, lambda note: worker.kill())
        assert raised.value.status == -9
        assert await worker.call("echo", 1) == 1

    scene(tmp_path, play)


def test_a_child_that_leaves_tells_its_status(tmp_path):
    async def play(worker):
        with pytest.raises(WorkerFailedError, match="ended with status 3") as raised:
            await worker.call("leave", 3)
        assert raised.value.status == 3

    scene(tmp_path, play)


def test_a_call_that_is_given_up_takes_the_child_with_it(tmp_path):
    async def play(worker):
        hanging = asyncio.Event()
        task = asyncio.ensure_future(worker.call("hang", None, lambda note: hanging.set()))
        await hanging.wait()
        pid = worker.pid
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert await worker.call("echo", "mine") == "mine"  # not the answer to another question
        assert worker.pid != pid

    scene(tmp_path, play)


def test_stop_ends_the_child_and_is_safe_at_any_time(tmp_path):
    async def play(worker):
        await worker.stop()
        worker.kill()
        await worker.start()
        await worker.start()
        process = worker.process
        await worker.stop()
        assert process.returncode == 0  # it ended by itself when its input ended
        await worker.stop()
        assert await worker.call("echo", 1) == 1

    scene(tmp_path, play)


def test_a_child_that_does_not_end_is_killed_after_its_grace(tmp_path):
    async def play(worker):
        hanging = asyncio.Event()
        task = asyncio.ensure_future(worker.call("hang", None, lambda note: hanging.set()))
        await hanging.wait()
        await worker.stop(grace_s=0.05)
        with pytest.raises(WorkerFailedError) as raised:
            await task
        assert raised.value.status == -9

    scene(tmp_path, play)


def test_a_module_that_can_not_be_started_says_so(tmp_path):
    async def play(worker):
        with pytest.raises(WorkerFailedError, match="ended with status 1"):
            await worker.call("echo", 1)

    scene(tmp_path, play, "no_such_module_anywhere")
    assert "no_such_module_anywhere" in log(tmp_path)


def test_a_frame_that_four_bytes_can_not_measure_is_refused_too(monkeypatch):
    class Huge(bytes):
        def __len__(self):
            return 2**32

    monkeypatch.setattr(msgspec.msgpack, "encode", lambda value: Huge())
    with pytest.raises(WorkerError, match="4294967296 bytes exceeds"):
        _frame("x")


def test_a_frame_beyond_the_limit_is_refused_on_either_side(tmp_path):
    async def play(worker):
        with pytest.raises(WorkerError, match="exceeds the limit"):
            await worker.call("echo", "x" * (MAX_FRAME_BYTES + 1))
        with pytest.raises(WorkerFailedError, match="exceeds the limit") as raised:
            await worker.call("swell", MAX_FRAME_BYTES + 1)
        assert raised.value.status is None
        assert await worker.call("echo", 1) == 1

    scene(tmp_path, play)


NONSENSE = [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\1\x80", b"\0\0\0\2\x91\x01", b"\0\0\0\4\x81\x91\x01\x01"]


@pytest.mark.parametrize("frame", NONSENSE)
def test_a_child_that_answers_nonsense_is_ended_and_the_next_call_starts_another(tmp_path, frame):
    async def play(worker):
        with pytest.raises(WorkerFailedError, match=r"echo_worker: a worker's frame of \d+ bytes"):
            await worker.call("babble", frame.hex())
        assert await worker.call("echo", 1) == 1

    scene(tmp_path, play)


def test_an_answer_of_another_kind_is_a_failure_of_the_worker():
    with pytest.raises(WorkerFailedError, match="something else than") as raised:
        understood({"size": "large"}, ObjectRef)
    assert raised.value.remedy
    assert understood({"id": "a", "size": 1}, ObjectRef) == ObjectRef("a", 1)
