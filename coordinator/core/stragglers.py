"""Updates made from an earlier round's model, where the policy keeps them (rounds: async, round.late: keep). Pure.

A device that has not answered when its round closes goes on: it moves to ``State.stragglers``, with its attempt. Its
update lies in ``State.buffered`` until the next aggregation includes it, by its staleness: the rounds closed since its
model was made. A stage's last round drops both: what other stages trained is other parts.
"""

from __future__ import annotations

import hashlib

import msgspec

from coordinator.core.state import OPEN, Assignment, State
from edgefl.protocol.messages import Update
from edgefl.records import Attempt

replace = msgspec.structs.replace


def staleness(state: State, attempt: Attempt) -> int:
    """How many rounds ago the model that ``attempt`` starts from was the newest."""
    return state.number - attempt.round


def key_of(device: str, attempt: Attempt) -> str:
    """The name of an update in ``State.buffered``: a column of 64 characters holds it, however long the device's is."""
    return f"{attempt.stage}.{attempt.round}.{attempt.attempt}/{hashlib.sha256(device.encode()).hexdigest()[:24]}"


def assignment_of(state: State, device: str, attempt: Attempt) -> Assignment | None:
    """A device's part in an attempt: the open one, or an earlier one whose update counts."""
    opened = state.open
    if opened is not None and opened.attempt == attempt and device in opened.assignments:
        return opened.assignments[device]
    one = state.stragglers.get(device)
    return one if one is not None and one.attempt == attempt else state.buffered.get(key_of(device, attempt))


def placed(state: State, device: str, assignment: Assignment) -> State:
    """``state`` with the device's part in an earlier attempt as it is now; one that is over is forgotten."""
    stragglers, buffered = dict(state.stragglers), state.buffered
    attempt = assignment.attempt
    if attempt is None:
        raise ValueError(f"{device}'s part is one in the open attempt")
    key = key_of(device, attempt)
    if device in stragglers and stragglers[device].attempt == attempt:
        del stragglers[device]
    if assignment.status in OPEN:
        stragglers[device] = assignment
    elif assignment.status == "done":
        buffered = {**buffered, key: assignment}
    elif key in buffered:
        buffered = {name: one for name, one in buffered.items() if name != key}
    return replace(state, stragglers=stragglers, buffered=buffered)


def mark_aggregated(state: State, keys: tuple[str, ...]) -> State:
    """``state`` once these updates are in the model."""
    devices = dict(state.devices)
    for update in updates_of(state, keys):
        devices[update.device] = replace(devices[update.device], aggregated=update.attempt)
    left = {key: one for key, one in state.buffered.items() if key not in keys}
    return replace(state, devices=devices, buffered=left, aggregating=())


def updates_of(state: State, keys: tuple[str, ...]) -> list[Update]:
    """These updates."""
    return [update for key in keys if (update := state.buffered[key].update) is not None]


def is_closing(state: State) -> bool:
    """Whether this is the closing round, in which every eligible device is asked and waited for."""
    return 0 < state.closing == state.stage


def is_buffered(state: State) -> bool:
    """Whether the round closes by the number of updates: nobody is asked anew in it, or nobody is ever waited for."""
    if is_closing(state):
        return False
    return state.policy.mode == "async" or (state.open is not None and not state.open.assignments)


def still_needed(state: State) -> tuple[tuple[Update, ...], frozenset[Attempt]]:
    """The updates that are on disk or on their way, and the attempts whose first state must stay readable."""
    every = [*state.stragglers.values(), *state.buffered.values()]
    updates = tuple(one.update for one in every if one.update is not None)
    return updates, frozenset(one.attempt for one in every if one.attempt is not None)
