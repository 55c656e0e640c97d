"""Periods in the agent's machine: it goes on from what it retained, or says that it cannot."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from test_agent_machine import job, offer, play, ready, sent

from device_agent.core import state as v
from edgefl.plan.job import PeriodRound
from edgefl.protocol import messages as m
from edgefl.records import OUT_OF_STEP, Budget, ObjectRef, Refusal, digest_of


def period_offer(number, base="", *, resumes=True, whole=False):
    period = PeriodRound(resumes, whole, ("task|out.weight",))
    return replace(offer(number, job=job(period=period)), base=base)


def ends(message, retained):
    result = v.Result({}, {"task": 32}, {"loss": 0.5}, retained=retained)
    return v.TrainingEnded(message.attempt, result)


def test_inside_a_period_a_device_goes_on_from_what_it_retained_or_declines():
    retained = {"task": ObjectRef("d" * 64, 500)}
    first = period_offer(1, resumes=False)
    state, out = play(ready(), first, v.Fetched(first.attempt), ends(first, retained))
    (update,) = sent(out, m.Update)
    assert update.base == digest_of(retained) != ""
    assert state.retained[-1].manifest == retained
    state = play(state, m.Ack(first.attempt))[0]
    strange = period_offer(2, base="0" * 64)
    _, out = play(state, strange)
    (decline,) = sent(out, m.Decline)
    assert decline.refusal.reason == OUT_OF_STEP
    assert "of round 1 of stage 1" in decline.refusal.detail
    second = period_offer(2, base=update.base)
    state, out = play(state, second, v.Fetched(second.attempt))
    (train,) = [one for one in out if isinstance(one, v.Train)]
    assert train.retained == retained
    new = {"task": ObjectRef("e" * 64, 500)}
    state = play(state, ends(second, new))[0]
    assert [one.manifest for one in state.retained] == [retained, new], "the round may be tried again"
    again = replace(second, attempt=replace(second.attempt, attempt=2))
    _, out = play(state, m.Abort(second.attempt), again, v.Fetched(again.attempt))
    assert [one.retained for one in out if isinstance(one, v.Train)] == [retained]


def test_a_device_that_retains_nothing_is_out_of_step():
    _, out = play(ready(), period_offer(2, base=digest_of({"task": ObjectRef("d" * 64, 500)})))
    (decline,) = sent(out, m.Decline)
    assert decline.refusal.reason == OUT_OF_STEP
    assert "of no round" in decline.refusal.detail


@pytest.mark.parametrize("trained", [("task",), ("acc/embed", "acc/stage1", "task")])
def test_a_device_that_is_planned_again_for_other_parts_is_out_of_step(trained):
    """Of fewer parts it would lose what it trained of the others, of more it would lack some."""
    retained = {"acc/embed": ObjectRef("d" * 64, 500), "task": ObjectRef("e" * 64, 500)}
    first = period_offer(1, resumes=False)
    state, out = play(ready(), first, v.Fetched(first.attempt), ends(first, retained))
    state = play(state, m.Ack(first.attempt))[0]
    second = period_offer(2, base=sent(out, m.Update)[0].base)
    planned = replace(second.job, stage=replace(second.job.stage, trained=trained))
    (decline,) = sent(play(state, replace(second, job=planned))[1], m.Decline)
    assert decline.refusal.reason == OUT_OF_STEP
    assert "planned again" in decline.refusal.detail
    (part,) = {"acc/embed", "task"} ^ set(trained)
    assert f"began with: {part};" in decline.refusal.detail
    same = replace(second.job, stage=replace(second.job.stage, trained=("task", "acc/embed")))
    assert sent(play(state, replace(second, job=same))[1], m.Accept), "the same parts, whatever their order"


def test_outside_of_periods_an_update_names_no_base():
    first = offer()
    _, out = play(ready(), first, v.Fetched(first.attempt), ends(first, {"task": ObjectRef("d" * 64, 500)}))
    assert sent(out, m.Update)[0].base == ""


def test_a_device_keeps_one_copy_of_its_parts_beside_the_one_that_it_trains():
    """So it holds the download, what it retained and what it trains, as the price has it."""
    state, base = ready(), ""
    refs = [{"task": ObjectRef(letter * 64, 500)} for letter in "cdef"]
    for number in range(1, 5):
        one = period_offer(number, base, resumes=number > 1, whole=number == 4)
        state, out = play(state, one, v.Fetched(one.attempt), ends(one, refs[number - 1]))
        base = sent(out, m.Update)[0].base
        state = play(state, m.Ack(one.attempt))[0]
    begins = period_offer(5, resumes=False)
    _, out = play(state, begins)
    (keep,) = [one.keep for one in out if isinstance(one, v.CollectGarbage)]
    assert keep == {"f" * 64, *(ref.id for ref in begins.manifest.values())}
    for disk_bytes, fits in ((1500 + 500 + 500, True), (1500 + 500 + 499, False)):
        limited = replace(state, budget=Budget(disk_bytes=disk_bytes))
        refused = [one.refusal for one in sent(play(limited, begins)[1], m.Decline)]
        assert refused == ([] if fits else [Refusal("disk", 2500.0, 2499.0, "B", refused[0].detail)])
