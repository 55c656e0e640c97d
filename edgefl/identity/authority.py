"""The fleet's own certificate authority: P-256 keys, X.509 certificates for TLS, and the list of revoked ones.

Needs ``cryptography`` (7 MB resident), so it is imported by the programs that make keys or certificates, never by the
agent's supervisor: that has a key made by ``python -m edgefl.identity.authority NAME KEY``, which writes it into the
file KEY, unless that is there already, and the signing request for it, which is no secret, as DER to standard output.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import ipaddress
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgefl.console import guarded
from edgefl.errors import IdentityError
from edgefl.identity.keys import read_private, write_private
from edgefl.protocol.topics import check_name

#: The authority and what it signs for the server: they are not renewed over the air, and the authority's key lies
#: beside theirs, so shorter lives would only stop fleets on a forgotten day.
LONG_LIFE_S = 20 * 365.25 * 86400
#: Certificates count from a day before they were made: small boards start with a clock that is behind.
BACKDATED_S = 86400
#: Largest certificate signing request: one for P-256 with a name is 250 bytes.
MAX_REQUEST_BYTES = 4096
#: Labels of a host name, the last not of digits alone; letters beyond ASCII are written as IDNA (xn--…).
_LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?!\d+$){_LABEL}", re.ASCII)

Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


class Certificate(NamedTuple):
    """A certificate as DER, its serial number, and when it is valid (seconds since the epoch)."""

    der: bytes
    serial: int
    not_before: float
    not_after: float


def new_key() -> Key:
    """A fresh key on P-256, which every TLS library and secure element knows."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> bytes:
    """The key as PEM, not encrypted: the file's mode protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(pem: bytes, name: str) -> Key:
    """The key in a PEM file. Raises IdentityError naming the file."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise IdentityError(f"{name} is not a private key in PEM: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise IdentityError(f"{name} is not a P-256 key")
    return key


def der_of(pem: bytes, name: str) -> bytes:
    """The certificate in a PEM file as DER. Raises IdentityError naming the file."""
    try:
        return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)
    except ValueError as error:
        raise IdentityError(f"{name} is not a certificate in PEM: {error}") from error


def self_signed(fleet: str, key: Key, now: float) -> Certificate:
    """The authority's own certificate: it may sign certificates and revocation lists, and no further authority."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"EdgeFL fleet {fleet}")])
    builder = _builder(name, name, key.public_key(), now, LONG_LIFE_S, signs=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return _described(builder.sign(key, hashes.SHA256()))


class Authority(NamedTuple):
    """Signs with the fleet's key."""

    certificate: bytes  # DER
    key: Key

    def server(self, key: ec.EllipticCurvePublicKey, hosts: Sequence[str], now: float) -> Certificate:
        """A broker's certificate for these host names and addresses."""
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = self._leaf(hosts[0][:64], key, now, LONG_LIFE_S, ExtendedKeyUsageOID.SERVER_AUTH)
        return _described(builder.add_extension(names, critical=False).sign(self.key, hashes.SHA256()))

    def client(self, user: str, key: ec.EllipticCurvePublicKey, life_s: float, now: float) -> Certificate:
        """The certificate of a device, or of the coordinator. Its common name is the user at the broker."""
        builder = self._leaf(user, key, now, life_s, ExtendedKeyUsageOID.CLIENT_AUTH)
        return _described(builder.sign(self.key, hashes.SHA256()))

    def revocations(self, serials: Iterable[int], now: float) -> bytes:
        """The signed list of revoked certificates, PEM. It does not expire: a stale one must not shut out a fleet."""
        issuer = x509.load_der_x509_certificate(self.certificate).subject
        at = _moment(now)
        builder = x509.CertificateRevocationListBuilder(issuer, _moment(now - BACKDATED_S), _moment(now + LONG_LIFE_S))
        for serial in serials:
            revoked = x509.RevokedCertificateBuilder(serial, at).build()
            builder = builder.add_revoked_certificate(revoked)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _leaf(
        self, name: str, key: ec.EllipticCurvePublicKey, now: float, life_s: float, purpose: x509.ObjectIdentifier
    ) -> x509.CertificateBuilder:
        own = x509.load_der_x509_certificate(self.certificate)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        life_s = min(life_s, own.not_valid_after_utc.timestamp() - now)
        builder = _builder(subject, own.subject, key, now, life_s, signs=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        return builder.add_extension(issuer, critical=False)


def signing_request(name: str, key: Key) -> bytes:
    """A certificate signing request for ``name``, DER: what a device sends; its key stays with it."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_name("device", name))])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def make_request(name: str, key_file: Path) -> bytes:
    """Certificate signing request, DER, for the key in a file.

    Without the file, a new key is made and written there.
    """
    if not key_file.exists():
        write_private(key_file, key_pem(new_key()))
    return signing_request(name, load_key(read_private(key_file), str(key_file)))


def requested(der: bytes) -> tuple[str, ec.EllipticCurvePublicKey]:
    """(name, public key) of a signing request whose own signature is right. Raises IdentityError."""
    if len(der) > MAX_REQUEST_BYTES:
        raise IdentityError(f"a signing request of {len(der)} bytes; {MAX_REQUEST_BYTES} are more than enough")
    try:
        request = x509.load_der_x509_csr(der)
        right = request.is_signature_valid
        key = request.public_key()
        names = [str(attribute.value) for attribute in request.subject]
    except (ValueError, InvalidSignature) as error:
        raise IdentityError(f"not a signing request: {error}") from error
    if not right or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError("the signing request's signature or kind of key is wrong; P-256 is used here")
    if len(names) != 1:
        raise IdentityError("the signing request must name its device, and nothing else")
    return names[0], key


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """sha256 of a public key, hexadecimal."""
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, life_s: float, *, signs: bool
) -> x509.CertificateBuilder:
    """A certificate of an authority (``signs``) or of a client or server."""
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(_moment(now - BACKDATED_S)).not_valid_after(_moment(now + life_s))
    constraints = x509.BasicConstraints(ca=signs, path_length=0 if signs else None)
    usage = x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
    return builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)


def _described(certificate: x509.Certificate) -> Certificate:
    return Certificate(
        certificate.public_bytes(serialization.Encoding.DER),
        certificate.serial_number,
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
    )


def host_name(host: str) -> str:
    """A server's host name, in lower case, or address.

    Raises IdentityError for what a certificate or a URL cannot hold.
    """
    try:
        ipaddress.ip_address(host)
        fits = "%" not in host  # a zone is one machine's own
    except ValueError:
        fits = _NAME.fullmatch(host) is not None
    if not fits:
        text = f"{host!r} is neither a host name nor an address"
        remedy = "Give it without mqtts:// and without a port: broker.example, 192.0.2.7."
        raise IdentityError(text, remedy=remedy)
    return host.lower()


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _moment(at: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(int(at), dt.timezone.utc)


def main() -> None:
    """NAME and KEY on the command line."""
    with guarded():
        sys.stdout.buffer.write(make_request(sys.argv[1], Path(sys.argv[2])))


if __name__ == "__main__":
    main()
