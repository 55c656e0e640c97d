"""Stages of a schedule: their encoder stages, shallower variants for smaller devices, and the closing round.

No schedule trains ``match/<m>``: the closing round fits them to the finished model, on every eligible device (PmcmFL,
arXiv 2312.13508, appendix D). It is a stage of its own with one round (docs/decisions/0031).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgefl.models.spec import (
    ModelSpec,
    is_encoder,
    is_matcher,
    match_parts,
    modality_of,
    part_names,
)
from edgefl.plan.job import Stage


def with_closing(spec: ModelSpec, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages, and after them the closing round where the model has networks that match."""
    if spec.matching == "none" or any(is_closing(stage) for stage in stages):
        return tuple(stages)
    names, index = tuple(part_names(spec)), max(stage.index for stage in stages) + 1
    return (*stages, Stage(index, spec.stages, 1, present=names, trained=tuple(match_parts(spec))))


def is_closing(stage: Stage) -> bool:
    """Whether the stage is the closing round, in which only networks that match are trained."""
    return bool(stage.trained) and all(is_matcher(part) for part in stage.trained)


def encoder_stage(part: str) -> int | None:
    """Number of the encoder stage a part is, 0 for an embedding, None for anything else."""
    if not is_encoder(part):  # what follows head/ is a modality's name, which may be "embed"
        return None
    name = part.rpartition("/")[2]
    if name == "embed":
        return 0
    return int(name[5:]) if name.startswith("stage") and name[5:].isdigit() else None


def stage_before(stages: Sequence[Stage], stage: Stage) -> Stage | None:
    """The last stage with rounds before ``stage``."""
    return next((s for s in reversed(stages) if s.index < stage.index and s.rounds), None)


def trained_stages(stage: Stage) -> list[int]:
    """Numbers of the encoder stages that are trained, ascending; 0: the embeddings."""
    return sorted({n for part in stage.trained if (n := encoder_stage(part)) is not None})


def shallower(stage: Stage) -> list[Stage]:
    """The stage with ever fewer encoder stages trained: what a smaller device can do instead.

    Where the stage has a fallback depth, the encoder stages beyond it are given up first, and do not exist then; after
    that the deepest are kept. The first entry is the stage itself; the last trains one encoder stage with heads, norms,
    fusion and task.
    """
    if 0 < stage.fallback_depth < stage.depth:
        return [stage, *shallower(_cut(stage))]
    variants = [stage]
    for lowest in trained_stages(stage)[1:]:
        kept = tuple(part for part in stage.trained if (n := encoder_stage(part)) is None or n >= lowest)
        variants.append(msgspec.structs.replace(stage, trained=kept))
    return variants


def _cut(stage: Stage) -> Stage:
    """The stage at its fallback depth."""
    depth = stage.fallback_depth

    def keep(part: str) -> bool:
        return (encoder_stage(part) or 0) <= depth

    present, trained = (tuple(filter(keep, parts)) for parts in (stage.present, stage.trained))
    return msgspec.structs.replace(stage, depth=depth, fallback_depth=0, present=present, trained=trained)


def restrict(stage: Stage, modalities: Sequence[str]) -> Stage:
    """The stage without the parts of modalities a device has no data of.

    ``reconstruct/<m>`` of such a modality stays present, since it makes what the device lacks, but is not trained:
    there is nothing to compare with.
    """

    def keep(part: str) -> bool:
        owner = modality_of(part)
        return owner is None or owner in modalities

    def need(part: str) -> bool:
        return keep(part) or part.startswith("reconstruct/")

    return msgspec.structs.replace(
        stage, present=tuple(filter(need, stage.present)), trained=tuple(filter(keep, stage.trained))
    )
