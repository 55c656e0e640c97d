"""Who may see the live page and who may act: host names, one-time links, cookies, headers, downloads, hostile texts."""

from __future__ import annotations

import io
import socket
import zipfile
from pathlib import Path
from typing import Any

import pytest
from page_fixture import ELSEWHERE, HOSTILE, Page, Recorder
from starlette.datastructures import URL
from starlette.requests import Request

from coordinator.web.access import CONTROL_HEADER, TOKEN, listening, place_of
from edgefl.errors import ConfigError
from edgefl.process.listening import Place, goes_by
from edgefl.run_records import EventRow

ACT = {CONTROL_HEADER: "1"}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", Place("127.0.0.1", 8480, chosen=False)),
        (":9000", Place("127.0.0.1", 9000)),
        ("0.0.0.0:80", Place("0.0.0.0", 80)),  # noqa: S104
        ("[::1]:9000", Place("::1", 9000)),
        ("edge.example", Place("edge.example", 8480)),
    ],
)
def test_an_address_is_read(text: str, place: Place) -> None:
    assert place_of(text) == place


@pytest.mark.parametrize("text", ["http://x:1", "x:port", "x:99999", "me@x:1", ":"])
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not HOST:PORT, such as 127\.0\.0\.1:8480"):
        place_of(text)


def test_a_taken_port_is_an_error_only_when_it_was_asked_for() -> None:
    with listening(Place("127.0.0.1", 0)) as first:
        taken = Place("127.0.0.1", first.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen"):
            listening(taken)
        with listening(taken._replace(chosen=False)) as other:
            assert other.getsockname()[1] != taken.port


def test_the_page_is_open_to_this_machine_and_shows_only(tmp_path: Path) -> None:
    page = Page(tmp_path)
    assert page.links == ["http://127.0.0.1:8480"]
    assert page.client.get("/").status_code == 200
    answer = page.client.post("/control/stop", headers=ACT)
    assert (answer.status_code, "--web-control" in answer.text) == (403, True)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8480", "127.0.0.1.evil.example", "", "[", "localhost.evil"]
)
def test_a_name_that_another_site_points_here_is_refused(tmp_path: Path, host: str) -> None:
    answer = Page(tmp_path).client.get("/snapshot.json", headers={"host": host})
    assert answer.status_code == 403
    assert "r1" not in answer.text


#: Hosts in which a path, an account or a question begins; the last are no characters of a host at all.
WITH_A_PATH = [
    "192.0.2.7:8480/static/?", "192.0.2.7/open/?", "192.0.2.7?", "192.0.2.7#", "me@192.0.2.7", "192.0.2.7\\static",
    "192.0.2.7:8480@192.0.2.7", "192.0.2.7 ", "\t192.0.2.7", "192.0.2.7\x0b", "192.0.2.7:80:80", "[::1]/static/?",
    "[::1", "localhost/", "192.0.2.7\xa0",
]  # fmt: skip


@pytest.mark.parametrize("host", WITH_A_PATH)
def test_a_host_with_a_path_is_no_host(tmp_path: Path, host: str) -> None:
    page = Page(tmp_path, place=ELSEWHERE)
    page.client.get(page.link)  # who holds the cookie is refused, too
    scope = {"type": "http", "method": "GET", "path": "/snapshot.json", "query_string": b"", "headers": []}
    assert page.access.refusal(_request(scope, "192.0.2.7", page)) == ""
    assert "does not go by that host name" in page.access.refusal(_request(scope, host, page))
    assert not goes_by(host, ELSEWHERE.names)
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        place_of(host)


def test_whoever_sends_a_host_with_a_path_needs_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starlette before 1.0.1 puts ``request.url`` together from the header; what is open there is open to nobody."""
    page = Page(tmp_path, place=ELSEWHERE)
    for path in ("static", "open"):
        monkeypatch.setattr(Request, "url", URL(f"http://192.0.2.7/{path}/?/snapshot.json"))
        assert page.client.get("/snapshot.json").status_code == 403
    monkeypatch.undo()
    for host in WITH_A_PATH[:2]:
        assert page.client.get("/snapshot.json", headers={"host": host}).status_code == 403


def _request(scope: dict[str, Any], host: str, page: Page) -> Request:
    cookie = "; ".join(f"{name}={value}" for name, value in page.client.cookies.items())
    headers = [(b"host", host.encode("latin-1")), (b"cookie", cookie.encode())]
    return Request({**scope, "headers": headers})


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:8480", "192.0.2.7:8480", socket.gethostname()])
def test_this_machine_s_names_and_any_address_are_taken(tmp_path: Path, host: str) -> None:
    assert Page(tmp_path).client.get("/", headers={"host": host}).status_code == 200


def test_elsewhere_everything_needs_the_link_that_works_once(tmp_path: Path) -> None:
    page = Page(tmp_path, place=ELSEWHERE)
    for path in ("/", "/live", "/snapshot.json", "/download/bill.csv"):
        assert page.client.get(path).status_code == 403
    opened = page.client.get(page.link)
    cookie = opened.headers["set-cookie"].lower()
    assert opened.status_code == 200
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip() for part in cookie.split(";")}
    assert page.client.get("/").status_code == 200
    first, second = page.links
    assert first != second
    assert page.browser().get("/" + first.split("/", 3)[3]).status_code == 403
    assert page.browser().get("/").status_code == 403
    assert page.browser().get("/" + second.split("/", 3)[3]).status_code == 200


def test_a_program_brings_a_token_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "0123456789abcdef")
    page = Page(tmp_path, place=ELSEWHERE)
    assert page.client.get("/snapshot.json", headers={"authorization": "Bearer 0123456789abcdef"}).status_code == 200
    assert page.client.get("/snapshot.json", headers={"authorization": "Bearer 0123456789abcdeF"}).status_code == 403
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(ConfigError, match="has 5 characters; a token needs 16") as refused:
        Page(tmp_path)
    assert refused.value.remedy.startswith(f"Set {TOKEN} to a longer one")


def test_acting_needs_the_cookie_and_the_header(tmp_path: Path) -> None:
    run = Recorder()
    page = Page(tmp_path, [EventRow(1.0, "device_joined", device="cam-1")], act=run)
    assert page.client.get("/").status_code == 200  # to look, this machine needs no cookie
    assert "data-acts" not in page.client.get("/").text
    assert page.client.post("/control/pause", headers=ACT).status_code == 403
    page.client.get(page.link)
    assert page.client.post("/control/pause").status_code == 403
    assert page.client.post("/control/pause", headers=ACT).status_code == 204
    assert page.client.post("/control/leave_out", data={"device": "cam-1"}, headers=ACT).status_code == 204
    refused = page.client.post("/control/leave_out", data={"device": "gone"}, headers=ACT)
    assert (refused.status_code, "knows no device" in refused.text, "cam-1" in refused.text) == (409, True, True)
    for action, device in (("leave_out", ""), ("pause", "cam-1"), ("status", ""), ("__init__", ""), ("_ask", "")):
        assert page.client.post(f"/control/{action}", data={"device": device}, headers=ACT).status_code == 404
    assert page.client.get("/control/stop", headers=ACT).status_code == 405
    assert run.acts == [("pause",), ("leave_out", "cam-1")]
    assert "data-acts" in page.client.get("/").text


def test_every_answer_forbids_foreign_code_frames_and_guesses(tmp_path: Path) -> None:
    page = Page(tmp_path)
    for path in ("/", "/snapshot.json", "/static/page.js", "/nowhere", "/open/x"):
        headers = page.client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert "access-control-allow-origin" not in headers


def test_the_page_has_no_code_of_its_own_in_it(tmp_path: Path) -> None:
    text = Page(tmp_path, [EventRow(1.0, "device_joined", device="a")], act=Recorder()).client.get("/").text
    assert text.count("<script") == text.count('<script src="/static/')
    assert " style=" not in text
    assert "<style" not in text
    assert "http://" not in text
    assert "https://" not in text


SECRETS = ("broker/url", "ledger.url", "ledger.sqlite", "run.yaml", "events.jsonl", "logs/coordinator.log", "key.pem")


@pytest.mark.parametrize(
    "path",
    [
        *SECRETS,
        *(f"../{name}" for name in SECRETS),
        *(f"bundles/../{name}" for name in SECRETS),
        "bundles/%2e%2e/run.yaml",
        "bundles/..%2frun.yaml",
        "/etc/passwd",
        "bundles/link.zip",
        "bundles/acc",
        "bundles/acc/model.onnx",
        "bundles/index.json.zip",
        "bundles/",
        "bundles",
        "",
    ],
)
def test_only_what_is_on_the_list_is_downloaded(tmp_path: Path, path: str) -> None:
    for name in SECRETS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("secret")
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles" / "acc").mkdir()
    (tmp_path / "bundles" / "link").symlink_to(tmp_path)
    (tmp_path / "bundles" / "index.json").write_text("{}")
    (tmp_path / "bundles" / "acc" / "model.onnx").write_bytes(b"model")
    (tmp_path / "bundles" / "acc" / "link").symlink_to(tmp_path / "run.yaml")
    client = Page(tmp_path).client
    answer = client.get(f"/download/{path}")
    assert (answer.status_code, "secret" in answer.text) == (404, False)
    with zipfile.ZipFile(io.BytesIO(client.get("/download/bundles/acc.zip").content)) as packed:
        assert packed.namelist() == ["acc/model.onnx"]
        assert packed.read("acc/model.onnx") == b"model"
    assert client.get(f"/static/{path}").status_code == 404


def hostile_events() -> list[EventRow]:
    """A run whose every text is code."""
    refusal = {"reason": HOSTILE, "detail": HOSTILE, "needed": 2.0, "allowed": 1.0, "unit": HOSTILE}
    return [
        EventRow(1.0, "run_started", data={"name": HOSTILE, "recipe": HOSTILE, "stages": 1, "rounds_total": 1}),
        EventRow(2.0, "device_joined", device=HOSTILE, data={"profile": HOSTILE, "samples": {HOSTILE: 1}}),
        EventRow(3.0, "declined", 1, 1, HOSTILE, refusal),
        EventRow(4.0, "evaluated", 1, 1, data={"values": [{"available": [HOSTILE], "missing": HOSTILE, "value": 0.5}]}),
        EventRow(5.0, "warning", data={"text": HOSTILE}),
        EventRow(6.0, "device_left", device=HOSTILE, data={"reason": HOSTILE}),
    ]


def test_texts_of_devices_stay_texts(tmp_path: Path) -> None:
    page = Page(tmp_path, hostile_events(), act=Recorder())
    text = page.client.get("/", params={"find": HOSTILE}).text
    assert "<img" not in text
    assert text.count("&lt;img") > 8
    assert 'value="{{7*7}}"' in page.client.get("/", params={"find": "{{7*7}}"}).text
    assert 'onerror=alert(1)>"' not in text
