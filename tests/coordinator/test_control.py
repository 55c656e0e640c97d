"""A run that is controlled by its object and over its socket: answers, errors, limits, and what it leaves behind."""

from __future__ import annotations

import asyncio
import itertools
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from coordinator_fixture import FakeDevice, a_plan
from ledger_fixture import ledger_at
from test_coordinator_runner import Scene, played, ready

from coordinator.ledger.ledger import Ledger
from coordinator.runtime import control_socket, device_logs
from coordinator.runtime.control_socket import SOCKET, Ask, request
from coordinator.runtime.environment import Watch
from coordinator.runtime.record import Record
from edgefl.cli.devices import devices_command
from edgefl.cli.show import runs_command
from edgefl.errors import ControlError, StoreError
from edgefl.protocol import messages as m


async def ask(scene: Scene, verb: str, device: str = "") -> Any:
    """As a terminal does it: from another thread."""
    return msgspec.json.decode(await asyncio.to_thread(request, scene.directory / "run", Ask(verb, device=device)))


async def refused(scene: Scene, verb: str, device: str = "") -> str:
    with pytest.raises(ControlError) as caught:
        await ask(scene, verb, device)
    return f"{caught.value.message} | {caught.value.remedy}"


async def training(scene: Scene, watch: Watch | None = None) -> asyncio.Task[Any]:
    """A run whose first round is open; its devices hold what they are offered."""
    for name in ("a", "b"):
        await scene.device(name, hold=True)
    task = asyncio.ensure_future(scene.coordinator(a_plan(), watch=watch))
    await scene.until(lambda: all(ready(device, 1) for device in scene.devices.values()))
    return task


def test_a_run_is_paused_resumed_and_stopped_from_a_terminal(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        task = await training(scene)
        status = await ask(scene, "pause")
        assert (status["run"], status["phase"], status["paused_by"]) == ("r1", "round", "terminal")
        device = status["devices"]["a"]
        assert (device["online"], device["part"], device["left_out_by"]) == (True, "accepted", "")
        assert "paused already (terminal)" in await refused(scene, "pause")
        for device in scene.devices.values():
            device.hold = False
            device.train()
        await scene.until(lambda: "paused" in scene.kinds())
        await asyncio.sleep(0.3)
        assert scene.kinds().count("round_started") == 1
        assert (await ask(scene, "status"))["phase"] == "paused"
        assert (await ask(scene, "resume"))["phase"] == "planning"
        assert "not paused" in await refused(scene, "resume")
        await scene.until(lambda: scene.kinds().count("round_started") == 2)
        assert (await ask(scene, "stop"))["phase"] == "stopped"
        report = await task
        assert report.status == "stopped"
        assert report.finished_at is not None
        (event,) = [one for one in report.events if one.kind == "run_stopped"]
        assert event.data["by"] == "terminal"
        await scene.until(lambda: all(device.drained.is_set() for device in scene.devices.values()))
        report = await scene.coordinator(a_plan(), resume=True)
        assert report.status == "done"
        assert [(row.stage, row.round, row.status) for row in report.rounds] == [
            (1, 1, "done"),
            (2, 1, "done"),
            (2, 2, "done"),
        ]

    played(tmp_path, script)


def test_a_device_is_left_out_and_taken_in_from_a_terminal(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        task = await training(scene)
        assert "Did you mean a?" in await refused(scene, "leave_out", "aa")
        assert "Devices it knows: a, b." in await refused(scene, "take_in", "\x1b[31m" + "x" * 3000)
        assert "b is not left out" in await refused(scene, "take_in", "b")
        status = await ask(scene, "leave_out", "b")
        device = status["devices"]["b"]
        assert (device["online"], device["part"], device["left_out_by"]) == (True, "left_out", "terminal")
        assert "b is left out already" in await refused(scene, "leave_out", "b")
        await scene.until(lambda: scene.devices["b"].drained.is_set() and scene.devices["b"].aborts)
        scene.devices["a"].hold = False
        scene.devices["a"].train()
        await scene.until(lambda: scene.kinds().count("round_started") == 2)
        assert len(scene.devices["b"].offers) == 1
        scene.devices["b"].hold = False
        await ask(scene, "take_in", "b")
        report = await task
        rows = {(row.stage, row.round): row.participants for row in report.rounds}
        assert (rows[1, 1], rows[2, 2]) == (("a",), ("a", "b"))
        (row,) = [one for one in report.assignments if one.status == "left_out"]
        assert (row.device, row.refusal.reason) == ("b", "left_out")
        kinds = [
            (one.kind, one.device, one.data["by"]) for one in report.events if one.kind in {"left_out", "taken_in"}
        ]
        assert kinds == [("left_out", "b", "terminal"), ("taken_in", "b", "terminal")]

    played(tmp_path, script)


def test_who_looks_is_told_what_the_coordinator_knows_and_the_ledger_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No sign of life is in the ledger yet, and to it the run is running."""

    async def look(verb: Callable[..., None], *run: str) -> Any:
        capsys.readouterr()
        await asyncio.to_thread(verb, *run, runs=tmp_path, format="json")
        return msgspec.json.decode(capsys.readouterr().out)

    async def script(scene: Scene) -> None:
        (tmp_path / "r1").symlink_to(scene.directory / "run")
        task = await training(scene)
        await ask(scene, "leave_out", "b")
        there = (await look(devices_command, "r1"))["presence"]
        assert {one["device"]: one["state"] for one in there} == {"a": "online", "b": "left out"}
        assert {one["seen_by"] for one in there} <= {"hello", "accept", "need"}  # and not "ledger"
        assert all(abs(time.time() - one["seen_at"]) < 60 for one in there)
        assert {one["status"] for one in await look(runs_command)} == {"running"}
        await ask(scene, "pause")
        scene.devices["a"].hold = False
        scene.devices["a"].train()
        await scene.until(lambda: "paused" in scene.kinds())
        assert {one["status"] for one in await look(runs_command)} == {"paused"}
        await ask(scene, "stop")
        await task
        assert {one["status"] for one in await look(runs_command)} == {"stopped"}

    played(tmp_path, script)


def test_the_socket_is_its_owners_replaces_one_left_behind_and_goes_with_the_run(tmp_path: Path) -> None:
    left = tmp_path / "run" / SOCKET
    left.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))

    async def script(scene: Scene) -> None:
        assert "does not answer" in await refused(scene, "status")
        task = await training(scene)
        assert stat.S_IMODE(left.stat().st_mode) == 0o600
        await ask(scene, "stop")
        await task
        assert not left.exists()

    played(tmp_path, script)


def test_a_coordinator_that_hangs_keeps_who_asks_for_seconds_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "STATUS_S", 0.2)
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / SOCKET))
        hanging.listen()
        with pytest.raises(ControlError, match=r"runs, and has not answered for 0\.2 s"):
            request(tmp_path, Ask("status"))


def test_a_directory_with_a_path_longer_than_a_sockets_is_no_obstacle(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)

    async def script(scene: Scene) -> None:
        task = await training(scene)
        assert (await ask(scene, "status"))["run"] == "r1"
        await ask(scene, "stop")
        await task

    played(deep, script)


@pytest.mark.parametrize("line", [b"", b"\n", b"no json\n", b'{"verb": 3}\n', b"[" * 5000 + b"\n", b"x" * 10**5])
def test_what_is_no_request_is_answered_as_such_and_the_run_goes_on(tmp_path: Path, line: bytes) -> None:
    async def script(scene: Scene) -> None:
        task = await training(scene)
        reader, writer = await asyncio.open_unix_connection(str(scene.directory / "run" / SOCKET))
        writer.write(line)
        writer.write_eof()
        answer = msgspec.json.decode(await reader.read())
        assert "not a request" in answer["error"]
        writer.close()
        await writer.wait_closed()
        assert "knows no request" in await refused(scene, "dance")
        await ask(scene, "stop")
        await task

    played(tmp_path, script)


@pytest.mark.parametrize(
    ("answer", "told"),
    [(b'{"error":"2 requests are being answered"}\n', "2 requests are being answered"), (b"", "does not answer")],
)
def test_an_answer_that_comes_before_the_request_is_sent_whole_is_read(
    tmp_path: Path, answer: bytes, told: str
) -> None:
    """A request larger than the socket's buffer, so that it is still being sent when the other side closes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / SOCKET))
        listener.listen()

        def refuse() -> None:
            link, _ = listener.accept()
            with link:
                link.sendall(answer)

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(ControlError, match=told):
            request(tmp_path, Ask("leave_out", device="x" * 2**22))
        thread.join()


def test_more_terminals_than_there_is_room_for_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "MOST_AT_ONCE", 2)
    monkeypatch.setattr(control_socket, "LINE_S", 0.3)

    async def script(scene: Scene) -> None:
        task = await training(scene)
        idle = [await asyncio.open_unix_connection(str(scene.directory / "run" / SOCKET)) for _ in range(2)]
        assert "2 requests are being answered" in await refused(scene, "status")
        for reader, writer in idle:
            await reader.read()  # the end of those who said nothing in time
            writer.close()
        await ask(scene, "stop")
        await task

    played(tmp_path, script)


def test_a_run_that_fails_answers_who_asks_and_fails_by_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody waits for an answer any more, as a page's that has gone."""

    def full(*given: object) -> None:
        raise StoreError("the disk is full")

    async def script(scene: Scene) -> None:
        watch = Watch()
        task = await training(scene, watch)
        assert watch.control is not None
        monkeypatch.setattr(Record, "commit_moves", full)
        gone, waits = (asyncio.ensure_future(watch.control.pause("web")) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(StoreError, match="the disk is full"):
            await task
        with pytest.raises(ControlError, match="the run has ended"):
            await waits
        with pytest.raises(ControlError, match="the run has ended"):
            await asyncio.wait_for(watch.control.stop("web"), 5)

    played(tmp_path, script)


def test_a_request_is_on_record_when_it_is_answered(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        task = await training(scene)
        await ask(scene, "leave_out", "b")
        with Ledger(ledger_at(scene.directory / "run" / "ledger.sqlite"), create=False) as ledger:
            assert "left_out" in {event.kind for event in ledger.report("r1").events}
        await ask(scene, "stop")
        await task

    played(tmp_path, script)


class Talker(FakeDevice):
    """Answers requests for its log with what ``says`` makes of them."""

    says: Any = None

    def _on_message(self, name: str, payload: bytes) -> None:
        message = m.decode_down(payload) if name.endswith("/down") else None
        if isinstance(message, m.LogRequest):
            for answer in self.says(message) if self.says else ():
                self.say(answer)
        else:
            super()._on_message(name, payload)


def test_a_devices_log_comes_on_request_and_is_safe_to_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_coordinator_runner.FakeDevice", Talker)
    monkeypatch.setattr(device_logs, "ANSWER_S", 0.3)
    monkeypatch.setattr(device_logs, "PAUSE_S", 0.0)

    async def script(scene: Scene) -> None:
        task = await training(scene)
        a = scene.devices["a"]
        asked: list[m.LogRequest] = []

        def answer(request: m.LogRequest) -> list[m.LogLines]:
            asked.append(request)
            unasked = m.LogLines("a", request.request + 1, 9, ("of another request",))
            return [unasked, m.LogLines("a", request.request, 2, ("one", "\x1b[31mred\u202e" + "x" * 10**4))]

        a.says = answer
        found = await asyncio.to_thread(
            request, scene.directory / "run", Ask("logs", device="a", lines=10**9, after=-3)
        )
        lines = msgspec.json.decode(found, type=m.LogLines)
        assert (lines.count, lines.lines[0]) == (2, "one")
        assert lines.lines[1].startswith("\ufffd[31mred\ufffdxxx")
        assert len(lines.lines[1]) == 500
        assert [(one.lines, one.after) for one in asked] == [(m.MOST_LOG_LINES, 0)]
        a.says = lambda request: [m.LogLines("a", request.request, 1, ("x",) * 10**4)]
        assert len((await ask(scene, "logs", "a"))["lines"]) == m.MOST_LOG_LINES
        a.says = lambda request: [m.LogLines("a", request.request, refusal="no\x07")]
        assert "a refuses: no\ufffd" in await refused(scene, "logs", "a")
        assert "b gave no log within 0.3 s | Its agent is of a release without" in await refused(scene, "logs", "b")
        scene.broker.cut("b", seconds=60)
        await scene.until(lambda: "device_left" in scene.kinds())
        assert "b is offline" in await refused(scene, "logs", "b")
        assert "knows no device" in await refused(scene, "logs", "../b")
        await ask(scene, "stop")
        await task

    played(tmp_path, script)


def test_a_device_is_asked_for_its_log_one_request_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_logs, "PAUSE_S", 0.2)

    async def script() -> None:
        sent: list[float] = []

        def post(device: str, message: m.DownMessage) -> None:
            assert isinstance(message, m.LogRequest)
            sent.append(asyncio.get_running_loop().time())
            logs.received(m.LogLines(device, message.request))

        logs = device_logs.DeviceLogs(post)
        await asyncio.gather(*(logs.ask("a", 1, 0) for _ in range(3)))
        assert all(later - sooner > 0.19 for sooner, later in itertools.pairwise(sent))

    asyncio.run(script())
