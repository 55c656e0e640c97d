"""Parts that a device retains between rounds: private parts, personal models, residuals. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from device_agent.core.state import RetainedParts, State
from edgefl.plan.stages import RESIDUAL
from edgefl.records import Attempt, Manifest


def retained_before(state: State, attempt: Attempt) -> list[RetainedParts]:
    """Parts retained of earlier rounds of this run, oldest first; a retried round starts from the same ones."""
    place = (attempt.stage, attempt.round)
    return [k for k in state.retained if k.attempt.same_run(attempt) and (k.attempt.stage, k.attempt.round) < place]


def retained(state: State, attempt: Attempt, manifest: Manifest) -> tuple[RetainedParts, ...]:
    """Parts retained of this round, and of the one before it."""
    before = retained_before(state, attempt)[-1:]
    return (*before, RetainedParts(attempt, manifest)) if manifest or before else ()


def taken_over(kept: tuple[RetainedParts, ...], run: Attempt, earlier_ms: tuple[int, ...]) -> tuple[RetainedParts, ...]:
    """Retained parts of this run, relabelled if from before its restore from a backup. ``run``: any attempt."""
    of_run = [one for one in kept if one.attempt.run == run.run and one.attempt.made_ms in {run.made_ms, *earlier_ms}]
    return tuple(replace(one, attempt=replace(one.attempt, made_ms=run.made_ms)) for one in of_run)


def restore_residuals(state: State, attempt: Attempt) -> State:
    """The state after a refused update, with the residuals of the round before restored."""
    if not state.retained or state.retained[-1].attempt != attempt:
        return state
    *earlier, last = state.retained
    before = earlier[-1].manifest if earlier else {}
    manifest = {part: ref for part, ref in last.manifest.items() if not part.startswith(RESIDUAL)}
    manifest |= {part: ref for part, ref in before.items() if part.startswith(RESIDUAL)}
    return replace(state, retained=(*earlier, replace(last, manifest=manifest)))
