"""Signatures under the coordinator's messages: Ed25519 over topic and body, checked before anything is decoded.

The topic names fleet and device, so that a message to one device is none to another. PyNaCl, not ``cryptography``:
the agent's supervisor checks them, and it costs 1 MB there against 7 MB.
"""

from __future__ import annotations

import base64
import binascii

from nacl.bindings import crypto_sign, crypto_sign_open, crypto_sign_seed_keypair
from nacl.exceptions import BadSignatureError

from edgefl.errors import IdentityError, ProtocolError

#: First bytes of a signed message. No MessagePack map begins so: an unsigned message is never taken for one.
MAGIC = b"EFS\x01"
SIGNATURE_BYTES = 64
#: Bytes that a signature adds to a message.
OVERHEAD_BYTES = len(MAGIC) + SIGNATURE_BYTES
KEY_BYTES = 32
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
