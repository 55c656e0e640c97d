"""Closed attempts, and replayed offers: old ones that were recorded and sent again. Pure.

A signature proves who made an offer, not when. Attempts of a run only go up, and each run of a fleet is made later than
the one before; so a device with an identity takes up nothing older than what it took up last, also after a restart.
"""

from __future__ import annotations

from msgspec.structs import replace

from device_agent.core.state import State
from edgefl.records import Attempt, Refusal


def is_over(closed: Attempt | None, attempt: Attempt) -> bool:
    """Whether ``attempt`` is closed, or older in its run."""
    return closed is not None and closed.same_run(attempt) and attempt <= closed


def newest_closed(closed: Attempt | None, attempt: Attempt) -> Attempt:
    """The newest closed attempt, once ``attempt`` is closed."""
    return closed if closed is not None and is_over(closed, attempt) else attempt


def replayed(state: State, attempt: Attempt) -> Refusal | None:
    """Why an offer is older than what this device has taken up already; None when it is not."""
    newest = state.newest
    if newest is not None and is_older_run(state, attempt):
        detail = f"run {newest.run} is newer; a device with an identity never goes back to an older run"
        return Refusal("replay", detail=detail)
    if state.strict and newest is not None and newest.same_run(attempt) and attempt < newest:
        return Refusal("replay", detail=f"attempt {newest} of the same run came before")
    return None


def is_older_run(state: State, run: Attempt) -> bool:
    """Whether a run (as an attempt of it) was made before the newest that this device has taken up."""
    newest = state.newest
    if not state.strict or newest is None or not run.run or newest.same_run(run):
        return False
    return run.made_ms <= newest.made_ms


def note_newest(state: State, attempt: Attempt) -> State:
    """The state with ``attempt`` as the newest that was ever accepted or declined."""
    return replace(state, newest=attempt) if state.strict else state


def finished(state: State, run: Attempt) -> State:
    """The run never goes on: whatever was offered in it is over."""
    if state.newest is None or not state.newest.same_run(run):
        return state
    return replace(state, closed=newest_closed(state.closed, state.newest))
