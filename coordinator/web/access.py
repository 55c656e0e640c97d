"""Access control of the live page: bound address, host names, one-time links, cookie, headers.

A browser carries three things past a page's author: requests that another site makes it send (cross-site request
forgery), host names that another site points here (DNS rebinding), and texts of devices that it would take for code.
Hence a cookie that is sent from here alone and a header that only our script sets, a list of host names, and a policy
that runs nothing but this package's files.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgefl.process.listening import Listener, Place, goes_by, holds_token, listen, read_place, read_token

#: Where the page is unless asked otherwise; when it is taken, any port that is free.
DEFAULT = ("127.0.0.1", 8480)
#: Environment variable with a token that stays, for programs such as Prometheus that open no link.
TOKEN = "EDGEFL_WEB_TOKEN"  # noqa: S105 - the variable's name
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


_LISTENER = Listener("the live page", "--web-at")


def place_of(text: str) -> Place:
    """Parse a place of the page: HOST:PORT, HOST or :PORT, "" for the default. Raises ConfigError."""
    return read_place(text, DEFAULT, _LISTENER)


def check_settings(where: str) -> None:
    """Raise ConfigError for an invalid address or token, before anything is made for the page."""
    place_of(where)
    read_token(TOKEN, _LISTENER.what)


def listening(place: Place) -> socket.socket:
    """A listening socket at ``place``. Raises ConfigError if it cannot be bound."""
    return listen(place, _LISTENER)


class Access:
    """Access rules for requests. ``announce`` is given each new one-time link.

    The page is open to this machine where it listens on loopback alone; elsewhere, and to act, a browser needs the
    cookie that a link gives. A link works once; the next is announced when it has been used.
    """

    def __init__(self, place: Place, *, control: bool, announce: Callable[[str], None]) -> None:
        self.control = control
        self.place = place
        self.announce = announce
        self._cookie = f"edgefl-{place.port}"
        self._session = secrets.token_urlsafe(32)
        self._link = ""
        self._token = read_token(TOKEN, _LISTENER.what)
        self._names = place.names

    def invite(self) -> None:
        """Announce the page's address, with a new one-time link if access or actions need one."""
        if self.place.is_loopback and not self.control:
            self.announce(self.place.url)
            return
        self._link = secrets.token_urlsafe(24)
        self.announce(f"{self.place.url}/open/{self._link}")

    def redeem(self, link: str) -> tuple[str, str] | None:
        """Cookie (name, value) for the first use of a one-time link; None otherwise."""
        if not self._link or not hmac.compare_digest(link.encode(), self._link.encode()):
            return None
        self.invite()
        return self._cookie, self._session

    def is_known(self, request: Request) -> bool:
        """True if the request carries the session cookie or the operator's token."""
        given = request.cookies.get(self._cookie, "")
        by_token = holds_token(request.headers.get("authorization", ""), self._token)
        return by_token or hmac.compare_digest(given.encode(), self._session.encode())

    def refusal(self, request: Request) -> str:
        """Reason to refuse a request; "" for none."""
        if not goes_by(request.headers.get("host", ""), self._names):
            return "This page does not go by that host name; open it by the address it was announced with."
        path = request.scope["path"]  # the one that is routed by; ``request.url`` is put together with the host header
        if request.method == "POST":
            if not self.control:
                return "This page only shows the run; --web-control lets it act."
            if request.headers.get(CONTROL_HEADER) != "1":
                return f"A request that acts needs the header {CONTROL_HEADER}: 1."
        elif self.place.is_loopback or path.startswith(("/open/", "/static/")):
            return ""
        return "" if self.is_known(request) else "Open the link that the coordinator printed; each works once."


class Gate:
    """ASGI middleware: refuses requests by ``access``, sets security headers on every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse one request."""

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        why = self._access.refusal(Request(scope)) if scope["type"] == "http" else "Only HTTP is spoken here."
        answer: ASGIApp = PlainTextResponse(why + "\n", status_code=403) if why else self._app
        await answer(scope, receive, marked)
