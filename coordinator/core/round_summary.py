"""Summary of a closed round, for the ledger and its event. Pure."""

from __future__ import annotations

from coordinator.core.round import aggregated_updates
from coordinator.core.state import State
from coordinator.core.stragglers import staleness
from edgefl.records import EvaluationRow


def metric_means(state: State) -> dict[str, float]:
    """Means of the devices' metrics, weighted by samples."""
    sums: dict[str, tuple[float, float]] = {}
    for update in aggregated_updates(state):
        weight = float(max(update.samples.values(), default=0))
        for metric, value in update.metrics.items():
            total, weights = sums.get(metric, (0.0, 0.0))
            sums[metric] = (total + weight * value, weights + weight)
    return {metric: total / weights for metric, (total, weights) in sorted(sums.items()) if weights > 0}


def summary(state: State, at: float) -> dict[str, object]:
    """Data of the event of a closed round."""
    opened, updates = state.open, aggregated_updates(state)
    assignments = opened.assignments if opened is not None else {}
    parts = [*assignments.values(), *(state.buffered[key] for key in state.aggregating)]
    names = ("payload_up_bytes", "payload_down_bytes")
    figures = [part.measured[name] for part in parts for name in names if name in part.measured]
    found: dict[str, object] = {
        "participants": sorted({update.device for update in updates}),
        "late": sorted(name for name, a in assignments.items() if a.status == "late"),
        "lost": sorted(name for name, a in assignments.items() if a.status == "lost"),
        "loss": metric_means(state).get("loss"),
        "seconds": at - opened.opened_at if opened is not None else None,
        "payload_bytes": sum((figure.value or 0.0 for figure in figures), 0.0),
    }
    if state.policy.keeps:
        found["updates"] = len(updates)
        found["behind"] = sorted(state.stragglers)
        found["staleness"] = {u.device: late for u in updates if (late := staleness(state, u.attempt))}
    return found


def not_finite(rows: list[EvaluationRow]) -> str:
    """The warning about figures of an evaluation that are not finite numbers."""
    names = sorted({f"{row.metric} with {'+'.join(row.available)}" for row in rows})
    text = f"the evaluation has no figure for {len(rows)} of its rows: {', '.join(names[:3])}"
    return f"{text}{', …' if len(names) > 3 else ''} is not a finite number; the model has diverged"
