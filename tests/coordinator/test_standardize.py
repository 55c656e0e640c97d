"""Devices that have to read their data as a run asks, and the constants that are fixed of what they tell."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from coordinator_fixture import MODEL
from test_coordinator_machine import NOT_BEGUN, POLICY, TIMEOUTS, Play, of

from coordinator.core import moves as do
from coordinator.core import state as v
from coordinator.core.machine import step
from coordinator.runtime.inbound import Inbound
from edgefl.models.spec import ModelSpec
from edgefl.plan.preparation import preparation_of
from edgefl.protocol import topics
from edgefl.protocol.messages import Hello, encode
from edgefl.records import Moments
from edgefl.run_records import EventRow

replace = msgspec.structs.replace
STANDARD: ModelSpec = replace(MODEL, encoders={"acc": replace(MODEL.encoders["acc"], standardize="fleet")})


def play(**changes: Any) -> Play:
    return Play(model=STANDARD, **changes)


def hello(run: Play, device: str, mean: float | None = 1.0, **changes: Any) -> Hello:
    told = {} if mean is None else {"acc": Moments(40, (mean, 0.0, 2.0), (1.0, 4.0, 0.0))}
    fields = {"samples": {"": 10, "acc": 10}, "modalities": {"acc": (8, 3)}, "prepared": preparation_of(run.plan).id}
    return Hello(device, "s", **{**fields, "moments": told, **changes})


def test_a_run_that_prepares_nothing_asks_for_nothing():
    plain = Play()
    assert preparation_of(plain.plan).id == ""
    assert of(do.SendWelcome, plain.send(do.Joined(0.0, Hello("a", "s", samples={"": 9})))) == [do.SendWelcome("a")]
    assert "a" in plain.state.devices
    out = plain.send(do.Joined(0.0, hello(plain, "b", prepared="for the run before", samples={"": 0})))
    assert of(do.SendWelcome, out) == [do.SendWelcome("b")]
    assert "b" not in plain.state.devices  # or no more than none of its samples would count


def test_a_device_that_has_read_otherwise_is_told_how_and_does_not_count():
    run = play()
    for prepared in ("", "of another run"):
        out = run.send(do.Joined(0.0, hello(run, "a", prepared=prepared)))
        assert of(do.SendWelcome, out) == [do.SendWelcome("a")]
        assert not run.state.devices
    run.send(do.Joined(0.0, hello(run, "a", samples={"": 70, "acc": 70})))
    assert run.state.devices["a"].claim.samples["acc"] == 70  # of windows, not of the recordings it counted before


def test_an_agent_too_old_to_prepare_is_refused_once():
    run = play()
    out = [one for _ in range(2) for one in run.send(do.Joined(0.0, hello(run, "a", prepared="", protocol=0)))]
    assert len(of(do.SendDrain, out)) == 2
    assert [one.kind for one in of(EventRow, out)] == ["warning"]


def test_constants_are_fixed_once_and_hold_for_those_who_come_later():
    """Two devices of 40 steps each with means 1 and 3: mean 2, variance 1 + 1; the constant channel stays unscaled."""
    run = play()
    run.send(do.Joined(0.0, hello(run, "a", 1.0)))
    out = run.send(do.Joined(1.0, hello(run, "b", 3.0)))
    (saved,) = of(do.SavePlan, out)
    encoder = saved.plan.model.encoders["acc"]
    assert encoder.mean == (2.0, 0.0, 2.0)
    assert encoder.std == (2.0**0.5, 2.0, 1.0)
    assert run.state.plan == saved.plan
    (told,) = [one for one in of(EventRow, out) if one.kind == "standardized"]
    assert told.data["modalities"]["acc"]["devices"] == ("a", "b")
    assert preparation_of(saved.plan) == preparation_of(run.plan)  # who has prepared need not again
    assert not of(do.SavePlan, run.send(do.Joined(2.0, hello(run, "c", 900.0))))
    assert run.state.plan == saved.plan
    assert run.state.phase is v.Phase.PLANNING


def test_what_cannot_be_true_is_left_out_with_a_warning():
    run = play()
    run.send(do.Joined(0.0, hello(run, "a", 1.0)))
    lie = {"acc": Moments(10**9, (0.0,) * 3, (1.0,) * 3)}
    out = run.send(do.Joined(1.0, hello(run, "b", moments=lie)))
    assert of(do.SavePlan, out)[0].plan.model.encoders["acc"].mean == (1.0, 0.0, 2.0)
    assert "of 1000000000 time steps, and it has 80" in str([one.data for one in of(EventRow, out)])


def test_without_statistics_the_run_waits_and_fails_with_the_way_out():
    run = play(policy=replace(POLICY, join_s=10.0))
    run.send(do.Joined(0.0, hello(run, "a", None)))
    assert not of(do.Plan, run.send(do.Joined(1.0, hello(run, "b", None))))
    assert run.state.phase is v.Phase.JOINING
    late = run.state
    _, out = step(late, do.Tick(10.5))
    (failed,) = of(do.Fail, out)
    assert "no device sent statistics of 'acc' within 10 s" in failed.message
    assert "model.encoders.acc.standardize to none" in failed.remedy
    assert of(do.SavePlan, run.send(do.Joined(9.0, hello(run, "c", 1.0))))


def test_a_resumed_run_has_the_constants_of_its_plan():
    run = play()
    run.send(do.Joined(0.0, hello(run, "a")))
    run.send(do.Joined(0.0, hello(run, "b")))
    fixed = run.state.plan
    again, _ = step(v.State(fixed, TIMEOUTS), do.Begin(0.0, NOT_BEGUN))
    for name in ("a", "b"):
        again, out = step(again, do.Joined(1.0, hello(run, name, 77.0)))
    assert not of(do.SavePlan, out)
    assert again.plan == fixed


def test_moments_that_are_no_numbers_never_come_in():
    """They would be in the snapshot, which a database takes for JSON."""
    inbound = Inbound(30.0, 1.0)
    told = {
        "acc": Moments(4, (float("nan"),), (1.0,)),
        "gyro": Moments(4, (1.0,), (float("inf"),)),
        "wide": Moments(4, (1.0,) * 600, (1.0,) * 600),
        "fine": Moments(4, (1.0,), (1.0,)),
    }
    topic = topics.parse(topics.build("up", "f", "a"))
    event = inbound.read(topic, encode(Hello("a", "s", moments=told)), 0.0)
    assert isinstance(event, do.Joined)
    assert set(event.hello.moments) == {"fine"}


@pytest.mark.parametrize(("size", "kept"), [(8192, 8192), (8193, 0)])
def test_a_signature_in_a_hello_is_bounded(size: int, kept: int):
    topic = topics.parse(topics.build("up", "f", "a"))
    event = Inbound(30.0, 1.0).read(topic, encode(Hello("a", "s", signature=bytes(size))), 0.0)
    assert isinstance(event, do.Joined)
    assert len(event.hello.signature) == kept
