"""A simulated fleet's devices that introduce themselves when they are asked first. Pure.

The coordinator knows their names, and of each the kind: devices of one kind have the same profile and as many samples,
so that the planner refuses all of them or none. The first device of each kind introduces itself before the first
round. A round draws from all names whose kind can train; devices that it draws and has not met are called, introduce
themselves and are planned before it opens. So a round's work grows with the devices that were asked, not the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.core.moves import Present, SendWelcome, Steps
from coordinator.core.state import Crowd, Phase, State
from edgefl.data.arrays import Indices
from edgefl.models.spec import unscaled
from edgefl.plan.job import RunPlan
from edgefl.plan.periods import period_length
from edgefl.plan.preparation import preparation_of
from edgefl.registry import choose
from edgefl.run_records import OPEN
from edgefl.sequences import SortedNames


def meets_all(plan: RunPlan) -> bool:
    """True if a run needs to know every device before its first round, and so cannot have a crowd.

    For a selection by more than names, asynchronous rounds, statistics or signatures of all data, data that are read as
    the run says, and repairs that look at the devices' samples or go on from their own parts.
    """
    repair, preparation = choose("repair", plan.server), preparation_of(plan)
    blind = choose("select", plan.server).method.blind
    periods = any(period_length(plan, stage) > 1 for stage in plan.stages)
    looks = repair.method.unlikely is not None or periods
    return not blind or plan.policy.mode == "async" or bool(preparation.id or unscaled(plan.model)) or looks


def crowd_of(plan: RunPlan, names: Sequence[str], kinds: Indices) -> Crowd:
    """The devices that take part. ``names``: sorted; ``kinds``: of each."""
    if plan.policy.eligible or plan.policy.excluded:
        taken = [place for place, name in enumerate(names) if plan.takes(name)]
        names, kinds = [names[place] for place in taken], kinds[taken]
    firsts = np.unique(kinds, return_index=True)[1].tolist()
    return Crowd(names, kinds.tolist(), tuple(names[place] for place in firsts))


def lacks_firsts(state: State) -> bool:
    """True until the first device of each kind has introduced itself."""
    firsts = state.crowd.firsts if state.crowd is not None else ()
    return any(name not in state.devices and name not in state.gone for name in firsts)


def sort_out(steps: Steps) -> None:
    """Once a stage, by what the planner said of each kind's first device: the names of those that can train."""
    state, crowd = steps.state, steps.state.crowd
    if crowd is None or state.sorted_stage == state.stage:
        return
    known = [state.devices.get(name) for name in crowd.firsts]
    fit = np.array([device is None or device.refusal is None for device in known])
    if fit.all():
        names = crowd.names
    else:
        able = fit[np.unique(crowd.kinds, return_inverse=True)[1]]
        names = [crowd.names[place] for place in np.flatnonzero(able).tolist()]
    steps.set(able=names, sorted_stage=state.stage)


def free_in(state: State) -> SortedNames:
    """Devices of a crowd free for an offer, by name."""
    busy = [
        name
        for name, device in state.devices.items()
        if device.refusal is not None or device.barred or device.out or name in state.stragglers
    ]
    return SortedNames(state.able, [*busy, *state.gone])


def call_absent(steps: Steps, names: Sequence[str]) -> bool:
    """Call those of the chosen devices that are not online and planned; True if there are any."""
    devices = steps.state.devices
    if steps.state.crowd is None:
        return False
    absent = [name for name in names if (one := devices.get(name)) is None or not one.online or one.placement is None]
    if absent:
        steps.set(phase=Phase.PLANNING, called=frozenset(absent))
        steps.do(*map(SendWelcome, absent))
    return bool(absent)


def call_at_work(steps: Steps) -> None:
    """Call the devices of a run that goes on with an open attempt: those of a crowd do not come by themselves."""
    state = steps.state
    if state.crowd is not None:
        at_work = [name for name, one in state.assignments.items() if one.status in OPEN]
        steps.do(*map(SendWelcome, {*at_work, *state.stragglers}))


def came(steps: Steps, name: str) -> bool:
    """Note that a called device has introduced itself, or has ended; True if it was the last one."""
    called = steps.state.called
    if name in called:
        steps.set(called=called - {name})
    return name in called and len(called) == 1 and steps.state.phase is Phase.PLANNING


def note_present(steps: Steps, event: Present) -> None:
    """Note which devices of a crowd can be called now."""
    steps.set(gone=(steps.state.gone | event.left) - event.came)


def end(steps: Steps, name: str) -> None:
    """Note that a device of a crowd has ended: it cannot be called any more."""
    if steps.state.crowd is not None:
        steps.set(gone=steps.state.gone | {name})
