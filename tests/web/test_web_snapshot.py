"""The page's snapshot: what a device does and since when, signs of life with their source, budgets, words."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import msgspec
import pytest
from page_fixture import Page, Recorder
from test_report_live import live_events

from coordinator.web.pieces import FEW, Axis, View, cards, plots
from coordinator.web.snapshot import GROUPS, MOST_POINTS, DeviceView, Feed, Snapshot
from edgefl.report.events import MOST_SPANS, LiveDevice
from edgefl.report.refusals import REASONS, REMEDIES
from edgefl.run_records import EventRow, Reference

MIB = 2**20


def fed(*events: EventRow, feed: Feed | None = None) -> Snapshot:
    feed = feed or Feed("r1", {})
    for event in events:
        feed.put(event)
    return feed.take()


def device(snapshot: Snapshot, name: str) -> DeviceView:
    return next(one for one in snapshot.devices if one.name == name)


def test_a_run_is_told_in_one_sentence() -> None:
    events = live_events()
    assert fed().standing == "Waiting for devices; none are here."
    assert fed(*events[:2]).standing == "Waiting for devices; 1 is here."
    assert fed(*events[:10]).standing == "Round 1 of 12, in stage 1 of 6: 1 of 4 devices trains, 2 wait, 1 is refused."
    assert fed(*events).standing == "The run is done: 1 round in 2 min 11 s, 4 devices."
    failed = EventRow(events[-1].at, "run_failed", data={"text": "no quorum.", "remedy": "Lower it."})
    assert fed(*events[:-1], failed).standing == "The run failed: no quorum. Lower it."


def test_simple_models_are_shown_once_they_are_fitted_and_a_run_below_them_says_so(tmp_path: Path) -> None:
    asked = iter([Reference(), Reference("accuracy", {"majority": 0.2, "forest": 0.99})])
    feed = Feed("r1", {}, reference=lambda: next(asked))
    before, after, again = (fed(*events, feed=feed) for events in (live_events(), [], []))
    assert before.below == ""
    assert "best simple model" not in [card.label for card in cards(before)]
    (card,) = [card for card in cards(after) if card.label == "best simple model"]
    assert (card.value, card.detail) == ("99.0 %", "forest, on the same samples")
    assert after.below.startswith("Below a simple model: forest has 99.0 %")
    assert again.reference == after.reference
    page = Page(tmp_path, live_events(), reference=lambda: after.reference)
    assert f'<p class="below">{after.below}</p>' in page.client.get("/").text


def test_the_largest_step_is_shown_also_of_a_device_whose_process_memory_is_limited() -> None:
    joined = {"budget": {"memory_bytes": 512 * MIB}}
    told = fed(
        EventRow(10.0, "device_joined", device="a", data=joined),
        EventRow(11.0, "round_started", 1, 1, data={"participants": ["a"]}),
        EventRow(12.0, "update", 1, 1, "a", {"loss": 1.0, "step_peak_bytes": 15 * MIB}),
    )
    assert [bar.figure for bar in device(told, "a").bars][:1] == ["process_peak_bytes"]
    assert [card.value for card in cards(told) if card.label == "largest step memory"] == ["15.0 MiB"]


def test_transfers_show_by_what_a_device_asks_and_sends() -> None:
    """Heard of by chunks it is sending; a sign older than what it began since changes nothing."""
    feed = Feed("r1", {})
    start = [
        EventRow(10.0, "device_joined", device="a"),
        EventRow(11.0, "round_started", 1, 1, data={"participants": ["a"]}),
    ]
    told = [*start]
    for at, by, doing in ((12.0, "need", "receiving"), (13.0, "heartbeat", "receiving"), (14.0, "upload", "sending")):
        told.append(EventRow(at, "heard", device="a", data={"by": by}))
        seen = device(fed(*told, feed=Feed("r1", {})), "a")
        assert (seen.doing, seen.heard_at, seen.heard_by) == (doing, at, by)
    told.append(EventRow(15.0, "update", 1, 1, "a", {"loss": 1.0}))
    told.append(EventRow(16.0, "heard", device="a", data={"by": "upload"}))
    done = device(fed(*told, feed=feed), "a")
    assert done.doing == "done"
    assert done.spans == ((10.0, "idle"), (11.0, "waiting"), (12.0, "receiving"), (14.0, "sending"), (15.0, "done"))
    again = EventRow(20.0, "round_started", 1, 2, data={"participants": ["a"]})
    late = EventRow(19.0, "heard", device="a", data={"by": "upload"})
    assert device(fed(again, late, feed=feed), "a").doing == "waiting"


def test_who_was_heard_of_empties_its_table_and_keeps_strangers_out() -> None:
    signs = {
        "a": (5.0, "heartbeat", True),
        "b": (5.0, "silence since", False),
        "stranger": (5.0, "presence", True),
    }
    feed = Feed("r1", signs)
    joined = [EventRow(1.0, "device_joined", device=name) for name in ("a", "b")]
    snapshot = fed(*joined, feed=feed)
    assert signs == {}
    assert [one.name for one in snapshot.devices] == ["a", "b"]
    assert [one.heard_by for one in snapshot.devices] == ["heartbeat", "hello"]


def test_the_sentence_says_that_the_next_stage_is_being_planned() -> None:
    phases = iter(["joining", "planning", "round"])
    feed = Feed("r1", {}, lambda: next(phases))
    assert fed(EventRow(1.0, "device_joined", device="a"), feed=feed).standing == "Waiting for devices; 1 is here."
    planning = "Planning which of 1 device can train the next stage within their budgets."
    assert feed.take().standing == planning
    begun = EventRow(2.0, "round_started", 1, 1, data={"participants": ["a"]})
    assert "0 of 1 device train, 1 waits" in fed(begun, feed=feed).standing


def test_a_device_left_out_while_a_stage_is_planned_stays_left_out(tmp_path: Path) -> None:
    """Headline, list, counts and its button, whatever the planner then says of it."""
    phases = iter(["planning", "planning", "round"])
    feed = Feed("r1", {}, lambda: next(phases))
    joined = [EventRow(1.0, "device_joined", device=name) for name in ("left", "right")]
    rounds = [EventRow(2.0, "round_started", 1, 1, data={"participants": ["left", "right"]})]
    fed(*joined, *rounds, EventRow(3.0, "stage_finished", 1, 2), feed=feed)
    out = EventRow(4.0, "left_out", 2, 1, "left", {"by": "web"})
    assert "which of 1 device can" in fed(out, feed=feed).standing
    placed = [{"device": name, "ok": True} for name in ("left", "right")]
    planned = fed(EventRow(5.0, "stage_planned", 2, data={"placements": placed}), feed=feed)
    left = device(planned, "left")
    assert (left.word, left.group, left.why) == ("left out", "refused", "left out by an operator, on the live page")
    assert planned.counts == {"refused": 1, "waiting": 1}
    text = Page(tmp_path, [*joined, *rounds, out], act=Recorder()).client.get("/").text
    assert text.split('id="device-right"')[0].count("Take in") == 1


def test_the_sentence_says_which_round_is_evaluated_and_after_which_the_run_is_paused() -> None:
    begun = [
        EventRow(1.0, "run_started", data={"stages": 6, "rounds_total": 12}),
        EventRow(1.0, "device_joined", device="a"),
        *(EventRow(2.0 + n, "round_closed", 1 + n // 2, 1 + n % 2) for n in range(5)),
        EventRow(8.0, "round_started", 3, 2, data={"participants": ["a"]}),
    ]
    closed = EventRow(9.0, "round_closed", 3, 2, data={"participants": ["a"]})
    feed = Feed("r1", {}, lambda: "evaluating")
    assert fed(*begun, closed, feed=feed).standing == "Evaluating round 6 of 12 (stage 3 of 6)."
    pausing = EventRow(10.0, "pausing", 3, 2, data={"by": "web"})
    assert fed(pausing, feed=feed).standing == ("Pausing after this round. Evaluating round 6 of 12 (stage 3 of 6).")
    paused = EventRow(11.0, "paused", 4, 1, data={"by": "web"})
    assert fed(*begun, closed, paused).standing.startswith("Paused after round 6 of 12 (stage 3 of 6): 0 of 1 device")


def test_legend_filter_headline_and_badges_have_one_vocabulary(tmp_path: Path) -> None:
    page = Page(tmp_path, live_events()).client.get("/").text
    words = ["training", "receiving", "sending", "waiting", "away", "refused"]
    assert list(GROUPS) == words
    assert re.findall(r"<option>(\w+)</option>", page) == words
    legend = page[page.index('class="legend"') : page.index('id="fleet"')]
    assert re.findall(r"</svg>(\w+)</li>", legend) == words
    every = {activity for activities in GROUPS.values() for activity in activities}
    more = {"declined", "rejected", "quarantined", "left out"}  # which the list says more exactly than "refused"
    more.add("revoked")  # more exactly than "away"
    assert {LiveDevice("a", doing).word for doing in every} == {*words, *more}
    documented = (Path(__file__).parents[2] / "docs" / "web.md").read_text()
    assert {word for word in (*words, *more) if f"*{word}*" not in documented} == set()


def test_a_score_is_rounded_the_same_way_everywhere(tmp_path: Path) -> None:
    """0.9625 is 96.2 % in a line, on a card and in a curve's legend."""
    values = [{"available": ["acc"], "missing": "none", "metric": "accuracy", "value": 0.9625}]
    told = fed(EventRow(1.0, "evaluated", 1, 1, data={"values": values}))
    ((_, points),) = plots(told)[0].lines
    assert "96.2 %" in told.lines[-1].text
    assert (points[0][2], cards(told)[0].value) == ("96.2 %", "96.2 %")


def test_what_no_device_measured_is_a_dash() -> None:
    told = fed(EventRow(1.0, "device_joined", device="a"), EventRow(2.0, "update", 1, 1, "a", {"loss": 1.0}))
    assert (told.devices[0].energy_j, told.devices[0].flops) == (None, None)
    shown = {card.label: card.value for card in cards(told)}
    assert (shown["FLOPs"], "energy" in shown) == ("—", False)
    measured = {"energy_j": 0.0, "flops": 2e9}
    told = fed(*(EventRow(n, "update", 1, n, "a", measured) for n in (1, 2)))
    assert (told.devices[0].energy_j, told.devices[0].flops) == (0.0, 4e9)


def test_a_limit_has_a_bar_and_no_limit_has_none_and_ages_are_whole_seconds(tmp_path: Path) -> None:
    joined = EventRow(time.time() - 4.2, "device_joined", device="a", data={"budget": {"step_memory_bytes": MIB}})
    text = Page(tmp_path, [joined]).client.get("/").text
    assert text.count('class="meter"') == 4
    assert text.count('<rect class="all" width="100"') == 1
    assert re.search(r"seen <time [^>]*>4 s</time> ago", text)
    assert "· 4\u00a0s</p>" in text, "a duration is not broken over two lines"


def test_the_page_of_a_run_that_is_over_has_no_buttons_and_says_how_a_stopped_one_goes_on(tmp_path: Path) -> None:
    begun = [EventRow(1.0, "run_started"), EventRow(2.0, "device_joined", device="a")]

    def text(*more: EventRow) -> str:
        page = Page(tmp_path, [*begun, *more], act=Recorder())
        page.client.get(page.link)
        return page.client.get("/").text

    assert text().count("<button hx-post") == 1
    assert "data-ended" not in text()
    done = text(EventRow(3.0, "run_finished", data={"status": "done"}))
    assert (done.count("<button hx-post"), " data-ended" in done, "--resume r1 …" in done) == (0, True, False)
    stopped = text(EventRow(3.0, "run_stopped", data={"by": "web"}))
    assert (stopped.count("<button hx-post"), " data-ended" in stopped) == (0, True)
    assert "<code>edgefl-coordinator run --resume r1 …</code>" in stopped


def test_a_last_will_is_a_sign_with_its_source_and_silence_is_not() -> None:
    joined = EventRow(1.0, "device_joined", device="a")
    will = fed(joined, EventRow(9.0, "device_left", device="a", data={"reason": "offline"}))
    silent = fed(joined, EventRow(9.0, "device_left", device="a", data={"reason": "silent for 35 s"}))
    assert (will.devices[0].heard_at, will.devices[0].heard_by, will.devices[0].group) == (9.0, "last will", "away")
    assert (silent.devices[0].heard_at, silent.devices[0].heard_by) == (1.0, "hello")


def test_each_budget_has_its_figure_of_the_costliest_round() -> None:
    budget = {"step_memory_bytes": 24 * MIB, "payload_bytes": 8 * MIB, "energy_j": 50.0}
    one = {"step_peak_bytes": 12 * MIB, "payload_up_bytes": 3 * MIB, "payload_down_bytes": 2 * MIB, "flops": 1e9}
    two = {
        "step_peak_bytes": 11 * MIB,
        "payload_up_bytes": MIB,
        "payload_down_bytes": 0,
        "flops": 2e9,
        "energy_j": 40.0,
    }
    snapshot = fed(
        EventRow(1.0, "device_joined", device="a", data={"budget": budget}),
        EventRow(2.0, "update", 1, 1, "a", one),
        EventRow(3.0, "update", 1, 2, "a", two),
    )
    (a,) = snapshot.devices
    assert {bar.figure: (bar.used, bar.allowed) for bar in a.bars} == {
        "step_peak_bytes": (12 * MIB, 24 * MIB),
        "flops": (2e9, None),
        "payload_bytes": (5 * MIB, 8 * MIB),
        "energy_j": (40.0, 50.0),
    }
    assert [bar.share for bar in a.bars] == [0.5, None, 0.625, 0.8]
    assert (a.sent_bytes, a.received_bytes, a.flops, a.energy_j) == (4 * MIB, 2 * MIB, 3e9, 40.0)


def test_a_refusal_has_both_numbers_and_a_remedy_that_is_there_for_every_budget() -> None:
    (tiny, nano) = fed(*live_events()).refusals
    assert (tiny.device, tiny.by, tiny.allowed) == ("tiny", "plan", "3.00 MiB")
    assert (nano.device, nano.by, nano.needed, nano.allowed) == ("nano", "device", "26.4 MiB", "24.0 MiB")
    assert "model.encoders.NAME.size" in nano.remedy
    assert set(REMEDIES) <= {*REASONS}
    assert {"step_memory", "memory", "flops", "payload", "energy", "disk"} <= set(REMEDIES)


def test_a_run_that_goes_on_shows_what_was_before(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    lines = [msgspec.json.encode(event) for event in live_events()[:-1]]
    log.write_bytes(b"\n".join([*lines[:3], b'{"at": 1, "ki', *lines[3:]]) + b"\n")
    length = log.stat().st_size
    with log.open("ab") as file:  # what comes while the page starts is told to it as well
        file.write(msgspec.json.encode(EventRow(5e9, "device_joined", device="later")) + b"\n")
    feed = Feed("r1", {})
    feed.replay(log, length)
    before = feed.take()
    assert [one.name for one in before.devices] == ["gpu-box", "nano", "orin-nano", "tiny"]
    assert {one.heard_by for one in before.devices} == {"ledger"}
    assert before.rounds_done == 1
    again = fed(EventRow(4e9, "run_started", data={"stages": 6, "rounds_total": 12}), feed=feed)
    assert {one.group for one in again.devices} == {"away"}
    back = fed(EventRow(4e9 + 1, "device_joined", device="nano"), feed=feed)
    assert (device(back, "nano").group, device(back, "nano").heard_by) == ("waiting", "hello")
    assert (back.rounds_done, back.ended) == (1, "")


def test_curves_are_by_what_the_model_was_given() -> None:
    loss, *_ = reversed(plots(fed(*live_events())))
    assert (loss.title, loss.lines[0][1]) == ("loss", ((1, 1.21, "1.21"),))
    accuracy = plots(fed(*live_events()))[0]
    assert accuracy.unit == "%"
    assert [label for label, _ in accuracy.lines][:2] == ["acc + gyro", "acc, zero mask"]
    assert all(0 < y <= 100 for _, points in accuracy.lines for _, y, _ in points)


@pytest.mark.parametrize(
    ("elapsed", "begin", "length"), [(0.2, 0, 1), (31.5, 0, 32), (701, 0, 710), (3600, 0, 3600), (9001, 5700, 3360)]
)
def test_the_time_axis_ends_within_a_hundredth_of_now(elapsed: float, begin: float, length: float) -> None:
    axis = Axis.of(Snapshot(at=300 + elapsed, began_at=300.0, elapsed_s=elapsed))
    assert axis == (300 + begin, length)
    assert length - (elapsed - begin) < max(1.0, length / 50)


def test_a_device_s_time_is_drawn_without_gaps_to_the_right_edge() -> None:
    feed = Feed("r1", {})
    fed(EventRow(0.0, "device_joined", device="a"), EventRow(5.0, "progress", device="a"), feed=feed)
    (a,) = feed.latest.devices
    axis = Axis(0.0, 20.0)
    assert axis.bars(a) == [(0.0, 250.0, "waiting", "idle"), (250.0, 750.0, "training", "training")]
    ((group, path),) = axis.layers(feed.latest)
    assert (group, "1000,0.0" in path) == ("training", True)


def test_what_is_kept_is_bounded() -> None:
    feed = Feed("r1", {})
    fed(EventRow(0.0, "device_joined", device="a"), feed=feed)
    for number in range(MOST_POINTS + 50):
        kind = "progress" if number % 2 else "update"
        fed(EventRow(number, kind, device="a"), EventRow(number, "warning", data={"text": "x"}), feed=feed)
    snapshot = feed.latest
    assert len(snapshot.history) <= MOST_POINTS
    assert len(snapshot.devices[0].spans) == MOST_SPANS
    assert len(snapshot.lines) == 200


def test_five_hundred_devices_are_summed_up_filtered_and_found(tmp_path: Path) -> None:
    names = [f"cam-{number:03d}" for number in range(500)]
    events = [EventRow(1.0, "device_joined", device=name) for name in names]
    events += [EventRow(2.0, "round_started", 1, 1, data={"participants": names})]
    events += [EventRow(3.0, "progress", 1, 1, name, {"step": 1, "steps": 2}) for name in names[400:]]
    page = Page(tmp_path, events)
    text = page.client.get("/").text
    assert text.count("<article") == FEW
    assert f"{500 - FEW} more devices fit" in text
    assert "100 of 500 devices train, 400 wait" in text
    assert 'id="device-cam-400"' in text  # those at work first
    assert page.client.get("/?show=training").text.count("<article") == FEW
    assert page.client.get("/?find=CAM-01").text.count("<article") == 10
    assert page.client.get("/?rows=all").text.count("<article") == 500
    assert "No device fits" in page.client.get("/?show=away").text
    assert View.of({"show": "<b>", "find": "x" * 99, "rows": "-1"}) == View("", "x" * 64, FEW)


def test_programs_read_the_same_snapshot(tmp_path: Path) -> None:
    page = Page(tmp_path, live_events())
    body = json.loads(page.client.get("/snapshot.json").text)
    assert (body["run"], body["rounds_done"], body["rounds_total"]) == ("r1", 1, 12)
    assert msgspec.json.decode(page.client.get("/snapshot.json").content, type=Snapshot) == page.feed.latest
    assert set(body["counts"]) <= set(GROUPS)
