"""Tokens for a list of names: all of them or none, and fifty devices enrolled by one command."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path

import pytest
from identity_fixture import Asked, a_fleet, enrolled
from transport_fixtures import mosquitto_wanted, run, until
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.runtime.fleet_auth import serve
from device_agent.enroll import enroll
from edgefl.errors import ConfigError, StoreError
from edgefl.identity import token as t
from edgefl.identity.fleet import Fleet
from edgefl.identity.issued_tokens import issue_tokens
from edgefl.identity.keys import write_private

needs_mosquitto = pytest.mark.skipif(not mosquitto_wanted(), reason="mosquitto is not installed")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return a_fleet(tmp_path / "fleet")


def listed(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "names.csv"
    file.write_text(text)
    return file


def tokens_of(fleet: Fleet) -> list[Path]:
    return list((fleet.directory / "tokens").iterdir())


def test_a_spreadsheets_list_gives_a_private_file_a_name(fleet: Fleet, tmp_path: Path) -> None:
    file = listed(tmp_path, '\ufeffName,Place\r\ncam-01,hall\r\n\r\n# spare\r\n cam-02 ,"door, north"\r\n')
    files = issue_tokens(fleet, file, tmp_path / "tokens", time.time())
    assert [path.name for path in files] == ["cam-01.token", "cam-02.token"]
    for path, name in zip(files, ("cam-01", "cam-02"), strict=True):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert t.decode_token(path.read_text()).name == name
    assert stat.S_IMODE((tmp_path / "tokens").stat().st_mode) == 0o700


def test_each_line_at_fault_is_named_and_nothing_is_written(fleet: Fleet, tmp_path: Path) -> None:
    enrolled(fleet, "cam-09", tmp_path / "cam-09")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "cam-05.token").write_text("of yesterday")
    before = tokens_of(fleet)
    lines = ["name", "cam-01", "cam 02", "cam-01", "cam-09", "coordinator", "cam-05", "cam-03"]
    with pytest.raises(ConfigError) as caught:
        issue_tokens(fleet, listed(tmp_path, "\n".join(lines)), tmp_path / "tokens", time.time())
    found = {problem.line: problem.message for problem in caught.value.problems}
    assert set(found) == {3, 4, 5, 6, 7}
    for line, words in {3: "not a valid name", 4: "on line 2 already", 5: "enrolled already", 7: "is there"}.items():
        assert words in found[line]
    assert "line 3, name: device 'cam 02' is not a valid name" in caught.value.message
    assert tokens_of(fleet) == before
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["cam-05.token"]


def test_of_a_list_that_was_used_already_the_first_lines_are_shown(fleet: Fleet, tmp_path: Path) -> None:
    file = listed(tmp_path, "\n".join(f"cam-{n:02d}" for n in range(50)))
    issue_tokens(fleet, file, tmp_path / "tokens", time.time())
    with pytest.raises(ConfigError) as caught:
        issue_tokens(fleet, file, tmp_path / "tokens", time.time())
    first, *lines = caught.value.message.splitlines()
    assert first == f"{file}: 50 problems"
    assert len(lines) == 9
    assert "cam-07.token is there already" in lines[7]
    assert lines[8].strip() == "and 42 more"
    assert len(caught.value.problems) == 50


def test_a_directory_that_is_there_keeps_its_permissions(fleet: Fleet, tmp_path: Path) -> None:
    out = tmp_path / "shared"
    out.mkdir()
    out.chmod(0o755)
    (path,) = issue_tokens(fleet, listed(tmp_path, "cam"), out, time.time())
    assert (stat.S_IMODE(out.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o755, 0o600)


def test_after_a_full_disk_the_same_command_does_it(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = listed(tmp_path, "a\nb\nc"), tmp_path / "out"

    def full(path: Path, data: bytes) -> None:
        if path.name == "b.token":
            raise StoreError(f"cannot write {path}: No space left on device")
        write_private(path, data)

    with monkeypatch.context() as disk:
        disk.setattr("edgefl.identity.issued_tokens.write_private", full)
        with pytest.raises(StoreError, match="No space"):
            issue_tokens(fleet, file, out, time.time())
    assert not list(out.iterdir())
    files = issue_tokens(fleet, file, out, time.time())
    assert len(tokens_of(fleet)) == 3, "those without a file have ended"
    for path in files:
        assert Asked(path.read_text()).answered(fleet).certificate
    fleet_again = a_fleet(tmp_path / "again")
    with pytest.raises(ConfigError, match="is there already") as caught:  # after kill -9, say
        issue_tokens(fleet_again, file, out, time.time())
    assert "name another --out" in str(caught.value.remedy)


def test_lines_are_counted_past_quoted_ones_and_an_endless_field_is_told(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        issue_tokens(fleet, listed(tmp_path, 'name,place\ncam,"hall,\nleft"\ncam!\n'), tmp_path / "o", time.time())
    assert [problem.line for problem in caught.value.problems] == [4]
    with pytest.raises(ConfigError, match="field larger") as caught:
        issue_tokens(fleet, listed(tmp_path, "cam\n" + "x" * 140000), tmp_path / "o", time.time())
    assert [problem.line for problem in caught.value.problems] == [2]


@pytest.mark.parametrize("text", ["", "name\n", "# nothing\n\n"])
def test_a_list_without_names_is_told(fleet: Fleet, tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="has no name"):
        issue_tokens(fleet, listed(tmp_path, text), tmp_path / "tokens", time.time())
    assert not (tmp_path / "tokens").exists()


def test_a_list_may_be_of_machines_that_are_replaced(fleet: Fleet, tmp_path: Path) -> None:
    for name in ("a", "b"):
        enrolled(fleet, name, tmp_path / name)
    assert len(issue_tokens(fleet, listed(tmp_path, "a\nb"), tmp_path / "out", time.time(), replace=True)) == 2
    with pytest.raises(ConfigError, match="line 2, name: no device 'c' is enrolled"):
        issue_tokens(fleet, listed(tmp_path, "a\nc"), tmp_path / "other", time.time(), replace=True)


@pytest.mark.parametrize(
    "words",
    [[], ["--name", "a", "--from", "names.csv", "--out", "o"], ["--from", "names.csv"], ["--name", "a", "--out", "o"]],
)
def test_the_command_takes_a_name_or_a_list(fleet: Fleet, words: list[str]) -> None:
    done = CliRunner().invoke(app, ["enroll", "--identity", str(fleet.directory), *words])
    assert done.exit_code == 2
    assert "--from" in done.output
    assert "No such option" not in done.output


@needs_mosquitto
def test_fifty_devices_are_enrolled_by_one_command_and_one_enrollments(fleet: Fleet, tmp_path: Path) -> None:
    names = [f"cam-{number:02d}" for number in range(50)]
    file, out = listed(tmp_path, "\n".join(names)), tmp_path / "tokens"
    words = ["enroll", "--from", str(file), "--out", str(out), "--identity", str(fleet.directory)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "tokens of 50 devices are in " in done.output

    async def scene() -> None:
        told: list[str] = []
        serving = asyncio.ensure_future(serve(fleet, told.append))
        await until(lambda: any("answering" in line for line in told))

        async def device(name: str) -> None:
            text = (out / f"{name}.token").read_text()
            await enroll(text, tmp_path / "devices" / name, tmp_path, 60.0, lambda line: None)

        for at in range(0, 50, 10):  # ten at a time: a person with a script, not a crowd
            await asyncio.gather(*map(device, names[at : at + 10]))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    began = time.monotonic()
    run(scene(), 120)
    assert time.monotonic() - began < 60.0
    assert sorted(fleet.devices()) == names
