"""What a device keeps of its rounds for the next ones. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from device_agent.core.state import RetainedParts, State
from edgefl.plan.exchange import RESIDUAL
from edgefl.records import Attempt, Manifest


def retained_before(state: State, attempt: Attempt) -> list[RetainedParts]:
    """What earlier rounds of this run left here, oldest first: a round that is tried again starts where it did."""
    place = (attempt.stage, attempt.round)
    return [k for k in state.retained if k.attempt.same_run(attempt) and (k.attempt.stage, k.attempt.round) < place]


def retained(state: State, attempt: Attempt, manifest: Manifest) -> tuple[RetainedParts, ...]:
    """What stays here of this round, and of the one before it."""
    before = retained_before(state, attempt)[-1:]
    return (*before, RetainedParts(attempt, manifest)) if manifest or before else ()


def restore_residuals(state: State, attempt: Attempt) -> State:
    """Nobody has what this round sent: what earlier rounds had left out is still to be sent."""
    if not state.retained or state.retained[-1].attempt != attempt:
        return state
    *earlier, last = state.retained
    before = earlier[-1].manifest if earlier else {}
    manifest = {part: ref for part, ref in last.manifest.items() if not part.startswith(RESIDUAL)}
    manifest |= {part: ref for part, ref in before.items() if part.startswith(RESIDUAL)}
    return replace(state, retained=(*earlier, replace(last, manifest=manifest)))
