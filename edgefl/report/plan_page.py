"""A plan as an HTML page: the verdict, each device's memory against its budget, and all tables of ``edgefl plan``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from edgefl.budget.fit import DevicePlan, RunPrice
from edgefl.records import HOST, Refusal
from edgefl.report import units
from edgefl.report.budget_plots import against_budgets
from edgefl.report.charts import Chart
from edgefl.report.pages import page
from edgefl.report.price_tables import price_grids
from edgefl.report.verdict import percent, share_of, verdict


def to_html(price: RunPrice, assumptions: Sequence[str] = ()) -> str:
    """The page, without scripts. ``assumptions``: sentences on what the run file leaves out."""
    chart, tables = memory(price), price_grids(price, details=False)
    return page(
        "brief.html.j2",
        [chart] if chart else [],
        title=f"{price.name} · EdgeFL plan",
        facts=[
            *(price.name, f"recipe {price.recipe}", f"schedule {price.schedule}"),
            *(f"model {units.mib(price.model_bytes)}", "predicted: nothing was run"),
        ],
        headline=verdict(price),
        remarks=[*assumptions, *(f"Warning: {text}" for text in price.warnings)],
        tables=tables,
        details=price_grids(price)[len(tables) :],
    )


def memory(price: RunPrice) -> Chart | None:
    """Chart of each device's largest step memory beside its budget, also of devices refused for memory."""
    known: dict[str, dict[str, float]] = {}
    of_process: dict[str, Refusal] = {}
    for plan in price.devices:
        here = known.setdefault(plan.device, {})
        for needed, allowed in _step_memory(plan, price.trainer_base_bytes):
            here["predicted"] = max(needed / units.MIB, here.get("predicted", 0.0))
            if allowed is not None:
                here["budget"] = min(allowed / units.MIB, here.get("budget", math.inf))
        for limit in filter(_of_process, plan.limits):
            of_process[plan.device] = max(limit, of_process.get(plan.device, limit), key=share_of)
    shown = {name: found for name, found in known.items() if found.get("predicted")}
    if not shown:
        return None
    caption = (
        "The largest step of any stage, predicted (circle), beside what the device may use (stroke); a budget of the "
        "whole process is shown without the idle trainer; its share is of the whole."
    )
    if left := [name for name in known if name not in shown]:
        caption += f" Refused for another reason than memory: {len(left)}, see the table."
    base = price.trainer_base_bytes
    words = {
        name: f"{percent(share_of(limit))} of process memory ({_numbers(limit)})"
        for name, limit in of_process.items()
        if name in shown and shown[name]["budget"] == max((limit.allowed or 0.0) - base, 1.0) / units.MIB
    }
    return against_budgets(shown, caption, words)


def _step_memory(plan: DevicePlan, base: int) -> Iterator[tuple[float, float | None]]:
    """(needed, allowed or None) bytes of step memory by each memory budget; process budgets less ``base``."""
    refusal = plan.placement.refusal
    if refusal is None:
        yield plan.placement.cost.step_peak_bytes, None
    for limit in plan.limits if refusal is None else (refusal,):
        if limit.reason in {"step_memory", "memory"} and limit.where != HOST and limit.needed and limit.allowed:
            besides = base if _of_process(limit) else 0
            yield limit.needed - besides, max(limit.allowed - besides, 1.0)


def _numbers(limit: Refusal) -> str:
    needed, allowed = (units.mib(value) for value in (limit.needed, limit.allowed))
    return f"{needed.partition(' ')[0]} of {allowed}"


def _of_process(limit: Refusal) -> bool:
    return limit.reason == "memory" and not limit.where
