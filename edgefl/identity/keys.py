"""Signatures under the coordinator's messages: Ed25519 over topic and body, checked before anything is decoded.

The topic names fleet and device, so that a message to one device is none to another. PyNaCl, not ``cryptography``:
the agent's supervisor checks them, and it costs 1 MB there against 7 MB. Files that hold keys are written for their
owner alone, and refused when others could have read them.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path

from nacl.bindings import crypto_sign, crypto_sign_open, crypto_sign_seed_keypair
from nacl.exceptions import BadSignatureError

from edgefl.errors import IdentityError, ProtocolError
from edgefl.storage.disk import store_errors, write_new

#: First bytes of a signed message. No MessagePack map begins so: an unsigned message is never taken for one.
MAGIC = b"EFS\x01"
SIGNATURE_BYTES = 64
#: Bytes that a signature adds to a message.
OVERHEAD_BYTES = len(MAGIC) + SIGNATURE_BYTES
KEY_BYTES = 32
#: Largest file of keys or certificates that is read; a certificate is 500 bytes, a revocation list 40 bytes a device.
MAX_FILE_BYTES = 2**20
#: Keeps these signatures apart from any other use of the key.
_CONTEXT = b"edgefl/1 down\0"


class Signer:
    """Signs with the private key that follows from a seed of 32 bytes. Raises IdentityError for another length."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise IdentityError(f"a signing key has {KEY_BYTES} bytes, this one {len(seed)}")
        self.public, self._secret = crypto_sign_seed_keypair(seed)

    def seal(self, topic: str, body: bytes) -> bytes:
        """``body`` with its signature, to be published on ``topic`` and nowhere else."""
        signed = crypto_sign(_signed(topic, body), self._secret)
        return b"".join((MAGIC, signed[:SIGNATURE_BYTES], body))


class Verifier:
    """Checks with the public key. Raises IdentityError for one of another length."""

    def __init__(self, public: bytes) -> None:
        if len(public) != KEY_BYTES:
            raise IdentityError(f"a public signing key has {KEY_BYTES} bytes, this one {len(public)}")
        self._public = public

    def open(self, topic: str, payload: bytes) -> bytes:
        """The body of what came on ``topic``. Raises ProtocolError when this fleet's coordinator did not sign it."""
        if not payload.startswith(MAGIC):
            raise ProtocolError("not signed: this device takes only what its coordinator has signed")
        signature, body = payload[len(MAGIC) : OVERHEAD_BYTES], payload[OVERHEAD_BYTES:]
        try:
            crypto_sign_open(signature + _signed(topic, body), self._public)
        except (BadSignatureError, ValueError) as error:
            raise ProtocolError("its signature is not this fleet's coordinator's, or not for this device") from error
        return body


def key_text(key: bytes) -> str:
    """A key as text for a file."""
    return base64.b64encode(key).decode()


def key_of(text: str | bytes, name: str) -> bytes:
    """The key in a text. Raises IdentityError naming the file it came from; never repeats the text."""
    try:
        return base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise IdentityError(f"{name} does not hold a key") from error


def _signed(topic: str, body: bytes) -> bytes:
    return b"".join((_CONTEXT, topic.encode(), b"\0", body))


def make_private_directory(directory: Path) -> None:
    """Make it, with its parents, for its owner alone. Raises StoreError, also for another user's directory."""
    with store_errors("create", directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)


def write_private(path: Path, data: bytes) -> None:
    """Write a whole file that only its owner reads, from its first byte on. Raises StoreError."""
    with store_errors("write", path, len(data)):
        write_new(path, data, mode=0o600)


def check_private(path: Path) -> None:
    """Raises IdentityError when others than its owner (this user, or root) can read or change a key's file."""
    with store_errors("read", path):
        status = path.stat()
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
