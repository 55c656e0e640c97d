"""A step back: the last round is taken back where devices, or the evaluation, cannot calculate with its model. Pure.

Two or more devices whose updates or losses are not finite in one round say more of the model they were offered than of
themselves, and so does an evaluation that lacks figures where the one before had them. The round that made the model is
done again from the state before it, without the device whose change was the longest in it, and no device is blamed.
Once for each round: who breaks again, given another model, is counted as any other. Not in periods, not where late
updates count, and not where the model travels as differences from one that devices would not have any more.
"""

from __future__ import annotations

import msgspec

from coordinator.core.moves import Steps, TakenBack
from coordinator.core.plausibility import longest
from coordinator.core.state import Phase, State, Undo
from edgefl.plan.periods import period_length

replace = msgspec.structs.replace

#: Reasons of a refusal by which a device could not calculate.
BROKEN = frozenset({"not_finite", "range", "diverged"})
#: So many devices in one round.
LEAST = 2


def undo_of(state: State) -> Undo | None:
    """The state before the round that is being closed; None where it cannot be taken back."""
    opened, plan = state.open, state.plan
    packed = any(how != "f32" for _, how in plan.transfer.down)
    if opened is None or state.policy.keeps or packed or period_length(plan, plan.stages[state.stage - 1]) > 1:
        return None
    device = longest(state)
    return Undo(opened.attempt, state.memory, device) if device else None


def broken(state: State) -> tuple[str, ...]:
    """Devices that could not calculate in the open attempt."""
    parts = sorted(state.assignments.items())
    return tuple(name for name, one in parts if one.refusal is not None and one.refusal.reason in BROKEN)


def can_step_back(state: State) -> bool:
    """Whether the last round can be taken back: it was made by this process, and is not one that was done again."""
    return state.undo is not None and (state.stage, state.number) > state.stepped_back


def step_back(steps: Steps, why: str) -> None:
    """Take the last round back and do it again soon, without the device of the longest change."""
    state, undo = steps.state, steps.state.undo
    if undo is None:
        raise ValueError("no round to take back")
    spared = {}
    for name in broken(state):
        one = state.devices[name]
        barred = 0 if one.bad == state.policy.quarantine_after else one.barred  # it was put there just now
        spared[name] = replace(one, bad=max(0, one.bad - 1), barred=barred)
    back = undo.attempt
    steps.do(TakenBack(back))
    text = f"{why}: round {back.round} of stage {back.stage} is taken back and done again without {undo.device}, whose"
    steps.warn(f"{text} change was the longest in it; nobody is blamed for it")
    steps.set(
        stage=back.stage,
        number=back.round,
        attempt=back.attempt,
        tries=0,
        open=None,
        evaluating=None,
        memory=undo.memory,
        undo=None,
        stepped_back=(state.stage, state.number),
        set_aside=(back.stage, back.round, undo.device),
        devices={**state.devices, **spared},
        phase=Phase.RETRYING,
        until=steps.at,
    )
