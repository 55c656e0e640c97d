"""Messages with the cost of dropped attempts. Pure."""

from __future__ import annotations

from device_agent.core import state as v
from device_agent.core.offer_check import has_newer, is_over
from device_agent.core.state import Instruction, State, TaskPhase
from edgefl.protocol import messages as m
from edgefl.records import Attempt, Figures


def spent(state: State, attempt: Attempt, figures: Figures) -> list[Instruction]:
    """Message with the cost of a dropped attempt; [] while a stopped run may still resume it."""
    over = has_newer(state, attempt) or is_over(state.closed, attempt)
    return [v.Send(m.Spent(state.device, attempt, figures))] if over else []


def spent_before(before: State, state: State) -> list[Instruction]:
    """Messages with the cost of work dropped since ``before``; training in progress reports at its end."""
    messages: list[Instruction] = []
    task, update = before.task, before.update
    if task is not None and task.phase is not TaskPhase.TRAINING and task != state.task:
        messages += spent(state, task.attempt, v.NOTHING_TRAINED)
    if update is not None and state.update is None:
        messages += spent(state, update.attempt, update.figures)
    return messages
