"""Warnings of valid settings that are unlikely to be meant: given before a run, at its start and on its report."""

from __future__ import annotations

from collections.abc import Sequence

from edgefl.models.spec import ModelSpec, is_encoder, modality_of
from edgefl.plan.job import RunPlan, Stage


def warnings_of(plan: RunPlan) -> tuple[str, ...]:
    """A sentence each, with the way out."""
    names = random_and_frozen(plan.model, plan.stages)
    if not names:
        return ()
    fields = ", ".join(f"model.encoders.{m}.pretrained" for m in names)
    why = f"recipe {plan.recipe} never trains encoders, and these start from random weights: {', '.join(names)}"
    return (f"{why}; name a checkpoint in {fields}, or set slots.schedule to one that trains them, such as end_to_end",)


def random_and_frozen(model: ModelSpec, stages: Sequence[Stage]) -> list[str]:
    """The modalities whose encoder has no checkpoint to start from and is trained in no stage that has rounds."""
    trained = {modality_of(part) for stage in stages if stage.rounds for part in stage.trained if is_encoder(part)}
    if None in trained:  # the attention that all encoders share
        return []
    return [m for m, encoder in model.encoders.items() if not encoder.pretrained and m not in trained]
