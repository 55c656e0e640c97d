"""What the broker alone can do: the bytes of an echo round by plain paho clients, without files, hashes or decisions.

One client publishes a model in chunks on one topic; each agent, a process of its own, receives all of it and publishes
as many bytes; a round is over when the first has received everything. Used by ``benchmarks.network.echo`` in the same
run.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES
from edgefl.transport.address import Address, parse_url

#: Unacknowledged messages a client may have: more is not faster, and a broker's queues stay short.
IN_FLIGHT = 64
DOWN, UP = "raw/down", "raw/up"
PATIENCE_S = 120.0


def measured(url: str, agents: int, size: int, rounds: int) -> float:
    """Median seconds of a round of ``agents``, ``size`` bytes each way. Raises TimeoutError when one takes too long."""
    address = parse_url(url)
    environment = {**os.environ, "EDGEFL_BROKER": url}
    arguments = [sys.executable, "-m", "benchmarks.network.raw_broker", str(size)]
    children = [subprocess.Popen([*arguments, str(n)], env=environment) for n in range(agents)]
    try:
        return _server(address, agents, size, rounds)
    finally:
        for child in children:
            child.kill()
            child.wait()


def _server(address: Address, agents: int, size: int, rounds: int) -> float:
    arrived, here = threading.Semaphore(0), threading.Semaphore(0)
    came = 0

    def on_message(client: Client, data: Any, message: MQTTMessage) -> None:
        nonlocal came
        if not message.payload:
            here.release()
            return
        came += len(message.payload)
        if came >= agents * size:
            came -= agents * size
            arrived.release()

    client = connected(address, "raw-server", UP, on_message)
    for _ in range(agents):
        _wait(here)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        send(client, DOWN, size)
        _wait(arrived)
        seconds.append(time.perf_counter() - started)
    client.disconnect()
    client.loop_stop()
    return statistics.median(seconds)


def _wait(semaphore: threading.Semaphore) -> None:
    if not semaphore.acquire(timeout=PATIENCE_S):
        raise TimeoutError(f"the broker did not pass everything on within {PATIENCE_S:.0f} s")


def connected(address: Address, name: str, topic: str, on_message: Any) -> Client:
    """A plain client that listens to ``topic``, its network in a thread."""
    version = MQTTProtocolVersion.MQTTv311 if address.legacy else MQTTProtocolVersion.MQTTv5
    client = Client(CallbackAPIVersion.VERSION2, client_id=name, protocol=version)
    client.username_pw_set(address.username, address.password)
    client.max_inflight_messages_set(IN_FLIGHT)
    client.on_socket_open = _set_no_delay
    client.on_message = on_message
    subscribed = threading.Event()
    client.on_subscribe = lambda *_: subscribed.set()

    def subscribe(*_: object) -> None:
        client.subscribe(topic, 1)

    client.on_connect = subscribe
    client.connect(address.host, address.port)
    client.loop_start()
    if not subscribed.wait(PATIENCE_S):
        raise TimeoutError(f"no answer from {address}")
    return client


def send(client: Client, topic: str, size: int) -> None:
    """``size`` bytes in chunks."""
    chunk = os.urandom(min(size, DEFAULT_CHUNK_BYTES))
    for start in range(0, size, len(chunk)):
        client.publish(topic, chunk[: size - start], qos=1)


def _set_no_delay(client: Client, data: Any, opened: Any) -> None:
    import socket

    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def agent(size: int, name: str) -> None:
    """The child: sends as much as it gets, until it is killed."""
    got = 0
    full = threading.Semaphore(0)

    def on_message(client: Client, data: Any, message: MQTTMessage) -> None:
        nonlocal got
        got += len(message.payload)
        if got >= size:
            got -= size
            full.release()

    client = connected(parse_url(os.environ.pop("EDGEFL_BROKER")), f"raw-{name}", DOWN, on_message)
    client.publish(UP, b"", qos=1)
    while full.acquire(timeout=10 * PATIENCE_S):
        send(client, UP, size)


if __name__ == "__main__":
    agent(int(sys.argv[1]), sys.argv[2])
