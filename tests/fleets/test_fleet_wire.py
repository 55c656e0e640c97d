"""Bytes on the wire as a device reports them, beside what a proxy between it and the broker counts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import fleet_fixture
import pytest
from fleet_fixture import Fleet, finish, share
from transport_fixtures import CountingProxy, mosquitto_wanted

from edgefl.run_records import RunReport

BEATS = Path(__file__).parents[1] / "beats"
NAMES = ("one", "two")
#: 3 MB of parts in chunks of 16 KiB: transfers that meet beats.
RUN = (
    fleet_fixture.RUN.replace("width: 16, depth: 2", "width: 128, depth: 4")
    .replace("rounds: [1, 1]", "rounds: [2, 2]")
    .replace("chunk_bytes: 2048, credit: 4", "chunk_bytes: 16384")
)
#: Of both directions, beside rounds: CONNECT, hellos, acknowledgements and the messages of a round's two ends.
BESIDE_BYTES = 100_000
#: Bytes a second: a third of a round's parts within its deadline.
SLOW = 120_000.0


async def run(fleet: Fleet, file: Path) -> list[CountingProxy]:
    """A run of two devices, each behind a proxy of its own."""
    async with contextlib.AsyncExitStack() as stack:
        proxies, agents = [], []
        for seed, name in enumerate(NAMES):
            proxy = await stack.enter_async_context(CountingProxy().to(fleet.broker.address.port))
            url = fleet.broker.url.replace(f":{fleet.broker.address.port}", f":{proxy.port}")
            agents.append(fleet.agent(name, share(40, "acc", "gyro", seed=seed), broker=url))
            proxies.append(proxy)
        coordinator = fleet.coordinator("r1", {"round.devices": 2}, file)
        await asyncio.to_thread(finish, coordinator)
        for agent in agents:
            await asyncio.to_thread(agent.stop)
        return proxies


def total(report: RunReport, device: str, figure: str) -> float:
    return sum(row.measured[figure].value or 0.0 for row in report.assignments if row.device == device)


@pytest.mark.slow  # 20 s
@pytest.mark.skipif(not mosquitto_wanted(), reason="a broker fast enough for this")
def test_beats_have_nothing_sent_twice_and_the_wire_is_what_a_proxy_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEFL_TEST_BEAT", "0.05")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BEATS), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
    (tmp_path / "wire.yaml").write_text(RUN)
    with Fleet(tmp_path, "mosquitto") as fleet:
        proxies = asyncio.run(run(fleet, tmp_path / "wire.yaml"))
        report = fleet.report("r1")
    for name, proxy in zip(NAMES, proxies, strict=True):
        assert total(report, name, "resent_up_bytes") == total(report, name, "resent_down_bytes") == 0
        for way, passed in (("up", proxy.up), ("down", proxy.down)):
            wire, payload = total(report, name, f"wire_{way}_bytes"), total(report, name, f"payload_{way}_bytes")
            assert payload > 1e7
            assert payload < wire < passed < wire + BESIDE_BYTES


@pytest.mark.slow  # 40 s
@pytest.mark.skipif(not mosquitto_wanted(), reason="a broker fast enough for this")
def test_what_a_link_carries_for_rounds_that_come_late_is_in_the_bill(tmp_path: Path) -> None:
    """The slow device's link takes longer than the deadline for what a round needs."""

    async def scene(fleet: Fleet) -> tuple[CountingProxy, list[dict[str, Any]]]:
        async with CountingProxy(SLOW).to(fleet.broker.address.port) as proxy:
            url = fleet.broker.url.replace(f":{fleet.broker.address.port}", f":{proxy.port}")
            slow = fleet.agent("slow", share(40, "acc", "gyro", seed=0), broker=url)
            fast = fleet.agent("fast", share(40, "acc", "gyro", seed=1))
            settings = {"round.devices": 2, "round.deadline_s": 10, "training.rounds": "[3, 0]"}
            coordinator = fleet.coordinator("r1", {**settings, "transfer.credit": 4}, tmp_path / "late.yaml")
            await asyncio.to_thread(finish, coordinator)
            for agent in (slow, fast):
                await asyncio.to_thread(agent.stop)
            return proxy, slow.lines

    (tmp_path / "late.yaml").write_text(RUN)
    with Fleet(tmp_path, "mosquitto") as fleet:
        proxy, lines = asyncio.run(scene(fleet))
        report = fleet.report("r1")
    rows = [row for row in report.assignments if row.device == "slow"]
    assert "late" in {row.status for row in rows}
    names = [f"{kind}_{way}_bytes" for kind in ("payload", "resent") for way in ("up", "down")]
    billed, passed = sum(total(report, "slow", name) for name in names), proxy.up + proxy.down
    assert passed > 2e6
    assert abs(billed - passed) < 0.05 * passed, (billed, proxy.up, proxy.down)
    trained = {line["attempt"] for line in lines if line.get("event") == "trained"}
    for row in rows:
        if f"r1/s{row.stage}/r{row.round}/a{row.attempt}" in trained:
            assert row.measured["flops"].value, row
