"""What a device keeps of its rounds for the next ones. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from device_agent.core.state import Kept, State
from edgefl.plan.exchange import RESIDUAL
from edgefl.records import Attempt, Manifest


def kept_before(state: State, attempt: Attempt) -> list[Kept]:
    """What earlier rounds of this run left here, oldest first: a round that is tried again starts where it did."""
    place = (attempt.stage, attempt.round)
    return [k for k in state.kept if k.attempt.same_run(attempt) and (k.attempt.stage, k.attempt.round) < place]


def keeping(state: State, attempt: Attempt, manifest: Manifest) -> tuple[Kept, ...]:
    """What stays here of this round, and of the one before it."""
    before = kept_before(state, attempt)[-1:]
    return (*before, Kept(attempt, manifest)) if manifest or before else ()


def not_taken(state: State, attempt: Attempt) -> State:
    """Nobody has what this round sent: what earlier rounds had left out is still to be sent."""
    if not state.kept or state.kept[-1].attempt != attempt:
        return state
    *earlier, last = state.kept
    before = earlier[-1].manifest if earlier else {}
    manifest = {part: ref for part, ref in last.manifest.items() if not part.startswith(RESIDUAL)}
    manifest |= {part: ref for part, ref in before.items() if part.startswith(RESIDUAL)}
    return replace(state, kept=(*earlier, replace(last, manifest=manifest)))
