"""The endpoint of large objects, asked by whoever reaches its port: what it gives, takes and refuses."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from identity_fixture import a_fleet, enrolled, free_ports

from coordinator.core.moves import UpdateInvalid, UpdateStored
from coordinator.runtime import object_endpoint, object_urls
from coordinator.runtime.chunk_size import ChunkSizer
from coordinator.runtime.fleet_auth import Guard
from coordinator.runtime.object_endpoint import ObjectEndpoint, Served, opened
from coordinator.runtime.object_urls import MOST_URLS, VALID_S, Method, permit_of, urls_of
from coordinator.runtime.traffic import Traffic
from coordinator.runtime.uploads import Uploads
from coordinator.runtime.validate_update import Rules
from edgefl.errors import ConfigError, ProtocolError
from edgefl.identity.membership import revoke
from edgefl.process import web_server
from edgefl.protocol.messages import Grant, Update
from edgefl.protocol.tensors import encode_part
from edgefl.records import Attempt, ObjectRef
from edgefl.storage.objects import ObjectStore, object_id
from edgefl.transfer.disk_driver import DiskSender

CHUNK_BYTES = 10_000
KEY = b"k" * 32
NAME = "a" * 64
Answer = tuple[int, bytes]


def part(seed: int) -> bytes:
    return encode_part({"w": np.random.default_rng(seed).normal(size=30_000).astype(np.float32)})


class Scene:
    """An endpoint with one download, of the object ``here``, and one upload by dev-1, of the object ``coming``."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.store = ObjectStore(root / "objects")
        self.traffic = Traffic()
        self.grants: list[Grant] = []
        self.reports: list[Any] = []
        self.faults: list[BaseException] = []
        self.here = self.store.put(part(0))
        self.coming = part(1)
        self.ref = ObjectRef(object_id(self.coming), len(self.coming))
        self.sent: list[bytes] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = ObjectEndpoint(self.listener, f"http://127.0.0.1:{self.listener.getsockname()[1]}")
        self.uploads = Uploads(
            self.store,
            ChunkSizer(CHUNK_BYTES, 8),
            Rules(),
            self.traffic,
            clock=time.monotonic,
            grant=lambda device, grant: self.grants.append(grant),
            report=self.reports.append,
            urls=lambda device, transfer, sizes: self.endpoint.urls("PUT", device, transfer, sizes),
        )
        sender = DiskSender(
            "d-1",
            {self.here.id: self.here.size},
            self.store,
            lambda device, message: self.sent.append(message),
            on_sent=lambda device, sent: self.traffic.sent(device, ATTEMPT, sent),
            chunk_bytes=CHUNK_BYTES,
        )
        self.run = Served(
            self.store,
            {"d-1": sender}.get,
            self.uploads,
            {},
            lambda user, device: True,
            lambda device: None,
            self.faults.append,
        )._replace(**changes)

    def announce(self) -> str:
        """dev-1's update; where its object may be put."""
        self.uploads.fetch(Update("dev-1", ATTEMPT, {"task": self.ref}, {"task": 8}), {"task": self.here}, "u-1")
        return self.grants[-1].urls[self.ref.id]

    def url(self, method: Method, **changes: Any) -> str:
        permit = {"device": "dev-1", "transfer": "d-1", "sizes": {self.here.id: self.here.size}, **changes}
        (url,) = self.endpoint.urls(method, **permit).values()
        return url

    async def ask(self, method: str, url: str, body: bytes = b"", **headers: str) -> Answer:
        return await asyncio.to_thread(ask, method, url, body, **headers)

    async def put(self, url: str, data: bytes, begin: int = 0) -> Answer:
        span = f"bytes {begin}-{begin + len(data) - 1}/{self.ref.size}"
        return await self.ask("PUT", url, data, **{"content-range": span})


ATTEMPT = Attempt("r", 1, 1, 1, 1)


def ask(method: str, url: str, body: bytes = b"", context: ssl.SSLContext | None = None, **headers: str) -> Answer:
    """A request by Python's own client, in this thread."""
    parts = urlsplit(url)
    made = (
        http.client.HTTPSConnection(parts.netloc, timeout=20, context=context)
        if context
        else http.client.HTTPConnection(parts.netloc, timeout=20)
    )
    with contextlib.closing(made):
        made.request(method, f"{parts.path}?{parts.query}", body or None, headers)
        answer = made.getresponse()
        return answer.status, answer.read()


@contextlib.asynccontextmanager
async def raw(
    place: tuple[str, int], count: int
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Connections on which nothing is said yet."""
    made = [await asyncio.open_connection(*place) for _ in range(count)]
    try:
        yield made
    finally:
        for _, writer in made:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_urls, "LEAST_BYTES", 1)


def played(root: Path, script: Callable[[Scene], Awaitable[None]], **changes: Any) -> Scene:
    async def play() -> Scene:
        scene = Scene(root, **changes)
        with scene.listener:
            async with scene.endpoint.serving(scene.run):
                await asyncio.wait_for(script(scene), 60)
            await scene.uploads.close()
        return scene

    return asyncio.run(play())


def test_an_object_is_given_whole_or_from_a_byte_on_and_counted_once(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        url, data = scene.url("GET"), part(0)
        assert await scene.ask("GET", url, Range="bytes=0-49999") == (206, data[:50_000])
        status, rest = await scene.ask("GET", url, Range=f"bytes=50000-{len(data) - 1}")
        assert (status, data[:50_000] + rest) == (206, data)
        figures = scene.traffic.figures("dev-1", ATTEMPT)
        assert (figures["payload_down_bytes"].value, figures["resent_down_bytes"].value) == (len(data), 0)
        assert (await scene.ask("GET", url))[1] == data
        assert scene.traffic.figures("dev-1", ATTEMPT)["resent_down_bytes"].value == len(data)

    scene = played(tmp_path, script)
    assert scene.sent == []  # nothing by the broker


@pytest.mark.parametrize("span", ["bytes=5-", "bytes=-5", "bytes=9-3", "bytes=0-999999", "bytes=0-1,3-4", "lines=0-1"])
def test_a_range_that_makes_no_sense_is_refused(tmp_path: Path, span: str) -> None:
    async def script(scene: Scene) -> None:
        assert (await scene.ask("GET", scene.url("GET"), Range=span))[0] == 416

    played(tmp_path, script)


def test_an_object_is_put_in_two_pieces_and_becomes_an_update(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        url = scene.announce()
        assert (await scene.put(url, scene.coming[: 5 * CHUNK_BYTES]))[0] == 200
        (arriving,) = scene.store.root.glob("partial/*")
        assert arriving.read_bytes()[len(scene.coming) + 8 :].count(1) == 5  # what a killed coordinator goes on from
        assert (await scene.put(url, scene.coming[5 * CHUNK_BYTES :], 5 * CHUNK_BYTES))[0] == 200
        while not scene.reports:
            await asyncio.sleep(0.01)
        assert (await scene.put(url, scene.coming))[0] == 409

    scene = played(tmp_path, script)
    assert [type(one) for one in scene.reports] == [UpdateStored]
    assert scene.store.read(scene.ref.id) == scene.coming
    assert scene.traffic.figures("dev-1", ATTEMPT)["payload_up_bytes"].value == len(scene.coming)


def test_what_is_longer_shorter_or_elsewhere_than_granted_is_refused(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        url, size = scene.announce(), scene.ref.size
        span = f"bytes 0-{size - 1}/{size}"
        assert (await scene.ask("PUT", url, scene.coming + b"more", **{"content-range": span}))[0] == 413
        assert (await scene.ask("PUT", url, scene.coming[:-1], **{"content-range": span}))[0] == 413
        assert (await scene.ask("PUT", url, scene.coming))[0] == 416  # without a range
        longer = f"bytes 0-{size + 9}/{size + 10}"
        assert (await scene.ask("PUT", url, scene.coming + b"0123456789", **{"content-range": longer}))[0] == 416
        assert (await scene.put(url, scene.coming[5:], 5))[0] == 416  # within a chunk
        assert (await scene.ask("PUT", url, b"", **{"content-range": span, "transfer-encoding": "chunked"}))[0] == 411
        head = f"PUT {url[len(scene.endpoint.base) :]} HTTP/1.1\r\nhost: x\r\ncontent-range: {span}\r\n"
        head += f"content-length: {size}\r\n\r\n"
        async with raw(scene.listener.getsockname(), 1) as [(_, writer)]:
            writer.write(head.encode() + scene.coming[: 3 * CHUNK_BYTES + 5])
            while scene.uploads.receiver("dev-1", "u-1").received_bytes < 3 * CHUNK_BYTES:
                await asyncio.sleep(0.01)
            writer.transport.abort()
            await asyncio.sleep(0.1)
        scene.uploads.receiver("dev-1", "u-1").ask_again(time.monotonic())
        assert scene.grants[-1].missing[scene.ref.id][0] == 0b11111000  # three chunks came

    scene = played(tmp_path, script)
    assert scene.reports == []


def test_wrong_bytes_are_refused_by_their_hash(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        url = scene.announce()
        for _ in range(3):
            await scene.put(url, bytes(scene.ref.size))
        assert (await scene.put(url, scene.coming))[0] == 409

    scene = played(tmp_path, script)
    (report,) = scene.reports
    assert isinstance(report, UpdateInvalid)
    assert report.refusal.reason == "hash"
    assert not scene.store.has(scene.ref.id)


def test_a_url_is_for_one_method_object_device_and_time(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        url, put = scene.url("GET"), scene.announce()
        other = "b" * 64
        assert (await scene.put(url, scene.coming))[0] == 403
        assert (await scene.ask("GET", put))[0] == 403
        changed = [url.replace(scene.here.id, other), url.replace("dev-1", "dev-2"), url.replace("d-1", "d-2")]
        changed += [url.replace("until=1", "until=2"), url.replace(f"size={scene.here.size}", "size=9"), url[:-1]]
        changed += [url.replace("sign=", "no="), url.partition("?")[0], f"{url}&device=dev-2"]
        for one in changed:
            assert (await scene.ask("GET", one))[0] == 403, one
        assert (await scene.ask("GET", scene.url("GET", transfer="d-9")))[0] == 404  # is over
        assert (await scene.ask("GET", scene.url("GET", sizes={other: 10})))[0] == 404
        elsewhere = ObjectEndpoint(scene.listener, scene.endpoint.base)  # another start of the coordinator
        (old,) = elsewhere.urls("GET", "dev-1", "d-1", {scene.here.id: scene.here.size}).values()
        assert (await scene.ask("GET", old))[0] == 403
        assert (await scene.ask("DELETE", url))[0] == 405
        assert (await scene.ask("POST", put, b"x"))[0] == 405

    assert played(tmp_path, script).reports == []


def test_a_path_that_leaves_the_store_is_no_object(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        query = urlsplit(scene.url("GET")).query
        (tmp_path / "secret").write_text("secret")
        for path in ("/objects/../secret", "/objects/%2e%2e%2fsecret", "/objects/", "/", f"/objects//{scene.here.id}"):
            status, text = await scene.ask("GET", f"{scene.endpoint.base}{path}?{query}")
            assert (status, b"secret" in text) == (403, False)

    played(tmp_path, script)


def test_an_expired_url_is_refused() -> None:
    (url,) = urls_of("http://h:1", KEY, "GET", "dev-1", "d-1", {NAME: 10}, 1000.0).values()
    path, _, query = url.removeprefix("http://h:1").partition("?")
    until = permit_of(KEY, "GET", path, query.encode(), 1000.0).until
    assert 1000 + VALID_S <= until <= 1000 + 2 * VALID_S
    permit_of(KEY, "GET", path, query.encode(), until - 1)
    with pytest.raises(ProtocolError, match="expired"):
        permit_of(KEY, "GET", path, query.encode(), until)


def test_large_objects_alone_have_urls_and_the_largest_if_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_urls, "LEAST_BYTES", 100)
    sizes = {f"{n:064x}": n for n in range(300)}
    assert set(urls_of("http://h:1", KEY, "GET", "d", "t", sizes, 0.0)) == {*list(sizes)[-MOST_URLS:]}
    assert urls_of("http://h:1", KEY, "GET", "d", "t", {NAME: 99}, 0.0) == {}


def test_heads_and_bodies_that_do_not_come_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "IDLE_S", 0.2)
    monkeypatch.setattr(object_endpoint, "IDLE_S", 0.3)

    async def script(scene: Scene) -> None:
        url = scene.announce()[len(scene.endpoint.base) :]
        size = scene.ref.size
        span = f"content-range: bytes 0-{size - 1}/{size}\r\ncontent-length: {size}\r\n"
        for text in ("", "GET /obj", f"PUT {url} HTTP/1.1\r\nhost: x\r\n{span}\r\nxyz"):
            async with raw(scene.listener.getsockname(), 1) as [(reader, writer)]:
                writer.write(text.encode())
                with contextlib.suppress(ConnectionError):
                    answer = await asyncio.wait_for(reader.read(), 10)
                    assert (b" 408 " in answer) == text.startswith("PUT"), answer
        assert (await scene.put(scene.grants[-1].urls[scene.ref.id], scene.coming))[0] == 200

    played(tmp_path, script)


def test_a_request_replaces_what_is_left_of_one_whose_link_was_lost(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        url = scene.announce()
        size = scene.ref.size
        head = (
            f"PUT {url[len(scene.endpoint.base) :]} HTTP/1.1\r\nhost: x\r\ncontent-range: bytes 0-{size - 1}/{size}\r\n"
        )
        async with raw(scene.listener.getsockname(), 1) as [(reader, writer)]:
            writer.write(f"{head}content-length: {size}\r\n\r\n".encode() + scene.coming[: 2 * CHUNK_BYTES])
            while scene.uploads.receiver("dev-1", "u-1").received_bytes < 2 * CHUNK_BYTES:
                await asyncio.sleep(0.01)
            assert (await scene.put(url, scene.coming[2 * CHUNK_BYTES :], 2 * CHUNK_BYTES))[0] == 200
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        while not scene.reports:
            await asyncio.sleep(0.01)

    assert isinstance(played(tmp_path, script).reports[0], UpdateStored)


def test_a_flood_of_connections_is_bounded_and_the_next_one_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_endpoint, "MAX_CONNECTIONS", 20)

    async def script(scene: Scene) -> None:
        place = scene.listener.getsockname()
        async with raw(place, 100) as flood:
            await asyncio.sleep(0.1)
            held = [reader for reader, _ in flood if not reader.at_eof() and reader.exception() is None]
            assert len(held) <= 20
            assert (await scene.ask("GET", scene.url("GET")))[0] == 206  # idle ones make room

    played(tmp_path, script)


def test_an_object_that_cannot_be_read_ends_the_run_and_is_cut_short(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        scene.store.path(scene.here.id).write_bytes(bytes(scene.here.size))
        fresh = ObjectStore(scene.store.root)
        scene.endpoint._run = scene.run._replace(store=fresh)
        assert (await scene.ask("GET", scene.url("GET")))[0] == 500

    (fault,) = played(tmp_path, script).faults
    assert "damaged" in str(fault)


class Tls:
    """An endpoint of a fleet with an identity."""

    def __init__(self, root: Path) -> None:
        self.fleet = a_fleet(root / "fleet")
        self.own = {name: enrolled(self.fleet, name, root / name) for name in ("dev-1", "dev-2")}

    def context(self, name: str = "") -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.own["dev-1"].authority))
        if name:
            context.load_cert_chain(self.own[name].certificate)
        return context


def test_a_url_is_good_with_the_certificate_of_its_device_alone(tmp_path: Path) -> None:
    tls = Tls(tmp_path)
    guard = Guard(tls.fleet)

    async def play() -> None:
        scene = Scene(tmp_path, admits=guard.admits)
        scene.listener.close()
        with opened(f"127.0.0.1:{free_ports(1)[0]}", tls.fleet, insecure=False) as endpoint:
            scene.endpoint = endpoint
            async with endpoint.serving(scene.run):
                url = scene.url("GET")
                assert url.startswith("https://127.0.0.1:")

                async def answer(name: str) -> Answer:
                    return await asyncio.to_thread(ask, "GET", url, b"", tls.context(name))

                assert (await answer("dev-1"))[1] == part(0)
                assert (await answer("dev-2"))[0] == 403
                with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
                    await answer("")  # a stranger
                with pytest.raises((OSError, http.client.HTTPException)):
                    await scene.ask("GET", url.replace("https", "http"))
                await revoke(tls.fleet, "dev-1", time.time())
                assert guard.look()
                assert (await answer("dev-1"))[0] == 403

    asyncio.run(asyncio.wait_for(play(), 60))


def test_handshakes_that_do_not_come_are_bounded_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "MAX_HANDSHAKES", 8)
    monkeypatch.setattr(web_server, "HANDSHAKE_S", 0.5)
    tls = Tls(tmp_path)

    async def play() -> None:
        scene = Scene(tmp_path)
        scene.listener.close()
        with opened(f"127.0.0.1:{free_ports(1)[0]}", tls.fleet, insecure=False) as endpoint:
            scene.endpoint = endpoint
            place = urlsplit(endpoint.base)
            there = str(place.hostname), int(place.port or 0)
            async with endpoint.serving(scene.run), raw(there, 24) as flood:
                asked = asyncio.to_thread(ask, "GET", scene.url("GET"), b"", tls.context("dev-1"))
                assert (await asked)[0] == 206  # after three handshakes' time
                assert all(reader.at_eof() or reader.exception() for reader, _ in flood)

    asyncio.run(asyncio.wait_for(play(), 60))


def test_a_place_without_protection_or_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without TLS"), opened("0.0.0.0:0", None, insecure=False):
        pass
    with opened("localhost:0", None, insecure=False) as endpoint:
        assert endpoint.base.startswith("http://localhost:")
    fleet = a_fleet(tmp_path / "fleet")
    with pytest.raises(ConfigError, match="no name of this server"), opened("elsewhere:0", fleet, insecure=False):
        pass
