"""A device's own identity, in its state directory. Light: the supervisor reads it, and makes no keys.

``credentials/`` holds ca.pem, device.pem (certificate and key) and device.json (Record), each for its owner alone.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from edgefl.errors import BrokerError, IdentityError, ProtocolError
from edgefl.identity.keys import Verifier, check_private, key_of, make_private_directory, read, write_private
from edgefl.storage.disk import store_errors
from edgefl.transport import failures
from edgefl.transport.address import parse_url

DIRECTORY = "credentials"
#: A certificate is renewed after this share of its life, so that two thirds never pass while the fleet can be reached.
RENEW_AFTER = 0.5
#: URLs of a fleet's broker, for a name or two and the addresses that they stand for; the longest host name and a port.
MOST_ADDRESSES, MOST_CHARACTERS = 8, 300
_VALID = "edgefl-valid:"


class Record(msgspec.Struct, frozen=True):
    """Whose identity it is, and of which fleet. ``signer``: public key of the coordinator's signatures, as text.

    ``client_id`` is a secret of this device and its fleet: a client that knows it can push the device off the broker.
    ``others``: further URLs of the broker, as of the ``revision``-th change of them.
    """

    fleet: str = ""
    device: str = ""
    broker: str = ""
    signer: str = ""
    client_id: str = ""
    others: tuple[str, ...] = ()
    revision: int = 0


class Credentials:
    """The identity in a state directory. Raises IdentityError when it is damaged or others could read its key."""

    def __init__(self, state: Path) -> None:
        self.directory = state / DIRECTORY
        self.authority = self.directory / "ca.pem"
        self.certificate = self.directory / "device.pem"
        check_private(self.certificate)
        try:
            self.record = msgspec.json.decode(read(self.directory / "device.json"), type=Record)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise IdentityError(f"{self.directory / 'device.json'} is damaged: {error}") from error
        self.verifier = Verifier(key_of(self.record.signer, str(self.directory / "device.json")))

    def valid(self) -> tuple[float, float]:
        """From when until when the certificate is valid, seconds since the epoch."""
        line = read(self.certificate).split(b"\n", 1)[0].decode(errors="replace")
        try:
            begin, end = line.removeprefix(_VALID).split()
            return float(begin), float(end)
        except ValueError as error:
            text = f"{self.certificate} does not say how long it is valid"
            raise IdentityError(text, remedy="Enrol this device anew.") from error

    def renewal_due(self) -> float:
        """When to renew it."""
        begin, end = self.valid()
        return begin + RENEW_AFTER * (end - begin)


def learn_addresses(credentials: Credentials, urls: Sequence[str], revision: int) -> bool:
    """Keep the broker's signed URLs; False for a revision known already.

    The one that the device was enrolled with stays the first for as long as it is among them. Raises ProtocolError for
    URLs that are none of a fleet's; StoreError, and nothing is learnt.
    """
    record = credentials.record
    if revision <= record.revision:
        return False
    if not 0 < len(urls) <= MOST_ADDRESSES or any(len(url) > MOST_CHARACTERS for url in urls):
        raise ProtocolError(f"{len(urls)} addresses of the broker, or too long ones")
    try:
        if not all(parse_url(url).tls for url in urls):
            raise ProtocolError("an address of the broker without TLS")
    except BrokerError as error:
        raise ProtocolError(error.message) from error
    first = record.broker if record.broker in urls else urls[0]
    others = tuple(url for url in urls if url != first)
    record = replace(record, broker=first, others=others, revision=revision)
    write_private(credentials.directory / "device.json", msgspec.json.encode(record))
    credentials.record = record
    return True


def find(state: Path) -> Credentials | None:
    """The identity in a state directory, None if there is none. Raises IdentityError, StoreError."""
    with store_errors("read", state):
        there = (state / DIRECTORY / "device.json").is_file()
    return Credentials(state) if there else None


def save(state: Path, record: Record, authority_der: bytes, pem: bytes) -> None:
    """Write a new identity; the record comes last, since it says that the rest is there. Raises StoreError."""
    directory = state / DIRECTORY
    make_private_directory(directory)
    write_private(directory / "ca.pem", ssl.DER_cert_to_PEM_cert(authority_der).encode())
    write_private(directory / "device.pem", pem)
    write_private(directory / "device.json", msgspec.json.encode(record))


def bundle(certificate_der: bytes, key_pem: bytes, not_before: float, not_after: float) -> bytes:
    """Certificate and key in one file, so that they are replaced as one, with the dates in a line for us."""
    head = f"{_VALID} {not_before:.0f} {not_after:.0f}\n"
    return head.encode() + ssl.DER_cert_to_PEM_cert(certificate_der).encode() + key_pem


def replace_certificate(credentials: Credentials, pem: bytes) -> None:
    """Put a renewed certificate in place, if it and its key belong together. Raises IdentityError or StoreError."""
    fresh = credentials.directory / "next.pem"
    write_private(fresh, pem)
    try:
        check_pair(fresh)
    except IdentityError:
        fresh.unlink(missing_ok=True)
        raise
    write_private(credentials.certificate, pem)
    fresh.unlink(missing_ok=True)


def check_pair(path: Path) -> None:
    """Raises IdentityError when the certificate and the key in a file do not belong together."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(path)
    except OSError as error:
        raise IdentityError(f"{failures.unreadable(str(path), error).message}") from error
