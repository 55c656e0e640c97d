"""Schedules: which parts exist and are trained in each stage (LW-FedMML, Prog-FedMML; arXiv 2407.15426).

end_to_end:  one stage, everything exists and is trained.
progressive: stage s has encoder stages 1..s; everything present is trained.
layerwise:   stage s has encoder stages 1..s; stage s, the heads and the final norms are trained (and the embeddings, in
             the first stage that has rounds, when nothing pretrained them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from edgefl.models.spec import ModelSpec, modality_of, part_names, shared_parts
from edgefl.plan.values import ScheduleName, Stage

Embed = Literal["auto", "first_stage", "frozen"]


def end_to_end(spec: ModelSpec, rounds: Sequence[int], embed: Embed = "auto") -> tuple[Stage, ...]:
    """One stage with all the rounds. ``embed`` has no effect."""
    names = tuple(part_names(spec))
    return (Stage(index=1, depth=spec.stages, rounds=sum(rounds), present=names, trained=names),)


def progressive(spec: ModelSpec, rounds: Sequence[int], embed: Embed = "auto") -> tuple[Stage, ...]:
    """Stage s trains everything through encoder stage s. ``embed`` has no effect."""
    names = [tuple(part_names(spec, through=s)) for s in range(1, spec.stages + 1)]
    return tuple(
        Stage(index=s, depth=s, rounds=rounds[s - 1], present=names[s - 1], trained=names[s - 1])
        for s in range(1, spec.stages + 1)
    )


def layerwise(spec: ModelSpec, rounds: Sequence[int], embed: Embed = "auto") -> tuple[Stage, ...]:
    """Stage s trains encoder stage s, heads, final norms, fusion and task."""
    first = next((s for s, count in enumerate(rounds, start=1) if count > 0), 1)
    return tuple(
        Stage(
            index=s,
            depth=s,
            rounds=rounds[s - 1],
            present=tuple(part_names(spec, through=s)),
            trained=tuple(_layerwise_trained(spec, s, s == first, embed)),
        )
        for s in range(1, spec.stages + 1)
    )


SCHEDULES: dict[ScheduleName, Callable[[ModelSpec, Sequence[int], Embed], tuple[Stage, ...]]] = {
    "end_to_end": end_to_end,
    "progressive": progressive,
    "layerwise": layerwise,
}


def _layerwise_trained(spec: ModelSpec, s: int, first: bool, embed: Embed) -> list[str]:
    trained = []
    for modality, encoder in spec.encoders.items():
        if first and (embed == "first_stage" or (embed == "auto" and not encoder.pretrained)):
            trained.append(f"{modality}/embed")
        trained += [f"{modality}/stage{s}", f"{modality}/norm", f"head/{modality}"]
    return trained + shared_parts(spec)


def encoder_stage(part: str) -> int | None:
    """Number of the encoder stage a part is, 0 for an embedding, None for anything else."""
    owner, _, name = part.rpartition("/")
    if owner == "head":  # what follows is a modality's name, which may be "embed"
        return None
    if name == "embed":
        return 0
    return int(name[5:]) if name.startswith("stage") and name[5:].isdigit() else None


def trained_stages(stage: Stage) -> list[int]:
    """Numbers of the encoder stages that are trained, ascending; 0: the embeddings."""
    return sorted({n for part in stage.trained if (n := encoder_stage(part)) is not None})


def shallower(stage: Stage) -> list[Stage]:
    """The stage with ever fewer encoder stages trained, the deepest kept: what a smaller device can do instead.

    The first entry is the stage itself; the last trains one encoder stage with heads, norms, fusion and task.
    """
    numbers = trained_stages(stage)
    variants = [stage]
    for lowest in numbers[1:]:
        kept = tuple(part for part in stage.trained if (n := encoder_stage(part)) is None or n >= lowest)
        variants.append(
            Stage(index=stage.index, depth=stage.depth, rounds=stage.rounds, present=stage.present, trained=kept)
        )
    return variants


def restrict(stage: Stage, modalities: Sequence[str]) -> Stage:
    """The stage without the parts of modalities a device has no data of."""

    def keep(part: str) -> bool:
        owner = modality_of(part)
        return owner is None or owner in modalities

    return Stage(
        index=stage.index,
        depth=stage.depth,
        rounds=stage.rounds,
        present=tuple(filter(keep, stage.present)),
        trained=tuple(filter(keep, stage.trained)),
    )
