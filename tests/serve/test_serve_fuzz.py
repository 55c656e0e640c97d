"""A thousand malformed requests while a well-behaved client asks: each is refused, and nothing else changes."""

from __future__ import annotations

import io
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from PIL import Image
from serve_fixture import Server, arrays, bundles, json_inputs, post, running, until

from edgefl.export.runtime import load_bundle

#: Resident memory that malformed requests may leave behind, once each kind has been there: allocators keep some pages.
GROWTH_BYTES = 24 * 2**20
HEAD = "inference-header-content-length"
Request = tuple[str, bytes, dict[str, str]]  # path, body, headers
TEXT = b'--b\r\ncontent-disposition: form-data; name="text"\r\n\r\n%s\r\n--b--\r\n'


def valid() -> dict[str, object]:
    return {"id": "f", "inputs": json_inputs(arrays())}


def binary(x: np.ndarray, **changes: object) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "acc", "shape": list(x.shape), "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [{**tensor, **changes}]}).encode()
    return head + x.tobytes(), {HEAD: str(len(head))}


def truncated(rng: random.Random) -> Request:
    body = json.dumps(valid()).encode()
    return "/v2/models/demo/infer", body[: rng.randrange(len(body) - 1)], {}


def bytes_changed(rng: random.Random) -> Request:
    body = bytearray(json.dumps(valid()).encode())
    for _ in range(rng.randrange(1, 20)):
        body[rng.randrange(len(body))] = rng.randrange(128, 256)  # no ASCII: it cannot be meant
    return "/v2/models/demo/infer", bytes(body), {}


def wrong_shape(rng: random.Random) -> Request:
    odd = [rng.choice([-1, 0, 1, 3, 2**62, 10**2600]) for _ in range(rng.randrange(0, 12))]
    shape = rng.choice([odd, [999, 4, 3]])
    tensor = {"name": "acc", "shape": shape, "datatype": "FP32", "data": [0.5] * rng.randrange(40)}
    return "/v2/models/demo/infer", json.dumps({"inputs": [tensor]}).encode(), {}


def wrong_type(rng: random.Random) -> Request:
    one: object = rng.choice(["x", None, True, {"a": 1}, [[[]]], 1e400, "1"])
    place = rng.choice(["name", "shape", "datatype", "data", "parameters"])
    tensor = {**json_inputs({"acc": arrays()["acc"]})[0], place: [one] if place in {"shape", "data"} else one}
    if place == "parameters" and not isinstance(one, str | bool | float | list):
        tensor["parameters"] = 3  # null is no fault, and an unknown parameter neither
    return "/v2/models/demo/infer", json.dumps({"inputs": [tensor]}).encode(), {}


def not_finite(rng: random.Random) -> Request:
    x = arrays()["acc"]
    x[0, rng.randrange(4), rng.randrange(3)] = rng.choice([np.nan, np.inf, -np.inf])
    body, headers = binary(x)
    return "/v2/models/demo/infer", body, headers


def wrong_binary(rng: random.Random) -> Request:
    x = arrays()["acc"]
    kind = rng.randrange(4)
    body, headers = binary(
        x, **({"parameters": {"binary_data_size": rng.choice([-1, 47, 2**62, 1.5])}} if kind else {})
    )
    if kind == 0:
        headers[HEAD] = rng.choice(["-1", "abc", "999999999999", str(len(body) + 1), "0", "1e3", "9" * 40])
    return "/v2/models/demo/infer", body + (b"x" if kind == 3 else b""), headers


def deep(rng: random.Random) -> Request:
    depth = rng.choice([50, 2000, 100_000, 1_000_000])
    text = b"[" * depth + b"]" * depth
    place = rng.choice([b'{"inputs":%s}', b'{"inputs":[{"name":"acc","shape":[1],"datatype":"FP32","data":%s}]}'])
    return "/v2/models/demo/infer", place % text, {}


def many_values(rng: random.Random) -> Request:
    count = rng.choice([100_000, 2_000_000])
    tensor = b'{"inputs":[{"name":"acc","shape":[1,4,3],"datatype":"FP32","data":[%s0]}]}'
    return "/v2/models/demo/infer", tensor % (b"0," * count), {}


def form(rng: random.Random) -> Request:
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    data = bytearray(picture.getvalue())
    for _ in range(3):
        data[rng.randrange(8)] ^= 0xFF
    part = b'--b\r\ncontent-disposition: form-data; name="image"; filename="x.png"\r\n\r\n' + bytes(data)
    kind, body = rng.choice(
        [
            ("multipart/form-data; boundary=b", part[: rng.randrange(10, len(part))]),
            ("multipart/form-data; boundary=b", part + b"\r\n--b--\r\n"),
            ("multipart/form-data", part),
            ("multipart/form-data; boundary=b; charset=utf-7", TEXT % b"+2AA-"),
            ("multipart/form-data; boundary=b; charset=punycode", TEXT % (b"-" + b"z" * 2**19)),
            ("multipart/form-data; boundary=" + "z" * 300, part),
            ("multipart/form-data; boundary=b", b'--b\r\ncontent-disposition: form-data; name="t"\r\n\r\nx\r\n' * 200),
            ("multipart/form-data; boundary=b", b"--b\r\n" + b"x" * 20_000),
            ("text/plain", b"x"),
        ]
    )
    return "/predict", body, {"content-type": kind}


def elsewhere(rng: random.Random) -> Request:
    path = rng.choice(
        ["/v2/models/%00/infer", "/v2/models/" + "x" * 3000 + "/infer", "/v2/models/../infer", "//", "/x"]
    )
    return path, b"{}", {"content-encoding": "gzip"}


KINDS: tuple[Callable[[random.Random], Request], ...] = (
    truncated, bytes_changed, wrong_shape, wrong_type, not_finite, wrong_binary, deep, many_values, form, elsewhere,
)  # fmt: skip


def raw(server: Server, data: bytes) -> None:
    """Bytes that may be no HTTP at all, and a connection that is then closed."""
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), 5) as line:
        line.sendall(data)


def garbage(rng: random.Random) -> bytes:
    post_head = b"POST /v2/models/demo/infer HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    return rng.choice(
        [
            rng.randbytes(rng.randrange(1, 3000)),
            post_head + b"content-length: 1000\r\n\r\nhalf",
            post_head + b"transfer-encoding: chunked\r\n\r\nffffffff\r\nx",
            post_head + b"content-length: -5\r\n\r\n",
            post_head + b"content-length: 99999999999999999999\r\n\r\n",
            post_head + b"x: " + b"y" * 200_000,
            b"\x16\x03\x01\x02\x00\x01\x00\x01",  # a TLS client
        ]
    )


class WellBehaved(threading.Thread):
    """A client that asks the same all the time."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.wrong: list[str] = []
        self.answered = 0
        self._url = url

    def run(self) -> None:
        some = {"acc": arrays()["acc"]}
        expected = load_bundle(bundles() / "acc").predict(some).probabilities.ravel()
        with httpx.Client(timeout=30) as client:
            while not self.over.is_set():
                answer = client.post(f"{self._url}/v2/models/demo/infer", json={"inputs": json_inputs(some)})
                found = answer.json()
                if answer.status_code != 200 or not np.allclose(found["outputs"][1]["data"], expected, atol=1e-6):
                    self.wrong.append(answer.text)
                self.answered += 1


def requests(count: int) -> Iterator[Request | bytes]:
    rng = random.Random(7)
    for at in range(count):
        yield garbage(rng) if at % 11 == 10 else KINDS[at % len(KINDS)](rng)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_malformed_requests_change_nothing(count: int):
    with running("--max-body-mib", 8) as server, httpx.Client(timeout=30) as client:
        good = WellBehaved(server.url)
        good.start()
        codes: Counter[int] = Counter()
        settled = 0
        for at, request in enumerate(requests(count)):
            if isinstance(request, bytes):
                raw(server, request)
                continue
            path, body, headers = request
            answer = client.post(server.url + path, content=body, headers=headers)
            codes[answer.status_code] += 1
            assert 400 <= answer.status_code < 500, (at, path, answer.status_code, answer.text[:300], body[:300])
            assert list(answer.json()) == ["error"], answer.text[:300]
            if at == count // 4:  # every kind has been there
                settled = server.rss()
        good.over.set()
        good.join(30)
        assert good.wrong == []
        assert good.answered > count / 20
        assert post(server.url, valid()).status_code == 200
        until(lambda: "edgefl_serve_body_bytes 0.0" in httpx.get(f"{server.url}/metrics").text)
        assert "edgefl_serve_waiting_requests 0.0" in httpx.get(f"{server.url}/metrics").text
        assert server.rss() - settled < GROWTH_BYTES, (settled, server.rss())
        assert {400, 404, 413} <= set(codes)
        assert server.stop() == 0
        assert server.process.stderr is not None
        said = server.process.stderr.read()
        assert "Traceback" not in said, said[-2000:]
