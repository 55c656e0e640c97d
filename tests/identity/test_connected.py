"""The fleet's devices without a run: who is enrolled, and who answers the broker's call."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from identity_fixture import FLEET, a_fleet, enrolled
from test_hosts import Told, an_agent
from transport_fixtures import mosquitto_wanted, run, until

import edgefl
from edgefl.cli.connected import connected
from edgefl.cli.main import main
from edgefl.identity.fleet import Device, Fleet, fleet_broker
from edgefl.identity.issued_tokens import issue_token, issue_tokens
from edgefl.identity.membership import revoke
from edgefl.report.presence import Enrolled, between_runs, fleet_grid

needs_mosquitto = pytest.mark.skipif(not mosquitto_wanted(), reason="mosquitto is not installed")
NOW = 1_790_000_000.0


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return a_fleet(tmp_path / "fleet")


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[str, str]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["edgefl", "devices", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return capsys.readouterr()


@needs_mosquitto
def test_who_is_connected_answers_with_its_release(fleet: Fleet, tmp_path: Path) -> None:
    for name in ("cam", "away", "stolen"):
        enrolled(fleet, name, tmp_path / name)

    async def scene() -> None:
        async with fleet_broker(fleet):
            told = Told()
            agent = an_agent(fleet, tmp_path / "cam", told)
            running = asyncio.ensure_future(agent.run())
            await until(lambda: told.of("connected"))
            await revoke(fleet, "stolen", time.time())
            answers = await connected(fleet, 1.0)
            assert set(answers) == {"cam"}
            assert answers["cam"].release == edgefl.__version__
            assert answers["cam"].platform
            await revoke(fleet, "away", time.time())
            began = time.monotonic()
            assert set(await connected(fleet, 8.0)) == {"cam"}
            assert time.monotonic() - began < 4.0, "nothing is waited for once all have answered"
            agent.stop()
            await running
            assert await connected(fleet, 0.5) == {}

    run(scene(), 30)


@needs_mosquitto
def test_the_command_shows_the_fleet_without_a_run(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cam", "mic"):
        enrolled(fleet, name, tmp_path / name)
    words = ("--identity", str(fleet.directory), "--runs", str(tmp_path / "runs"))
    out, err = shown(capsys, monkeypatch, *words)
    assert "cam" in out
    assert "unknown" in out
    assert "which of them are connected is not known: cannot reach the broker" in err

    async def scene() -> tuple[Any, Any]:
        monkeypatch.setattr("edgefl.cli.connected.ANSWER_S", 1.0)
        async with fleet_broker(fleet):
            told = Told()
            agent = an_agent(fleet, tmp_path / "cam", told)
            running = asyncio.ensure_future(agent.run())
            await until(lambda: told.of("connected"))
            text = await asyncio.to_thread(shown, capsys, monkeypatch, *words)
            coded = await asyncio.to_thread(shown, capsys, monkeypatch, *words, "--format", "json")
            agent.stop()
            await running
            return text, coded

    (out, err), (coded, _) = run(scene(), 40)
    assert err == ""
    found = {one["device"]: (one["state"], one["release"], one["generation"]) for one in json.loads(coded)["presence"]}
    assert found == {"cam": ("connected", edgefl.__version__, 1), "mic": ("away", "", 1)}
    assert max(map(len, out.splitlines())) <= 80
    assert "Devices of fleet default" in out


def test_fifty_devices_take_a_line_each_at_eighty_columns(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet.changing() as devices:
        for number in range(50):
            devices[f"warehouse-camera-{number:02d}"] = Device(("1f",), not_after=9e9, enrolled=(NOW, NOW + 9))
    out, _ = shown(capsys, monkeypatch, "--identity", str(fleet.directory), "--runs", str(tmp_path / "runs"))
    assert max(map(len, out.splitlines())) <= 80
    lines = [line for line in out.splitlines() if "warehouse-camera-" in line]
    assert len(lines) == 50
    assert all("2255-03-1" in line and "2026-09-2" in line and " 2 " in line for line in lines)


def test_tokens_that_are_out_are_counted_and_few_are_named(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--identity", str(fleet.directory), "--runs", str(tmp_path / "runs")]
    assert "No device is enrolled: edgefl-coordinator enroll" in shown(capsys, monkeypatch, *given)[0]
    file = tmp_path / "names.csv"
    file.write_text("name,groups\n" + "\n".join(f"dev-{n:02d},{'roof' if n < 2 else ''}" for n in range(50)))
    issue_tokens(fleet, file, tmp_path / "tokens", time.time())
    end = time.strftime("%Y-%m-%d", time.localtime(time.time() + 86400))
    out = " ".join(shown(capsys, monkeypatch, *given)[0].split())
    assert f"No device is enrolled yet. 50 tokens are out, until {end}" in out
    out = " ".join(shown(capsys, monkeypatch, *given, "--group", "roof")[0].split())
    assert f"2 tokens are out, until {end}" in out
    assert out.endswith(": dev-00, dev-01.")
    enrolled(fleet, "dev-00", tmp_path / "dev-00")
    text, trouble = shown(capsys, monkeypatch, *given)
    assert "49 tokens are out" in " ".join(text.split())
    assert f"edgefl-coordinator enrollments --identity {fleet.directory}" in trouble, "the broker is down"
    tokens = json.loads(shown(capsys, monkeypatch, *given, "--format", "json")[0])["tokens"]
    assert len(tokens) == 49
    issue_token(fleet, "late", time.time() - 90000)
    assert "late" not in json.loads(shown(capsys, monkeypatch, *given, "--format", "json")[0])["tokens"], "it has ended"


def test_a_fleets_devices_are_sorted_and_say_revoked_and_expired() -> None:
    known = {
        "b": Enrolled(NOW + 9e6, False, 2, NOW),
        "a": Enrolled(NOW + 8e6, True, 1, NOW),
        "c": Enrolled(NOW - 5, False, 1),
        "d": Enrolled(NOW + 7e6, False, 1, NOW),
    }
    found = between_runs(known, {"b": ("0.2.0", "aarch64")}, NOW)
    assert [(one.device, one.state) for one in found] == [
        ("a", "revoked"),
        ("b", "connected"),
        ("c", "expired"),
        ("d", "away"),
    ]
    assert [one.device for one in between_runs(known, None, NOW, "identity")] == ["c", "d", "a", "b"]
    assert [one.state for one in between_runs(known, None, NOW)] == ["revoked", "unknown", "expired", "unknown"]
    assert [cell.text for cell in fleet_grid(found, FLEET).rows[2]][-2] == "—", "not on record"
