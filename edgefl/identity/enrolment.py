"""Enrolment at the coordinator: issues one-time tokens, and certificates to devices that enrol or renew.

Each answer is on disk before it is sent. The same request again gets the same answer, since the first may be lost;
another request by the same token gets a refusal.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from pathlib import Path

import msgspec
from msgspec.structs import replace

from edgefl.errors import IdentityError, ProtocolError
from edgefl.identity import authority as x
from edgefl.identity import token as t
from edgefl.identity.files import read_private, write_private
from edgefl.identity.fleet import Device, Devices, Fleet
from edgefl.protocol.messages import Renewed
from edgefl.protocol.topics import COORDINATOR, check_name
from edgefl.storage.disk import store_errors

_LOG = logging.getLogger(__name__)
#: A token is used within a day of being printed, or printed again.
TOKEN_LIFE_S = 86400.0
#: How long spent tokens are kept, so that a later use is refused with its reason.
REMEMBERED_S = 7 * 86400.0
#: A certificate is renewed after half its life. A device that asks before a quarter of it is broken or hostile.
EARLIEST_RENEWAL = 0.25


class Issued(msgspec.Struct, frozen=True):
    """Record of an issued token: enough to recognise it, not enough to print it again.

    ``holder``: fingerprint of the device's key that ``answer`` was given to.
    """

    name: str = ""
    key: bytes = b""
    expires: float = 0.0
    holder: str = ""
    answer: t.Answer | None = None


def issue_token(fleet: Fleet, name: str, now: float, life_s: float = TOKEN_LIFE_S) -> str:
    """A token for a new device; an earlier unused one of its name ends. Raises IdentityError for a name in use."""
    check_name("device", name)
    if name == COORDINATOR:
        raise IdentityError(f"no device can be called {name!r}", remedy="Choose another name.")
    with fleet.changing() as devices:
        _check_free(devices, name)
        for path, known in _tokens(fleet):
            if known.expires + REMEMBERED_S < now or (known.name == name and known.answer is None):
                with store_errors("delete", path):
                    path.unlink(missing_ok=True)
        secret = secrets.token_bytes(t.SECRET_BYTES)
        issued = Issued(name, t.proof_key(secret), now + life_s)
        write_private(_path(fleet, t.client_id(secret)), msgspec.msgpack.encode(issued))
    return t.encode_token(t.Token(1, fleet.record.fleet, name, fleet.enroll_url, secret, fleet.authority_der))


def is_expected(fleet: Fleet, client: str) -> bool:
    """Whether a token with this client id is out: a cheap look before anything is decoded."""
    return _path(fleet, client).is_file()


def answer_request(fleet: Fleet, client: str, payload: bytes, now: float) -> bytes | None:
    """The answer to a device that enrols; None, so no answer, without the proof of a token."""
    try:
        request = t.decode_request(payload)
    except ProtocolError:
        return None
    with fleet.changing() as devices:
        path = _path(fleet, client)
        if not path.is_file():
            return None
        issued = _issued(path)
        if not t.request_is_proved(issued.key, fleet.record.fleet, client, request):
            return None
        answer = _answer(fleet, devices, issued, request, now)
        spent = answer.certificate and answer is not issued.answer
        holder = devices[issued.name].holder if spent else ""
    # The device is on record by now. A crash in between leaves a token that its own key alone can use again.
    if spent:
        write_private(path, msgspec.msgpack.encode(replace(issued, holder=holder, answer=answer)))
    return t.encode(t.prove_answer(issued.key, answer, request))


def _answer(fleet: Fleet, devices: Devices, issued: Issued, request: t.Request, now: float) -> t.Answer:
    try:
        asked, key = x.requested(request.request)
        holder = x.fingerprint(key)
        if now > issued.expires:
            return t.Answer(refusal="this token has expired")
        if issued.answer is not None:
            return issued.answer if holder == issued.holder else t.Answer(refusal="this token has been used already")
        if request.name != issued.name or asked != issued.name:
            return t.Answer(refusal="this token is for a device with another name")
        known = devices.get(issued.name)
        if known is None or known.holder != holder:  # else a crash came between the two writes
            _check_free(devices, issued.name)
    except IdentityError as error:
        return t.Answer(refusal=error.message)
    if known is None:
        certificate = fleet.authority().client(issued.name, key, fleet.record.life_s, now)
        known = Device(client_id=f"{issued.name}-{secrets.token_hex(16)}").with_certificate(certificate, holder)
        devices[issued.name] = known
    return t.Answer(
        certificate=known.certificate,
        not_before=known.not_before,
        not_after=known.not_after,
        signer=fleet.signer.public,
        broker=fleet.url,
        client_id=known.client_id,
    )


def renew(fleet: Fleet, name: str, request: bytes, now: float) -> Renewed:
    """A fresh certificate for a device, which the broker knows by its old one."""
    given = hashlib.sha256(request).hexdigest()
    with fleet.changing() as devices:
        device = devices.get(name)
        if device is None or device.revoked_at is not None:
            return Renewed(given, refusal=f"{name} is not enrolled here")
        try:
            asked, key = x.requested(request)
        except IdentityError as error:
            return Renewed(given, refusal=error.message)
        if asked != name:
            return Renewed(given, refusal=f"the signing request is for {asked[:64]!r}, not for {name!r}")
        early = now < device.not_before + EARLIEST_RENEWAL * (device.not_after - device.not_before)
        if device.holder != x.fingerprint(key) or not early:  # early and the same: it has not heard the answer
            if early:
                return Renewed(given, refusal="it is too early: the certificate was made not long ago")
            certificate = fleet.authority().client(name, key, fleet.record.life_s, now)
            device = devices[name] = device.with_certificate(certificate, x.fingerprint(key))
        return Renewed(given, device.certificate, device.not_before, device.not_after)


def _check_free(devices: Devices, name: str) -> None:
    """Raise IdentityError for a name in use: two devices with certificates of one name are indistinguishable."""
    if name in devices:
        state = "was revoked" if devices[name].revoked_at is not None else "is enrolled already"
        raise IdentityError(f"a device {name!r} {state}", remedy="Choose another name, such as one with a number.")


def _path(fleet: Fleet, client: str) -> Path:
    return fleet.directory / "tokens" / check_name("client", client)


def _tokens(fleet: Fleet) -> list[tuple[Path, Issued]]:
    paths = sorted((fleet.directory / "tokens").glob("enroll-*"))
    found = []
    for path in paths:
        try:
            found.append((path, _issued(path)))
        except IdentityError as error:  # one token's matter: the others' devices enrol
            _LOG.warning("%s %s", error.message, error.remedy)
    return found


def _issued(path: Path) -> Issued:
    """The record of a token. Raises IdentityError, naming the file, when that is damaged or open to others."""
    try:
        return msgspec.msgpack.decode(read_private(path), type=Issued)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        remedy = "Delete it, and give the device another token with `edgefl-coordinator enroll`."
        raise IdentityError(f"{path} is damaged: it is no record of a token ({error})", remedy=remedy) from error
