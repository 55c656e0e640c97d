"""The account of a private run before it starts: what its rounds cost, and what it would not cover."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from edgefl.errors import Problem
from edgefl.models.declared import statistics_of
from edgefl.models.spec import ModelSpec, unscaled
from edgefl.plan.job import RoundPolicy, RunPlan
from edgefl.registry import Recipe, choose

if TYPE_CHECKING:
    from edgefl.config.settings import RunConfig

#: Fields of ``round`` by which a device's change is compared with the others', so that one moves what another counts.
_COMPARING = ("clip_change", "largest_change")


class Spending(NamedTuple):
    """Epsilon of the ``rounds`` that take place, of ``planned`` ones.

    ``noise``: on each weight, its standard deviation by the most that a device's change may measure. ``server``:
    epsilon towards the server of a device that sends an update in each of them; 0: it is trusted.
    """

    epsilon: float
    delta: float
    rounds: int
    planned: int
    noise: float
    server: float = 0.0


def planned_rounds(plan: RunPlan) -> int:
    """Rounds of all stages."""
    return sum(stage.rounds for stage in plan.stages)


def spending(plan: RunPlan) -> Spending | None:
    """Privacy account of the plan's rounds, up to its budget; None without differential privacy."""
    planned = planned_rounds(plan)
    if not is_private(plan.server) or not planned:
        return None
    combine = choose("combine", resolved(plan.server, plan.policy.devices, planned))
    account, rounds = combine.bind(combine.method.account), 1
    last = account(0.0, 1)
    while rounds < planned and not last.over:
        rounds += 1
        last = account(last.spent, rounds)
    noise, told = combine.bind(combine.method.noise)(), last.record
    ratio, towards = noise.deviation / noise.longest, told.get("server", 0.0)
    return Spending(told["epsilon"], told["delta"], rounds, planned, ratio, towards)


def resolved(slots: Recipe, devices: int, rounds: int) -> Recipe:
    """The slots as a run of so many rounds with so many devices has them."""
    combine = choose("combine", slots)
    resolve = combine.method.resolve
    return slots if resolve is None else {**slots, **combine.bind(resolve)(devices, rounds)}


def with_upload(plan: RunPlan) -> RunPlan:
    """The plan whose devices upload as its account has them."""
    if not (planned := planned_rounds(plan)):
        return plan
    made = resolved({**plan.server, "upload": plan.slots.upload}, plan.policy.devices, planned)
    upload = {name: dict(options) for name, options in made["upload"].items()}
    return msgspec.structs.replace(plan, slots=msgspec.structs.replace(plan.slots, upload=upload))


def is_private(slots: Recipe) -> bool:
    """True for a run with differential privacy."""
    return choose("combine", slots).method.account is not None


def uncovered(config: RunConfig, slots: Recipe, model: ModelSpec) -> list[Problem]:
    """Settings by which more leaves the devices than the account of a private run covers."""
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
    if model.declared and (name := statistics_of(model.declared)):
        text = f"has {name}, statistics of the devices' data, and {why}; use layer or group norm"
        found.append(Problem("model.own", text))
    for field in _COMPARING:
        if getattr(config.round, field) not in {0.0, getattr(RoundPolicy(), field)}:
            text = "compares a device's change with the others', so that one changes what another counts, and"
            found.append(Problem(f"round.{field}", f"{text} {why}; leave it out: it is 0 then"))
    up = config.transfer.up
    packed = set(up.values() if isinstance(up, Mapping) else [up]) - {"f32"}
    if packed and resolved(slots, 1, 1)["upload"] != slots["upload"]:
        text = f"is {min(packed)}, and noise that devices add is known to add up only where it arrives as it was"
        found.append(Problem("transfer.up", f"{text}; set f32, or let the server add it"))
    return found


def uncompared(slots: Recipe) -> dict[str, float]:
    """The fields of a run's policy that its account of privacy sets."""
    return dict.fromkeys(_COMPARING, 0.0) if is_private(slots) else {}
