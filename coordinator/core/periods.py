"""Periods of rounds in which devices go on from their own parts: members and exchanged layers. Pure.

``edgefl.plan.periods`` says what a period is. Its devices are those whose updates of the round before count; who was
late, lost or declined, and who joined meanwhile, waits for the next period.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coordinator.core.state import State
from edgefl.aggregation.history import Track
from edgefl.plan.job import PeriodRound, RunPlan
from edgefl.plan.periods import ends, period_length
from edgefl.registry import Member, choose


def makes_model(plan: RunPlan, stage: int, number: int) -> bool:
    """True if the round ends in a whole exchange, and so in a new global model."""
    one = plan.stages[stage - 1]
    return ends(number, one.rounds, period_length(plan, one))


def missing(state: State, present: Collection[str]) -> int:
    """Number of the period's eligible devices not in ``present``."""
    began = [state.devices[name] for name in state.period_devices if name not in present]
    return sum(device.eligible and not device.barred and not device.out for device in began)


def continuing(state: State, able: Sequence[str]) -> list[str]:
    """Members of the period among ``able``; none without a quorum, or at a period's begin."""
    members = [name for name in able if name in state.memory.period] if state.memory.period else []
    return members if len(members) >= state.policy.share(len(members) + missing(state, members)) else []


def period_rounds(state: State, names: Sequence[str], *, resumes: bool) -> dict[str, PeriodRound]:
    """Device -> its round of the period; empty where the recipe has no periods."""
    if period_length(state.plan, state.plan.stages[state.stage - 1]) == 1:
        return {}
    whole = makes_model(state.plan, state.stage, state.number)
    if whole:
        return {name: PeriodRound(resumes, whole) for name in names}
    repair, tracks = choose("repair", state.plan.server), state.memory.devices
    among = state.memory.period if resumes else names  # also who is absent now: each attempt asks for the same
    first = state.number == 1  # later a cluster without a poverty layer needs none
    members = {
        name: Member(
            *(track.cluster, track.layer, track.change),
            device.placement.stage.trained,
            device.placement.layer if first else "",
        )
        for name, device in state.devices.items()
        for track in [tracks.get(name, Track())]
        if name in among and device.placement is not None
    }
    asked = repair.bind(repair.method.ask)(members)
    return {name: PeriodRound(resumes, whole, asked.get(name, ())) for name in names}
