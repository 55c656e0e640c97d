"""The accumulator of one machine step: the state so far and the instructions collected. Changed by rules alone."""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator.core.instructions import EmitEvent, Instruction
from coordinator.core.state import State

replace = msgspec.structs.replace


class Steps:
    """Outcome of one event so far: ``state``, and the instructions ``out``, in order. ``at``: the event's time."""

    __slots__ = ("at", "out", "state")

    def __init__(self, state: State, at: float) -> None:
        self.state = state
        self.at = at
        self.out: list[Instruction] = []

    def set(self, **fields: object) -> None:
        """Replace fields of the state."""
        self.state = replace(self.state, **fields)

    def set_device(self, device: str, **fields: object) -> None:
        """Replace fields of a known device."""
        devices = self.state.devices
        self.set(devices={**devices, device: replace(devices[device], **fields)})

    def do(self, *instructions: Instruction) -> None:
        """Add instructions."""
        self.out += instructions

    def emit(self, kind: str, device: str = "", data: dict[str, Any] | None = None) -> None:
        """Emit an event of the current round."""
        self.do(EmitEvent(kind, self.state.stage, self.state.number, device, data or {}))

    def warn(self, text: str, device: str = "") -> None:
        """Warn operators."""
        self.emit("warning", device, {"text": text})

    def warn_once(self, device: str, about: str, text: str) -> None:
        """Warn operators about a known device, once in a run for each subject ``about``."""
        warned = self.state.devices[device].warned
        if about not in warned:
            self.set_device(device, warned=(*warned, about))
            self.emit("warning", device, {"text": f"{device}: {text}", "about": about})

    def drop(self, reason: str) -> None:
        """Count a message without effect."""
        dropped = self.state.dropped
        self.set(dropped={**dropped, reason: dropped.get(reason, 0) + 1})
