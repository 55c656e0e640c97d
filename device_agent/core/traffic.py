"""Bytes of the agent's connection since it started, and of these, while it had no run."""

from __future__ import annotations

from msgspec.structs import replace

from device_agent.core.state import State, Tick
from edgefl.records import Traffic


def measured(state: State, event: Tick, now: float) -> State:
    """The state with the link's traffic since the last tick added; an unknown link's is not."""
    before, counted = state.capabilities.traffic, state.link_bytes
    seconds = now - state.ticked_at if state.ticked_at else 0.0
    if event.link_bytes is None or not state.connected:
        return replace(state, ticked_at=now)
    state = replace(state, ticked_at=now, link_bytes=event.link_bytes)
    moved = event.link_bytes - counted
    if moved < 0:  # another transport than before
        moved = event.link_bytes
    idle = not (state.run or state.working_on)
    sums = before.bytes + moved, before.seconds + seconds
    waited = before.idle_bytes + idle * moved, before.idle_s + idle * seconds
    return replace(state, capabilities=replace(state.capabilities, traffic=Traffic(*sums, *waited)))
