"""Turns what sockets and brokers say into a BrokerError that names the culprit and the way out."""

from __future__ import annotations

import socket
import ssl

from edgefl.errors import BrokerError, BrokerUnreachableError
from edgefl.transport.address import Address


def unreachable(address: Address, error: OSError) -> BrokerUnreachableError:
    """For a connection that could not be opened."""
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
        reason = f"its certificate is not trusted: {error.verify_message}"
        remedy = "Give the authority's certificate as broker.ca, and use the host name the certificate was made for."
    elif isinstance(error, ssl.SSLError) or (address.tls and isinstance(error, ConnectionResetError)):
        reason = f"no TLS session with {where}: {getattr(error, 'reason', None) or reason}"
        remedy = "Use mqtt:// if the port speaks plain MQTT; check broker.ca, broker.cert and broker.key."
    return BrokerUnreachableError(f"can not reach the broker {address}: {reason}", remedy=remedy)


def silent(address: Address) -> BrokerUnreachableError:
    """For a peer that accepts the connection but never answers the greeting."""
    hint = "Check that an MQTT broker listens there" + (
        "." if address.tls else "; if it expects TLS, write mqtts:// instead of mqtt://."
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


def unreadable(what: str, error: OSError) -> BrokerError:
    """For a certificate or key file that can not be loaded."""
    reason = error.strerror or str(error)
    if isinstance(error, ssl.SSLError):
        reason = f"not a valid PEM file ({error.reason or reason})"
    return BrokerError(f"can not load {what}: {reason}", remedy="Give the path of a readable PEM file.")
