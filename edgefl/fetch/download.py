"""A file over HTTP: resumed by Range, bounded, from and to safe schemes only, checked by its sha256."""

from __future__ import annotations

import hashlib
import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from edgefl import __version__
from edgefl.console import safe_text
from edgefl.errors import DataError
from edgefl.storage.disk import store_errors

#: Bytes read at a time: progress is seen and limits are checked some times a second on a fast line.
_READ_BYTES = 2**18
#: A server that is silent for so long has gone away; the next try goes on where this one stopped.
STALL_S = 30.0
#: Tries that bring nothing before it is given up; one that brought bytes does not count.
TRIES = 4
_PAUSE_S = 1.0
#: Redirects to follow: sources use one or two, a loop has no end.
_MAX_REDIRECTS = 5
#: Tells how far it is: bytes there, bytes in all.
Progress = Callable[[int, int], None]


class Wanted(NamedTuple):
    """A file to download, of exactly ``size`` bytes where that is known, else of at most ``limit``.

    ``sha256``: its hash; "": not known.
    """

    url: str
    limit: int
    size: int | None = None
    sha256: str = ""


def download(wanted: Wanted, target: Path, progress: Progress = lambda _done, _all: None) -> str:
    """Download to ``target`` and return the sha256 (hex). A part that is there already is not downloaded again, where
    the hash that shows whether it is of the same file is known.

    Proxies are those of the environment (https_proxy, no_proxy). Raises DataError (unsafe address, refused by the
    server, cut off, too large, another hash), StoreError.
    """
    check_address(wanted.url)
    part = target.with_name(f"{target.name}.part")
    if not wanted.sha256:
        with store_errors("delete", part):
            part.unlink(missing_ok=True)
    resumed = part.is_file() and part.stat().st_size > 0
    _complete(wanted, part, progress)
    found = file_sha256(part)
    if wanted.sha256 and found != wanted.sha256:
        part.unlink()
        if resumed:  # the part may have been of another file
            return download(wanted, target, progress)
        raise DataError(
            f"{wanted.url}: the file has the sha256 {found}, not {wanted.sha256}",
            remedy="It was deleted. Try again; if it stays so, the source has another file than it had, or somebody on "
            "the way has changed it. --sha256 names the hash of one that you trust.",
        )
    with store_errors("write", target):
        part.replace(target)
    return found


def check_address(url: str) -> None:
    """Check a download's address; raises DataError.

    Allowed is https, or http on this machine, in printable ASCII without spaces.
    """
    try:
        parts = urlsplit(url)
        fits = re.fullmatch("[!-~]+", url) and parts.port != 0
    except ValueError:  # brackets without an IPv6 address, or a port that is none
        parts, fits = urlsplit(""), False
    local = parts.scheme == "http" and parts.hostname in {"127.0.0.1", "::1", "localhost"}
    if not fits or not (parts.scheme == "https" or local) or not parts.hostname:
        remedy = "Name one, with other signs than those of ASCII as %XX, or a file on this disk."
        raise DataError(f"{safe_text(url[:200])}: is no https:// address", remedy=remedy)


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _complete(wanted: Wanted, part: Path, progress: Progress) -> None:
    """Make ``part`` complete, in several requests if need be. Raises DataError."""
    fruitless, most = 0, 0
    while True:
        before = part.stat().st_size if part.is_file() else 0
        try:
            if _request(wanted, part, before, progress):
                return
            reason = "the connection ended early"
        except urllib.error.HTTPError as error:
            if error.code < 500:
                text = f"{wanted.url}: the server answers {error.code} {safe_text(str(error.reason)[:100])}"
                raise DataError(text, remedy="Look at the source's page, or give it by --from FILE.") from error
            reason = f"the server answers {error.code}"
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            reason = safe_text(str(getattr(error, "reason", None) or error)[:200]) or type(error).__name__
        except ValueError as error:  # a host or a proxy whose name cannot be one
            remedy = "Look at the address, and at https_proxy."
            raise DataError(f"{wanted.url}: {safe_text(str(error)[:200])}", remedy=remedy) from error
        there = part.stat().st_size if part.is_file() else 0
        most = max(most, before)
        fruitless = 0 if there > most else fruitless + 1  # without Range each try starts at the first byte
        if fruitless >= TRIES:
            later = "Try again later: it goes on from there." if wanted.sha256 else "Try again later."
            text = f"{wanted.url}: {reason}, {there} bytes are here"
            raise DataError(text, remedy=f"{later} Behind a proxy set https_proxy.")
        time.sleep(_PAUSE_S * fruitless)


def _request(wanted: Wanted, part: Path, offset: int, progress: Progress) -> bool:
    """One request from ``offset`` on; whether the file is complete now. Raises DataError, OSError, HTTPException."""
    if wanted.size is not None and offset == wanted.size:
        return True
    headers = {"User-Agent": f"edgefl/{__version__}", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    try:
        response = _opener().open(urllib.request.Request(wanted.url, headers=headers), timeout=STALL_S)  # noqa: S310 - its scheme is checked
    except urllib.error.HTTPError as error:
        if error.code == 416 and offset:  # there is nothing from there on: the part is of another file
            part.unlink()
            return False
        raise
    with response:
        if response.status != 206:
            offset = 0  # the whole file
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
            part.unlink(missing_ok=True)  # another piece than was asked for: from the beginning, in one piece
            return False
        length = response.headers.get("Content-Length", "")
        total = offset + int(length) if length.isascii() and length.isdecimal() and len(length) < 19 else None
        _check_size(wanted, total or 0)
        with store_errors("open", part):
            file = part.open("r+b" if offset else "wb")
        with file:
            file.seek(offset)
            done = _copy(response, file, wanted, progress)
    expected = wanted.size if wanted.size is not None else total
    return done == expected if expected is not None else True


def _copy(response: IO[bytes], file: IO[bytes], wanted: Wanted, progress: Progress) -> int:
    done = file.tell()
    while block := response.read(_READ_BYTES):
        done += len(block)
        _check_size(wanted, done)
        with store_errors("write", Path(str(file.name))):
            file.write(block)
        progress(done, wanted.size or wanted.limit)
    return done


def _check_size(wanted: Wanted, size: int) -> None:
    limit = wanted.limit if wanted.size is None else wanted.size
    if size > limit:
        raise DataError(
            f"{wanted.url}: sends more than the {limit} bytes that are expected",
            remedy="The source has another file than it had; --sha256 names the hash of one that you trust.",
        )


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to https only, or on this machine to http."""

    max_redirections = _MAX_REDIRECTS

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        check_address(newurl)
        if urlsplit(req.full_url).scheme == "https" and urlsplit(newurl).scheme != "https":
            raise DataError(f"{req.full_url}: redirects to {safe_text(newurl[:200])}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS through the environment's proxies, and no other scheme."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _SafeRedirects(),
    ):
        opener.add_handler(handler)
    return opener
