"""Files that hold keys: written for their owner alone, and refused when others could have read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from edgefl.errors import IdentityError, StoreError
from edgefl.storage.disk import store_errors, write_new

#: Largest file of keys or certificates that is read; a certificate is 500 bytes, a revocation list 40 bytes a device.
MAX_FILE_BYTES = 2**20


def make_private_directory(directory: Path) -> None:
    """Make it, with its parents, for its owner alone. Raises StoreError."""
    with store_errors("create", directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)


def write_private(path: Path, data: bytes) -> None:
    """Write a whole file that only its owner reads, from its first byte on. Raises StoreError."""
    with store_errors("write", path, len(data)):
        write_new(path, data, mode=0o600)


def write_public(path: Path, data: bytes) -> None:
    """Write a whole file that holds no secret. Raises StoreError."""
    with store_errors("write", path, len(data)):
        write_new(path, data)


def check_private(path: Path) -> None:
    """Raises IdentityError when others than its owner (this user, or root) can read or change a key's file."""
    try:
        status = path.stat()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise IdentityError(
            f"{path} holds a secret key, and others may open it (its mode is {mode:04o})",
            remedy=f"If nobody has read it: chmod 600 {path}. Else revoke this identity and make another.",
        )
    if status.st_uid not in {0, os.geteuid()}:
        raise IdentityError(
            f"{path} holds a secret key and belongs to another user (uid {status.st_uid})",
            remedy="Run as that user, or enrol again as this one.",
        )


def read_private(path: Path) -> bytes:
    """The bytes of a key's file. Raises IdentityError when it is not private, StoreError when reading fails."""
    check_private(path)
    return read(path)


def read(path: Path) -> bytes:
    """The bytes of a small file. Raises StoreError; IdentityError for one too large to hold keys."""
    with store_errors("read", path), path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise IdentityError(f"{path} is larger than {MAX_FILE_BYTES} bytes: no file of keys or certificates")
    return data
