"""Privacy account of a run before it starts: epsilon of its rounds, and uncovered settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from edgefl.errors import Problem
from edgefl.models.spec import ModelSpec, unscaled
from edgefl.plan.job import RoundPolicy, RunPlan
from edgefl.registry import Recipe, choose

if TYPE_CHECKING:
    from edgefl.config.settings import RunConfig

#: Fields of ``round`` by which a device's change is compared with the others', so that one moves what another counts.
_COMPARING = ("clip_change", "largest_change")


class Spending(NamedTuple):
    """Epsilon of the ``rounds`` within the budget, of ``planned`` ones.

    ``noise``: standard deviation on each weight, relative to the clipping norm of a device's change.
    """

    epsilon: float
    delta: float
    rounds: int
    planned: int
    noise: float


def planned_rounds(plan: RunPlan) -> int:
    """Rounds of all stages."""
    return sum(stage.rounds for stage in plan.stages)


def spending(plan: RunPlan) -> Spending | None:
    """Privacy account of the plan's rounds, up to its budget; None without differential privacy."""
    combine, planned = choose("combine", plan.server), planned_rounds(plan)
    if combine.method.account is None or not planned:
        return None
    account, rounds = combine.bind(combine.method.account), 1
    last = account(0.0, planned)
    while rounds < planned and not last.over:
        last, rounds = account(last.spent, planned), rounds + 1
    noise = combine.bind(combine.method.noise)(plan.policy.devices, planned)
    return Spending(last.record["epsilon"], last.record["delta"], rounds, planned, noise.deviation / noise.longest)


def is_private(slots: Recipe) -> bool:
    """True for a run with differential privacy."""
    return choose("combine", slots).method.account is not None


def uncovered(config: RunConfig, slots: Recipe, model: ModelSpec) -> list[Problem]:
    """Settings that send data beyond a private run's account."""
    if not is_private(slots):
        return []
    why = f"combine: {choose('combine', slots).name} accounts for the devices' changes alone"
    found = [
        Problem(f"model.encoders.{m}.standardize", f"is fleet, of statistics of the devices' data, and {why}; set none")
        for m in unscaled(model)
    ]
    if model.head.kind != "none" and model.head.norm == "batch":
        text = f"is batch, whose statistics are of the devices' data, and {why}; set layer"
        found.append(Problem("model.head.norm", text))
    for field in _COMPARING:
        if getattr(config.round, field) not in {0.0, getattr(RoundPolicy(), field)}:
            text = "compares a device's change with the others', so that one changes what another counts, and"
            found.append(Problem(f"round.{field}", f"{text} {why}; leave it out: it is 0 then"))
    return found


def uncompared(slots: Recipe) -> dict[str, float]:
    """Round policy fields fixed by differential privacy, all 0; {} without it."""
    return dict.fromkeys(_COMPARING, 0.0) if is_private(slots) else {}
