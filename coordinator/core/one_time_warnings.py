"""Warnings that operators get once a device and run, however often there is a reason. Pure."""

from __future__ import annotations

import msgspec

from coordinator.core.instructions import EmitEvent, Step
from coordinator.core.state import State

replace = msgspec.structs.replace


def warn_once(state: State, device: str, about: str, text: str) -> Step:
    """A warning about a known device, given once in a run for each subject ``about``."""
    known = state.devices[device]
    if about in known.warned:
        return state, []
    devices = {**state.devices, device: replace(known, warned=(*known.warned, about))}
    tell = EmitEvent("warning", state.stage, state.number, device, {"text": f"{device}: {text}", "about": about})
    return replace(state, devices=devices), [tell]
