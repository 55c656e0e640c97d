"""Bad links in namespaces: an outage of every device, and bytes of a device that is late, lost and back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from benchmarks.network.network_fleet import DEVICES, Fleet, Network, fleet_over
from benchmarks.network.network_links import Conditions, unavailable
from edgefl.run_records import AssignmentRow, EventRow
from edgefl.transport.broker import broker_program

REASON = unavailable()
# CI is root, and there an outage must not go untested.
if REASON and os.environ.get("EDGEFL_REQUIRE_NAMESPACES"):
    pytest.fail(f"EDGEFL_REQUIRE_NAMESPACES is set, but {REASON}", pytrace=False)
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON or "there are namespaces"),
    pytest.mark.skipif(broker_program("mosquitto") is None, reason="needs mosquitto"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]
#: Devices are silent for 35 s before they count as away: the attempt that the outage falls into ends after that.
DEADLINE_S = 42.0


async def outage(fleet: Fleet, network: Network, number: int, comings: dict[str, float]) -> None:
    """Cut every link in this round, end the agents, and bring these back so many seconds after the run waits."""

    def heard(kind: str, text: str = "") -> int:
        return sum(one.kind == kind and text in str(one.data.get("text", "")) for one in fleet.events)

    async def until(kind: str, text: str, count: int) -> None:
        while heard(kind, text) < count:
            await asyncio.sleep(0.05)

    waited = heard("warning", "waiting ")
    await until("round_started", "", number)
    for name, link in network.links.items():
        link.up = False
        fleet.agents[name].send_signal(signal.SIGKILL)
        fleet.agents[name].wait()
    await until("warning", "waiting ", waited + 1)
    began = asyncio.get_running_loop().time()
    for name, after in sorted(comings.items(), key=lambda pair: pair[1]):
        await asyncio.sleep(max(0.0, began + after - asyncio.get_running_loop().time()))
        network.links[name].up = True
        fleet.start_agent(network, name)


def test_after_an_outage_of_the_network_the_next_round_has_whoever_is_back_within_grace(tmp_path: Path) -> None:
    far, left, right = DEVICES

    async def play() -> tuple[list[EventRow], str]:
        with Network() as network:
            network.set(Conditions(delay_s=0.02, rate=4_000_000))
            async with fleet_over(network, tmp_path / "fleet", 3, quorum=0.5, deadline_s=DEADLINE_S) as fleet:

                async def outages() -> None:
                    await outage(fleet, network, 2, {right: 0.0, left: 4.0, far: 15.0})
                    await outage(fleet, network, 4, {right: 0.0, left: 4.0})

                working = asyncio.create_task(outages())
                try:
                    trouble = await fleet.finish()
                finally:
                    working.cancel()
                return fleet.events, trouble

    events, trouble = asyncio.run(play())
    assert trouble in {"", f"these agents ended by themselves: {far}; see {tmp_path / 'fleet'}"}
    begun = [row for row in events if row.kind == "round_started"]
    assert [(row.round, sorted(row.data["participants"])) for row in begun] == [
        (1, sorted(DEVICES)),
        (2, sorted(DEVICES)),  # cut
        (2, sorted(DEVICES)),
        (3, sorted(DEVICES)),  # cut
        (3, [left, right]),
    ]
    back = [row.at for row in events if row.kind == "device_joined" and row.device == right]
    assert 15.0 - 3.0 <= begun[2].at - back[1] <= 20.0
    assert 19.0 <= begun[4].at - back[2] <= 23.0, "grace, and no longer"


#: Of IP and TCP with time stamps, a packet; what else is not payload (MQTT, heartbeats, figures) counts against us.
HEADERS = 52


def test_what_a_link_carries_for_late_lost_and_done_rounds_is_in_the_bill(tmp_path: Path) -> None:
    far = DEVICES[0]
    fast, slow = Conditions(delay_s=0.02, rate=4_000_000), Conditions(delay_s=0.02, rate=300_000, queue_s=600.0)

    async def play() -> tuple[list[AssignmentRow], float]:
        with Network() as network:
            link = network.links[far]
            network.set(fast)
            link.conditions = slow
            async with fleet_over(network, tmp_path / "fleet", 6, quorum=0.5, deadline_s=15.0) as fleet:

                async def begun(number: int) -> None:
                    while sum(one.kind == "round_started" for one in fleet.events) < number:
                        await asyncio.sleep(0.05)

                async def troubles() -> None:
                    await begun(3)
                    await asyncio.sleep(4)
                    fleet.agents[far].send_signal(signal.SIGKILL)
                    fleet.agents[far].wait()
                    await begun(4)
                    link.conditions = fast
                    fleet.start_agent(network, far)

                working = asyncio.create_task(troubles())
                try:
                    assert await fleet.finish() == ""
                finally:
                    working.cancel()
                passed = (link.to_near, link.to_far)
                payload = sum(way.offered_bytes - way.offered_packets * HEADERS for way in passed)
                return [row for row in fleet.result()[0].assignments if row.device == far], payload

    rows, passed = asyncio.run(play())
    assert {"late", "lost", "done"} <= {row.status for row in rows}
    names = [f"{kind}_{way}_bytes" for kind in ("payload", "resent") for way in ("up", "down")]
    billed = sum(row.measured[name].value or 0.0 for row in rows for name in names if name in row.measured)
    assert abs(billed - passed) < 0.05 * passed, (billed, passed)
