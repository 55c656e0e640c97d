"""What lies on disk: private under any umask, and one damaged file is one file's matter."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from identity_fixture import Asked, a_fleet
from test_coordinator_runner import Scene, one_stage, played

from device_agent.runtime.store import AgentStore, Owner
from edgefl.errors import IdentityError
from edgefl.identity.issued_tokens import issue_token
from edgefl.plan.job import RoundPolicy
from edgefl.storage.disk import make_private


@pytest.fixture(params=[0o000, 0o022])
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def reachable(directory: Path) -> list[Path]:
    """Files that others than the owner could open: all on whose way no directory is closed to them."""
    if not stat.S_IMODE(directory.stat().st_mode) & 0o077:
        return []
    found: list[Path] = []
    for path in directory.iterdir():
        if path.is_dir():
            found += reachable(path)
        elif stat.S_IMODE(path.stat().st_mode) & 0o077:
            found.append(path)
    return found


@pytest.mark.usefixtures("any_umask")
def test_a_runs_directory_and_an_agents_state_are_their_owners_alone(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        await scene.device("a")
        await scene.coordinator(one_stage(RoundPolicy(devices=1, join_s=5.0), 1))

    played(tmp_path, script)
    assert list((tmp_path / "run" / "objects").iterdir())
    assert reachable(tmp_path / "run") == []
    store = AgentStore(tmp_path / "state", Owner("a", "test"))
    store.objects.put(b"weights")
    store.close()
    assert reachable(tmp_path / "state") == []


def test_a_directory_that_was_open_is_closed_and_its_parents_are_left(tmp_path: Path) -> None:
    old = tmp_path / "runs" / "r1"
    old.mkdir(parents=True)
    old.chmod(0o755)
    parents = stat.S_IMODE(old.parent.stat().st_mode)
    make_private(old)
    assert stat.S_IMODE(old.stat().st_mode) == 0o700
    assert stat.S_IMODE(old.parent.stat().st_mode) == parents


def test_a_file_system_without_permissions_is_told_of_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FAT and exFAT refuse what they cannot keep, also to the owner."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    tmp_path.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", refuse)
    make_private(tmp_path)
    assert f"{tmp_path} can be read by others" in caplog.text


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40, b"\x93\x01"])
def test_a_damaged_token_file_names_itself_and_the_others_enrol(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = a_fleet(tmp_path / "fleet")
    broken = Asked(issue_token(fleet, "broken", time.time()))
    (path,) = (fleet.directory / "tokens").iterdir()
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        other = Asked(issue_token(fleet, "other", time.time()))
    assert f"{path} is damaged" in caplog.text
    assert "edgefl-coordinator enroll" in caplog.text
    assert other.answered(fleet).certificate
    with pytest.raises(IdentityError, match=f"{path.name} is damaged"):
        broken.answered(fleet)
