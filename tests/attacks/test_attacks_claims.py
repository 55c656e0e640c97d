"""Devices that say what cannot be, or say it without end: marked, told once, and bounded."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
from coordinator_fixture import FLEET, FakeDevice
from test_coordinator_runner import Scene, one_stage, played

from coordinator.core.known_devices import MOST_CONNECTIONS
from coordinator.core.plausibility import likely, plausible
from edgefl.plan.job import RoundPolicy
from edgefl.protocol import messages as m
from edgefl.protocol import topics
from edgefl.protocol.releases import mismatch
from edgefl.records import Figure
from edgefl.report.bills import device_bill
from edgefl.run_records import RunReport

ONE = one_stage(RoundPolicy(devices=1, join_s=5.0, deadline_s=600.0), 1)


def warnings(scene: Scene, about: str) -> list[str]:
    return [e.data["text"] for e in scene.events if e.kind == "warning" and e.data.get("about") == about]


def holds(device: FakeDevice) -> bool:
    """Whether it has all that it was offered."""
    offer = device.offer
    return offer is not None and all(device.store.has(ref.id) for ref in offer.manifest.values())


def test_a_device_of_another_protocol_is_refused_with_the_reason_and_offered_nothing(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        await scene.device("old", protocol=99)
        await scene.device("b")
        await scene.coordinator(ONE)

    scene = played(tmp_path, script)
    assert warnings(scene, "protocol") == [f"old is refused: {mismatch('this coordinator', 'its agent', '', 99)}"]
    assert scene.devices["old"].offers == []
    assert scene.devices["old"].drained.is_set()


def test_two_agents_with_one_identity_are_told_of(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        device = await scene.device("a", hold=True)

        async def alternate() -> None:
            await scene.until(lambda: holds(device))
            first = device.session
            for session in ("second", first, "second", first):
                device.session = session
                device.hello()
            await scene.until(lambda: warnings(scene, "twin"))
            device.train()

        await scene.both(scene.coordinator(ONE), alternate())

    scene = played(tmp_path, script)
    assert warnings(scene, "twin") == [
        "a: two agents use this identity and take turns at the broker; stop one, or enrol it under its own name"
    ]


def test_an_agent_that_is_started_again_and_again_is_no_twin(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        device = await scene.device("a", hold=True)

        async def restart() -> None:
            await scene.until(lambda: holds(device))
            for session in ("second", "third", "fourth"):
                device.session = session
                device.hello()
                device.hello()
            device.train()

        await scene.both(scene.coordinator(ONE), restart())

    assert warnings(played(tmp_path, script), "twin") == []


def test_coming_and_going_without_end_fills_no_ledger(tmp_path: Path) -> None:
    report = RunReport()
    times = MOST_CONNECTIONS + 50

    async def script(scene: Scene) -> None:
        nonlocal report
        device = await scene.device("a", hold=True)

        async def flood() -> None:
            nonlocal report
            await scene.until(lambda: holds(device))
            gone = m.Presence("a", device.session, online=False)
            for _ in range(times):
                device.say(gone, topics.build("presence", FLEET, "a"))
                device.hello()
            await scene.until(lambda: warnings(scene, "comings"))
            device.train()

        report = (await scene.both(scene.coordinator(ONE), flood()))[0]

    scene = played(tmp_path, script)
    kinds = [event.kind for event in report.events]
    assert kinds.count("device_joined") == MOST_CONNECTIONS
    assert kinds.count("device_left") <= MOST_CONNECTIONS
    assert len(warnings(scene, "comings")) == 1


def test_figures_that_can_not_be_are_marked_and_teach_nothing(tmp_path: Path) -> None:
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        liar = await scene.device("liar")
        await scene.device("b", add=2.0)
        say = liar.say
        lies = {
            "step_peak_bytes": Figure(0.5, "measured", "kernel"),
            "process_peak_bytes": Figure(-5.0, "measured", "kernel"),
            "compute_s": Figure(1e-9, "measured", "clock"),
            "temperature_c": Figure(-12.0, "measured", "sensor"),
        }

        def lying(message: m.UpMessage, topic: str = "") -> None:
            if isinstance(message, m.Update):
                message = msgspec.structs.replace(message, figures=lies, metrics={"loss": -1e300})
            say(message, topic)

        liar.say = lying  # type: ignore[method-assign]
        report = await scene.coordinator(one_stage(RoundPolicy(devices=2, join_s=5.0, deadline_s=600.0), 1))

    scene = played(tmp_path, script)
    (mine,) = [row for row in report.assignments if row.device == "liar"]
    peak = mine.measured["step_peak_bytes"]
    assert peak == Figure(None, "measured", "kernel", peak.reason)
    assert peak.reason.startswith("implausible: ")
    assert peak.reason.endswith(" MiB predicted")
    assert mine.measured["process_peak_bytes"].reason.startswith("implausible: ")
    assert mine.measured["compute_s"].value is None
    assert mine.measured["temperature_c"].value == -12.0
    assert report.rounds[0].metrics == {"loss": 2.0}, "of the honest device alone"
    assert len(warnings(scene, "figures")) == 1


def test_figures_that_are_merely_false_are_doubtful_in_the_bill(tmp_path: Path) -> None:
    report = RunReport()
    lies = {
        "wall_s": Figure(3600.0, "measured", "trust me"),
        "energy_j": Figure(0.0, "counted", "trust me"),
        "temperature_c": Figure(1e9, "measured", "sensor"),
    }

    async def script(scene: Scene) -> None:
        nonlocal report
        liar = await scene.device("liar")
        await scene.device("b", add=2.0)
        say = liar.say

        def lying(message: m.UpMessage, topic: str = "") -> None:
            is_update = isinstance(message, m.Update)
            say(msgspec.structs.replace(message, figures=lies) if is_update else message, topic)

        liar.say = lying  # type: ignore[method-assign]
        report = await scene.coordinator(one_stage(RoundPolicy(devices=2, join_s=5.0, deadline_s=600.0), 1))

    played(tmp_path, script)
    (mine,) = [row for row in report.assignments if row.device == "liar"]
    (other,) = [row for row in report.assignments if row.device == "b"]
    assert {name: mine.measured[name].value for name in lies} == {name: lie.value for name, lie in lies.items()}
    assert {mine.measured[name].kind for name in lies} == {"doubtful"}
    assert "by the coordinator's clock" in mine.measured["wall_s"].source
    assert not [name for name, one in other.measured.items() if one.kind == "doubtful"]
    cells = {row[0].text: row for row in device_bill(report).rows}
    assert len([cell for cell in cells["liar"] if cell.text.endswith(" ?") and "trust me" in cell.why]) == 2
    assert not [cell for cell in cells["b"] if cell.text.endswith(" ?")]


def test_honest_figures_are_kept() -> None:
    told = {"flops": Figure(1.2e9), "step_peak_bytes": Figure(3e6), "wall_s": Figure(0.4), "energy_j": Figure(None)}
    predicted = {"flops": Figure(1e9), "step_peak_bytes": Figure(1e7), "wall_s": Figure(4000.0)}
    assert plausible(told, predicted) == (told, [])
    nothing = {"resent_up_bytes": Figure(0.0), "filling_flops": Figure(0.0)}
    assert plausible(nothing, predicted) == (nothing, [])
    assert likely({"loss": 2.5, "accuracy": 1.0}) == {"loss": 2.5, "accuracy": 1.0}


def test_a_clock_that_is_set_back_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    back = 0.0
    real = time.time
    monkeypatch.setattr("coordinator.runtime.runner.time.time", lambda: real() - back)

    async def script(scene: Scene) -> None:
        device = await scene.device("a", hold=True)

        async def set_back() -> None:
            nonlocal back
            await scene.until(lambda: holds(device))
            back = 172_799.0
            await scene.until(lambda: "warning" in scene.kinds())
            device.train()

        await scene.both(scene.coordinator(ONE), set_back())

    told = [e.data["text"] for e in played(tmp_path, script).events if e.kind == "warning"]
    assert told == ["this machine's clock was set back by 172799 s: times in the record go back here"]


def test_a_clock_that_is_set_back_between_two_processes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time

    async def script(scene: Scene) -> None:
        device = await scene.device("a", hold=True)
        running = asyncio.ensure_future(scene.coordinator(ONE))
        await scene.until(lambda: holds(device))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        device.hold = False
        device.offer = None
        monkeypatch.setattr("coordinator.runtime.runner.time.time", lambda: real() - 5000)
        await scene.coordinator(ONE, resume=True)

    told = [e.data["text"] for e in played(tmp_path, script).events if e.kind == "warning"]
    assert len(told) == 1
    assert told[0].startswith("this machine's clock was set back by ")
