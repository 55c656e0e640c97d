"""The agent reads its data as the coordinator's run asks, and says again what it has."""

from __future__ import annotations

from msgspec.structs import replace
from test_agent_machine import DEVICE, FACTS, kinds, play, sent

from device_agent.core import state as v
from device_agent.core.machine import initial
from edgefl.models.spec import EncoderSpec
from edgefl.plan.job import Preparation
from edgefl.protocol import messages as m
from edgefl.records import Moments

ASKED = Preparation("abc", {"acc": EncoderSpec(input_shape=(8, 3), step=4, standardize="fleet")})
WELCOME = m.Welcome("c1", run="r1", preparation=ASKED)
PREPARED = replace(
    FACTS, samples={"": 90, "acc": 90}, prepared="abc", moments={"acc": Moments(9, (0.0,) * 3, (1.0,) * 3)}
)


def test_a_welcome_that_asks_for_windows_has_the_data_described_anew():
    state, out = play(initial(DEVICE, v.Saved(), None), v.Connected(), v.TrainerReady(FACTS), WELCOME)
    assert [one for one in out if isinstance(one, v.StartTrainer)][-1].preparation == ASKED
    assert state.trainer is v.TrainerPhase.WARMING
    assert [hello.prepared for hello in sent(out, m.Hello)] == [""]  # the one that was answered
    state, out = play(state, v.TrainerReady(PREPARED))
    (hello,) = sent(out, m.Hello)
    assert (hello.prepared, hello.samples["acc"], hello.moments) == ("abc", 90, PREPARED.moments)
    assert [one.facts for one in out if isinstance(one, v.SaveFacts)] == [PREPARED]
    assert state.trainer is v.TrainerPhase.IDLE


def test_what_was_read_before_a_restart_counts():
    state, out = play(initial(DEVICE, v.Saved(), PREPARED), v.Connected(), WELCOME)
    assert [hello.prepared for hello in sent(out, m.Hello)] == ["abc"]
    assert kinds(out).count("StartTrainer") == 1  # cold, because there is a run
    state, out = play(state, v.TrainerReady(PREPARED))
    assert not sent(out, m.Hello)


def test_the_next_run_may_ask_for_nothing():
    state, _ = play(initial(DEVICE, v.Saved(), None), v.Connected(), v.TrainerReady(FACTS), WELCOME)
    state, _ = play(state, v.TrainerReady(PREPARED), m.Drain("r1"))
    state, out = play(state, v.Connected(), m.Welcome("c2", run="r2"))
    starts = [one for one in out if isinstance(one, v.StartTrainer)]
    assert [one.preparation.id for one in starts] == [""]
    state, out = play(state, v.TrainerReady(FACTS))
    assert [hello.samples for hello in sent(out, m.Hello)] == [FACTS.samples]


def test_statistics_can_be_kept_back():
    _, out = play(initial(replace(DEVICE, no_moments=True), v.Saved(), PREPARED), v.Connected())
    assert [hello.moments for hello in sent(out, m.Hello)] == [{}]


def test_an_agent_sends_what_clusters_are_made_of_unless_it_is_to_tell_no_statistics():
    signed = replace(PREPARED, signature=b"sketch")
    for device, expected in ((DEVICE, b"sketch"), (replace(DEVICE, no_moments=True), b"")):
        _, out = play(initial(device, v.Saved(), signed), v.Connected())
        assert [hello.signature for hello in sent(out, m.Hello)] == [expected]


def test_data_that_cannot_be_used_so_is_told_as_none_and_logged():
    none = replace(FACTS, samples={"": 0}, modalities={}, prepared="abc", problem="acc: has 3 time steps")
    state, _ = play(initial(DEVICE, v.Saved(), None), v.Connected(), v.TrainerReady(FACTS), WELCOME)
    state, out = play(state, v.TrainerReady(none))
    assert [hello.samples for hello in sent(out, m.Hello)] == [{"": 0}]
    assert [one.fields["text"] for one in out if isinstance(one, v.Log) and one.event == "data-unusable"] == [
        "acc: has 3 time steps"
    ]
