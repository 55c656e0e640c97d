"""Stages of a schedule: encoder stages, shallower variants, the closing round, exchanged parts.

No schedule trains ``match/<m>``: the closing round fits them to the finished model, on every eligible device (PmcmFL,
arXiv 2312.13508, appendix D). It is a stage of its own with one round (docs/decisions/0031).

A device uploads all trained parts, the mappings only (AproMFL), or nothing (local training). Kept parts go on from
its own copy of the round before; a received copy is then the teacher.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Sequence

import msgspec

from edgefl.errors import Problem
from edgefl.models.spec import (
    ModelSpec,
    adapted_part,
    is_encoder,
    is_lora,
    is_matcher,
    match_parts,
    modality_of,
    part_names,
    rank_slices,
    rank_start,
    space_of_part,
    with_lora,
)
from edgefl.plan.job import Exchange, Job, RunPlan, Slots, Stage
from edgefl.registry import Choice, Recipe, Slot, choose, chosen


def planned(spec: ModelSpec, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """A schedule's stages for a model, with low-rank terms in place of adapted parts, and the closing round."""
    return with_closing(spec, [_adapted(spec, stage) for stage in stages])


def _adapted(spec: ModelSpec, stage: Stage) -> Stage:
    """The stage with ``lora/<part>`` trained for its part; encoders with such terms are frozen otherwise."""
    if spec.lora is msgspec.UNSET:
        return stage
    wanted = set(stage.trained)
    encoders = {modality_of(part) for part in spec.lora.parts if is_encoder(part)}

    def trains(part: str) -> bool:
        if is_lora(part):
            return not wanted.isdisjoint((part, adapted_part(part)))
        frozen = modality_of(part) in encoders if is_encoder(part) else len(with_lora(spec, part)) > 1
        return part in wanted and not frozen

    return msgspec.structs.replace(stage, trained=tuple(filter(trains, stage.present)))


def with_closing(spec: ModelSpec, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages, with a closing round if the model has matcher networks."""
    if spec.matching == "none" or any(is_closing(stage) for stage in stages):
        return tuple(stages)
    names, index = tuple(part_names(spec)), max(stage.index for stage in stages) + 1
    return (*stages, Stage(index, spec.stages, 1, present=names, trained=tuple(match_parts(spec))))


def is_closing(stage: Stage) -> bool:
    """True for the closing round, which trains matcher networks only."""
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
    """Numbers of the trained encoder stages, ascending; 0: the embeddings."""
    return sorted({n for part in stage.trained if (n := encoder_stage(part)) is not None})


def draws(stage: Stage, whole: Stage | None = None) -> list[Stage]:
    """The stage as each draw trains it; [stage] without draws.

    A draw trains one encoder stage, the first one with its embeddings, and the parts outside encoder stages. ``whole``:
    the stage as all devices train it, whose encoder stages are counted.
    """
    numbers = sorted({max(1, n) for n in trained_stages(whole or stage)}) if stage.draw else []

    def of(number: int) -> tuple[str, ...]:
        return tuple(part for part in stage.trained if (n := encoder_stage(part)) is None or max(1, n) == number)

    return [msgspec.structs.replace(stage, trained=of(number)) for number in numbers] or [stage]


def drawn(stage: Stage, seed: int, number: int) -> int:
    """Index of round ``number``'s draw among ``draws(stage)``; each comes up once in every cycle of as many rounds.

    "random": each cycle has an order of its own, by hashes, which are the same in every release.
    """
    cycle, place = divmod(number - 1, len(draws(stage)))
    if stage.draw != "random":
        return place

    def key(index: int) -> bytes:
        return hashlib.sha256(f"{seed}/{stage.index}/{cycle}/{index}".encode()).digest()

    return sorted(range(len(draws(stage))), key=key)[place]


def stage_in(plan: RunPlan, stage: int, number: int) -> Stage:
    """Stage number ``stage`` as its round ``number`` trains it."""
    one = plan.stages[stage - 1]
    return draws(one)[drawn(one, plan.seed, number)]


def later_heavy(stages: Sequence[Stage]) -> list[int]:
    """Rounds for pretrained encoders trained stage by stage, more in the later ones; [] where they have them.

    None in the first half, then in proportion to 1, 3, 5 and so on: [0, 0, 0, 10, 30, 50] of 90 (LW-FedMML, arXiv
    2407.15426, Table II). Also [] where a stage trains again what an earlier one did.
    """
    encoders = [stage for stage in stages if trained_stages(stage)]
    numbers = [n for stage in encoders for n in trained_stages(stage) if n]
    if len(encoders) < 2 or len(set(numbers)) < len(numbers) or encoders[-1].rounds > encoders[0].rounds:
        return []
    total, idle = sum(stage.rounds for stage in encoders), len(encoders) // 2
    parts = [max(0, 2 * (s - idle) + 1) for s in range(len(encoders))]
    rounds = [total * part // sum(parts) for part in parts]
    return [*rounds[:-1], total - sum(rounds[:-1])]


def shallower(stage: Stage) -> list[Stage]:
    """Variants of the stage for smaller devices, with ever fewer trained encoder stages.

    Where the stage has a fallback depth, the encoder stages beyond it are given up first, and do not exist then; after
    that the deepest are kept. The first entry is the stage itself; the last trains one encoder stage with heads, norms,
    fusion and task. A stage with draws has no other: in rounds of what it gave up, a device would train no encoder.
    """
    if stage.draw:
        return [stage]
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


def narrower(stage: Stage, whole: Stage) -> list[Stage]:
    """Variants of the stage with ever fewer rank dimensions of low-rank terms.

    ``whole``: the stage as all devices train it. Only slices that it trains are cut, from the present parts too; terms
    that are frozen on every device stay whole. The first entry is the stage itself.
    """
    starts = sorted({rank_start(part) for part in whole.trained} - {0}, reverse=True)
    variants = [stage]
    for start in starts:
        gone = {part for part in whole.trained if rank_start(part) >= start}
        present, trained = (tuple(p for p in parts if p not in gone) for parts in (stage.present, stage.trained))
        variants.append(msgspec.structs.replace(stage, present=present, trained=trained))
    return variants


def trained_rank(spec: ModelSpec, stage: Stage) -> int:
    """Rank of the trained low-rank terms; 0: none, or no choice."""
    starts = {rank_start(part) for part in stage.trained if is_lora(part)}
    return rank_slices(spec.lora)[max(starts)] if spec.lora and spec.lora.fallback_ranks and starts else 0


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


def of_spaces(stage: Stage, spaces: Sequence[str]) -> Stage:
    """The stage without classifiers of label sets other than the device's ``spaces``."""

    def keep(part: str) -> bool:
        return space_of_part(part) in {"", *spaces}

    return msgspec.structs.replace(
        stage, present=tuple(filter(keep, stage.present)), trained=tuple(filter(keep, stage.trained))
    )


#: Prefix of the residual of a part, among what a device retains.
RESIDUAL = "lost/"
#: Share of a device's samples that its own model is tested on, where the run file sets none and a classifier stays on
#: the device, which alone can judge it, or the server goes by what devices measure. Of 100 samples 20: the standard
#: error of an accuracy is at most 11 points on one device, and 3 over twelve of them.
OWN_HOLDOUT = 0.2


def by_holdouts(slots: Recipe) -> list[str]:
    """The slots ("role: choice") that use figures from devices' hold-outs: returns, or the best k."""
    choices = {role: choose(role, slots) for role in ("pace", "select", "upload", "optimise")}
    found = [f"{role}: {choice.name}" for role, choice in choices.items() if choice.method.returns]
    prototypes = choose("prototypes", slots)
    return [*found, f"prototypes: {prototypes.name}"] if compared_k(prototypes) else found


def compared_k(prototypes: Choice) -> tuple[int, ...]:
    """The recipe's candidates for k, compared on hold-outs, before the limit by classes; () for a fixed k."""
    ks = prototypes.method.candidates
    return prototypes.bind(ks)() if ks else ()


def default_holdout(slots: Recipe) -> float:
    """Hold-out of a run file that sets none."""
    return OWN_HOLDOUT if exchange_of(slots["weight"]) != "all" or by_holdouts(slots) else 0.0


def unmeasured(slots: Recipe, holdout: float | None) -> list[Problem]:
    """Problem of a hold-out of 0 with methods that use its figures."""
    needing = " and ".join(by_holdouts(slots))
    if holdout != 0.0 or not needing:
        return []
    text = f"is 0, and {needing} goes by what devices measure on their hold-outs; leave it out, or give a share"
    return [Problem("training.holdout", text)]


def exchange_of(weight: Slot) -> Exchange:
    """The exchange (all, mappings, nothing) of a recipe's slot ``weight``."""
    exchange: Exchange = choose("weight", {"weight": weight}).method.exchange
    return exchange


def private(stage: Stage, exchange: Exchange) -> tuple[str, ...]:
    """The trained parts that never leave the device."""
    if exchange == "nothing":
        return stage.trained
    if exchange == "mappings":
        return tuple(part for part in stage.trained if modality_of(part) is None and not is_encoder(part))
    return ()


def sent(stage: Stage, exchange: Exchange) -> tuple[str, ...]:
    """The trained parts that are uploaded."""
    stay = set(private(stage, exchange))
    return tuple(part for part in stage.trained if part not in stay)


def may_omit(stage: Stage, slots: Slots) -> bool:
    """True if the slot upload may omit trained parts of an update; never in the closing round."""
    return not is_closing(stage) and chosen("upload", slots.upload)[0].method.has("most")


def kept(job: Job) -> tuple[str, ...]:
    """The trained parts resumed from the device's own copy, not from the model received."""
    exchange = job.slots.exchange
    if exchange == "mappings":
        heads = (part for part in job.stage.trained if part.startswith("head/"))
        return (*private(job.stage, exchange), *heads)
    return private(job.stage, exchange)


def packing_of(rules: Sequence[tuple[str, str]], part: str) -> str:
    """Packing of a part by the first rule with a matching pattern; "f32" without one."""
    return next((packing for pattern, packing in rules if fnmatch.fnmatchcase(part, pattern)), "f32")
