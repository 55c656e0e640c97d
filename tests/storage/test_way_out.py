"""What to do about each refusal of the system: by its reason, and for a permission by whose directory it is."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgefl.errors import StoreError
from edgefl.storage.disk import store_errors, way_out

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "Free space"),
        (errno.EDQUOT, "Free space"),
        (errno.EFBIG, "Free space"),
        (errno.EROFS, "for writing"),
        (errno.ENOENT, "nothing is there"),
        (errno.ENOTDIR, "A file is where a directory has to be"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "dmesg"),
        (None, "dmesg"),
    ],
)
def test_each_reason_has_its_own_way_out(code: int | None, words: str, tmp_path: Path) -> None:
    refused = OSError("no number") if code is None else OSError(code, os.strerror(code))
    with pytest.raises(StoreError, match="cannot write") as raised, store_errors("write", tmp_path / "file"):
        raise refused
    assert words in raised.value.remedy
    assert ("Free space" in raised.value.remedy) == (words == "Free space")


@contextmanager
def somebody_else() -> Iterator[None]:
    """Nobody instead of root; who is no root stays so."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def remedy_of_reading(path: Path) -> str:
    with somebody_else(), pytest.raises(StoreError) as raised, store_errors("read", path):
        path.read_bytes()
    return raised.value.remedy


@as_root
@pytest.mark.parametrize(
    ("uid", "words"),
    [
        (0, "belongs to root: run the same command as root (sudo …)"),
        (1, "belongs to daemon: run the same command as daemon (sudo -u daemon …) or as root (sudo …)"),
        (59_999, "belongs to #59999: run the same command as #59999 (sudo -u #59999 …)"),
    ],
)
def test_a_permission_is_of_the_account_whose_directory_it_is(uid: int, words: str) -> None:
    place = Path(os.path.realpath("/var/tmp")) / f"edgefl-way-{os.getpid()}"
    place.mkdir(mode=0o700)
    try:
        (place / "inside").mkdir()
        (place / "inside" / "file").write_text("")
        os.chown(place, uid, -1)
        for path in (place / "inside" / "file", place / "nothing"):
            told = remedy_of_reading(path)
            assert told.startswith(f"{place} {words}"), told
            assert told.endswith("or choose a directory of your own.")
    finally:
        (place / "inside" / "file").unlink()
        (place / "inside").rmdir()
        place.rmdir()


@as_root
def test_what_is_ones_own_takes_a_chmod() -> None:
    place = Path(os.path.realpath("/var/tmp")) / f"edgefl-own-{os.getpid()}"
    place.mkdir(mode=0o500)
    os.chown(place, NOBODY, -1)
    try:
        with somebody_else(), pytest.raises(StoreError) as raised, store_errors("write", place / "new"):
            (place / "new").write_text("")
        assert raised.value.remedy.startswith(f"Give yourself the permission (chmod -R u+rwX {place})")
    finally:
        place.rmdir()


@as_root
def test_root_is_not_sent_to_root() -> None:
    told = way_out("/nonexistent", PermissionError(errno.EPERM, "Operation not permitted"))
    assert told.startswith("Root is refused")
