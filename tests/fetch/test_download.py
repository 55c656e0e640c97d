"""Downloads from a real HTTP server: resumed, cut off, too large, of another hash, redirected."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edgefl.errors import DataError
from edgefl.fetch import download as module
from edgefl.fetch.download import Wanted, check_address, download

BODY = bytes(range(256)) * 4096  # 1 MiB
HASH = hashlib.sha256(BODY).hexdigest()


@dataclass
class Behaviour:
    """How the server answers: ``cuts``: bytes after which each of the first requests breaks off."""

    cuts: list[int] = field(default_factory=list)
    ranges: bool = True
    wrong_range: bool = False
    statuses: list[int] = field(default_factory=list)
    redirect: str = ""
    body: bytes = BODY
    chunked: bool = False
    asked: list[str] = field(default_factory=list)  # Range of each request


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    how: Behaviour

    def do_GET(self) -> None:
        how, range_ = self.how, self.headers.get("Range", "")
        how.asked.append(range_)
        if how.redirect and self.path != "/there":
            return self._head(302, {"Location": how.redirect, "Content-Length": "0"})
        if how.statuses:
            return self._head(how.statuses.pop(0), {"Content-Length": "0"})
        start = int(match[1]) if how.ranges and (match := re.fullmatch(r"bytes=(\d+)-", range_)) else 0
        if start >= len(how.body):
            return self._head(416, {"Content-Length": "0"})
        rest = how.body[start:]
        said = 0 if how.wrong_range else start
        headers = {"Content-Range": f"bytes {said}-{len(how.body) - 1}/{len(how.body)}"} if start else {}
        headers |= {} if how.chunked else {"Content-Length": str(len(rest))}
        self._head(206 if start else 200, {**headers, "Connection": "close"})
        self.wfile.write(rest[: how.cuts.pop(0)] if how.cuts else rest)
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        return None

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Behaviour]]:
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    how = Behaviour()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"how": how})) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/file", how
        running.shutdown()


def wanted(url: str, **changes: object) -> Wanted:
    return Wanted(url, 2 * len(BODY), len(BODY), HASH)._replace(**changes)  # type: ignore[arg-type]


def test_a_file_arrives_whole_and_its_progress_is_told(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, how = server
    seen: list[tuple[int, int]] = []
    assert download(wanted(url), tmp_path / "f", lambda *step: seen.append(step)) == HASH
    assert (tmp_path / "f").read_bytes() == BODY
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert seen[-1] == (len(BODY), len(BODY))
    assert how.asked == [""]


@pytest.mark.parametrize("size", [len(BODY), None])
def test_a_download_that_is_cut_off_goes_on_where_it_stopped(
    server: tuple[str, Behaviour], tmp_path: Path, size: int | None
) -> None:
    url, how = server
    how.cuts = [300_000, 200_000]
    assert download(wanted(url, size=size), tmp_path / "f") == HASH
    assert how.asked == ["", "bytes=300000-", "bytes=500000-"]


def test_a_part_of_an_earlier_try_is_not_downloaded_again(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, how = server
    (tmp_path / "f.part").write_bytes(BODY[:400_000])
    assert download(wanted(url), tmp_path / "f") == HASH
    assert how.asked == ["bytes=400000-"]


def test_a_part_is_not_gone_on_with_where_no_hash_is_known(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, how = server
    (tmp_path / "f.part").write_bytes(b"x" * 1000)
    assert download(wanted(url, sha256=""), tmp_path / "f") == HASH
    assert how.asked == [""]


def test_a_server_that_always_begins_anew_and_never_ends_is_given_up(
    server: tuple[str, Behaviour], tmp_path: Path
) -> None:
    url, how = server
    how.ranges, how.cuts = False, [1, 2] * 30
    with pytest.raises(DataError, match="the connection ended early"):
        download(wanted(url), tmp_path / "f")
    assert len(how.asked) == 2 + module.TRIES


@pytest.mark.parametrize("changes", [{"ranges": False}, {"wrong_range": True}])
def test_a_server_without_ranges_sends_it_anew(
    server: tuple[str, Behaviour], tmp_path: Path, changes: dict[str, bool]
) -> None:
    url, how = server
    for name, value in changes.items():
        setattr(how, name, value)
    (tmp_path / "f.part").write_bytes(BODY[:400_000])
    assert download(wanted(url), tmp_path / "f") == HASH


@pytest.mark.parametrize("part", [b"x" * 1000, BODY + b"more"])
def test_a_part_of_another_file_is_thrown_away(server: tuple[str, Behaviour], tmp_path: Path, part: bytes) -> None:
    url, how = server
    (tmp_path / "f.part").write_bytes(part)
    assert download(wanted(url), tmp_path / "f") == HASH
    assert how.asked[-1] == ""


def test_another_hash_is_refused_and_nothing_is_left(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, how = server
    how.body = BODY[:-1] + b"!"
    with pytest.raises(DataError, match=f"has the sha256 [0-9a-f]{{64}}, not {HASH}"):
        download(wanted(url), tmp_path / "f")
    assert list(tmp_path.iterdir()) == []
    assert how.asked == [""]


def test_it_gives_up_after_tries_that_bring_nothing_and_keeps_the_part(
    server: tuple[str, Behaviour], tmp_path: Path
) -> None:
    url, how = server
    how.cuts = [300_000, *[0] * module.TRIES]
    with pytest.raises(DataError, match="the connection ended early, 300000 bytes are here") as caught:
        download(wanted(url), tmp_path / "f")
    assert "goes on from there" in caught.value.remedy
    assert (tmp_path / "f.part").stat().st_size == 300_000
    assert download(wanted(url), tmp_path / "f") == HASH


def test_a_larger_file_than_expected_is_refused(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, how = server
    how.body = BODY * 2 + b"x"
    with pytest.raises(DataError, match=f"more than the {len(BODY)} bytes"):
        download(wanted(url), tmp_path / "f")
    assert not (tmp_path / "f.part").exists(), "its length was known before a byte was read"
    how.chunked = True  # no length is said: what comes is counted
    with pytest.raises(DataError, match=f"more than the {2 * len(BODY)} bytes"):
        download(wanted(url, size=None, sha256=""), tmp_path / "g")
    assert (tmp_path / "g.part").stat().st_size <= 2 * len(BODY)


def test_an_unknown_hash_is_told(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    assert download(wanted(server[0], size=None, sha256=""), tmp_path / "f") == HASH


def test_what_the_server_refuses_is_not_tried_again(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, how = server
    how.statuses = [404]
    with pytest.raises(DataError, match="the server answers 404"):
        download(wanted(url), tmp_path / "f")
    assert len(how.asked) == 1
    how.statuses = [503]
    assert download(wanted(url), tmp_path / "f") == HASH


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://example.org/f", "http://example.org/f", "data:,x"])
def test_a_redirect_to_another_scheme_is_refused(server: tuple[str, Behaviour], tmp_path: Path, place: str) -> None:
    url, how = server
    how.redirect = place
    with pytest.raises(DataError, match=r"is no https:// address|is not allowed"):
        download(wanted(url), tmp_path / "f")
    assert len(how.asked) == 1


def test_a_redirect_on_the_way_is_followed_and_a_loop_ends(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, how = server
    how.redirect = url.replace("/file", "/there")
    assert download(wanted(url), tmp_path / "f") == HASH
    how.redirect = url
    with pytest.raises(DataError, match="302"):
        download(wanted(url), tmp_path / "g")
    assert len(how.asked) < 20


def test_https_never_becomes_http() -> None:
    import urllib.request

    request = urllib.request.Request("https://example.org/f")
    handler = module._SafeRedirects()
    with pytest.raises(DataError, match="which is not https"):
        handler.redirect_request(request, None, 302, "Found", {}, "http://127.0.0.1/f")
    assert handler.redirect_request(request, None, 302, "Found", {}, "https://example.org/g") is not None


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "ftp://h/f", "http://example.org/f", "https://", "HTTP://10.0.0.1/f", "archive.zip"),
        *(
            "https://[x",
            "https://example.org/\xe4",
            "https://example.org/a b",
            "https://example.org:x/",
            "https://h:99999/",
        ),
    ],
)
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(DataError, match="is no https:// address"):
        check_address(url)
    check_address("https://example.org/f")


def test_a_host_that_can_be_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DataError, match=r"https://a\.\.b/f: .*label"):
        download(wanted("https://a..b/f"), tmp_path / "f")


def test_the_proxy_of_the_environment_is_used(
    server: tuple[str, Behaviour], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, how = server
    monkeypatch.setenv("http_proxy", url.removesuffix("/file"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert download(wanted("http://localhost:9/elsewhere"), tmp_path / "f") == HASH
    assert how.asked == [""]
