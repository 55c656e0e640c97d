"""Step memory by schedule: what a device holds in its largest stage, and in each of freeze's two phases."""

from __future__ import annotations

from typing import Any

from edgefl.config.profiles import load_run
from edgefl.data.sources import load
from edgefl.models.spec import ModelSpec
from edgefl.plan.compile import compile_run
from edgefl.plan.job import Job, RunPlan, Stage
from edgefl.plan.stages import shallower
from edgefl.plan.training_samples import can_cache, with_cache
from edgefl.pricing.round_price import price_step
from edgefl.registry import method


def step_peaks(values: dict[str, Any]) -> dict[str, float]:
    """What a training step holds, by who trains what: MiB of tensors, of a batch that has every modality."""
    config, recipe = load_run(values, ())
    data = load(values["data"]["source"])
    plan = compile_run(config, recipe, run="memory", shapes=data.signature(), label_names=data.label_names)
    first, *_, last = _stages(plan.model, "freeze")
    return {
        "end-to-end, and the first rounds of freeze": _peak(plan, first),
        "the first rounds of freeze, a device short of the whole: last stage, prefix not stored": _peak(
            plan, shallower(first)[-1], stored=False
        ),
        "freeze and layer-wise, the last stage over its stored prefix": _peak(plan, last),
        "layer-wise, its largest stage": max(_peak(plan, stage) for stage in _stages(plan.model, "layerwise")),
        "progressive, its first stage": _peak(plan, _stages(plan.model, "progressive")[0]),
        "heads, over stored features": _peak(plan, _stages(plan.model, "heads")[0]),
    }


def _stages(model: ModelSpec, schedule: str) -> tuple[Stage, ...]:
    found: tuple[Stage, ...] = method("schedule", schedule).stages(model, [1] * model.stages)
    return found


def _peak(plan: RunPlan, stage: Stage, *, stored: bool = True) -> float:
    job = Job(plan.model, stage, plan.hypers[-1], plan.slots)
    job = with_cache(job, "f16" if stored and can_cache(job) else "")
    return price_step(job, dict.fromkeys(plan.model.encoders, job.hyper.batch_size)).peak / 2**20
