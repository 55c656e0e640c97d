"""Rounds of several devices, halted before their steps, so that those of one kind take them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from device_agent.core.state import Result
from device_agent.runtime.trainer_process import TrainRequest
from edgefl.process.worker import Note
from edgefl.training.joint_steps import Halted, halted, take_steps
from edgefl.training.joint_trial import JointSteps, most, together
from edgefl.training.local_round import Halting, Training

if TYPE_CHECKING:
    from device_agent.trainer.process import Trainers

R = TypeVar("R")


class JointRounds:
    """Rounds of devices that wait for the same thread."""

    def __init__(self, trainers: Trainers, joint: JointSteps) -> None:
        self._trainers = trainers
        self._joint = joint

    def together(self, body: object, note: Note) -> list[Callable[[], Result]]:
        """Train one round of each requesting device, the steps of those of one kind together.

        Each function gives a device's result, or raises its error. Notes are those of all by their places.
        """
        requests = cast("Sequence[TrainRequest]", body)  # which crosses no pipe
        notes: dict[int, object] = {}

        def noted(place: int, said: object) -> None:
            notes[place] = said
            note(notes)

        rounds = [
            JointRound(self._trainers.begin(request, partial(noted, place), together=True))
            for place, request in enumerate(requests)
        ]
        carry_out(rounds, self._joint)
        return [one.result for one in rounds]


class JointRound(Generic[R]):
    """A device's round. Its FLOPs are counted apart from those of others that are on their way."""

    def __init__(self, halting: Halting[R]) -> None:
        self._halting = halting
        self._context = copy_context()
        self._error: Exception | None = None
        self._result: list[R] = []

    def go_on(self) -> Training | None:
        """Up to its steps; None: to its end."""
        try:
            return self._context.run(next, self._halting)
        except StopIteration as end:
            self._result.append(end.value)
        except Exception as error:  # of this device alone
            self._error = error
        return None

    def result(self) -> R:
        """The result, or the error that it ended with."""
        if self._error is not None:
            raise self._error
        return self._result[0]


def carry_out(rounds: Sequence[JointRound[R]], joint: JointSteps) -> None:
    """Every round to its end."""
    waiting: dict[object, list[tuple[JointRound[R], Halted]]] = {}
    limits: dict[object, int] = {}
    for one in rounds:
        if (training := one.go_on()) is None:
            continue
        if joint.refused(training):
            one.go_on()
            continue
        kind, device = together(training), halted(training)
        group = waiting.setdefault(kind, [])
        group.append((one, device))
        if kind not in limits:
            limits[kind] = most(device, len(rounds))
        if len(group) >= limits[kind]:
            _end(waiting.pop(kind), joint)
    for group in waiting.values():
        _end(group, joint)


def _end(group: Sequence[tuple[JointRound[R], Halted]], joint: JointSteps) -> None:
    devices = [device for _, device in group]
    if joint.agreed(devices):
        take_steps(devices, joint.flops(devices[0]))
    for one, device in group:
        device.resume()
        one.go_on()
