"""Devices' membership of a fleet: one-time tokens, certificates for devices that enrol or renew, and revocation.

Each answer to a device is on disk before it is sent. The same request again gets the same answer, since the first may
be lost; another request by the same token gets a refusal. A revocation is effective at the coordinator at its next
tick, at the broker once that reloads its files. A machine takes the place of another once the broker shuts out the old.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import structs

from edgefl.errors import BrokerError, IdentityError, ProtocolError
from edgefl.identity import authority as x
from edgefl.identity import token as t
from edgefl.identity.acl import user_of
from edgefl.identity.fleet import Device, Devices, Fleet, enrolled_id
from edgefl.identity.issued_tokens import Issued, check_free, end_tokens, issued_in, path_of
from edgefl.identity.keys import write_private
from edgefl.protocol.messages import Renewed

#: A certificate is renewed after half its life. A device that asks before a quarter of it is broken or hostile.
EARLIEST_RENEWAL = 0.25
#: Time limit of a command that reloads a broker elsewhere: a login over a slow line.
RELOAD_S = 60.0


class Answered(NamedTuple):
    """Answer to an enrolling device. ``name``: of a machine just enrolled, else ""; ``replaced``: old client id."""

    payload: bytes
    name: str = ""
    replaced: str = ""


def answer_request(fleet: Fleet, client: str, payload: bytes, now: float) -> Answered | None:
    """The answer to a device that enrols; None, so no answer, without the proof of a token."""
    try:
        request = t.decode(payload, t.Request)
    except ProtocolError:
        return None
    with fleet.changing() as devices:
        path = path_of(fleet, client)
        if not path.is_file():
            return None
        issued = issued_in(path)
        proof = t.request_proof(issued.key, fleet.record.fleet, client, request)
        if not hmac.compare_digest(request.proof, proof):
            return None
        before = devices.get(issued.name)
        answer = _answer(fleet, devices, issued, request, now)
        is_fresh = devices.get(issued.name) is not before
        spent = answer.certificate and answer is not issued.answer
        holder = devices[issued.name].holder if spent else ""
    # The device is on record by now. A crash in between leaves a token that its own key alone can use again.
    if spent:
        write_private(path, msgspec.msgpack.encode(structs.replace(issued, holder=holder, answer=answer)))
    sealed = t.encode(structs.replace(answer, proof=t.answer_proof(issued.key, answer, request)))
    return Answered(sealed, issued.name, before.client_id if before else "") if is_fresh else Answered(sealed)


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
            known = _enrolled(fleet, devices, issued, key, now)
    except IdentityError as error:
        return t.Answer(refusal=error.message)
    return t.Answer(
        certificate=known.certificate,
        not_before=known.not_before,
        not_after=known.not_after,
        signer=fleet.signer.public,
        broker=fleet.url,
        client_id=known.client_id,
    )


def _enrolled(fleet: Fleet, devices: Devices, issued: Issued, key: x.PublicKey, now: float) -> Device:
    """Enrol a device, in place of another machine if its token says so. Raises IdentityError."""
    name, before = issued.name, devices.get(issued.name)
    if not issued.replaces:
        check_free(devices, name)
    elif before is None or before.generation != issued.replaces:
        raise IdentityError(f"another machine has taken the place of {name} meanwhile")
    client_id = f"{name}-{secrets.token_hex(16)}"
    fresh = Device(client_id=client_id, enrolled=(now,)) if before is None else before.successor(client_id, now)
    fresh = structs.replace(fresh, hosts=() if fleet.record.broker else fleet.record.hosts[:1])
    certificate = fleet.authority().client(user_of(name, fresh.generation), key, fleet.record.life_s, now)
    devices[name] = fresh = fresh.with_certificate(certificate, x.fingerprint(key))
    if before is not None:
        _shut_out(fleet, devices, name, before, now)
    return fresh


def _shut_out(fleet: Fleet, devices: Devices, name: str, before: Device, now: float) -> None:
    """Revoke the old machine of a name at the broker.

    Raises IdentityError, and the old one keeps the name: two machines at a broker with one name's topics would be
    indistinguishable.
    """
    fleet.write_rules(now, devices)
    try:
        if not reload_broker(fleet):
            raise IdentityError("no broker runs on the server to shut the old machine out: start it first")
    except IdentityError:
        devices[name] = before
        fleet.write_rules(now, devices)
        with contextlib.suppress(IdentityError):
            reload_broker(fleet)  # a command may have acted before it failed
        raise


def renew(fleet: Fleet, name: str, request: bytes, now: float) -> Renewed:
    """Answer to a device's certificate renewal: a certificate or a refusal.

    ``name``: the device, already authenticated by the broker; ``request``: its signing request. Too early with the same
    key: the present certificate again, since the first answer may be lost.
    """
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
            certificate = fleet.authority().client(user_of(name, device.generation), key, fleet.record.life_s, now)
            device = devices[name] = device.with_certificate(certificate, x.fingerprint(key))
        return Renewed(given, device.certificate, device.not_before, device.not_after)


class Revoked(NamedTuple):
    """Outcome of a revocation. ``reloaded``: the broker reads its files again; ``dropped``: the connection was cut."""

    name: str
    reloaded: bool
    dropped: bool
    trouble: str = ""


async def revoke(fleet: Fleet, name: str, now: float) -> Revoked:
    """Revoke a device; a second time only reloads the broker. Raises IdentityError for one that is not enrolled."""
    with fleet.changing() as devices:
        name = enrolled_id(devices, name)
        device = devices[name]
        if device.revoked_at is None:
            device = devices[name] = structs.replace(device, revoked_at=now)
        end_tokens(fleet, [name], now)
        fleet.write_rules(now, devices)  # before anybody else can change them
    try:
        reloaded = reload_broker(fleet)
    except IdentityError as error:
        return Revoked(name, False, False, error.message)
    if not reloaded:
        return Revoked(name, False, False)
    trouble = await drop(fleet, device.client_id)
    return Revoked(name, True, not trouble, trouble)


def reload_broker(fleet: Fleet) -> bool:
    """Have the broker read its access rules and certificates again; False when none is found.

    That is the mosquitto whose process id lies beside its configuration, or the command in ``fleet.json``. Raises
    IdentityError when the command fails, or the process cannot be signalled.
    """
    command = list(fleet.record.reload)
    if command:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RELOAD_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise IdentityError(f"the broker's reload command {command[0]!r} failed: {error}") from error
        if done.returncode != 0:
            words = done.stderr.strip()[-300:]
            raise IdentityError(f"the broker's reload command {command[0]!r} ended with {done.returncode}: {words}")
        return True
    pids = [running(fleet.directory / "broker" / f"{name}.pid") for name in ("mosquitto", "newcomers")]
    for pid in pids:
        try:
            if pid is not None:
                os.kill(pid, signal.SIGHUP)
        except OSError as error:
            raise IdentityError(f"mosquitto (process {pid}) cannot be told to read its files: {error}") from error
    return pids[0] is not None


def running(pid_file: Path) -> int | None:
    """The process id in a file, if that process is a mosquitto: after a crash, the number may be another's."""
    try:
        pid = int(pid_file.read_text())
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, ValueError):
        return None
    return pid if name == "mosquitto" else None


async def drop(fleet: Fleet, client_id: str) -> str:
    """Cut a device's connection by taking over its client id, which only it and this directory know.

    Returns the reason why not, "" when it was cut. A device that stays connected has no topic left.
    """
    taking = fleet.transport(client_id=client_id)
    try:
        await taking.connect()
    except BrokerError as error:
        return f"its connection could not be cut: {error.message}"
    await taking.close()
    return ""
