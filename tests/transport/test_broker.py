"""Brokers of our own: they start, end, come back under the same URL, and say plainly why they cannot."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from transport_fixtures import MqttWorld, broker_kinds, fails, mosquitto_wanted, run, until

from edgefl.errors import BrokerError, EdgeFLError
from edgefl.process import parent_death as leash
from edgefl.transport.broker import broker_program, resolve_kind, start_broker
from edgefl.transport.mosquitto import AUTOSAVE_S, hash_password, write_configuration


@pytest.fixture(params=broker_kinds())
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _program(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_it_starts_quickly_stops_cleanly_and_keeps_its_url(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        broker = start_broker(tmp_path / "with a space", kind)
        began = time.monotonic()
        await broker.start()
        assert time.monotonic() - began < 10
        url, first = broker.url, broker.pid
        await broker.start()  # runs already
        assert broker.pid == first is not None
        await broker.stop()
        await broker.stop()
        assert broker.pid is None
        assert not _alive(first)
        await broker.start()
        assert broker.url == url
        await broker.kill()
        again = start_broker(tmp_path / "with a space", kind)  # another process, after a crash of this one
        assert again.url == url

    run(scenario())


def test_secrets_are_generated_and_only_their_owner_can_read_them(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with start_broker(tmp_path / "one", kind) as broker:
            other = start_broker(tmp_path / "two", kind)
            assert broker.address.password != other.address.password
            assert len(broker.address.password) == 32
            for file in broker.directory.iterdir():
                if broker.address.password in file.read_text(errors="replace"):
                    assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
            assert broker.address.password not in str(broker.address)

    run(scenario())


def test_it_listens_on_loopback_only(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with start_broker(tmp_path, kind) as broker:
            listening = {
                line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"
            }
            assert f"0100007F:{broker.address.port:04X}" in listening
            assert f"00000000:{broker.address.port:04X}" not in listening

    run(scenario())


def test_it_does_not_outlive_a_parent_that_is_killed(tmp_path: Path, kind: str) -> None:
    program = f"""
        import asyncio, sys
        from pathlib import Path
        from edgefl.transport.broker import start_broker
        async def main():
            broker = start_broker(Path({str(tmp_path)!r}), {kind!r})
            await broker.start()
            print(broker.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _alive(pid)
        parent.kill()
    deadline = time.monotonic() + 10
    while _alive(pid):
        assert time.monotonic() < deadline, "the broker outlived its parent"
        time.sleep(0.02)


def test_a_port_in_use_is_named(tmp_path: Path, kind: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        error = run(fails(start_broker(tmp_path, kind, port=port).start()))
    assert isinstance(error, BrokerError)
    assert f"port {port} on 127.0.0.1 is already in use" in error.message
    assert "choose another port" in error.remedy


def test_a_port_taken_since_last_time_is_replaced_when_any_will_do(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with start_broker(tmp_path, kind) as broker:
            taken = broker.address.port
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", taken))
            other.listen()
            error = await fails(broker.start())  # others hold its URL: it may not move
            assert isinstance(error, BrokerError)
            async with start_broker(tmp_path, kind) as moved:
                assert moved.address.port != taken

    run(scenario())


def test_a_host_that_is_not_ours_is_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(BrokerError, match=r"192\.0\.2\.1"):
        start_broker(tmp_path, kind, host="192.0.2.1")


def test_a_directory_that_can_not_be_used_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokerError, match="file"):
        start_broker(tmp_path / "file" / "broker", kind)


def test_a_program_that_dies_at_once_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "echo Loading config; echo 'Error: the moon is full' >&2; exit 3"
    monkeypatch.setenv("EDGEFL_MOSQUITTO", _program(tmp_path / "broken", body))
    broker = start_broker(tmp_path / "broker", "mosquitto")
    error = run(fails(broker.start()))
    assert isinstance(error, BrokerError)
    assert "exit code 3: Error: the moon is full" in error.message
    assert str(broker.log) in error.remedy
    assert broker.address.password not in f"{error.message} {error.remedy}"
    assert broker.pid is None


def test_a_program_that_never_answers_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEFL_MOSQUITTO", _program(tmp_path / "deaf", "echo thinking; exec sleep 60"))
    monkeypatch.setattr("edgefl.transport.broker.START_TIMEOUT_S", 0.3)
    broker = start_broker(tmp_path / "broker", "mosquitto")
    error = run(fails(broker.start()))
    assert isinstance(error, BrokerError)
    assert "did not answer" in error.message
    assert "thinking" in error.message
    assert broker.pid is None


def test_a_program_that_can_not_be_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "garbage").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "garbage").chmod(0o755)
    monkeypatch.setenv("EDGEFL_MOSQUITTO", str(tmp_path / "garbage"))
    error = run(fails(start_broker(tmp_path / "broker", "mosquitto").start()))
    assert isinstance(error, BrokerError)
    assert "cannot start" in error.message
    assert "garbage" in error.message


def test_a_program_that_ignores_the_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with start_broker(tmp_path, "amqtt") as broker:
            pid = broker.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            monkeypatch.setattr("edgefl.transport.broker.STOP_TIMEOUT_S", 0.1)
            await broker.stop()
            assert not _alive(pid)

    run(scenario())


def test_auto_means_mosquitto_if_there_is_one_else_amqtt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEFL_MOSQUITTO", _program(tmp_path / "mosquitto", "exit 0"))
    assert resolve_kind("auto") == "mosquitto"
    assert broker_program("mosquitto") == str(tmp_path / "mosquitto")
    monkeypatch.setenv("EDGEFL_MOSQUITTO", "off")
    assert resolve_kind("auto") == "amqtt"
    assert broker_program("mosquitto") is None
    assert start_broker(tmp_path / "broker").kind == "amqtt"
    with pytest.raises(BrokerError, match="mosquitto is not on the PATH"):
        start_broker(tmp_path / "broker", "mosquitto")


def test_mosquitto_is_found_on_the_path_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGEFL_MOSQUITTO", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert broker_program("mosquitto") is None
    (tmp_path / "bin").mkdir()
    on_path = _program(tmp_path / "bin" / "mosquitto", "exit 0")
    assert broker_program("mosquitto") == on_path


def test_an_unknown_kind_and_a_missing_package_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokerError, match="rabbit"):
        start_broker(tmp_path, "rabbit")
    monkeypatch.setattr("edgefl.transport.broker.importlib.util.find_spec", lambda name: None)
    with pytest.raises(EdgeFLError, match="amqtt"):
        start_broker(tmp_path, "amqtt")


def test_the_configuration_shuts_strangers_out_and_queues_deep(tmp_path: Path) -> None:
    lines = write_configuration(tmp_path, "127.0.0.1", 4321, "edgefl", "s3cret").read_text().splitlines()
    assert lines[:2] == ["listener 4321 127.0.0.1", "allow_anonymous false"]
    for line in ["max_queued_messages 100000", "set_tcp_nodelay true", "max_packet_size 2097152", "persistence true"]:
        assert line in lines
    assert (tmp_path / "passwords").read_text().startswith("edgefl:$7$101$")
    assert "s3cret" not in (tmp_path / "passwords").read_text()
    assert hash_password("s3cret") != hash_password("s3cret")  # salted


def test_a_damaged_identity_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "identity.json").write_text('{"port": ')
    assert len(start_broker(tmp_path, "amqtt").address.password) == 32


def test_the_leash_refuses_an_orphan() -> None:
    command = [sys.executable, "-I", "-S", leash.__file__, "1", "true"]  # process 1 is not this test
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ended before" in done.stderr


@pytest.mark.skipif(not mosquitto_wanted(), reason="only mosquitto keeps sessions on disk; it is not installed here")
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_mosquitto_keeps_waiting_messages_through_a_restart(tmp_path: Path, end: str) -> None:
    async def scenario() -> None:
        async with start_broker(tmp_path, "mosquitto") as broker:
            world = MqttWorld(broker.url)
            receiver, _ = await world.connected("receiver", "x")
            sender, _ = await world.connected("sender")
            await receiver.close()
            await sender.publish(world.topic("x"), b"waiting for you")
            await sender.close()
            if end == "kill":  # nothing is written at a kill: wait for the next autosave
                sessions = broker.directory / "sessions.db"
                await until(lambda: sessions.exists() and b"waiting for you" in sessions.read_bytes(), AUTOSAVE_S * 5)
            await getattr(broker, end)()
            await broker.start()
            _, received = await world.connected("receiver")
            await received.arrived(1)
            assert received.payloads == [b"waiting for you"]
            await world.close()

    run(scenario(), 30)
