"""Who may see a live page, and who may act on the run: bound address, host names, one-time links, cookie, headers.

A browser carries three things past a page's author: requests that another site makes it send (cross-site request
forgery), host names that another site points here (DNS rebinding), and texts of devices that it would take for code.
Hence a cookie that is sent from here alone and a header that only our script sets, a list of host names, and a policy
that runs nothing but this package's files.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgefl.errors import ConfigError, Problem

#: Where the page is unless asked otherwise; when it is taken, any port that is free.
DEFAULT = ("127.0.0.1", 8480)
#: Environment variable with a token that stays, for programs such as Prometheus that open no link.
TOKEN = "EDGEFL_WEB_TOKEN"  # noqa: S105 - the variable's name
#: A short one is guessed.
LEAST_TOKEN = 16
#: Header of requests that act; a browser sets it for our own script alone.
CONTROL_HEADER = "x-edgefl-control"
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Place(NamedTuple):
    """An address to listen on. ``chosen``: a person asked for this very port."""

    host: str
    port: int
    chosen: bool = True

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host == "localhost" or (_is_address(self.host) and ipaddress.ip_address(self.host).is_loopback)

    @property
    def url(self) -> str:
        """As a browser on this machine opens it."""
        anywhere = _is_address(self.host) and ipaddress.ip_address(self.host).is_unspecified
        host = "localhost" if anywhere else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def read_place(text: str) -> Place:
    """``text``: HOST:PORT, HOST or :PORT; "" is the default. Raises ConfigError."""
    if not text:
        return Place(*DEFAULT, chosen=False)
    try:
        parts = urlsplit(f"//{text}")
        if (parts.hostname is None and parts.port is None) or parts.path or parts.username is not None:
            raise ValueError
        return Place(parts.hostname or DEFAULT[0], DEFAULT[1] if parts.port is None else parts.port)
    except ValueError:
        problem = Problem("--web-at", f"{text!r} is not HOST:PORT, such as 127.0.0.1:8480")
        raise ConfigError("the live page", [problem]) from None


def listen(place: Place) -> socket.socket:
    """A socket that listens there. Raises ConfigError that says why it cannot."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        return socket.create_server((place.host, place.port), family=family)
    except OSError as error:
        if not place.chosen:
            return socket.create_server((place.host, 0), family=family)
        text = f"cannot listen on {place.host}:{place.port}: {error.strerror or error}"
        remedy = "Name another address, or port 0 for any that is free."
        raise ConfigError("the live page", [Problem("--web-at", text)], remedy=remedy) from error


class Access:
    """Decides what a request may do. ``announce`` is given each new one-time link.

    The page is open to this machine where it listens on loopback alone; elsewhere, and to act, a browser needs the
    cookie that a link gives. A link works once; the next is announced when it has been used.
    """

    def __init__(self, place: Place, *, control: bool, announce: Callable[[str], None]) -> None:
        self.control = control
        self.place = place
        self._announce = announce
        self._cookie = f"edgefl-{place.port}"
        self._session = secrets.token_urlsafe(32)
        self._link = ""
        self._token = os.environ.get(TOKEN, "")
        if self._token and len(self._token) < LEAST_TOKEN:
            text = f"has {len(self._token)} characters; a token needs {LEAST_TOKEN}"
            remedy = f"Set {TOKEN} to a longer one, such as the output of `openssl rand -hex 24`, or leave it away."
            raise ConfigError("the live page", [Problem(TOKEN, text)], remedy=remedy)
        self._names = {"localhost", place.host, socket.gethostname().lower(), socket.getfqdn().lower()}

    def invite(self) -> None:
        """Announce where the page is: by a new one-time link, where one is needed for anything."""
        if self.place.is_loopback and not self.control:
            self._announce(self.place.url)
            return
        self._link = secrets.token_urlsafe(24)
        self._announce(f"{self.place.url}/open/{self._link}")

    def redeem(self, link: str) -> tuple[str, str] | None:
        """Name and value of the cookie for whoever opens the link for the first time."""
        if not self._link or not hmac.compare_digest(link.encode(), self._link.encode()):
            return None
        self.invite()
        return self._cookie, self._session

    def is_known(self, request: Request) -> bool:
        """Whether the request carries the cookie, or the token that stays."""
        given = request.cookies.get(self._cookie, "")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        by_token = bool(self._token) and hmac.compare_digest(bearer.encode(), self._token.encode())
        return by_token or hmac.compare_digest(given.encode(), self._session.encode())

    def refusal(self, request: Request) -> str:
        """Why a request is refused; "" when it is not."""
        try:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        except ValueError:
            host = ""
        if host not in self._names and not _is_address(host):
            return "This page does not go by that host name; open it by the address it was announced with."
        path = request.url.path
        if request.method == "POST":
            if not self.control:
                return "This page only shows the run; --web-control lets it act."
            if request.headers.get(CONTROL_HEADER) != "1":
                return f"A request that acts needs the header {CONTROL_HEADER}: 1."
        elif self.place.is_loopback or path.startswith(("/open/", "/static/")):
            return ""
        return "" if self.is_known(request) else "Open the link that the coordinator printed; each works once."


class Gate:
    """Refuses what ``access`` refuses, and sets the headers of every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        why = self._access.refusal(Request(scope)) if scope["type"] == "http" else "Only HTTP is spoken here."
        answer: ASGIApp = PlainTextResponse(why + "\n", status_code=403) if why else self._app
        await answer(scope, receive, marked)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
