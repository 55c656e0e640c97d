"""Between two rounds: joining, the wait for devices, planning, pauses. Pure."""

from __future__ import annotations

import msgspec

from coordinator.core import moves as m
from coordinator.core.crowd import lacks_firsts
from coordinator.core.known_devices import ask, nearest_refusal, without
from coordinator.core.moves import Steps
from coordinator.core.returning import expects_back, online, wanted
from coordinator.core.round_rules import open_round
from coordinator.core.standardize import standardize
from coordinator.core.state import Phase

replace = msgspec.structs.replace


def begin_round_if_enough(steps: Steps) -> None:
    """Leave joining with enough devices, or after ``join_s`` with any; fail without one."""
    if expects_back(steps) or (lacks_firsts(steps.state) and steps.at < steps.state.until):
        return
    state = steps.state
    if state.crowd is None and len(state.devices) < state.policy.devices and steps.at < state.until:
        return  # at each join: to count those that are online takes as long as there are devices
    there = online(state)
    needed, waited = wanted(state), state.policy.join_s
    if there >= needed or not state.until:
        next_round(steps)
    elif steps.at >= state.until and not there:
        steps.do(m.Fail("RunError", f"no device connected within {waited:g} s"))
    elif steps.at >= state.until:
        steps.warn(f"{there} of {needed} devices connected within {waited:g} s; the run begins with them")
        next_round(steps)


def next_round(steps: Steps) -> None:
    """Open the next round; if its stage has no plan, request one and wait for the planner."""
    if steps.state.paused:
        enter_pause(steps)
        return
    if expects_back(steps):
        steps.set(phase=Phase.JOINING, until=0.0)
        return
    if not standardize(steps):
        return
    steps.set(returning={}, regained=False)
    state = steps.state
    if state.planned_stage != state.stage:
        devices = {n: replace(d, placement=None, ticket=0, declined=()) for n, d in state.devices.items()}
        steps.set(devices=devices, planned_stage=state.stage, phase=Phase.PLANNING)
    online = {name: one for name, one in steps.state.devices.items() if one.online and not one.out}
    ask(steps, [name for name, device in online.items() if device.placement is None and not device.ticket])
    if any(steps.state.devices[name].ticket for name in online):
        steps.set(phase=Phase.PLANNING)
    else:
        open_round(steps)


def try_again(steps: Steps, event: m.Tick) -> None:
    if event.at >= steps.state.until:
        next_round(steps)


def end_waiting(steps: Steps, event: m.Tick) -> None:
    state = steps.state
    if event.at >= state.until:
        where = f"stage {state.stage}, round {state.number}"
        more = f"; {nearest}" if (nearest := nearest_refusal(state)) else ""
        text = f"no device that can train was connected for {state.policy.join_s:g} s ({where}){without(state)}{more}"
        steps.do(m.Fail("RunError", text))


def wait_for_devices(steps: Steps) -> None:
    """Wait for enough connected devices; in a pause, for the operator."""
    if steps.state.paused:
        enter_pause(steps)
    else:
        steps.set(phase=Phase.JOINING, until=steps.at + steps.state.policy.join_s)
        begin_round_if_enough(steps)


def pause(steps: Steps, event: m.PauseAsked) -> None:
    steps.set(paused=event.by)
    enter_pause(steps)


def pause_after_round(steps: Steps, event: m.PauseAsked) -> None:
    """Request a pause after the open round, so that no training is lost."""
    if steps.state.paused:
        steps.drop("paused already")
        return
    steps.set(paused=event.by)
    steps.emit("pausing", data={"by": event.by})


def enter_pause(steps: Steps) -> None:
    steps.set(phase=Phase.PAUSED)
    steps.emit("paused", data={"by": steps.state.paused, "run": steps.state.plan.run})


def resume(steps: Steps, event: m.ResumeAsked) -> None:
    """End the pause, or call off one that has not begun. Waits begin again with their whole time."""
    if not steps.state.paused:
        steps.drop("not paused")
        return
    steps.set(paused="")
    steps.emit("resumed", data={"by": event.by})
    if steps.state.phase is not Phase.PAUSED:
        return
    if steps.state.planned_stage:
        next_round(steps)
    else:  # it was paused before enough devices were there
        wait_for_devices(steps)
