"""Where a program listens, the host names it goes by, and the token that its clients hold.

A browser can be made to send requests to this machine by another site, or by a host name that another site points here
(DNS rebinding): hence a list of host names.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from edgefl.errors import ConfigError, Problem

#: A short one is guessed.
LEAST_TOKEN = 16
#: A host and perhaps a port, in ASCII. Parsers of URLs take more for a host, such as ``user@host`` and ``host/path?``,
#: and a URL that is put together from such a header has another path than the request (starlette before 1.0.1).
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+(%[\w.~-]+)?\]|[\w.~-]+)?(:[0-9]{0,5})?", re.ASCII)


class Place(NamedTuple):
    """An address to listen on. ``chosen``: a person asked for this very port."""

    host: str
    port: int
    chosen: bool = True

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host == "localhost" or (is_address(self.host) and ipaddress.ip_address(self.host).is_loopback)

    @property
    def url(self) -> str:
        """The URL by which a client on this machine opens it."""
        anywhere = is_address(self.host) and ipaddress.ip_address(self.host).is_unspecified
        host = "localhost" if anywhere else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def names(self) -> frozenset[str]:
        """Host names it goes by; addresses are no names."""
        return frozenset({"localhost", self.host, socket.gethostname().lower(), socket.getfqdn().lower()})


class Listener(NamedTuple):
    """Names for messages: ``what`` listens, and the ``option`` that chooses its address."""

    what: str
    option: str


def read_place(text: str, default: tuple[str, int], listener: Listener) -> Place:
    """``text``: HOST:PORT, HOST or :PORT; "" is the default. Raises ConfigError."""
    if not text:
        return Place(*default, chosen=False)
    try:
        parts = urlsplit(f"//{text}")
        if (parts.hostname is None and parts.port is None) or not _HOST.fullmatch(text):
            raise ValueError
        return Place(parts.hostname or default[0], default[1] if parts.port is None else parts.port)
    except ValueError:
        problem = Problem(listener.option, f"{text!r} is not HOST:PORT, such as {default[0]}:{default[1]}")
        raise ConfigError(listener.what, [problem]) from None


def listen(place: Place, listener: Listener) -> socket.socket:
    """A socket that listens there. Raises ConfigError that says why it cannot."""
    try:
        return _listening(place)
    except OSError as error:
        if not place.chosen:
            return _listening(place._replace(port=0))
        text = f"cannot listen on {place.host}:{place.port}: {error.strerror or error}"
        remedy = "Name another address, or port 0 for any that is free."
        raise ConfigError(listener.what, [Problem(listener.option, text)], remedy=remedy) from error


def _listening(place: Place) -> socket.socket:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    made = socket.create_server((place.host, place.port), family=family)
    # asyncio sets this on sockets of protocol TCP alone, and these have protocol 0. Connections inherit it; without it
    # a body waits for the acknowledgement of its head, 43 ms an answer on loopback.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def read_token(variable: str, what: str) -> str:
    """Access token from an environment variable; "" if unset.

    ``what``: the setting's name for the error. Raises ConfigError for fewer than ``LEAST_TOKEN`` characters.
    """
    token = os.environ.get(variable, "")
    if token and len(token) < LEAST_TOKEN:
        text = f"has {len(token)} characters; a token needs {LEAST_TOKEN}"
        remedy = f"Set {variable} to a longer one, such as the output of `openssl rand -hex 24`, or leave it out."
        raise ConfigError(what, [Problem(variable, text)], remedy=remedy)
    return token


def holds_token(authorization: str, token: str) -> bool:
    """Whether the header ``authorization`` carries the token; "" is never one."""
    bearer = authorization.removeprefix("Bearer ")
    return bool(token) and hmac.compare_digest(bearer.encode(), token.encode())


def goes_by(host_header: str, names: frozenset[str]) -> bool:
    """Whether the header ``host`` is an address or one of the names."""
    try:
        host = urlsplit(f"//{host_header}").hostname if _HOST.fullmatch(host_header) else None
    except ValueError:
        host = None
    return host is not None and (host in names or is_address(host))


def is_address(host: str) -> bool:
    """Whether a host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
