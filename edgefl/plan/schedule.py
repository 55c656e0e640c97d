"""Schedules: which parts exist and are trained in each stage (LW-FedMML, Prog-FedMML; arXiv 2407.15426).

end_to_end:  one stage, everything exists and is trained.
progressive: stage s has encoder stages 1..s; everything present is trained.
layerwise:   stage s has encoder stages 1..s; stage s, the heads and the final norms are trained (and the embeddings, in
             the first stage that has rounds, when nothing pretrained them).
heads:       one stage at full depth; the encoders are frozen, heads, fusion and task are trained.
mixed:       in every stage everything exists and is trained by the devices that can; in stage s the others train as in
             progressive, or as much of that as they can, down to layerwise.

No schedule trains ``match/<m>``: the closing round fits them to the finished model, on every eligible device (PmcmFL,
arXiv 2312.13508, appendix D). It is a stage of its own with one round (docs/decisions/0031).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from edgefl.errors import ModelError
from edgefl.models.spec import (
    ModelSpec,
    is_encoder,
    is_matcher,
    match_parts,
    modality_of,
    part_names,
    reconstruct_parts,
    shared_parts,
)
from edgefl.plan.job import ScheduleName, Stage

Embed = Literal["auto", "first_stage", "frozen"]


def end_to_end(spec: ModelSpec, rounds: Sequence[int], embed: Embed = "auto") -> tuple[Stage, ...]:
    """One stage with all the rounds. ``embed`` has no effect."""
    names = _fitted(spec, part_names(spec))
    return (Stage(index=1, depth=spec.stages, rounds=sum(rounds), present=names, trained=names),)


def progressive(spec: ModelSpec, rounds: Sequence[int], embed: Embed = "auto") -> tuple[Stage, ...]:
    """Stage s trains everything through encoder stage s. ``embed`` has no effect."""
    names = [_fitted(spec, part_names(spec, through=s)) for s in range(1, spec.stages + 1)]
    return tuple(
        Stage(index=s, depth=s, rounds=rounds[s - 1], present=names[s - 1], trained=names[s - 1])
        for s in range(1, spec.stages + 1)
    )


def layerwise(spec: ModelSpec, rounds: Sequence[int], embed: Embed = "auto") -> tuple[Stage, ...]:
    """Stage s trains encoder stage s, heads, final norms, reconstruction, fusion and task."""
    first = next((s for s, count in enumerate(rounds, start=1) if count > 0), 1)
    return tuple(
        Stage(
            index=s,
            depth=s,
            rounds=rounds[s - 1],
            present=_fitted(spec, part_names(spec, through=s)),
            trained=tuple(_layerwise_trained(spec, s, s == first, embed)),
        )
        for s in range(1, spec.stages + 1)
    )


def heads(spec: ModelSpec, rounds: Sequence[int], embed: Embed = "auto") -> tuple[Stage, ...]:
    """One stage with all the rounds that trains what follows the encoders. ``embed`` has no effect.

    Raises ModelError when nothing that follows them has weights.
    """
    names = _fitted(spec, part_names(spec))
    trained = tuple(part for part in names if not is_encoder(part))
    if spec.head.kind == "none" and all(part.startswith("head/") for part in trained):
        raise ModelError(
            "schedule heads would train nothing: the model has no heads, no reconstruction and no task",
            remedy="Set model.head.kind: mlp, or choose another schedule.",
        )
    return (Stage(index=1, depth=spec.stages, rounds=sum(rounds), present=names, trained=trained),)


def mixed(spec: ModelSpec, rounds: Sequence[int], embed: Embed = "auto") -> tuple[Stage, ...]:
    """Stage s trains everything; devices that cannot, through encoder stage s. ``embed`` has no effect."""
    names = _fitted(spec, part_names(spec))
    return tuple(
        Stage(
            index=s,
            depth=spec.stages,
            rounds=rounds[s - 1],
            present=names,
            trained=names,
            fallback_depth=s,
        )
        for s in range(1, spec.stages + 1)
    )


SCHEDULES: dict[ScheduleName, Callable[[ModelSpec, Sequence[int], Embed], tuple[Stage, ...]]] = {
    "end_to_end": end_to_end,
    "progressive": progressive,
    "layerwise": layerwise,
    "heads": heads,
    "mixed": mixed,
}


def with_closing(spec: ModelSpec, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages, and after them the closing round where the model has networks that match."""
    if spec.matching == "none" or any(is_closing(stage) for stage in stages):
        return tuple(stages)
    names, index = tuple(part_names(spec)), max(stage.index for stage in stages) + 1
    return (*stages, Stage(index, spec.stages, 1, present=names, trained=tuple(match_parts(spec))))


def is_closing(stage: Stage) -> bool:
    """Whether the stage is the closing round, in which only networks that match are trained."""
    return bool(stage.trained) and all(is_matcher(part) for part in stage.trained)


def _fitted(spec: ModelSpec, names: Sequence[str]) -> tuple[str, ...]:
    kept_out = set(match_parts(spec))
    return tuple(part for part in names if part not in kept_out)


def _layerwise_trained(spec: ModelSpec, s: int, first: bool, embed: Embed) -> list[str]:
    trained = []
    for modality, encoder in spec.encoders.items():
        if first and (embed == "first_stage" or (embed == "auto" and not encoder.pretrained)):
            trained.append(f"{modality}/embed")
        trained += [f"{modality}/stage{s}", f"{modality}/norm", f"head/{modality}"]
    return trained + reconstruct_parts(spec) + [p for p in shared_parts(spec) if encoder_stage(p) in (None, s)]


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
