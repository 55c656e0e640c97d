"""The beginning of a run, or of another process of it: damaged rounds, and the event that says what begins."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.core.moves import EmitEvent
from coordinator.ledger.ledger import Ledger
from coordinator.runtime.update_norms import ruined
from edgefl.plan.compile import moving
from edgefl.plan.job import RunPlan
from edgefl.records import Attempt, Manifest
from edgefl.report.units import public_url
from edgefl.storage.objects import ObjectStore


def take_back_if_ruined(ledger: Ledger, store: ObjectStore, attempt: Attempt) -> str:
    """Take back a round whose state the run does not evaluate or continue from. Returns the reason, else "".

    Versions that did not check a state before they committed it have left runs so.
    """
    states = ledger.states(attempt.run)
    why = ruined(store, states.pop((attempt.stage, attempt.round)))
    before = states[max(states)]
    if not why or not all(store.has(ref.id) for ref in before.values()):
        return ""
    ledger.take_back(attempt.run, attempt)
    return f"round {attempt.round} of stage {attempt.stage} is taken back and done again: of its model, {why}"


def run_started(plan: RunPlan, manifest: Manifest, broker: str, facts: Mapping[str, object]) -> EmitEvent:
    """The event ``run_started``. ``facts``: of the connection to the broker."""
    rounds = [stage.rounds for stage in plan.stages]
    data = {
        "name": plan.name,
        "recipe": plan.recipe,
        "stages": len(rounds),
        "rounds_total": sum(rounds),
        "broker": public_url(broker),
        **facts,
        "parts": len(manifest),
        "bytes": sum(ref.size for ref in manifest.values()),
        **({"statistics": moving(plan)} if plan.slots.statistics else {}),
    }
    return EmitEvent("run_started", data=data)
