"""A simulated fleet's devices are called when a round draws them: the machine, worked through by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from coordinator_fixture import a_plan, place

from coordinator.core import moves as do
from coordinator.core import state as v
from coordinator.core.crowd import crowd_of, meets_all
from coordinator.core.machine import step
from coordinator.core.state import Phase, changes, decode, resumed
from coordinator.core.timeouts import Timeouts
from edgefl.methods.select import at_random
from edgefl.plan.job import RoundPolicy, RunPlan
from edgefl.protocol.messages import Hello
from edgefl.records import Budget
from edgefl.sequences import Made, SortedNames, place_of

NAMES = [f"d{n:02}" for n in range(40)]
#: Of the second kind, those whose budget refuses them.
SMALL = {name for n, name in enumerate(NAMES) if n % 4 == 3}
MADE = 7


def plan_of(**more: Any) -> RunPlan:
    server = {**a_plan().server, "select": {"random": {"share": 0.1}}}
    return a_plan(policy=RoundPolicy(devices=40, join_s=10.0), server=server, **more)


class Fleet:
    """The machine of a fleet whose devices come as soon as they are called. ``called``: in order."""

    def __init__(self, plan: RunPlan | None = None, state: v.State | None = None) -> None:
        plan = plan or plan_of()
        kinds = np.array([name in SMALL for name in NAMES], int)
        self.state = state or v.State(plan, Timeouts(), crowd=crowd_of(plan, NAMES, kinds))
        self.called: list[str] = []
        self.offered: list[str] = []
        self.dead: set[str] = set()
        self.send(do.Begin(0.0, do.Position(0, 0, 0, {}, None, MADE)))

    def send(self, event: do.Event) -> None:
        self.state, out = step(self.state, event)
        for one in out:
            if isinstance(one, do.SendOffer):
                self.offered.append(one.device)
            elif isinstance(one, do.Plan):
                hyper = self.state.plan.hypers[one.stage - 1]
                found = tuple(place(self.state.plan.stages[one.stage - 1], hyper, each) for each in one.candidates)
                self.send(do.Planned(0.0, one.ticket, found))
            elif isinstance(one, do.SendWelcome) and one.device not in self.state.devices:
                self.called.append(one.device)
        for one in out:
            if isinstance(one, do.SendWelcome) and one.device in self.state.called:
                self.join(one.device)

    def join(self, name: str) -> None:
        if name in self.dead:
            self.send(do.DeviceOffline(0.0, name, "offline"))
        else:
            budget = Budget(step_memory_bytes=10 if name in SMALL else None)
            self.send(do.Joined(0.0, Hello(device=name, session="s", samples={"": 8}, budget=budget)))

    def begin(self) -> Fleet:
        for name in self.state.crowd.firsts if self.state.crowd is not None else ():
            self.join(name)
        return self


def drawn(able: list[str], plan: RunPlan, number: int = 1) -> list[str]:
    return at_random(able, np.random.default_rng((plan.seed, 1, number)), share=0.1)


def test_a_round_asks_those_that_it_would_if_all_had_come() -> None:
    fleet = Fleet()
    assert fleet.state.crowd is not None
    assert fleet.state.crowd.firsts == ("d00", "d03")
    fleet.join("d00")
    assert fleet.state.phase is Phase.JOINING, "nobody knows yet what the second kind can do"
    fleet.join("d03")
    able = [name for name in NAMES if name not in SMALL]
    expected = drawn(able, fleet.state.plan)
    assert fleet.offered == expected
    assert fleet.state.phase is Phase.ROUND
    assert set(fleet.called) == set(expected) - {"d00"}
    assert set(fleet.state.devices) == {"d00", "d03", *expected}
    everyone = Fleet(state=v.State(plan_of(), Timeouts()))
    for name in NAMES:
        everyone.join(name)
    assert everyone.offered == expected


def test_a_called_device_that_ends_is_replaced_by_another_draw() -> None:
    fleet = Fleet()
    able = [name for name in NAMES if name not in SMALL]
    dead = drawn(able, fleet.state.plan)[1]
    fleet.dead.add(dead)
    fleet.begin()
    assert fleet.state.gone == {dead}
    assert fleet.offered == drawn([name for name in able if name != dead], fleet.state.plan)


def test_who_is_away_by_a_trace_is_left_out_of_the_draw_until_it_comes() -> None:
    fleet, able = Fleet(), [name for name in NAMES if name not in SMALL]
    away = frozenset(able[1:20])
    fleet.send(do.Present(0.0, left=away))
    fleet.begin()
    assert fleet.offered == [], "fewer are there than are waited for"
    fleet.send(do.Tick(10.0))
    assert fleet.offered == drawn([name for name in able if name not in away], fleet.state.plan)
    fleet.send(do.Present(11.0, came=away))
    assert fleet.state.gone == frozenset()


def test_a_round_waits_until_all_that_it_has_called_are_there() -> None:
    fleet = Fleet()
    held, join = list[str](), fleet.join
    fleet.join = held.append  # type: ignore[method-assign]
    join("d00")
    join("d03")
    assert len(held) >= 3
    *early, last = held
    for name in early:
        join(name)
        assert fleet.state.phase is Phase.PLANNING
        assert fleet.offered == []
    join(last)
    assert sorted(fleet.offered) == sorted({*held, *fleet.offered})
    assert fleet.state.phase is Phase.ROUND


def test_a_process_that_goes_on_calls_who_is_at_work_and_waits_for_nobody_else() -> None:
    fleet = Fleet().begin()
    kept = {key: msgspec.to_builtins(row) for key, row in changes(v.State(fleet.state.plan), fleet.state).rows.items()}
    blank = v.State(fleet.state.plan, Timeouts(), crowd=fleet.state.crowd)
    was = decode(blank, ((kind, name, row) for (kind, name), row in kept.items()))
    assert was is not None
    again = resumed(was, 0.0)
    assert set(again.returning) <= {"d00", "d03"}
    begin = do.Begin(0.0, do.Position(0, 0, 1, {}, None, MADE), resumed=again)
    state, out = step(blank, begin)
    assert state.phase is Phase.ROUND
    assert {one.device for one in out if isinstance(one, do.SendWelcome)} == set(fleet.offered)
    back = Hello(device=fleet.offered[0], session="t", samples={"": 8})
    _, out = step(state, do.Joined(0.0, back))
    assert [one.device for one in out if isinstance(one, do.SendOffer)] == [fleet.offered[0]]


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: msgspec.structs.replace(plan, server={**plan.server, "select": {"all": {}}}),
        lambda plan: msgspec.structs.replace(plan, policy=msgspec.structs.replace(plan.policy, mode="async")),
    ],
)
def test_runs_that_have_to_know_every_device(change: Callable[[RunPlan], RunPlan]) -> None:
    assert not meets_all(plan_of())
    assert meets_all(change(plan_of()))


def test_excluded_devices_are_not_of_the_crowd() -> None:
    plan = plan_of()
    plan = msgspec.structs.replace(plan, policy=msgspec.structs.replace(plan.policy, excluded=("d00", "d05")))
    crowd = crowd_of(plan, NAMES, np.array([name in SMALL for name in NAMES], int))
    assert len(crowd.names) == 38
    assert crowd.firsts == ("d01", "d03")


def test_names_without_some_are_drawn_from_as_a_list_of_them() -> None:
    for left_out in ([], ["d00"], ["d39"], ["d01", "d02", "d20"], NAMES, ["nobody", "d07"]):
        names, listed = SortedNames(NAMES, left_out), [name for name in NAMES if name not in left_out]
        assert list(names) == listed
        assert len(names) == len(listed)
        assert names[:3] == listed[:3]
        for place_at in range(-len(listed), len(listed)):
            assert names[place_at] == listed[place_at]
        with pytest.raises(IndexError):
            names[len(listed)]
        if listed:
            rngs = [np.random.default_rng(1) for _ in range(2)]
            assert at_random(names, rngs[0], share=0.3) == at_random(listed, rngs[1], share=0.3)
    assert list(SortedNames(NAMES[:3], ["d00"]).without("d02")) == ["d01"]
    assert place_of(NAMES, "d07") == 7
    assert place_of(NAMES, "d071") is None


def test_values_that_are_made_when_they_are_asked_for() -> None:
    squares = Made(5, lambda at: at * at)
    assert (squares[-1], squares[1:3], len(squares)) == (16, [1, 4], 5)
    with pytest.raises(IndexError):
        squares[5]
