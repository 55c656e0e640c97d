"""Enrolment by a one-time token (``edgefl-agent enroll``). The key is made here and never leaves the device."""

from __future__ import annotations

import asyncio
import hmac
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from edgefl.errors import BrokerUnreachableError, IdentityError, ProtocolError
from edgefl.identity import device, token
from edgefl.identity.authority import make_request
from edgefl.identity.keys import key_text, make_private_directory, read_private, write_private
from edgefl.protocol import topics
from edgefl.transport.link import TlsFiles
from edgefl.transport.mqtt import MqttTransport

#: The request is sent again this often: the coordinator may start after the device.
RESEND_S = 2.0
_SERVER = (
    "On the server a run, `edgefl-coordinator enrollments` or `edgefl-coordinator enroll --wait` must be running until "
    "the device has come: ask who keeps it to start one"
)


async def enroll(text: str, state: Path | None, states: Path, wait_s: float, say: Callable[[str], None]) -> Path:
    """Exchange a token for an identity in ``state`` (default: by fleet and name in ``states``); returns the directory.

    Raises IdentityError for a token that is mistyped, expired, spent or of a device that has an identity already,
    BrokerError when the broker cannot be reached or is not the fleet's.
    """
    given = token.decode_token(text)
    state = state or states / given.fleet / given.name
    known = device.find(state)
    if known is not None:
        raise IdentityError(
            f"{state} holds the identity of {known.record.device!r} already",
            remedy=f"Start it with `edgefl-agent run`; to replace it, delete {known.directory} first.",
        )
    make_private_directory(state)
    directory = state / device.DIRECTORY
    make_private_directory(directory)
    client = token.client_id(given.secret)
    pending = directory / f"{client}.key"
    authority = directory / f"{client}.pem"
    write_private(authority, ssl.DER_cert_to_PEM_cert(given.authority).encode())
    request = token.Request(name=given.name, request=make_request(given.name, pending))
    proof = token.request_proof(token.proof_key(given.secret), given.fleet, client, request)
    request = replace(request, proof=proof)
    say(f"asking {given.url} for the identity of {given.name!r} in fleet {given.fleet!r}")
    transport = MqttTransport(given.url, client, tls=TlsFiles(str(authority)), clean_session=True)
    try:
        answer = await _exchange(transport, given, client, request, wait_s)
    finally:
        await transport.close()
    if answer.refusal:
        raise IdentityError(
            f"the coordinator refuses: {answer.refusal}",
            remedy="Ask for another token, or use this one again once what the coordinator names is mended there.",
        )
    pem = device.bundle(answer.certificate, read_private(pending), answer.not_before, answer.not_after)
    record = device.Record(given.fleet, given.name, answer.broker, key_text(answer.signer), answer.client_id)
    device.save(state, record, given.authority, pem)
    device.check_pair(directory / "device.pem")
    pending.unlink()
    authority.unlink()
    return state


async def _exchange(
    transport: MqttTransport, given: token.Token, client: str, request: token.Request, wait_s: float
) -> token.Answer:
    """Connect, and resend an enrolment request until an authenticated answer.

    Other answers are ignored. Raises IdentityError after ``wait_s`` seconds, BrokerUnreachableError.
    """
    key = token.proof_key(given.secret)
    found: asyncio.Future[token.Answer] = asyncio.get_running_loop().create_future()

    def hear(topic: str, payload: bytes) -> None:
        try:
            answer = token.decode(payload, token.Answer)
        except ProtocolError:
            return
        if hmac.compare_digest(answer.proof, token.answer_proof(key, answer, request)) and not found.done():
            found.set_result(answer)

    transport.on_message = hear
    try:
        await transport.connect()
    except BrokerUnreachableError as error:
        remedy = f"{_SERVER}; the host and port are the token's, and the network must let this device reach them."
        raise BrokerUnreachableError(error.message, remedy=remedy, finding=error.finding) from error
    await transport.subscribe([topics.build("enroll-down", given.fleet, client)])
    deadline = time.monotonic() + wait_s
    while (left := deadline - time.monotonic()) > 0:
        await transport.publish(topics.build("enroll-up", given.fleet, client), token.encode(request))
        done, _ = await asyncio.wait([found], timeout=min(RESEND_S, left))
        if done:
            return found.result()
    raise IdentityError(
        f"nobody answered at {given.url} within {wait_s:g} s",
        remedy=f"{_SERVER}; or ask for a new token.",
    )
