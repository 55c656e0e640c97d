"""Cost of attempts ended without a device's update. Pure.

Payload is the coordinator's own count (``coordinator.runtime.traffic``), never a device's; bytes on the wire, FLOPs,
memory and seconds are the device's, where they are plausible.
"""

from __future__ import annotations

import msgspec

from coordinator.core.assignments import expected, put
from coordinator.core.moves import Spending, Steps
from coordinator.core.plausibility import plausible
from coordinator.core.state import Assignment, Unfinished
from edgefl.records import FIGURES, Attempt, Figure, Figures

replace = msgspec.structs.replace

#: Attempts of a device whose cost is still expected: a device reports one as soon as its trainer has stopped.
MOST_EXPECTED = 4
#: Figures that are not a device's to tell: the coordinator counts them.
COUNTED = ("payload_", "resent_", "prototypes_", "signature_", "layer_")
_CUT = "the upload did not end"


def end_without_update(steps: Steps, device: str, assignment: Assignment) -> None:
    """Record the end of an assignment without a counted update, with the figures reported so far."""
    told = assignment.update.figures if assignment.update is not None else {}
    # One that was done has its figures on record.
    put(steps, device, assignment, {} if assignment.measured else own_figures(steps, device, assignment, told))
    if assignment.update is None:
        before = steps.state.devices[device].unfinished[1 - MOST_EXPECTED :]
        steps.set_device(device, unfinished=(*before, _unfinished(steps, device, assignment)))


def own_figures(steps: Steps, device: str, assignment: Assignment, figures: Figures) -> Figures:
    """A device's own plausible figures of an attempt without an update."""
    return _checked(figures, _unfinished(steps, device, assignment), steps.at)


def record_spent(steps: Steps, device: str, attempt: Attempt, figures: Figures) -> None:
    """Record a device's cost of an attempt without its update, once."""
    known = steps.state.devices[device].unfinished
    if (one := next((one for one in known if one.attempt == attempt), None)) is None:
        return
    steps.set_device(device, unfinished=tuple(other for other in known if other is not one))
    if checked := _checked(figures, one, steps.at):
        steps.do(Spending(device, attempt, checked))


def _unfinished(steps: Steps, device: str, one: Assignment) -> Unfinished:
    attempt = one.attempt or steps.opened.attempt
    predicted = expected(steps.state, attempt, one.placement, device, one.period)
    return Unfinished(attempt, predicted, one.first_offered_at)


def _checked(figures: Figures, of: Unfinished, at: float) -> Figures:
    """The device's own plausible figures of a round or a part of one."""
    own = {name: figure for name, figure in figures.items() if name in FIGURES and not name.startswith(COUNTED)}
    if "wire_up_bytes" in own:
        own["wire_up_bytes"] = Figure(reason=_CUT)
    since = of.first_offered_at
    found, _ = plausible(own, of.predicted, None if since is None else at - since, partial=True)
    return found
