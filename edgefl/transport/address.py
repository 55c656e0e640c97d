"""A broker's address: parsed from a URL, printed without its password."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import parse_qs, quote, unquote, urlsplit

from edgefl.errors import BrokerError
from edgefl.findings import remedy

_PORTS = {"mqtt": 1883, "mqtts": 8883}


@dataclass(frozen=True)
class Address:
    """Address and user of a broker. ``legacy``: speak MQTT 3.1.1 at once instead of trying 5 first (``?version=3``).

    amqtt never answers an MQTT 5 greeting, so its URL carries the hint that saves a time-out.
    """

    host: str
    port: int
    tls: bool = False
    username: str = ""
    password: str = field(default="", repr=False)
    legacy: bool = False

    def __str__(self) -> str:
        user = f"{quote(self.username, safe='')}@" if self.username else ""
        return f"{'mqtts' if self.tls else 'mqtt'}://{user}{self._netloc()}"

    def secret_url(self) -> str:
        """The URL with the password: for files only their owner reads, never for logs."""
        given = self.username or self.password
        credentials = f"{quote(self.username, safe='')}:{quote(self.password, safe='')}@" if given else ""
        version = "?version=3" if self.legacy else ""
        return f"{'mqtts' if self.tls else 'mqtt'}://{credentials}{self._netloc()}{version}"

    def masked_url(self) -> str:
        """The URL with ``***`` in place of a password."""
        if not self.password:
            return str(self)
        return self.secret_url().replace(f":{quote(self.password, safe='')}@", ":***@", 1)

    def _netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> Address:
    """The address in a URL. Raises BrokerError, which never repeats the password."""
    try:
        url.encode()
    except UnicodeEncodeError:
        raise _malformed("the broker's URL is no text") from None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _malformed(f"the broker's URL is malformed: {_reason(error)}") from None
    if port == 0:
        raise _malformed("the broker's URL names port 0, where nothing can listen")
    if parts.scheme not in _PORTS:
        raise _malformed(f"a broker's URL starts with mqtt:// or mqtts://, not {parts.scheme!r}")
    if not parts.hostname:
        raise _malformed("the broker's URL names no host")
    try:
        parts.hostname.encode("idna")
    except UnicodeError:
        raise _malformed(f"{parts.hostname!r} cannot be a host name") from None
    version = parse_qs(parts.query).get("version", ["5"])[-1]
    if version not in {"3", "3.1.1", "5"}:
        raise BrokerError(
            f"the broker's URL asks for MQTT version {version!r}", remedy="Choose version=3 or version=5."
        )
    return Address(
        host=parts.hostname,
        port=_PORTS[parts.scheme] if port is None else port,
        tls=parts.scheme == "mqtts",
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        legacy=version != "5",
    )


def _malformed(text: str) -> BrokerError:
    return BrokerError(text, remedy=remedy("broker-url"), finding="broker-url")


def check_protected(url: str, *, insecure: bool) -> None:
    """Raises BrokerError for a broker on another machine without TLS, unless that is what the user wants."""
    address = parse_url(url)
    if address.tls or insecure or is_loopback(address.host):
        return
    raise BrokerError(
        f"{address} is on another machine and without TLS: whoever is between reads and changes everything",
        remedy=remedy("broker-unprotected"),
        finding="broker-unprotected",
    )


def is_loopback(host: str) -> bool:
    """Whether traffic to this host stays on the machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in {"localhost", "localhost.", "ip6-localhost"}


def _reason(error: ValueError) -> str:
    """urllib quotes the faulty piece, which may be half a password (``user:pa/ss@host``): keep only what is safe."""
    return "the host is no valid address" if "IPv6" in str(error) else "the port must be a number from 1 to 65535"
