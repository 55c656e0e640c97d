"""A link that never makes the deadline: measured by the coordinator, told after the second late round."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from coordinator_fixture import FakeDevice, a_plan
from test_coordinator_machine import FIRST, POLICY, TIMEOUTS, Play, of
from test_coordinator_runner import Scene, played

from coordinator.core import moves as do
from coordinator.core import moves as e
from coordinator.core import state as v
from coordinator.runtime.link_rates import LinkRates, Moved
from edgefl.plan.job import RoundPolicy, Stage, Transfer
from edgefl.protocol.messages import Need
from edgefl.records import Attempt
from edgefl.report import decisions, story
from edgefl.run_records import AssignmentRow, EventRow, RunReport
from edgefl.storage.objects import ObjectStore
from edgefl.transfer import sender
from edgefl.transfer.disk_driver import DiskSender

SLOW = msgspec.structs.replace(POLICY, deadline_s=120.0)


def stages(rounds: int) -> tuple[Stage, ...]:
    first, second = a_plan().stages
    return first, msgspec.structs.replace(second, rounds=rounds)


def a_round(play: Play, link: v.Link | None, *, b_is_late: bool = True) -> list[do.Instruction]:
    """A round in which a delivers at once, and b not by the deadline."""
    while play.plans:
        play.finish_plan()
    play.announce("a")
    play.receive("a")
    if not b_is_late:
        play.announce("b")
        out = play.receive("b")
    else:
        play.now += SLOW.deadline_s
        out = play.send(e.Tick(play.now, {"b": link} if link is not None else {}))
    play.finish_aggregate()
    if play.evaluate is not None:
        play.finish_evaluate()
    return out


def warned(out: list[do.Instruction]) -> list[str]:
    return [str(row.data["text"]) for row in of(EventRow, out) if row.kind == "warning"]


def row_of(out: list[do.Instruction]) -> AssignmentRow:
    (row,) = [row for row in of(AssignmentRow, out) if row.status == "late"]
    return row


def test_after_the_second_late_round_in_a_row_the_operator_hears_why_and_of_the_ways_out() -> None:
    play = Play(SLOW, stages=stages(4)).started("a", "b")
    link = v.Link(33_000.0, lacks=300_000, asked=3_900_000)
    first = a_round(play, link)
    # 120 s are over, 300 kB lack at 33 kB/s: 9.1 s more, which is 129.1 s in all, told as 130.
    assert (row_of(first).refusal.needed, row_of(first).refusal.allowed, row_of(first).refusal.unit) == (130, 120, "s")
    assert warned(first) == [], "one late round may be an accident"
    text = (
        "b's link (33 kB/s) needs about 130 s a round, round.deadline_s is 120: raise round.deadline_s, "
        "or set round.late: keep, or set transfer.up and transfer.down: delta+int4"
    )
    second = a_round(play, link)
    assert warned(second) == [text]
    (event,) = [row for row in of(EventRow, second) if row.kind == "warning"]
    assert (event.device, event.data["lasting"]) == ("b", True)
    assert warned(a_round(play, link)) == [], "once in a run"
    report = RunReport(run="r", events=(event,), assignments=(row_of(first), row_of(second)))
    assert f"Warning: {text}." in story.troubles(report)
    assert [row[5].text for row in decisions.refusals(report).rows] == ["130 s", "130 s"]
    assert [row[6].text for row in decisions.refusals(report).rows] == ["120 s", "120 s"]


def test_a_round_in_time_between_two_late_ones_says_that_the_link_can() -> None:
    play = Play(SLOW, stages=stages(4)).started("a", "b")
    link = v.Link(33_000.0, lacks=300_000, asked=3_900_000)
    outs = [a_round(play, link), a_round(play, None, b_is_late=False), a_round(play, link)]
    assert [text for out in outs for text in warned(out)] == []
    assert warned(a_round(play, link)) != []


def test_two_attempts_of_a_round_and_rounds_with_one_between_them_are_not_in_a_row() -> None:
    link = v.Link(33_000.0, lacks=300_000, asked=3_900_000)
    play = Play(msgspec.structs.replace(SLOW, quorum=1.0), stages=stages(4)).started("a", "b")
    for attempt in (1, 2):
        assert play.opened[-1].attempt == attempt
        play.now += SLOW.deadline_s
        assert not [text for text in warned(play.send(e.Tick(play.now, {"b": link}))) if "link" in text]
        play.wait(TIMEOUTS.retry_pause_s)
    play = Play(SLOW, stages=stages(4)).started("a", "b")
    a_round(play, link)
    play.finish_plan()
    play.send(e.DeviceOffline(play.now, "b", "will"))
    play.announce("a")
    play.receive("a")
    play.wait(TIMEOUTS.grace_s)  # b is lost
    play.hello("b")
    play.finish_aggregate()
    play.finish_evaluate()
    assert (play.opened[-1].round, warned(a_round(play, link))) == (2, [])
    assert warned(a_round(play, link)) != []


def test_a_run_that_keeps_late_updates_is_not_told_to() -> None:
    play = Play(msgspec.structs.replace(SLOW, late="keep"), stages=stages(1)).started("a", "b")
    link = v.Link(33_000.0, lacks=300_000, asked=3_900_000)
    a_round(play, link)
    (text,) = warned(a_round(play, link))
    assert "round.late" not in text


@pytest.mark.parametrize("link", [None, v.Link(5e6, asked=3_900_000)], ids=["nothing moved", "a fast link"])
def test_where_the_link_is_not_at_fault_nothing_is_said_of_it(link: v.Link | None) -> None:
    play = Play(SLOW, stages=stages(4)).started("a", "b")
    for _ in range(3):
        out = a_round(play, link)
        assert warned(out) == []
        assert (row_of(out).refusal.needed, row_of(out).refusal.allowed) == (None, 120)


def test_a_run_that_sends_few_bits_already_is_not_told_to() -> None:
    few = (("*", "delta+int4"),)
    play = Play(SLOW, stages=stages(4), transfer=Transfer(few, few)).started("a", "b")
    link = v.Link(33_000.0, lacks=300_000, asked=3_900_000)
    a_round(play, link)
    (text,) = warned(a_round(play, link))
    assert text.endswith("round.deadline_s is 120: raise round.deadline_s, or set round.late: keep")


def test_a_rate_is_of_the_time_in_which_chunks_moved_and_not_of_what_was_sent_at_once() -> None:
    rates = LinkRates()
    # A window of 1.5 MB is sent at once, then 30 kB a second for 70 s, training for 40 s, then 30 kB up in 1 s.
    for second in range(71):
        rates.look(float(second), FIRST, {"b": Moved(3_600_000, 1_500_000 + 30_000 * second)})
    sent = 1_500_000 + 30_000 * 70
    rates.look(110.0, FIRST, {"b": Moved(3_600_000, sent, 10_000)})
    rates.look(111.0, FIRST, {"b": Moved(3_600_000, sent, 40_000)})
    link = rates.links()["b"]
    assert link.rate == pytest.approx((30_000 * 70 + 30_000) / 71)
    assert (link.lacks, link.asked, link.received) == (0, 3_600_000, 40_000)


def test_what_moved_in_another_attempt_or_at_one_moment_says_nothing() -> None:
    rates = LinkRates()
    rates.look(0.0, FIRST, {"b": Moved(100, 50)})
    assert rates.links() == {}
    rates.look(1.0, FIRST, {"b": Moved(100, 100)})
    assert rates.links()["b"].rate == 50.0
    rates.look(2.0, Attempt("r1", 1, 2, 1), {"b": Moved(100, 50)})
    assert rates.links() == {}


@pytest.mark.parametrize("slow", [{"b"}, {"a", "b"}], ids=["one slow", "both slow"])
def test_a_fast_link_in_step_with_a_slow_one_is_not_taken_for_as_slow(tmp_path: Path, slow: set[str]) -> None:
    """Chunks of 1 kB are published once for both; who is slow acknowledges one a second, who is not all at once."""
    store = ObjectStore(tmp_path)
    ref, rates, names = store.put(bytes(100_000)), LinkRates(), ("a", "b")
    downloads = DiskSender("t", {ref.id: ref.size}, store, lambda *_: None, names)

    def acknowledge(device: str, received: int, now: float) -> None:
        missing = {ref.id: b"\xff" * 12 + b"\x0f"} if not received else {}
        downloads.on_need(device, Need(device, "t", 1, 1000, 4, received, missing=missing), now)

    def look(now: float) -> dict[str, v.Link]:
        moved = {name: Moved(ref.size, downloads.sent_bytes(name), waits=downloads.waits(name)) for name in names}
        rates.look(now, FIRST, moved)
        return rates.links()

    for name in names:
        acknowledge(name, 0, 0.0)
    for second in range(1, 40):
        acknowledge("b", second, float(second))
        acknowledge("a", second if "a" in slow else downloads.sent_bytes("a") // 1000, second + 0.1)
        for quarter in range(4):
            links = look(second + 0.2 + quarter / 4)
    assert set(links) == slow
    assert all(links[name].rate == pytest.approx(1000, rel=0.05) for name in slow)
    rates.look(50.0, FIRST, {"a": Moved(ref.size, ref.size, 0)})
    rates.look(51.0, FIRST, {"a": Moved(ref.size, ref.size, 5_000)})
    rates.look(52.0, FIRST, {"a": Moved(ref.size, ref.size, 30_000)})
    assert (rates.links()["a"].rate == 25_000) == ("a" not in slow), "its upload's"


class SlowDevice(FakeDevice):
    """Takes a message of chunks every 0.15 s."""

    _free_at = 0.0

    def _on_object(self, transfer: str, payload: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + 0.15
        loop.call_at(self._free_at, super()._on_object, transfer, payload)


def test_a_run_measures_the_link_by_its_own_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "PACE_STALL_S", 0.1)  # a slow device holds up the others for 3 s
    policy = RoundPolicy(devices=2, join_s=2.0, quorum=0.5, deadline_s=0.8)
    reports: list[RunReport] = []

    async def script(scene: Scene) -> None:
        await scene.device("a")
        slow = scene.devices["b"] = SlowDevice(scene.broker, "b", tmp_path / "devices")
        await slow.start()
        reports.append(await scene.coordinator(a_plan(policy=policy)))
        texts = [str(row.data["text"]) for row in scene.events if row.kind == "warning"]
        (told,) = [text for text in texts if "b's link" in text]
        rate = float(told.partition("(")[2].partition(" kB/s")[0])
        assert 2 < rate < 15, "about a chunk of 1 KiB in 0.15 s"
        assert "round.deadline_s is 0.8: raise round.deadline_s, or set round.late: keep" in told

    played(tmp_path, script)
    late = [row for row in reports[0].assignments if row.status == "late"]
    assert {row.device for row in late} == {"b"}
    assert all(row.refusal is not None and row.refusal.allowed == 0.8 for row in late)
    assert any(row.refusal is not None and (row.refusal.needed or 0) > 0.8 for row in late)
