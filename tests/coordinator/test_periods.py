"""Periods in the coordinator's machine: who goes on, what each is offered and asked, what an update may hold."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from coordinator_fixture import FakeWorker, a_plan
from msgspec.structs import replace
from test_coordinator_machine import POLICY, Play, of

from coordinator.core import moves as do
from coordinator.core import state as v
from coordinator.core.assignments import expected, offer_for
from coordinator.core.periods import makes_model, period_rounds
from coordinator.core.plausibility import bounded, unfit
from coordinator.core.round_rules import quorum
from coordinator.runtime import model_tasks
from coordinator.runtime.model_tasks import ModelTasks
from edgefl.aggregation.history import Memory, PeriodMember, Track
from edgefl.models.spec import LAYERS
from edgefl.plan.job import PeriodRound, Slots
from edgefl.protocol.messages import Update
from edgefl.records import OUT_OF_STEP, Figure, ObjectRef, Refusal
from edgefl.storage.objects import ObjectStore

LAYER = "task|out.weight"
REPAIR = {"poverty": {"exchange": "layer", "whole_every": 4, "layers": 1}}
REF, BASE = ObjectRef("0" * 64, 10), "f" * 64


def period_play(*names: str, rounds: int = 6, **policy: Any) -> Play:
    """A run of one stage whose periods have four rounds; its devices are planned."""
    (stage, _), hypers = a_plan().stages, a_plan().hypers[:1]
    slots, server = Slots(repair=REPAIR), {"repair": REPAIR}
    policy = {"devices": len(names), "quorum": 1.0} | policy
    play = Play(
        replace(POLICY, **policy), stages=(replace(stage, rounds=rounds),), hypers=hypers, slots=slots, server=server
    )
    return play.started(*names)


def finish_round(play: Play, *names: str, lent: str = "") -> list[do.Instruction]:
    """These devices' updates, and the aggregation with the memory that the real one leaves."""
    whole = makes_model(play.plan, play.state.stage, play.state.number)
    manifest = dict.fromkeys(play.plan.stages[0].trained, REF) if whole else {}
    for name in names:
        update = Update(name, play.opened[-1], manifest, {"task": 8}, {"loss": 1.0}, base=BASE)
        play.send(do.Announced(play.now, update))
        play.receive(name)
    assert play.aggregate is not None
    attempt, play.aggregate = play.aggregate.attempt, None
    members = {} if whole else {name: PeriodMember(BASE, lent) for name in names}
    tracks = {name: Track(layer=LAYER, change=1.0) for name in names}
    out = play.send(do.Aggregated(play.now, attempt, {"task": REF}, memory=Memory(devices=tracks, period=members)))
    return out + (play.finish_evaluate() if play.evaluate is not None else [])


def periods(out: list[do.Instruction]) -> dict[str, PeriodRound | None]:
    return {one.device: one.period for one in of(do.SendOffer, out)}


def test_devices_go_on_until_the_period_ends_and_then_begin_anew():
    play = period_play("a", "b")
    assert play.state.open is not None
    first = {name: one.period for name, one in play.state.open.assignments.items()}
    assert first == dict.fromkeys("ab", PeriodRound(resumes=False, whole=False)), "nothing is known to ask for"
    between = dict.fromkeys("ab", PeriodRound(resumes=True, whole=False, layers=(LAYER,)))
    assert periods(finish_round(play, "a", "b")) == between
    assert periods(finish_round(play, "a", "b")) == between
    assert periods(finish_round(play, "a", "b")) == dict.fromkeys("ab", PeriodRound(resumes=True, whole=True))
    begins = dict.fromkeys("ab", PeriodRound(resumes=False, whole=False, layers=(LAYER,)))
    assert periods(finish_round(play, "a", "b")) == begins
    last = dict.fromkeys("ab", PeriodRound(resumes=True, whole=True))
    assert periods(finish_round(play, "a", "b")) == last, "the stage's last round ends a period"


def test_only_a_new_model_is_evaluated():
    play = period_play("a", "b", rounds=5)
    for number in range(1, 5):
        out = finish_round(play, "a", "b")
        assert bool(of(do.Evaluate, out)) == (number == 4)
    assert of(do.Evaluate, finish_round(play, "a", "b")), "which the stage's last round makes"
    assert play.state.phase is v.Phase.FINISHED


def test_a_newcomer_waits_for_the_next_period_and_is_said_to():
    play = period_play("a", "b")
    play.hello("c")
    play.finish_plan()
    out = finish_round(play, "a", "b")
    assert set(periods(out)) == {"a", "b"}
    (started,) = [one for one in out if getattr(one, "kind", "") == "round_started"]
    assert started.data["next_period"] == ["c"]
    for _ in range(3):
        out = finish_round(play, "a", "b")
    assert set(periods(out)) == {"a", "b", "c"}


def test_a_device_whose_update_does_not_count_is_out_of_the_period():
    play = period_play("a", "b", "c", quorum=0.5)
    play.decline("c", Refusal(OUT_OF_STEP))
    assert set(periods(finish_round(play, "a", "b"))) == {"a", "b"}


def test_a_quorum_is_a_share_of_the_devices_that_the_period_began_with():
    """Of eight it is four in every round, not four, two and one; where four cannot go on, another period begins."""
    play = period_play(*"abcdefgh", quorum=0.5, max_attempts=3)
    assert quorum(play.state) == 4
    for name in "efgh":
        play.decline(name, Refusal("error"))
    assert set(periods(finish_round(play, *"abcd"))) == set("abcd")
    assert quorum(play.state) == 4
    rows = v.changes(v.State(play.plan), play.state).rows
    again = v.decode(v.State(play.plan), [(*key, row) for key, row in rows.items()])
    assert again is not None
    assert again.period_devices == play.state.period_devices, "a coordinator that restarts knows them"
    gone = {name: replace(play.state.devices[name], left_out="operator") for name in "gh"}
    assert quorum(replace(play.state, devices=play.state.devices | gone)) == 3, "of six that are left in"
    play.decline("d", Refusal(OUT_OF_STEP))
    for name in "abc":
        play.send(do.Announced(play.now, Update(name, play.opened[-1], {}, {"task": 8}, {"loss": 1.0}, base=BASE)))
        play.receive(name)
    assert play.aggregate is None, "three of four"
    assert periods(play.wait(5)) == dict.fromkeys("abcdefgh", PeriodRound(resumes=False, whole=False, layers=(LAYER,)))


def test_where_nobody_can_go_on_another_period_begins():
    play = period_play("a", "b")
    play.hello("c")
    play.finish_plan()
    finish_round(play, "a", "b")
    for name in ("a", "b"):
        play.send(do.DeviceOffline(play.now, name, "lost"))
    play.wait(101)  # the attempt's deadline: nobody delivered
    out = play.wait(5)
    while not of(do.SendOffer, out):
        out = play.wait(5)
    assert periods(out) == {"c": PeriodRound(resumes=False, whole=False)}
    warned = [one.data["text"] for one in out if getattr(one, "kind", "") == "warning"]
    assert any("another period begins" in text for text in warned)


@pytest.mark.parametrize("base", ["", "x" * 64, BASE * 1000, BASE.upper()])
def test_a_base_that_is_no_digest_is_none(base: str):
    """It would be kept with the model and come back in offers, which have a limit of size."""
    claim = v.Claim({"": 8})
    assert bounded(Update("a", base=base), claim).base == ""
    assert bounded(Update("a", base=BASE), claim).base == BASE


@pytest.mark.parametrize("change", [float("nan"), float("inf"), -1.0, 1e30])
def test_a_change_that_cannot_be_names_no_layer(change: float):
    """NaN would be written into the memory of the run, which no process could read again."""
    found = bounded(Update("a", layer=LAYER, poverty_change=change), v.Claim({"": 8}))
    assert (found.layer, found.poverty_change) == ("", 0.0)


def test_where_all_are_out_of_step_the_retry_begins_another_period():
    play = period_play("a", "b", max_attempts=3)
    finish_round(play, "a", "b")
    for name in ("a", "b"):
        play.decline(name, Refusal(OUT_OF_STEP))
    assert periods(play.wait(5)) == dict.fromkeys("ab", PeriodRound(resumes=False, whole=False, layers=(LAYER,)))


def test_a_round_that_is_tried_again_asks_for_the_same():
    play = period_play("a", "b", max_attempts=3)
    first = periods(finish_round(play, "a", "b"))
    play.wait(101)
    again = play.wait(5)
    assert periods(again) == first
    assert play.opened[-1].attempt > play.opened[-2].attempt


def test_an_attempt_without_a_member_asks_for_the_same_as_the_one_with_it():
    play = period_play("a", "b", "c", quorum=0.5, max_attempts=4)
    finish_round(play, "a", "b", "c")
    most = Track(layer="acc/stage1|most.weight", change=9.0)
    memory = replace(play.state.memory, devices=play.state.memory.devices | {"c": most})
    play.state = replace(play.state, memory=memory)
    play.wait(101)
    first = periods(play.wait(5))
    play.send(do.DeviceOffline(play.now, "c", "lost"))
    play.wait(101)
    while not (again := periods(play.wait(5))):
        pass
    assert set(first) == {"a", "b", "c"}
    assert again == {name: first[name] for name in "ab"}
    assert again["a"] == PeriodRound(resumes=True, whole=False, layers=(most.layer,))


@pytest.mark.parametrize(("every", "evaluated"), [(5, [8, 12, 16, 18]), (4, [4, 8, 12, 16, 18]), (9, [12, 18])])
def test_evaluations_are_due_at_the_end_of_the_period_that_a_multiple_is_in(every: int, evaluated: list[int]):
    play = period_play("a", rounds=18)
    play.state = replace(play.state, plan=replace(play.plan, evaluate_every=every))
    assert [number for number in range(1, 19) if of(do.Evaluate, finish_round(play, "a"))] == evaluated


def test_what_may_be_exchanged_alone_is_read_once_a_round_and_off_the_event_loop(tmp_path: Path, monkeypatch):
    readers, events = list[int](), list[Any]()

    def reading(*_: Any) -> dict[str, int]:
        readers.append(threading.get_ident())
        return {LAYER: 100}

    monkeypatch.setattr(model_tasks, "exchangeable_layers", reading)
    monkeypatch.setattr(model_tasks, "exchange_layers", lambda updates, *_: ({}, {u.device: u.layer for u in updates}))

    async def aggregate() -> None:
        tasks = ModelTasks(play.plan, ObjectStore(tmp_path), FakeWorker(), events.append, lambda: 0.0)
        tasks.begin({}, {})
        named = {"a": LAYER, "b": LAYER, "c": "task|table.weight"}
        updates = tuple(Update(name, play.opened[-1], layer=layer) for name, layer in named.items())
        tasks.start(do.Aggregate(play.opened[-1], updates, {}))
        await tasks._tasks.wait()

    play = period_play("a", "b", "c")
    asyncio.run(aggregate())
    assert len(readers) == 1
    assert readers[0] != threading.get_ident()
    warned, done = events
    assert "c names a poverty layer that may not be exchanged alone" in warned.data["text"]
    assert done.record == {"a": LAYER, "b": LAYER, "c": ""}


def test_the_largest_layer_is_asked_for_in_a_stages_first_round_alone():
    """Later a cluster without a poverty layer, as of complete devices, needs none."""
    play = period_play("a", "b")
    placed = {n: replace(d, placement=replace(d.placement, layer=LAYER)) for n, d in play.state.devices.items()}
    asked = [
        period_rounds(replace(play.state, devices=placed, number=number, memory=Memory()), ["a", "b"], resumes=False)
        for number in (1, 2)
    ]
    assert [one["a"].layers for one in asked] == [(LAYER,), ()]


def test_a_limit_hit_inside_a_period_is_planned_for_the_next():
    play = period_play("a", "b", quorum=0.5)
    finish_round(play, "a", "b")
    out = play.decline("a", Refusal("ceiling", 2.0, 1.0, "B"))
    assert of(do.Plan, out), "it is planned again"
    assert play.status("a") == "declined", "not for this round"


def test_an_offer_inside_a_period_brings_nothing_but_what_was_lent():
    play = period_play("a", "b")
    (one, _) = of(do.SendOffer, finish_round(play, "a", "b", lent="e" * 64))
    state = dict.fromkeys(play.plan.stages[0].present, REF) | {f"@a/{LAYERS}": ObjectRef("e" * 64, 99)}
    one = replace(one, placement=replace(one.placement, layer=LAYER))
    offer = offer_for(one, state, play.state)
    frozen = set(play.plan.stages[0].present) - set(play.plan.stages[0].trained)
    assert set(offer.manifest) == {*frozen, LAYERS}
    assert offer.base == BASE
    assert offer.job.period == PeriodRound(resumes=True, whole=False, layers=(LAYER,), largest=LAYER)
    begins = offer_for(replace(one, period=PeriodRound(whole=False)), state, play.state)
    assert set(begins.manifest) == set(play.plan.stages[0].present)
    assert begins.base == ""


def test_bytes_are_expected_as_the_period_has_them():
    play = period_play("a", "b")
    (one, _) = of(do.SendOffer, finish_round(play, "a", "b", lent="e" * 64))
    usual = {name: Figure(1000.0, "predicted") for name in ("payload_up_bytes", "payload_down_bytes")}
    cost = replace(one.placement.cost, layer_bytes=7, layers_up_bytes=14, payload_up_bytes=1000, whole_up_bytes=1000)
    placement = replace(one.placement, predicted=usual, cost=cost)

    def sizes(period: PeriodRound) -> tuple[float | None, float | None]:
        found = expected(play.state, one.attempt, placement, "a", period)
        return found["payload_down_bytes"].value, found["payload_up_bytes"].value

    assert sizes(PeriodRound(resumes=True, whole=False, layers=(LAYER,))) == (7, 14)
    assert sizes(PeriodRound(resumes=True, whole=False)) == (7, 0)
    assert sizes(PeriodRound(resumes=True, whole=True)) == (7, 1000)
    assert sizes(PeriodRound(resumes=False, whole=False, layers=(LAYER,))) == (1000, 14)


@pytest.mark.parametrize(
    ("period", "parts", "wrong"),
    [
        (PeriodRound(resumes=True, whole=False, layers=(LAYER,)), (LAYERS,), ""),
        (PeriodRound(resumes=True, whole=False, layers=(LAYER,)), (), ""),
        (PeriodRound(resumes=True, whole=False), (LAYERS,), LAYERS),
        (PeriodRound(resumes=True, whole=False, layers=(LAYER,)), (LAYERS, "task"), "task"),
        (PeriodRound(resumes=True, whole=True), ("acc/stage1", "task"), ""),
        (PeriodRound(resumes=True, whole=True), ("acc/stage1", "task", LAYERS), LAYERS),
        (PeriodRound(resumes=True, whole=True), (), "task"),
        (None, ("acc/stage1", "task", LAYERS), LAYERS),
    ],
)
def test_an_update_holds_what_its_round_of_the_period_asks_for(period, parts: tuple[str, ...], wrong: str):
    play = period_play("a", "b")
    assert play.state.open is not None
    assignment = replace(play.state.open.assignments["a"], period=period)
    refusal = unfit(play.state, assignment, Update("a", play.opened[-1], dict.fromkeys(parts, REF), {"task": 8}))
    assert (refusal.reason if refusal else "") == ("parts" if wrong else "")
    assert wrong in (refusal.detail if refusal else "")
