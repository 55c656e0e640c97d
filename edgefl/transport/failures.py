"""Errors of sockets, TLS and brokers as a BrokerError that names the culprit and the way out."""

from __future__ import annotations

import socket
import ssl
import time

from edgefl.errors import BrokerError, BrokerUnreachableError, MessageSizeError
from edgefl.transport.address import Address

#: OpenSSL's verify codes of certificates.
_NOT_YET_VALID, _EXPIRED, _OTHER_HOST = 9, 10, frozenset({62, 64})
_ENROL = "ask the coordinator for a new token (`edgefl-coordinator enroll`) and enrol it: edgefl-agent enroll TOKEN"
#: A broker's TLS alerts about this device's certificate: OpenSSL's name -> (what it means, what to do).
_ALERTS: dict[str, tuple[str, str]] = {
    name: (meaning, remedy)
    for names, meaning, remedy in (
        (
            ("SSLV3_ALERT_CERTIFICATE_REVOKED", "SSL/TLS_ALERT_CERTIFICATE_REVOKED"),
            "this device's certificate was revoked: the fleet has shut it out",
            "Stop it; to let it in again, delete its state directory and enrol it under another name.",
        ),
        (
            ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "SSL/TLS_ALERT_CERTIFICATE_EXPIRED"),
            "this device's certificate has expired",
            f"Set the clocks here and at the broker; if they are right, {_ENROL}.",
        ),
        (
            ("TLSV1_ALERT_UNKNOWN_CA",),
            "the broker does not know the authority of this device's certificate",
            f"Check --cert; if it is of another fleet, {_ENROL}.",
        ),
        (
            ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE"),
            "the broker asks for a certificate of this device",
            f"Give --cert and --key, or {_ENROL}.",
        ),
    )
    for name in names
}


def _distrusted(error: ssl.SSLCertVerificationError, now: float) -> tuple[str, str]:
    """(fault of the broker's certificate, what to do). ``now``: seconds since the epoch."""
    clock = f"this device's clock says {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(now))}"
    if error.verify_code == _NOT_YET_VALID:
        return (
            f"its certificate is not valid yet: {clock}, which is before the certificate begins",
            "Set this device's clock: timedatectl set-ntp true, or timedatectl set-time 'YYYY-MM-DD hh:mm'.",
        )
    if error.verify_code == _EXPIRED:
        return (
            f"its certificate has expired: {clock}",
            "If that is wrong, set the clock (timedatectl set-ntp true); else renew the broker's certificate.",
        )
    reason = f"its certificate is not trusted: {error.verify_message}"
    if error.verify_code in _OTHER_HOST:
        return reason, "Dial the broker by a name or address that its certificate was made for."
    return reason, "Give the authority's certificate by --ca FILE; an enrolled device has it in its identity."


def unreachable(address: Address, error: OSError, now: float | None = None) -> BrokerUnreachableError:
    """For a connection that could not be opened. ``now``: this device's clock, seconds since the epoch."""
    where = f"{address.host}:{address.port}"
    reason = error.strerror or str(error) or type(error).__name__
    remedy: str | None = None
    if isinstance(error, socket.gaierror):
        reason, remedy = (
            f"the host name {address.host!r} can not be resolved",
            "Check its spelling and this machine's DNS.",
        )
    elif isinstance(error, ConnectionRefusedError):
        reason, remedy = f"nothing listens on {where}", "Start the broker, or correct the host and port."
    elif isinstance(error, TimeoutError):
        reason, remedy = f"{where} does not answer", "Check the address, the network and any firewall between"
        remedy += "; if the port speaks plain MQTT, write mqtt://." if address.tls else "."
    elif isinstance(error, ssl.SSLCertVerificationError):
        reason, remedy = _distrusted(error, time.time() if now is None else now)
    elif isinstance(error, ssl.SSLError) and (alert := _ALERTS.get(getattr(error, "reason", ""))) is not None:
        reason, remedy = alert
    elif isinstance(error, ssl.SSLError) or (address.tls and isinstance(error, ConnectionResetError)):
        reason = f"no TLS session with {where}: {getattr(error, 'reason', None) or reason}"
        remedy = "Use mqtt:// if the port speaks plain MQTT; check --ca, --cert and --key."
    return BrokerUnreachableError(f"can not reach the broker {address}: {reason}", remedy=remedy)


def silent(address: Address) -> BrokerUnreachableError:
    """For a peer that accepts the connection but never answers the greeting."""
    hint = "Check that an MQTT broker listens there" + (
        ", and that it knows this device's certificate: one that was revoked, has expired or is of another fleet can "
        "be turned away without a word."
        if address.tls
        else "; if it expects TLS, write mqtts:// instead of mqtt://."
    )
    text = f"can not reach the broker {address}: it does not answer as an MQTT broker"
    return BrokerUnreachableError(text, remedy=hint)


def refused(address: Address, client_id: str, reason: str) -> BrokerError:
    """For a broker that answers the greeting with a refusal; ``reason`` is the name of its reason code."""
    remedy = None
    if reason in {"Bad user name or password", "Not authorized", "Bad authentication method"}:
        user = f"user {address.username!r}" if address.username else "anonymous clients"
        reason = (
            f"it does not admit {user} with the password given" if address.username else f"it does not admit {user}"
        )
        remedy = "Correct the user and password in the URL (mqtt://user:password@host), or the broker's password file."
    elif "identifier" in reason.lower():
        remedy = f"Choose another device name: the broker does not accept the client id {client_id!r}."
    return BrokerError(f"the broker {address} refuses the connection: {reason}", remedy=remedy)


def denied(address: Address, topic: str, verb: str, reason: str) -> BrokerError:
    """For a topic the broker's access list keeps from this client; ``verb`` is publish or subscribe."""
    return BrokerError(
        f"the broker {address} does not let {address.username or 'this client'!r} {verb} {topic}: {reason}",
        remedy="Grant it in the broker's access list, or check that the fleet and device names match it.",
    )


def too_large(address: Address, topic: str, size: int, reason: str) -> MessageSizeError:
    """For a message that the broker does not take, though it has announced no limit, or a larger one."""
    error = MessageSizeError(
        f"the broker {address} does not take a message of {size:,} bytes on {topic}: {reason}",
        remedy="Lower the chunk size (--set transfer.chunk_bytes=16384), or raise the broker's limit (mosquitto:"
        " message_size_limit, max_packet_size).",
    )
    error.size, error.reason = size, reason
    return error


def unreadable(what: str, error: OSError) -> BrokerError:
    """For a certificate or key file that does not load."""
    reason = error.strerror or str(error)
    if isinstance(error, ssl.SSLError):
        reason = f"not a valid PEM file ({error.reason or reason})"
    return BrokerError(f"can not load {what}: {reason}", remedy="Give the path of a readable PEM file.")
