"""Errors of sockets, TLS and brokers as a BrokerError that names the culprit and the way out."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable

from edgefl.errors import BrokerError, BrokerUnreachableError, MessageSizeError
from edgefl.findings import remedy
from edgefl.transport.address import Address

#: OpenSSL's verify codes of certificates -> the finding.
_DISTRUST = {9: "clock-behind", 10: "broker-expired", 62: "broker-other-host", 64: "broker-other-host"}
#: A broker's TLS alerts about this device's certificate: OpenSSL's name -> (the finding, what it means).
_ALERTS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("SSLV3_ALERT_CERTIFICATE_REVOKED", "SSL/TLS_ALERT_CERTIFICATE_REVOKED"),
        ("identity-revoked", "this device's certificate was revoked: the fleet has shut it out"),
    ),
    **dict.fromkeys(
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "SSL/TLS_ALERT_CERTIFICATE_EXPIRED"),
        ("identity-expired", "this device's certificate has expired"),
    ),
    "TLSV1_ALERT_UNKNOWN_CA": (
        "identity-foreign",
        "the broker does not know the authority of this device's certificate",
    ),
    **dict.fromkeys(
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE"),
        ("identity-missing", "the broker asks for a certificate of this device"),
    ),
}


def _distrusted(error: ssl.SSLCertVerificationError, now: float) -> tuple[str, str]:
    """(finding, fault of the broker's certificate). ``now``: seconds since the epoch."""
    finding = _DISTRUST.get(error.verify_code, "broker-distrusted")
    clock = f"this device's clock says {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(now))}"
    if finding == "clock-behind":
        return finding, f"its certificate is not valid yet: {clock}, which is before the certificate begins"
    if finding == "broker-expired":
        return finding, f"its certificate has expired: {clock}"
    return finding, f"its certificate is not trusted: {error.verify_message}"


def unreachable(
    address: Address, error: OSError, now: float | None = None, spoken: Callable[[Address], str] = lambda _: ""
) -> BrokerUnreachableError:
    """For a connection that could not be opened. ``now``: this device's clock, seconds since the epoch.

    ``spoken``: asks what the port speaks instead of TLS.
    """
    where = f"{address.host}:{address.port}"
    reason = error.strerror or str(error) or type(error).__name__
    finding = "broker-away"
    if isinstance(error, socket.gaierror):
        finding, reason = "broker-name", f"the host name {address.host!r} cannot be resolved"
    elif isinstance(error, ConnectionRefusedError):
        finding, reason = "broker-absent", f"nothing listens on {where}"
    elif isinstance(error, ssl.SSLCertVerificationError):
        finding, reason = _distrusted(error, time.time() if now is None else now)
    elif isinstance(error, ssl.SSLError) and (alert := _ALERTS.get(getattr(error, "reason", ""))) is not None:
        finding, reason = alert
    elif address.tls and isinstance(error, ssl.SSLError | ConnectionResetError | TimeoutError) and spoken(address):
        finding, reason = "broker-plain", f"{where} speaks plain MQTT, and mqtts:// asks for TLS"
    elif isinstance(error, TimeoutError):
        reason = f"{where} does not answer"
    elif isinstance(error, ssl.SSLError) or (address.tls and isinstance(error, ConnectionResetError)):
        finding, reason = "broker-handshake", f"no TLS session with {where}: {getattr(error, 'reason', None) or reason}"
    text = f"cannot reach the broker {address}: {reason}"
    return BrokerUnreachableError(text, remedy=remedy(finding), finding=finding)


def silent(address: Address, spoken: Callable[[Address], str] = lambda _: "") -> BrokerUnreachableError:
    """Error for a broker silent after the connection was accepted.

    The peer never answers the MQTT greeting. ``spoken``: as in ``unreachable``.
    """
    text, finding = f"cannot reach the broker {address}: it does not answer as an MQTT broker", "broker-silent"
    if not address.tls and spoken(address):
        text, finding = f"cannot reach the broker {address}: the port speaks TLS, and mqtt:// does not", "broker-tls"
    hint = "Check that an MQTT broker listens there" + (
        ", and that it knows this device's certificate: one that was revoked, has expired or is of another fleet can "
        "be turned away without a word."
        if address.tls
        else "; if it expects TLS, write mqtts:// instead of mqtt://."
    )
    return BrokerUnreachableError(text, remedy=remedy(finding, hint=hint), finding=finding)


def refused(address: Address, client_id: str, reason: str) -> BrokerError:
    """For a broker that answers the greeting with a refusal; ``reason`` is the name of its reason code."""
    finding = "broker-refuses"
    if reason in {"Bad user name or password", "Not authorized", "Bad authentication method"}:
        user = f"user {address.username!r}" if address.username else "anonymous clients"
        reason = (
            f"it does not admit {user} with the password given" if address.username else f"it does not admit {user}"
        )
        finding = "broker-login"
    elif "identifier" in reason.lower():
        finding = "broker-client-id"
    text = f"the broker {address} refuses the connection: {reason}"
    return BrokerError(text, remedy=remedy(finding, client=client_id), finding=finding)


def denied(address: Address, topic: str, verb: str, reason: str) -> BrokerError:
    """For a topic the broker's access list keeps from this client; ``verb`` is publish or subscribe."""
    text = f"the broker {address} does not let {address.username or 'this client'!r} {verb} {topic}: {reason}"
    return BrokerError(text, remedy=remedy("broker-topics"), finding="broker-topics")


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
    return BrokerError(f"cannot load {what}: {reason}", remedy=remedy("broker-files"), finding="broker-files")
