"""Bad links between namespaces: what they do to packets is counted, and TCP, MQTT and a whole round get through."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.network import networks
from benchmarks.network.network_links import CLEAN, Conditions, Link, Namespace, unavailable
from edgefl.transport.broker import broker_program

REASON = unavailable()
# CI is root, and there a bad network must not go untested.
if REASON and os.environ.get("EDGEFL_REQUIRE_NAMESPACES"):
    pytest.fail(f"EDGEFL_REQUIRE_NAMESPACES is set, but {REASON}", pytrace=False)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "there are namespaces")


@pytest.fixture
def link() -> Iterator[tuple[Link, Namespace, Namespace]]:
    with Namespace() as near, Namespace() as far, Link(near, far, seed=1) as made:
        yield made, near, far


def sent(link: Link, near: Namespace, far: Namespace, data: bytes) -> tuple[bytes, float]:
    """What arrived of data sent from far to near, and the seconds it took."""
    with near.entered():
        listening = socket.create_server((link.near_address, 0))
    arrived = bytearray()

    def take() -> None:
        connection, _ = listening.accept()
        with connection:
            while piece := connection.recv(65536):
                arrived.extend(piece)

    taker = threading.Thread(target=take)
    taker.start()
    with far.entered():
        sender = socket.create_connection((link.near_address, listening.getsockname()[1]))
    began = time.monotonic()
    with sender:
        sender.sendall(data)
    taker.join()
    listening.close()
    return bytes(arrived), time.monotonic() - began


@pytest.mark.parametrize(
    "conditions",
    [
        CLEAN,
        Conditions(delay_s=0.05),
        Conditions(delay_s=0.01, loss=0.1),
        Conditions(delay_s=0.01, reorder=0.3),
        Conditions(delay_s=0.01, duplicate=0.2),
        Conditions(rate=2_000_000),
    ],
)
def test_tcp_gets_everything_through_and_the_link_did_what_it_says(
    link: tuple[Link, Namespace, Namespace], conditions: Conditions
) -> None:
    made, near, far = link
    made.conditions = conditions
    data = os.urandom(200_000)
    before = near.tcp()["InSegs"]
    arrived, seconds = sent(*link, data)
    assert arrived == data
    way = made.to_near
    assert way.offered_bytes > len(data)
    assert (way.lost_packets > 0) == bool(conditions.loss)
    got = near.tcp()["InSegs"] - before
    delivered = way.offered_packets - way.lost_packets
    assert got > delivered if conditions.duplicate else got <= delivered
    assert seconds >= conditions.delay_s  # its bytes cannot be here sooner
    if conditions.rate:
        assert seconds >= 0.9 * 8 * len(data) / conditions.rate - 64 * 1024 * 8 / conditions.rate
    if conditions.loss or conditions.reorder:
        assert far.tcp()["RetransSegs"] > 0


def test_nothing_passes_a_cut_and_what_was_under_way_arrives_after_it(
    link: tuple[Link, Namespace, Namespace],
) -> None:
    made = link[0]
    made.conditions = Conditions(rate=4_000_000)
    result: list[tuple[bytes, float]] = []
    data = os.urandom(400_000)
    sending = threading.Thread(target=lambda: result.append(sent(*link, data)))
    sending.start()
    while made.to_near.offered_bytes < 100_000:
        time.sleep(0.005)
    made.up = False
    time.sleep(0.1)
    before = link[1].tcp()["InSegs"]
    time.sleep(1.0)
    assert link[1].tcp()["InSegs"] == before
    made.up = True
    sending.join()
    assert result[0][0] == data
    assert made.to_near.lost_packets > 0


@pytest.mark.skipif(broker_program("mosquitto") is None, reason="needs mosquitto")
@pytest.mark.timeout(240)
@pytest.mark.slow
def test_rounds_over_a_bad_link_are_made_at_once_and_by_everybody(tmp_path: Path) -> None:
    """That the weights are those of clean links, the benchmark itself checks, with a second run."""
    bad = Conditions(delay_s=0.02, loss=0.05, reorder=0.1, duplicate=0.05, rate=4_000_000)
    rows, manifest, trouble = asyncio.run(networks.over_bad_links(tmp_path / "bad", [networks.Case("bad", bad, 2)]))
    assert trouble == ""
    assert [(row.rounds, row.faults) for row in rows] == [(2, ())]
    assert rows[0].segments_resent > 0
    assert rows[0].link_bytes > rows[0].needed_bytes > 0
    assert manifest
