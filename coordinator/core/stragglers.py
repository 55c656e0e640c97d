"""Stragglers: updates made from an earlier round's model, where the policy keeps them (async, round.late: keep). Pure.

A device that has not answered when its round closes goes on: it moves to ``State.stragglers``, with its attempt. Its
update lies in ``State.buffered`` until the next aggregation includes it, by its staleness: the rounds closed since its
model was made. A stage's last round drops both: what other stages trained is other parts.
"""

from __future__ import annotations

import msgspec

from coordinator.core.state import State
from coordinator.core.steps import Steps
from edgefl.protocol.messages import Update
from edgefl.records import Attempt

replace = msgspec.structs.replace


def staleness(state: State, attempt: Attempt) -> int:
    """How many rounds ago the model that ``attempt`` starts from was the newest."""
    return state.number - attempt.round


def mark_aggregated(steps: Steps) -> None:
    """Note that the buffered updates being aggregated are in the model."""
    state = steps.state
    devices = dict(state.devices)
    for update in updates_of(state, state.aggregating):
        devices[update.device] = replace(devices[update.device], aggregated=update.attempt)
    buffered = {key: one for key, one in state.buffered.items() if key not in state.aggregating}
    steps.set(devices=devices, buffered=buffered, aggregating=())


def updates_of(state: State, keys: tuple[str, ...]) -> list[Update]:
    """Buffered updates, by key."""
    return [update for key in keys if (update := state.buffered[key].update) is not None]


def is_closing(state: State) -> bool:
    """Whether this is the closing round, in which every eligible device is asked and waited for."""
    return 0 < state.closing == state.stage


def is_buffered(state: State) -> bool:
    """Whether the round closes by the number of updates: async, or only stragglers are at work in it."""
    if is_closing(state):
        return False
    return state.policy.mode == "async" or (state.open is not None and not state.open.assignments)


def still_needed(state: State) -> tuple[tuple[Update, ...], frozenset[Attempt]]:
    """The updates that are on disk or on their way, and the attempts whose first state must stay readable."""
    every = [*state.stragglers.values(), *state.buffered.values()]
    updates = tuple(one.update for one in every if one.update is not None)
    return updates, frozenset(one.attempt for one in every if one.attempt is not None)
