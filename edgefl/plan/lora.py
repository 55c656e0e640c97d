"""Low-rank adaptation of a run: the adapted parts, and contradicting settings."""

from __future__ import annotations

import fnmatch

import msgspec

from edgefl.config.lora import LoraConfig
from edgefl.errors import Problem
from edgefl.models.spec import LoraSpec, ModelSpec, adaptable_parts, is_encoder
from edgefl.plan.job import RunPlan
from edgefl.registry import choose, chosen


def with_adaptation(given: LoraConfig | None, spec: ModelSpec) -> tuple[ModelSpec, list[Problem]]:
    """The model with its low-rank terms, and a problem for each pattern without a match."""
    if given is None:
        return spec, []
    able = adaptable_parts(spec)
    parts = tuple(part for part in able if any(fnmatch.fnmatchcase(part, pattern) for pattern in given.where))
    problems = [
        Problem("model.lora.where", f"{pattern!r} fits no part that can be adapted; there are: {', '.join(able)}")
        for pattern in given.where
        if not fnmatch.filter(able, pattern)
    ]
    ranks = sorted(set(given.fallback_ranks))
    if ranks and ranks[-1] >= given.rank:
        text = f"{ranks[-1]} is not below model.lora.rank, {given.rank}; name smaller ones"
        problems.append(Problem("model.lora.fallback_ranks", text))
    alpha = 2.0 * given.rank if given.alpha is None else given.alpha
    lora = LoraSpec(given.rank, alpha, parts, tuple(given.maps), tuple(ranks) or msgspec.UNSET)
    return msgspec.structs.replace(spec, lora=lora), problems


def lora_problems(plan: RunPlan) -> list[Problem]:
    """Settings that contradict low-rank terms."""
    lora = plan.model.lora
    if lora is msgspec.UNSET:
        return []
    found = []
    repair = chosen("repair", plan.slots.repair)[0]
    if repair.method.observe is not None:
        text = f"{repair.name} compares whole layers, and of those model.lora trains none; leave one of the two out"
        found.append(Problem("slots.repair", text))
    weight = choose("weight", plan.server)
    if lora.fallback_ranks and weight.method.similarity is not None:
        text = f"weight {weight.name} compares whole models, which devices of a smaller rank lack; leave one out"
        found.append(Problem("model.lora.fallback_ranks", text))
    if all(is_encoder(part) for part in lora.parts):
        return found
    terms = [
        t for t in chosen("objective", plan.slots.objective) if {"teacher", "private_head"} & {*t.method.auxiliaries}
    ]
    why = [f"objective {term.name} needs the whole ones" for term in terms]
    if plan.slots.exchange != "all":
        why.append(f"weight {choose('weight', plan.server).name} exchanges whole ones")
    if plan.slots.statistics:
        why.append("devices recompute their batch statistics (set model.head.norm: layer)")
    text = "; or leave them out, such as by '*/stage*'"
    return found + [Problem("model.lora.where", f"adapts heads, and {reason}{text}") for reason in why]
