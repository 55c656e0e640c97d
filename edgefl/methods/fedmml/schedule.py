"""Schedules: which parts exist and are trained in each stage (LW-FedMML, Prog-FedMML; arXiv 2407.15426).

end_to_end:  one stage, everything exists and is trained.
progressive: stage s has encoder stages 1..s; everything present is trained.
layerwise:   stage s has encoder stages 1..s; stage s, the heads and the final norms are trained (and the embeddings, in
             the first stage that has rounds, when nothing pretrained them).
freeze:      in every stage everything exists; stage s trains encoder stages s to the last, and what follows them
             (FreezeOut, arXiv 1706.04983, in whole stages). Rounds [9, 0, 27]: 9 end-to-end, then 27 of the last stage.
heads:       one stage at full depth; the encoders are frozen, heads, fusion and task are trained, and low-rank terms
             (model.lora). With frozen: pretrained the encoders without a checkpoint are trained too, whole.
sampled:     one stage at full depth; each round trains one encoder stage of all modalities, the first with embeddings
             that nothing pretrained, and what follows the encoders (LISA, arXiv 2403.17919). As in BAdam
             (arXiv 2404.02827) each encoder stage has its turn before any has another.
mixed:       in every stage everything exists and is trained by the devices that can; in stage s the others train as in
             progressive, or as much of that as they can, down to layerwise.

Of a declared model (own training code) every part exists in every stage; "encoder stage s" is its s-th part, and the
last part is its head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from edgefl.errors import ModelError
from edgefl.models.spec import (
    ModelSpec,
    adapted_part,
    is_encoder,
    is_lora,
    match_parts,
    modality_of,
    part_names,
    reconstruct_parts,
    shared_parts,
)
from edgefl.plan.job import Stage
from edgefl.plan.stages import encoder_stage
from edgefl.registry import Option, Rule, register
from edgefl.roles import Schedule

Embed = Literal["auto", "first_stage", "frozen"]
Frozen = Literal["all", "pretrained"]
Order = Literal["random", "cyclic"]


def end_to_end(spec: ModelSpec, rounds: Sequence[int], embed: Embed | None = None) -> tuple[Stage, ...]:
    """One stage with all the rounds. ``embed`` has no effect."""
    names = _present(spec)
    return (Stage(index=1, depth=spec.stages, rounds=sum(rounds), present=names, trained=names),)


def _of_declared(
    spec: ModelSpec, rounds: Sequence[int], trained: Callable[[tuple[str, ...], int], tuple[str, ...]]
) -> tuple[Stage, ...]:
    """Stages of a declared model, one for each part but the last; every part is present.

    ``trained(parts, s)``: those of stage s; the last part, which the loss is made from, is always among them. Raises
    ModelError for other than one number of rounds a stage.
    """
    names = tuple(part_names(spec))
    if len(rounds) != max(1, len(names) - 1):
        text = (
            f"training.rounds has {len(rounds)} entries, and the parts {', '.join(names)} make {len(names) - 1} stages"
        )
        raise ModelError(text, remedy="Give one a stage; the last part is trained in every stage.")
    return tuple(
        Stage(s, s, count, present=names, trained=tuple(p for p in names if p in {*trained(names, s), names[-1]}))
        for s, count in enumerate(rounds, start=1)
    )


def _needs_encoders(spec: ModelSpec, name: str) -> None:
    if spec.declared:
        remedy = "Choose end_to_end, layerwise, progressive or freeze."
        raise ModelError(
            f"schedule {name} tells encoders from heads, which declared parts (model.own) do not", remedy=remedy
        )


def progressive(spec: ModelSpec, rounds: Sequence[int], embed: Embed | None = None) -> tuple[Stage, ...]:
    """Stage s trains everything through encoder stage s. ``embed`` has no effect."""
    if spec.declared:
        return _of_declared(spec, rounds, lambda parts, s: parts[:s])
    names = [_present(spec, through=s) for s in range(1, spec.stages + 1)]
    return tuple(
        Stage(index=s, depth=s, rounds=rounds[s - 1], present=names[s - 1], trained=names[s - 1])
        for s in range(1, spec.stages + 1)
    )


def layerwise(spec: ModelSpec, rounds: Sequence[int], embed: Embed = "auto") -> tuple[Stage, ...]:
    """Stage s trains encoder stage s, heads, final norms, reconstruction, fusion and task."""
    if spec.declared:
        return _of_declared(spec, rounds, lambda parts, s: parts[s - 1 : s])
    first = next((s for s, count in enumerate(rounds, start=1) if count > 0), 1)
    return tuple(
        Stage(
            index=s,
            depth=s,
            rounds=rounds[s - 1],
            present=_present(spec, through=s),
            trained=tuple(_layerwise_trained(spec, s, s == first, embed)),
        )
        for s in range(1, spec.stages + 1)
    )


def freeze(spec: ModelSpec, rounds: Sequence[int], embed: Embed | None = None) -> tuple[Stage, ...]:
    """Stage s trains all but the embeddings and encoder stages before s; the first, all. ``embed`` has no effect."""
    if spec.declared:
        return _of_declared(spec, rounds, lambda parts, s: parts[s - 1 :])
    (whole,) = end_to_end(spec, rounds)

    def trained(s: int) -> tuple[str, ...]:
        return tuple(part for part in whole.trained if s == 1 or (n := encoder_stage(part)) is None or n >= s)

    return tuple(
        msgspec.structs.replace(whole, index=s, rounds=rounds[s - 1], trained=trained(s))
        for s in range(1, spec.stages + 1)
    )


def heads(
    spec: ModelSpec, rounds: Sequence[int], embed: Embed | None = None, frozen: Frozen = "all"
) -> tuple[Stage, ...]:
    """One stage with all the rounds that trains what follows the encoders. ``embed`` has no effect.

    Raises ModelError when nothing that is trained has weights.
    """
    _needs_encoders(spec, "heads")
    names = _present(spec)
    fresh: set[str | None] = {m for m, e in spec.encoders.items() if frozen == "pretrained" and not e.pretrained}
    if fresh:
        fresh.add(None)  # the attention that all encoders share
    trained = tuple(part for part in names if not is_encoder(part) or is_lora(part) or modality_of(part) in fresh)
    if spec.head.kind == "none" and all(part.startswith("head/") for part in trained):
        raise ModelError(
            "schedule heads would train nothing: the model has no heads, no reconstruction and no task",
            remedy="Set model.head.kind: mlp, or choose another schedule.",
        )
    return (Stage(index=1, depth=spec.stages, rounds=sum(rounds), present=names, trained=trained),)


def sampled(
    spec: ModelSpec, rounds: Sequence[int], embed: Embed = "auto", order: Order = "random"
) -> tuple[Stage, ...]:
    """One stage whose rounds each train one encoder stage, the heads, the fusion and the classifier."""
    _needs_encoders(spec, "sampled")
    (whole,) = end_to_end(spec, rounds)
    frozen = {f"{m}/embed" for m, e in spec.encoders.items() if not _trains_embedding(embed, e.pretrained)}
    trained = tuple(part for part in whole.trained if adapted_part(part) not in frozen)
    return (msgspec.structs.replace(whole, trained=trained, draw=order),)


def mixed(spec: ModelSpec, rounds: Sequence[int], embed: Embed | None = None) -> tuple[Stage, ...]:
    """Stage s trains everything; devices that cannot, through encoder stage s. ``embed`` has no effect."""
    _needs_encoders(spec, "mixed")
    (whole,) = end_to_end(spec, rounds)
    return tuple(
        msgspec.structs.replace(whole, index=s, rounds=rounds[s - 1], fallback_depth=s)
        for s in range(1, spec.stages + 1)
    )


def _present(spec: ModelSpec, through: int | None = None) -> tuple[str, ...]:
    """The parts of the model, or those through an encoder stage, without what the closing round trains."""
    kept_out = set(match_parts(spec))
    return tuple(part for part in part_names(spec, through=through) if part not in kept_out)


def _trains_embedding(embed: Embed, pretrained: str) -> bool:
    return embed == "first_stage" or (embed == "auto" and not pretrained)


def _layerwise_trained(spec: ModelSpec, s: int, first: bool, embed: Embed) -> list[str]:
    trained = []
    for modality, encoder in spec.encoders.items():
        if first and _trains_embedding(embed, encoder.pretrained):
            trained.append(f"{modality}/embed")
        trained += [f"{modality}/stage{s}", f"{modality}/norm", f"head/{modality}"]
    return trained + reconstruct_parts(spec) + [p for p in shared_parts(spec) if encoder_stage(p) in (None, s)]


_OTHER_LAYERS = (
    "each round of sampled trains another encoder stage, and the repair goes by how a layer changed in the round "
    "before; set slots.repair: none, or another schedule"
)
_OTHER_PARTS = (
    "each round of sampled trains another encoder stage, and the objective has a term for which devices keep something "
    "of the parts that they trained before; leave the term out, or set another schedule"
)
_EMBED = Option(
    "auto",
    "whether the embeddings are trained in the first stage; auto: yes unless they are pretrained",
    ("auto", "first_stage", "frozen"),
)
_ORDER = Option(
    "random",
    "in which encoder stages have their turns: random, another order each time; cyclic, the first to the last",
    ("random", "cyclic"),
)
_FROZEN = Option(
    "all", "which encoders are frozen; pretrained: those that begin with a checkpoint", ("all", "pretrained")
)
register(
    Schedule("end_to_end", "every stage exists and is trained from the first round", default=True, stages=end_to_end),
    Schedule("progressive", "stage s adds encoder stage s; everything present is trained", stages=progressive),
    Schedule(
        "layerwise",
        "stage s adds encoder stage s; only it, the heads and the final norms are trained",
        {"embed": _EMBED},
        stages=layerwise,
        freezes=True,
    ),
    Schedule(
        "freeze",
        "the whole model exists; stage s trains encoder stages s to the last: rounds [9, 0, 27] are 9 end-to-end, then "
        "27 of the last stage over its stored prefix",
        stages=freeze,
        freezes=True,
    ),
    Schedule(
        "heads",
        "whole, frozen encoders; only heads, fusion, task and model.lora are trained",
        {"frozen": _FROZEN},
        stages=heads,
    ),
    Schedule(
        "sampled",
        "the whole model exists; each round trains one encoder stage and what follows the encoders, the others frozen",
        {"embed": _EMBED, "order": _ORDER},
        rules=(
            Rule("repair", "observe", _OTHER_LAYERS, wanted=False),
            Rule("objective", "keep", _OTHER_PARTS, wanted=False),
        ),
        per_round=True,
        stages=sampled,
        freezes=True,
    ),
    Schedule(
        "mixed",
        "each device the most its budget allows: end to end, or in stage s as in progressive, down to layerwise",
        stages=mixed,
        by_budget=True,
        freezes=True,
    ),
)
