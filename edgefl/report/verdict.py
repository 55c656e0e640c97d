"""Verdict on a plan in one sentence: fitting devices, tightest budget, refusals and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edgefl.budget.fit import DevicePlan, RunPrice, StagePrice
from edgefl.records import GPU, Refusal
from edgefl.report import units
from edgefl.report.folding import listed
from edgefl.report.refusals import REMEDIES, reason

#: Devices that do not fit and are named in the sentence; the table has the others.
_NAMED = 3
#: Reason of a refusal -> the budget of a round; of the others the reason's own words name it.
_OF_A_ROUND = {"flops": "FLOPs a round", "payload": "payload a round", "energy": "energy a round"}


def verdict(price: RunPrice) -> str:
    """Sentence on fitting devices and the limit used most, or on refused ones with numbers and remedy."""
    rows: dict[str, list[DevicePlan]] = {}
    for plan in price.devices:
        rows.setdefault(plan.device, []).append(plan)
    refused = {name: plans for name, plans in rows.items() if any(plan.placement.refusal for plan in plans)}
    if not refused:
        fit = f"{_who(list(rows), len(rows))} every stage{_pieces(price.devices)}"
        return f"{fit}; {_tightest(price.devices)}{_less(price.devices)}."
    named = [_unfit(name, plans) for name, plans in list(refused.items())[:_NAMED]]
    more = [f"{len(refused) - _NAMED} more in the table"] if len(refused) > _NAMED else []
    fitting = [name for name in rows if name not in refused]
    pieces = _pieces(plan for plan in price.devices if plan.device in fitting)
    head = f"{_who(fitting, len(rows))} every stage{pieces}; " if len(rows) > 1 else ""
    first = next(refusal for plan in next(iter(refused.values())) if (refusal := plan.placement.refusal))
    way = remedy(price, first)
    return f"{head}{'; '.join([*named, *more])}{_less(price.devices)}.{f' {way}.' if way else ''}"


def _who(fitting: list[str], of: int) -> str:
    if of == 1:
        return f"{fitting[0]} fits"
    if not fitting:
        return "No device fits"
    return f"{'All' if len(fitting) == of else f'{len(fitting)} of'} {of} devices fit"


def limit_name(limit: Refusal) -> str:
    """Name of a limit: step memory, process memory, payload a round, …"""
    return _OF_A_ROUND.get(limit.reason) or reason(limit).removesuffix(" over budget")


def tightest_limit(limits: Iterable[Refusal]) -> tuple[float, Refusal] | None:
    """(share needed, limit) with the largest share; None without limits."""
    shares = ((share_of(limit), limit) for limit in limits)
    return max(shares, key=lambda pair: pair[0], default=None)


def share_of(limit: Refusal) -> float:
    """Share of a limit that is needed; of a limit of nothing, all or none."""
    needed, allowed = limit.needed or 0.0, limit.allowed or 0.0
    return needed / allowed if allowed else float(needed > 0)


def percent(share: float) -> str:
    """13 %; of less than half a percent "under 1 %"."""
    return f"{100 * share:.0f} %" if share >= 0.005 else "under 1 %"


def _tightest(plans: Iterable[DevicePlan]) -> str:
    found = [(*used, plan) for plan in plans if (used := tightest_limit(plan.limits))]
    if not found:
        return "none has a budget that could be short"
    share, limit, plan = max(found, key=lambda one: one[0])
    needed, allowed = (units.quantity(value, limit.unit) for value in (limit.needed, limit.allowed))
    stage = plan.placement.stage.index
    numbers = f"{needed} of {allowed}, stage {stage}"
    return f"the tightest is {plan.device}, at {percent(share)} of its {limit_name(limit)} ({numbers})"


def _pieces(plans: Iterable[DevicePlan]) -> str:
    """Clause on devices that fit only with micro-batches, checkpointing or the low-memory optimiser; "" for none."""
    hypers = [(plan.device, plan.placement.hyper) for plan in plans]
    names = list(dict.fromkeys(name for name, h in hypers if h.micro_batch or h.checkpoint or h.low_memory))
    return f", {listed(names)} in smaller steps" if names else ""


def _less(plans: Iterable[DevicePlan]) -> str:
    """Clauses on devices of less depth or rank than scheduled; "" for none."""
    shallow, narrow = dict[str, None](), dict[str, None]()
    for plan in plans:
        if plan.left_out:
            shallow[plan.device] = None
        if 0 < plan.placement.rank < plan.whole_rank:
            narrow[plan.device] = None
    clauses = (
        (shallow, "fewer encoder stages than the schedule asks for"),
        (narrow, "low-rank terms of a smaller rank"),
    )
    return "".join(f"; {_train(list(names))} {what}" for names, what in clauses if names)


def _train(names: list[str]) -> str:
    who = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return f"{who} {'trains' if len(names) == 1 else 'train'}"


def _unfit(name: str, plans: list[DevicePlan]) -> str:
    out = [plan for plan in plans if plan.placement.refusal]
    stages = [plan.placement.stage.index for plan in plans if not plan.placement.refusal]
    fits = f"fits stage{'s' * (len(stages) > 1)} {units.spans(stages)} only" if stages else "fits no stage"
    return f"{name} {fits}: stage {out[0].placement.stage.index} {refusal_words(out[0].placement.refusal)}"


def refusal_words(refusal: Refusal | None) -> str:
    """ "needs 412 MiB of step memory, allowed 256 MiB"; without numbers the reason with its detail."""
    if refusal is None:
        return ""
    if refusal.needed is None or refusal.allowed is None:
        return f"is refused: {reason(refusal)}" + f" ({refusal.detail})" * bool(refusal.detail)
    needed, allowed = (units.quantity(value, refusal.unit) for value in (refusal.needed, refusal.allowed))
    if refusal.unit == "samples":
        return f"needs {needed} for one batch, has {allowed}"
    return f"needs {needed} of {limit_name(refusal)}, allowed {allowed}"


def remedy(price: RunPrice, refusal: Refusal) -> str:
    """Remedy of a refusal: the most demanding schedule within the limit, else general advice."""
    on_card = refusal.where == GPU
    base = 0 if on_card else price.trainer_base_bytes

    def step(stage: StagePrice) -> float:
        return stage.step_peak_bytes + (0 if on_card else stage.libraries_bytes)

    needs: dict[str, Callable[[StagePrice], float]] = {
        "step_memory": step,
        "memory": lambda stage: base + step(stage),
        "payload": lambda stage: max(stage.whole_bytes, stage.payload_down_bytes + stage.payload_up_bytes),
        "flops": lambda stage: stage.flops_per_round,
    }
    need = needs.get(refusal.reason)
    if need is not None and refusal.allowed is not None:
        most: dict[str, float] = {}
        for stage in price.schedules:
            if stage.schedule != price.schedule and stage.batch_size == price.batch_size and stage.rounds:
                most[stage.schedule] = max(most.get(stage.schedule, 0.0), need(stage))
        fitting = {name: value for name, value in most.items() if value <= refusal.allowed}
        if fitting:
            name = max(fitting, key=lambda one: fitting[one])
            about = units.quantity(fitting[name], refusal.unit)
            return f"The schedule {name} needs about {about}: --set slots.schedule={name}"
    return REMEDIES.get(refusal.reason, "")
