"""Devices whose updates cannot be used, in every way: refused by name, counted, quarantined; the others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from coordinator_fixture import a_plan
from test_coordinator_runner import Scene, one_stage, played, values

from benchmarks.crash.broken_agents import WARM, WAYS, way_of
from benchmarks.crash.broken_devices import BROKEN, CASE, found_in, page
from coordinator.core.state import State
from coordinator.ledger.ledger import Ledger
from edgefl.errors import RunError
from edgefl.plan.job import RoundPolicy, Transfer
from edgefl.run_records import EventRow, RoundRow, RunReport

#: A deadline that no test waits for.
POLICY = RoundPolicy(devices=2, join_s=5.0, quorum=0.5, deadline_s=600.0)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_refused_by_name_and_ends_in_quarantine_while_the_round_goes_on(tmp_path: Path, way: str) -> None:
    report = RunReport()
    breaking, reason = WAYS[way]

    async def script(scene: Scene) -> None:
        nonlocal report
        await scene.device("a", breaking=breaking)
        await scene.device("b", add=3.0)
        report = await scene.coordinator(one_stage(POLICY, 3))

    scene = played(tmp_path, script)
    assert report.status == "done"
    mine = [row for row in report.assignments if row.device == "a"]
    assert [row.status for row in mine] == ["rejected", "rejected", "quarantined"]
    refusals = [row.refusal for row in mine if row.refusal is not None]
    assert [refusal.reason for refusal in refusals] == [reason, reason, "quarantine"]
    named = "../../etc/passwd" if way == "a part nobody asked for" else "task"
    assert named in refusals[0].detail
    assert f"{reason} × 2" in refusals[2].detail
    assert [r.participants for r in report.rounds] == [("b",)] * 3
    assert np.allclose(values(scene, "task"), 60 + 3 * 3), "only what b has trained"
    assert [e.device for e in scene.events if e.kind == "rejected"] == ["a", "a"]
    assert [(e.device, e.round, e.data["rejected"]) for e in scene.events if e.kind == "quarantined"] == [
        ("a", 2, {reason: 2})
    ]
    assert [ack.refusal.reason for ack in scene.devices["a"].acks] == [reason, reason]
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        kept = ledger.snapshot(State(one_stage(POLICY, 3)))
    assert kept is not None
    assert (kept.devices["a"].rejected, kept.devices["a"].barred) == ({reason: 2}, -1)


def test_what_is_told_by_its_size_is_refused_before_a_byte_of_it_is_fetched(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        await scene.device("a", breaking=WAYS["1 MiB too large"][0])
        await scene.device("b")
        await scene.coordinator(one_stage(POLICY, 1))

    scene = played(tmp_path, script)
    assert scene.devices["a"].sender is None, "it was never asked for anything"
    (told,) = [event.data for event in scene.events if event.kind == "rejected"]
    assert told["needed"] == told["allowed"] + 2**20


def test_a_packed_update_may_be_smaller_than_its_parts_and_not_larger(tmp_path: Path) -> None:
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        await scene.device("a", breaking=WAYS["1 MiB too large"][0])
        await scene.device("b")
        packed = msgspec.structs.replace(one_stage(POLICY, 1), transfer=Transfer(up=(("*", "delta+int8"),)))
        report = await scene.coordinator(packed)

    scene = played(tmp_path, script)
    assert report.rounds[0].participants == ("b",)
    (told,) = [event.data for event in scene.events if event.kind == "rejected"]
    assert "at most" in told["detail"]


def test_out_of_quarantine_a_mended_device_counts_again(tmp_path: Path) -> None:
    report = RunReport()
    policy = msgspec.structs.replace(POLICY, quarantine_after=1, quarantine_rounds=1)

    async def script(scene: Scene) -> None:
        nonlocal report
        device = await scene.device("a", breaking=WAYS["NaN"][0])
        await scene.device("b")

        async def mend() -> None:
            await scene.until(lambda: "quarantined" in scene.kinds())
            device.breaking = None

        mending = asyncio.create_task(mend())
        report = await scene.coordinator(one_stage(policy, 4))
        await mending

    played(tmp_path, script)
    assert [r.participants for r in report.rounds] == [("b",), ("b",), ("a", "b"), ("a", "b")]


def test_with_every_device_in_quarantine_the_run_fails_by_name(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        for name in ("a", "b"):
            await scene.device(name, breaking=WAYS["NaN"][0])
        with pytest.raises(RunError, match="every device that can train stage 1 is in quarantine: a, b"):
            await scene.coordinator(a_plan())

    played(tmp_path, script)


def test_the_benchmarks_page_tells_each_way_and_the_quarantine() -> None:
    events = []
    for number in range(1, CASE.rounds + 1):
        if way_of(number) and number <= WARM + 2 * len(WAYS):
            data: dict[str, Any] = {"reason": WAYS[way_of(number)][1], "detail": "part task"}
            events += [EventRow(0.0, "rejected", 1, number, device, data) for device in BROKEN]
        data = {"participants": ["x"] * 6, "seconds": 2.0 if way_of(number) else 1.0}
        events.append(EventRow(0.0, "round_closed", 1, number, "", data))
    last = WARM + 2 * len(WAYS) + 2
    events += [EventRow(0.0, "quarantined", 1, last, device, {}) for device in BROKEN]
    rows = tuple(RoundRow(1, number, 1, "done") for number in range(1, CASE.rounds + 1))
    text = page(found_in(RunReport(rounds=rows, events=tuple(events))))
    assert text.count("| 6 of 8 | 2.000 | 2.00 |") == len(WAYS)
    assert "quarantine at the end, after two bad updates in a row: agent-006, agent-007; 2 rounds" in text
