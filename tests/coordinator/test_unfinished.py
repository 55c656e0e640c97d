"""What attempts without a counted update cost: counted by the coordinator, told by the device, kept in the ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from coordinator_fixture import FLEET, FakeDevice, a_plan
from ledger_fixture import ledger_at
from test_coordinator_machine import POLICY, Play, e, of
from test_coordinator_runner import Scene
from test_ledger import FIRST, begun

from coordinator.core import moves as do
from coordinator.runtime.traffic import MOST_KEPT, Traffic
from edgefl.plan.job import RoundPolicy
from edgefl.protocol import topics
from edgefl.protocol.messages import Update
from edgefl.records import Attempt, Figure, ObjectRef, Refusal
from edgefl.report.resources import unknown
from edgefl.run_records import AssignmentRow, RunReport
from edgefl.transfer.sender import Sent

FIGURES = {
    "flops": Figure(5e6, "counted", "steps"),
    "step_peak_bytes": Figure(900.0, "measured", "probe"),
    "wire_up_bytes": Figure(7e6, "counted", "with the upload"),
    "payload_down_bytes": Figure(1e12, "counted", "the device's word"),
    "made_up": Figure(1.0),
}


class HaltingDevice(FakeDevice):
    """Sends two messages of its first update and then none, until it may."""

    left = 2

    def _publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        if topic.startswith(topics.build("up-object", FLEET, self.name, "")) and self.left >= 0:
            if self.left == 0:
                return
            self.left -= 1
        super()._publish(topic, payload, retain=retain)


def late(play: Play, announced: bool) -> list[do.Instruction]:
    """Device b misses the deadline of the first round; ``announced``: its update is on its way."""
    play.started("a", "b")
    play.announce("a")
    play.receive("a")
    if announced:
        play.send(e.Announced(play.now, update_of(play)))
    return play.wait(POLICY.deadline_s)


def update_of(play: Play, attempt: Attempt | None = None) -> Update:
    ref = ObjectRef("0" * 64, 10)
    return Update("b", attempt or play.opened[-1], {"task": ref}, {"task": 8}, {"loss": 1.0}, FIGURES)


def row(out: list[do.Instruction]) -> AssignmentRow:
    (found,) = [one for one in of(AssignmentRow, out) if one.device == "b"]
    return found


def check_own(figures: dict[str, Figure]) -> None:
    """A device's own figures, without those that are not its to tell."""
    assert set(figures) == {"flops", "step_peak_bytes", "wire_up_bytes"}
    assert (figures["flops"].value, figures["step_peak_bytes"].value) == (5e6, 900.0)
    assert (figures["wire_up_bytes"].value, figures["wire_up_bytes"].reason) == (None, "the upload did not end")


def test_a_late_round_has_the_figures_of_an_update_that_was_on_its_way() -> None:
    found = row(late(Play(), announced=True))
    assert found.status == "late"
    check_own(found.measured)


def test_a_late_device_tells_its_figures_afterwards_and_once() -> None:
    play = Play()
    assert row(late(play, announced=False)).measured == {}
    attempt = play.opened[-1]
    (told,) = of(do.Spending, play.send(e.Spent(play.now, "b", attempt, FIGURES)))
    assert (told.device, told.attempt) == ("b", attempt)
    check_own(told.figures)
    assert not of(do.Spending, play.send(e.Spent(play.now, "b", attempt, FIGURES)))
    assert not of(do.Spending, play.send(e.Spent(play.now, "a", attempt, FIGURES))), "of an update that counts"


@pytest.mark.parametrize("aggregated", [False, True])
@pytest.mark.parametrize("declined", [False, True])
def test_an_update_or_a_decline_that_comes_too_late_tells_them_as_well(declined: bool, aggregated: bool) -> None:
    play = Play()
    late(play, announced=False)
    attempt = play.opened[-1]
    if aggregated:
        play.finish_aggregate()
    decline = e.Declined(play.now, "b", attempt, Refusal("memory"), FIGURES)
    event = decline if declined else e.Announced(play.now, update_of(play, attempt))
    (told,) = of(do.Spending, play.send(event))
    check_own(told.figures)


def test_a_device_that_is_left_out_hears_that_its_attempt_is_over_before_it_leaves_the_run() -> None:
    """Of an attempt that is not over, which a stopped run goes on with, a device tells no cost."""
    play = Play().started("a", "b")
    attempt = play.opened[-1]
    assert [type(one) for one in of((do.SendAbort, do.SendDrain), play.leave_out("b"))] == [do.SendAbort, do.SendDrain]
    (told,) = of(do.Spending, play.send(e.Spent(play.now, "b", attempt, FIGURES)))
    check_own(told.figures)


def test_times_of_an_earlier_process_cast_no_doubt_on_figures() -> None:
    """After a reboot the clock begins again: it is 5 s, and was 7 s when the offers were sent."""
    seconds = {"compute_s": Figure(90.0, "measured", "clock")}
    play = Play()
    play.now = 7.0
    late(play, announced=False)
    past = play.opened[-1]
    play.finish_aggregate()
    play.now = 5.0
    play.restart()
    (told,) = of(do.Spending, play.send(e.Spent(play.now, "b", past, seconds)))
    assert told.figures["compute_s"].kind == "measured"
    play = Play()
    play.now = 7.0
    play.started("a", "b")
    play.now = 5.0
    play.restart()
    (found,) = of(AssignmentRow, play.send(e.Declined(play.now, "b", play.opened[-1], Refusal("data"), seconds)))
    assert found.measured["compute_s"].kind == "measured"


def test_a_part_of_a_round_may_be_less_than_predicted_and_not_much_more() -> None:
    play = Play()
    late(play, announced=False)
    odd = {"step_peak_bytes": Figure(1e9), "flops": Figure(-1.0)}
    (told,) = of(do.Spending, play.send(e.Spent(play.now, "b", play.opened[-1], odd)))
    assert [one.value for one in told.figures.values()] == [None, None]
    play = Play()
    late(play, announced=False)
    (told,) = of(do.Spending, play.send(e.Spent(play.now, "b", play.opened[-1], {"step_peak_bytes": Figure(0.5)})))
    assert told.figures["step_peak_bytes"] == Figure(0.5)


def test_the_ledger_has_the_newest_count_and_keeps_a_counted_updates_figures_as_they_are(tmp_path: Path) -> None:
    attempt = FIRST
    with begun(ledger_at(tmp_path / "ledger.sqlite")) as ledger:
        rows = [
            AssignmentRow("b", 1, 1, 1, "late"),
            AssignmentRow("a", 1, 1, 1, "done", measured={"flops": Figure(3.0)}),
        ]
        moved = {"payload_down_bytes": Figure(100.0, "counted", "chunks")}
        ledger.commit("r1", [*rows, *(do.Spending(name, attempt, moved) for name in ("a", "b", "stranger"))], [], 1.0)
        moved = {"payload_down_bytes": Figure(200.0, "counted", "chunks")}
        ledger.commit("r1", [do.Spending("b", attempt, moved)], [], 1.0)
        told = {"flops": Figure(5.0, "counted", "steps")}
        ledger.commit("r1", [do.Spending("b", attempt, told)], [], 1.0)
        ledger.commit("r1", [msgspec.structs.replace(rows[0], measured={"compute_s": Figure(2.0)})], [], 1.0)
        found = {one.device: one.measured for one in ledger.report().assignments}
        assert found["a"] == {"flops": Figure(3.0)}
        assert {name: one.value for name, one in found["b"].items()} == {
            "payload_down_bytes": 200.0,
            "flops": 5.0,
            "compute_s": 2.0,
        }
        assert ledger.measured(attempt)["b"] == {"payload_down_bytes": 200.0, "flops": 5.0, "compute_s": 2.0}
        ledger.commit("r1", [AssignmentRow("b", 1, 1, 1, "done", measured={"flops": Figure(9.0)})], [], 1.0)
        (done,) = [one.measured for one in ledger.report().assignments if one.device == "b"]
        assert done == {"flops": Figure(9.0)}, "an attempt that went on to its end has its own figures alone"


def test_bytes_of_an_update_that_is_rejected_as_it_is_stored_are_on_the_bill_once(tmp_path: Path) -> None:
    traffic = Traffic()
    traffic.sent("b", FIRST, Sent(1000))
    with begun(ledger_at(tmp_path / "ledger.sqlite")) as ledger:
        ledger.commit("r1", [AssignmentRow("b", 1, 1, 1, "accepted")], [], 1.0)
        pending = traffic.take()
        stored = AssignmentRow("b", 1, 1, 1, "done", measured=traffic.figures("b", FIRST))
        outlier = AssignmentRow("b", 1, 1, 1, "rejected")
        ledger.commit("r1", [*pending, stored, outlier, *traffic.take()], [], 1.0)
        assert ledger.measured(FIRST)["b"]["payload_down_bytes"] == 1000


def test_late_chunks_of_a_forgotten_attempt_change_no_count() -> None:
    traffic = Traffic()
    traffic.name_upload("b", FIRST, "u1")
    traffic.received("b", "u1", 70, 0)
    assert [one.figures["payload_up_bytes"].value for one in traffic.take()] == [70]
    for number in range(2, 2 + MOST_KEPT):
        traffic.sent("b", msgspec.structs.replace(FIRST, attempt=number), Sent(1))
    traffic.received("b", "u1", 5, 0)
    assert FIRST not in [one.attempt for one in traffic.take()]


def test_an_update_over_a_restart_of_the_coordinator_has_all_its_bytes(tmp_path: Path) -> None:
    """The first coordinator ends by a signal with part of the update here; the second is sent the rest."""

    async def scene() -> tuple[RunReport, int]:
        scene = Scene(tmp_path)
        await scene.device("a")
        slow = scene.devices["b"] = HaltingDevice(scene.broker, "b", tmp_path / "devices", add=2.0)
        await slow.start()
        plan = a_plan(policy=RoundPolicy(devices=2, join_s=2.0))
        first = asyncio.ensure_future(scene.coordinator(plan))
        await scene.until(lambda: slow.left == 0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        slow.left = -1
        assert slow.update is not None
        size = sum(ref.size for ref in slow.update.manifest.values())
        return await scene.coordinator(plan, resume=True), size

    report, size = asyncio.run(asyncio.wait_for(scene(), 20))
    rows = [row for row in report.assignments if (row.device, row.stage) == ("b", 1)]
    assert [row.status for row in rows] == ["done"]
    assert rows[0].measured["payload_up_bytes"].value == size
    assert rows[0].measured["payload_down_bytes"].value > 0, "all of it before the restart"


def test_every_way_a_device_misses_a_round_has_the_bytes_that_moved_for_it(tmp_path: Path) -> None:
    """Device b has downloaded all, and has sent all but the end of its update when the deadline comes."""

    async def scene() -> tuple[RunReport, FakeDevice]:
        scene = Scene(tmp_path)
        await scene.device("a")
        slow = await scene.device("b", hold=True)
        policy = RoundPolicy(devices=2, join_s=2.0, quorum=0.5, deadline_s=1.0)
        plan = a_plan(policy=policy)

        async def script() -> None:
            await slow.offered.wait()
            await scene.until(lambda: slow.receiver is not None and slow.receiver.finished)

        report, _ = await scene.both(scene.coordinator(plan), script())
        return report, slow

    report, slow = asyncio.run(asyncio.wait_for(scene(), 20))
    late = [row for row in report.assignments if row.device == "b"]
    assert {row.status for row in late} == {"late"}
    size = sum(slow.store.size(ref.id) for ref in slow.offers[0].manifest.values())
    assert late[0].measured["payload_down_bytes"].value == size > 0
    assert late[0].measured["payload_up_bytes"].value == 0
    assert "the device has not told" in unknown(late[0]).reason
