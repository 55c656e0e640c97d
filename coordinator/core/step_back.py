"""Step back from a model with non-finite results on devices or in the evaluation. Pure.

An evaluation that lacks figures where the one before had them: its round is done again, as another attempt. Most of the
devices of a round, two at least, whose losses or updates are not finite: the round before counts as if it had changed
nothing, and this one is tried again from there. Either way without the device whose change was the longest in what is
taken back, and no device is blamed. Once for each round: who breaks again, given another model, is counted as any
other. Not in periods, not where late updates count, not where the model travels as differences from one that
devices would not have any more, and not where a round's privacy is spent once devices have its model.
"""

from __future__ import annotations

import msgspec

from coordinator.core.moves import Steps, TakenBack
from coordinator.core.outliers import longest
from coordinator.core.state import Phase, State, Undo
from edgefl.plan.periods import period_length
from edgefl.plan.privacy import is_private

replace = msgspec.structs.replace

#: Reasons of a refusal by which a device could not calculate.
BROKEN = frozenset({"not_finite", "range", "diverged"})
#: So many devices in one round, and more than half of those that answered.
LEAST = 2


def undo_of(state: State) -> Undo | None:
    """Data to withdraw the round being closed; None if it cannot be withdrawn."""
    opened, plan = state.open, state.plan
    packed = any(how != "f32" for _, how in plan.transfer.down)
    in_periods = period_length(plan, plan.stages[state.stage - 1]) > 1
    if opened is None or state.policy.keeps or packed or in_periods or is_private(plan.server):
        return None
    device = longest(state)
    return Undo(opened.attempt, state.memory, device) if device else None


def broken(state: State) -> tuple[str, ...]:
    """Devices with non-finite losses or updates in the open attempt, if the majority; else none."""
    parts = sorted(state.assignments.items())
    names = [name for name, one in parts if one.refusal is not None and one.refusal.reason in BROKEN]
    answered = len(names) + sum(one.status == "done" for _, one in parts)
    return tuple(names) if len(names) >= LEAST and 2 * len(names) > answered else ()


def can_step_back(state: State) -> bool:
    """True if a closed round can be withdrawn, and none was in this round yet."""
    return state.undo is not None and (state.stage, state.number) > state.stepped_back


def step_back(steps: Steps, why: str, *, again: bool) -> None:
    """Withdraw the last closed round. ``again``: repeat it; else retry the open one from the state before."""
    state, undo = steps.state, steps.state.undo
    if undo is None:
        raise ValueError("no round to take back")
    back = undo.attempt
    steps.do(TakenBack(back, again))
    how = "done again" if again else "left out, and this one is tried"
    text = f"{why}: round {back.round} of stage {back.stage} is taken back and {how} without {undo.device}"
    steps.warn(f"{text}, whose change was the longest in it; no device is blamed")
    _spare(steps)
    stage, number = (back.stage, back.round) if again else (state.stage, state.number)
    steps.set(
        stage=stage,
        number=number,
        attempt=back.attempt if again else state.attempt,
        open=None,
        evaluating=None,
        memory=undo.memory,
        undo=None,
        stepped_back=(state.stage, state.number),
        set_aside=(stage, number, undo.device),
        phase=Phase.RETRYING,
        until=steps.at,
    )


def _spare(steps: Steps) -> None:
    """Uncount rejections of the open attempt for the ``broken`` devices; lift their quarantine."""
    state = steps.state
    for name in broken(state):
        device = state.devices[name]
        if state.assignments[name].status != "rejected":
            continue
        lifted = device.bad == state.policy.quarantine_after and device.barred != 0
        steps.set_device(name, bad=max(0, device.bad - 1), barred=0 if lifted else device.barred)
        if lifted:
            steps.emit("readmitted", name)
