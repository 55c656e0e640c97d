"""Requests over a real broker: by response topic and by a pair of topics, raw files, refusals, a broker's restart."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import paho.mqtt.client as paho
import pytest
from identity_fixture import free_ports
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from serve_fixture import Server, arrays, bundles, json_inputs, running, until
from transport_fixtures import mosquitto_wanted

from edgefl.export.runtime import load_bundle
from edgefl.serve.mqtt import answer_topic
from edgefl.transport.broker import broker_program

pytestmark = pytest.mark.skipif(not mosquitto_wanted(), reason="mosquitto is not installed")


class Broker:
    """mosquitto on a port of its own, that can be stopped and started."""

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.url = f"mqtt://127.0.0.1:{port}"
        self._file = folder / "mosquitto.conf"
        self._file.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")

    def start(self) -> None:
        program = broker_program("mosquitto")
        assert program is not None
        self._process = subprocess.Popen([program, "-c", str(self._file)], stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(tmp_path_factory.mktemp("broker"))
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def server(broker: Broker) -> Iterator[Server]:
    with running("--mqtt", broker.url, "--max-body-mib", 1) as started:
        assert "edgefl-serve/# of mqtt://" in started.said
        until(lambda: takes_requests(started), 30)  # it serves by HTTP before the broker has taken its topics
        yield started


def takes_requests(server: Server) -> bool:
    return "\nedgefl_serve_broker_connected 1.0\n" in httpx.get(f"{server.url}/metrics").text


def listens(url: str) -> bool:
    host, _, port = url.removeprefix("mqtt://").rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
        return True
    return False


class Device:
    """A device with paho alone, of one version of MQTT."""

    def __init__(self, url: str, version: int, topic: str) -> None:
        self.got: queue.Queue[tuple[str, bytes, bytes]] = queue.Queue()
        ready = queue.Queue[bool]()
        self._client = paho.Client(paho.CallbackAPIVersion.VERSION2, secrets.token_hex(4), protocol=version)
        self._client.on_message = self._heard
        self._client.on_subscribe = lambda *_: ready.put(True)
        self._client.on_connect = lambda *_: self._client.subscribe(topic, 1)
        host, _, port = url.removeprefix("mqtt://").rpartition(":")
        until(lambda: listens(url), 15)
        self._client.connect(host, int(port))
        self._client.loop_start()
        ready.get(timeout=15)

    def _heard(self, _client: object, _data: object, message: Any) -> None:
        self.got.put((message.topic, message.payload, getattr(message.properties, "CorrelationData", b"")))

    def ask(self, topic: str, payload: bytes, reply: str = "", mark: bytes = b"") -> None:
        properties = None
        if reply:
            properties = Properties(PacketTypes.PUBLISH)
            properties.ResponseTopic, properties.CorrelationData = reply, mark
        self._client.publish(topic, payload, 1, properties=properties)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


@pytest.fixture
def devices(broker: Broker) -> Iterator[Any]:
    made: list[Device] = []

    def make(version: int, topic: str) -> Device:
        made.append(Device(broker.url, version, topic))
        return made[-1]

    yield make
    for device in made:
        device.close()


def request(rows: int = 1) -> bytes:
    return json.dumps({"id": "q", "inputs": json_inputs({"acc": arrays(rows)["acc"]})}).encode()


def test_mqtt_5_answers_on_the_response_topic(server: Server, devices: Any):
    device = devices(paho.MQTTv5, "wrist-1/answers")
    for at in range(20):
        device.ask("edgefl-serve/demo/infer", request(2), "wrist-1/answers", f"{at}".encode())
    got = [device.got.get(timeout=20) for _ in range(20)]
    assert {mark for _, _, mark in got} == {f"{at}".encode() for at in range(20)}
    body = json.loads(got[0][1])
    expected = load_bundle(bundles() / "acc").predict({"acc": arrays(2)["acc"]})
    assert body["outputs"][2]["data"] == list(expected.labels)
    assert body["parameters"]["filled"] == "image,text"


def test_mqtt_3_answers_on_a_topic_beside_the_requests(server: Server, devices: Any):
    device = devices(paho.MQTTv311, "edgefl-serve/demo/answer/wrist-2/#")
    device.ask("edgefl-serve/demo/infer/wrist-2/77", request())
    topic, payload, _ = device.got.get(timeout=20)
    assert topic == "edgefl-serve/demo/answer/wrist-2/77"
    assert json.loads(payload)["id"] == "q"


def test_a_raw_file(server: Server, devices: Any):
    device = devices(paho.MQTTv5, "w3")
    device.ask("edgefl-serve/demo/predict/acc.csv", b"1,2,3\n" * 4, "w3", b"a")
    (found,) = json.loads(device.got.get(timeout=20)[1])["predictions"]
    x = np.tile(np.float32([1, 2, 3]), (1, 4, 1))
    assert found["label"] == load_bundle(bundles() / "acc").predict({"acc": x}).labels[0]


@pytest.mark.parametrize(
    ("topic", "payload", "said"),
    [
        ("demo/infer", b"{", "no inference request"),
        ("demo/infer", b"x" * (2**20 + 1), "1048576 at most"),
        ("demo/infer/a/b/c", b"{}", "a request's topic is"),
        ("demo/predict/acc.exe", b"x", ".csv"),
        ("demo/predict/..%2F.csv", b"x", "cannot name a modality"),
        ("demo-acc/infer", request()[:-1] + b"x", "no inference request"),
    ],
)
def test_a_refusal_is_an_answer(server: Server, devices: Any, topic: str, payload: bytes, said: str):
    device = devices(paho.MQTTv5, "w4")
    device.ask(f"edgefl-serve/{topic}", payload, "w4", b"m")
    body = json.loads(device.got.get(timeout=20)[1])
    assert list(body) == ["error"]
    assert said in body["error"]


@pytest.mark.parametrize(
    "asked", ["edgefl/1/fleet/d/wrist/down", "edgefl-serve/demo/infer", "$SYS/x", "a/#", "x" * 300]
)
def test_answers_go_to_no_topic_of_others(asked: str):
    assert answer_topic("edgefl-serve/demo/infer", asked) == ""
    assert answer_topic("edgefl-serve/demo/infer", "") == ""


@pytest.mark.slow
def test_it_answers_again_after_the_broker_was_away(tmp_path: Path):
    made = Broker(tmp_path)
    with running("--mqtt", made.url, environment={"EDGEFL_SERVE_TOKEN": ""}) as server:  # nothing listens there yet
        made.start()
        try:
            for _ in range(2):
                device = Device(made.url, paho.MQTTv5, "w5")
                for _ in range(60):  # until it is connected: at most once, there is no session before
                    device.ask("edgefl-serve/demo/infer", request(), "w5", b"z")
                    try:
                        assert device.got.get(timeout=0.5)[2] == b"z"
                        break
                    except queue.Empty:
                        continue
                else:
                    pytest.fail("no answer")
                device.close()
                until(lambda: takes_requests(server), 30)
                made.stop()
                until(lambda: not takes_requests(server), 30)
                made.start()
        finally:
            made.stop()
        assert server.stop() == 0
