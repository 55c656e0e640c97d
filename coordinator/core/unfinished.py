"""Attempts that end without a device's update: on record with what they cost, as far as the device tells it. Pure.

Bytes are the coordinator's own count (``coordinator.runtime.traffic``), never a device's word.
"""

from __future__ import annotations

import msgspec

from coordinator.core.assignments import expected, put
from coordinator.core.moves import Spending, Steps
from coordinator.core.plausibility import plausible
from coordinator.core.state import Assignment, Unfinished
from edgefl.records import FIGURES, Attempt, Figure, Figures

replace = msgspec.structs.replace

#: Attempts of a device that it may still tell of: it tells of one as soon as its trainer has left it off.
MOST_UNTOLD = 4
#: Figures that are not a device's to tell: the coordinator counts them.
COUNTED = ("payload_", "resent_", "prototypes_", "signature_", "layer_")
_CUT = "the upload did not end"


def end_without_update(steps: Steps, device: str, assignment: Assignment) -> None:
    """Set a device's part whose update does not count, with what an update that it has announced tells of it."""
    told = assignment.update.figures if assignment.update is not None else {}
    # One that was done has its figures on record.
    put(steps, device, assignment, {} if assignment.measured else own_figures(steps, device, assignment, told))
    if assignment.update is None:
        before = steps.state.devices[device].unfinished[1 - MOST_UNTOLD :]
        steps.set_device(device, unfinished=(*before, _unfinished(steps, device, assignment)))


def own_figures(steps: Steps, device: str, assignment: Assignment, figures: Figures) -> Figures:
    """The figures that a device tells of an attempt without an update, as far as they are its own and can be."""
    return _checked(figures, _unfinished(steps, device, assignment), steps.at)


def tell(steps: Steps, device: str, attempt: Attempt, figures: Figures) -> None:
    """Record a device's own figures of an attempt that ended without its update, once."""
    known = steps.state.devices[device].unfinished
    if (one := next((one for one in known if one.attempt == attempt), None)) is None:
        return
    steps.set_device(device, unfinished=tuple(other for other in known if other is not one))
    if checked := _checked(figures, one, steps.at):
        steps.do(Spending(device, attempt, checked, adds=False))


def _unfinished(steps: Steps, device: str, one: Assignment) -> Unfinished:
    attempt = one.attempt or steps.opened.attempt
    predicted = expected(steps.state, attempt, one.placement, device, one.period)
    return Unfinished(attempt, predicted, one.first_offered_at)


def _checked(figures: Figures, of: Unfinished, at: float) -> Figures:
    """The device's own figures that can be, of what may have been a part of a round."""
    own = {name: figure for name, figure in figures.items() if name in FIGURES and not name.startswith(COUNTED)}
    if "wire_up_bytes" in own:
        own["wire_up_bytes"] = Figure(reason=_CUT)
    since = of.first_offered_at
    found, _ = plausible(own, of.predicted, None if since is None else at - since, partial=True)
    return found
