"""One-time enrolment tokens, and the two messages of an enrolment, proved by the token's secret.

A token is text for a person to carry: ``edgefl-`` and base64url of a record with a checksum. Its secret never travels:
the device proves it by an HMAC over its signing request, the coordinator by one over its answer.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from edgefl.errors import IdentityError, ProtocolError
from edgefl.protocol.topics import check_name

PREFIX = "edgefl-"
SECRET_BYTES = 32
#: Longest token that is parsed: the authority's certificate is 450 bytes, an address 100.
MAX_TEXT = 8192
#: Largest enrolment message: a request is 400 bytes, an answer 800.
MAX_MESSAGE_BYTES = 8192
_CHECKSUM_BYTES = 6

M = TypeVar("M")


class Token(msgspec.Struct, frozen=True, array_like=True):
    """Enrolment token of a device. ``authority``: the fleet's certificate, DER: the device trusts nothing else."""

    version: int = 1
    fleet: str = ""
    name: str = ""
    url: str = ""
    secret: bytes = b""
    authority: bytes = b""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Device → coordinator. ``request``: certificate signing request, DER."""

    version: int = 1
    name: str = ""
    request: bytes = b""
    proof: bytes = b""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Coordinator → device: a certificate (DER) and the rest of an identity, or a refusal."""

    version: int = 1
    refusal: str = ""
    certificate: bytes = b""
    not_before: float = 0.0
    not_after: float = 0.0
    signer: bytes = b""  # public key of the coordinator's signatures
    broker: str = ""  # URL for devices with certificates
    client_id: str = ""
    proof: bytes = b""


def encode_token(token: Token) -> str:
    """The token as text."""
    body = msgspec.msgpack.encode(token)
    data = body + hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]
    return PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")


def decode_token(text: str) -> Token:
    """The token in a text; white space inside is overlooked. Raises IdentityError, which never repeats the text."""
    again = "Copy the whole token, from `edgefl-` to its end, or ask for another one."
    joined = "".join(text[: 2 * MAX_TEXT].split())
    if not joined.startswith(PREFIX) or len(joined) > MAX_TEXT:
        raise IdentityError(f"not an enrolment token: it begins with {PREFIX!r}", remedy=again)
    coded = joined.removeprefix(PREFIX)
    if re.search(r"[^A-Za-z0-9_-]", coded):
        raise IdentityError("the enrolment token has a character that does not belong there", remedy=again)
    if len(coded) % 4 == 1:  # no number of bytes is so long
        raise IdentityError("the enrolment token is incomplete", remedy=again)
    data = base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4))
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if not hmac.compare_digest(hashlib.sha256(body).digest()[:_CHECKSUM_BYTES], checksum):
        raise IdentityError("the enrolment token is incomplete or mistyped: its checksum is wrong", remedy=again)
    try:
        token = msgspec.msgpack.decode(body, type=Token)
    except msgspec.MsgspecError as error:
        raise IdentityError("the enrolment token is malformed", remedy=again) from error
    if token.version != 1 or len(token.secret) != SECRET_BYTES or not token.authority:
        raise IdentityError("the enrolment token is of another version", remedy="Bring agent and coordinator together.")
    check_name("fleet", token.fleet)
    check_name("device", token.name)
    return token


def client_id(secret: bytes) -> str:
    """The client id that a device enrols with, derived from the token's secret."""
    return "enroll-" + _hmac(secret, b"edgefl enrolment client")[:16].hex()


def proof_key(secret: bytes) -> bytes:
    """HMAC key of both sides' proofs. The coordinator keeps this, not the secret."""
    return _hmac(secret, b"edgefl enrolment proof")


def request_proof(key: bytes, fleet: str, client: str, request: Request) -> bytes:
    """The proof that a request carries when its sender knows the token."""
    body = msgspec.msgpack.encode(replace(request, proof=b""))
    return _hmac(key, b"\0".join((b"request", fleet.encode(), client.encode(), body)))


def answer_proof(key: bytes, answer: Answer, request: Request) -> bytes:
    """The proof that the answer to ``request`` carries."""
    body = msgspec.msgpack.encode(replace(answer, proof=b""))
    return _hmac(key, b"\0".join((b"answer", request.proof, body)))


def encode(message: Request | Answer) -> bytes:
    """The message as MessagePack."""
    return msgspec.msgpack.encode(message)


def decode(payload: bytes, kind: type[M]) -> M:
    """A Request or an Answer. Raises ProtocolError when it is malformed or too large."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"an enrolment message of {len(payload)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed enrolment message: {error}") from error


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.new(key, message, hashlib.sha256).digest()
