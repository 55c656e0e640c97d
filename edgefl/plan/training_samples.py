"""Samples usable by a recipe, and the frozen prefix of each encoder ahead of trained parts.

The prefix's output is the same every round, so it can be computed once and stored. Not for multiway encoders, whose
output depends on a row's other modalities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from edgefl.encoder_kinds import kind_of
from edgefl.models.check import state_shape
from edgefl.models.spec import EncoderSpec, fuses_tokens, is_lora, is_task, shares_attention, with_lora
from edgefl.patterns import Pattern, is_pattern_key, patterns_of
from edgefl.plan.job import Cache, Hyper, Job, Slots, Stage
from edgefl.plan.stages import is_closing
from edgefl.records import Refusal
from edgefl.registry import chosen

#: Samples of a modality without which no variance can be taken.
LEAST = 2
#: Most samples of a modality that batch statistics are taken on: a mean is then within 4 % of a deviation, a deviation
#: within 3 %, and what a head of width w holds meanwhile, 12 * 512 * w bytes, is less than 1 MiB above the gradients
#: and moments, 12 * w * w bytes, of a training step.
MOST = 512
#: Of larger models a round is not rehearsed: a step of theirs takes at least as much again.
REHEARSED_BYTES = 64 * 2**20
#: Reason of a refusal: an objective that learns from labels, and samples of which none has one.
UNLABELLED = "labels"
LABEL_THEM = (
    "Label the samples, or take a recipe that needs no labels (`edgefl recipes` lists them), such as lw-fedmml-clip."
)


def usable_samples(
    slots: Slots, samples: Mapping[str, int], modalities: Sequence[str], labelled: int | None = None
) -> int:
    """Largest number of samples usable by the objective's terms, which need labels or two modalities.

    ``labelled``: how many have a label; None: all.
    """
    usable = usable_patterns(slots, samples, modalities)
    some = sum(usable.values())
    paired = sum(count for pattern, count in usable.items() if len(pattern) > 1)
    known = some if labelled is None else min(some, labelled)
    return max(known if needs_labels(slots) else 0, paired if needs_pairs(slots) else 0)


def usable_patterns(slots: Slots, samples: Mapping[str, int], modalities: Sequence[str]) -> dict[Pattern, int]:
    """Pattern (exact modalities) -> samples that the objective's terms use, labelled or not."""
    least = 1 if needs_labels(slots) else 2
    if chosen("missing", slots.missing)[0].method.complete_only:
        least = len(modalities)
    found = patterns_of(samples, modalities)
    return {pattern: count for pattern, count in found.items() if len(pattern) >= least}


def unlabelled(slots: Slots, samples: int, labelled: int) -> Refusal | None:
    """Refusal of a device with samples but no labels, if the objective learns from labels alone."""
    if not samples or labelled or needs_pairs(slots) or not needs_labels(slots):
        return None
    return Refusal(UNLABELLED, detail=f"{samples} samples, none has a label")


def held_out(hyper: Hyper, usable: int) -> int:
    """Number of hold-out samples among ``usable`` ones; one batch at least stays for training."""
    return max(0, min(int(hyper.holdout * usable), usable - hyper.batch_size))


def after_completion(slots: Slots, samples: Mapping[str, int], encoders: Mapping[str, EncoderSpec]) -> dict[str, int]:
    """Sample counts (modality -> number with it, "" -> all) after the recipe's completion of missing modalities."""
    missing = chosen("missing", slots.missing)[0]
    if missing.method.completed_counts is None:
        return dict(samples)
    counts = {key: count for key, count in samples.items() if not is_pattern_key(key)}
    found: dict[str, int] = missing.bind(missing.method.completed_counts)(counts, encoders)
    return found


def complete_only(slots: Slots) -> bool:
    """True if only samples with every modality are trained on."""
    return chosen("missing", slots.missing)[0].method.complete_only or not needs_labels(slots)


def clusters_apart(slots: Slots, stage: Stage) -> bool:
    """True if a device without labels trains a private copy of its mappings for clustering (AproMFL).

    ``stage`` is the device's own: without labels it trains no classifier.
    """
    return any("private_head" in t.method.auxiliaries for t in chosen("objective", slots.objective)) and not any(
        map(is_task, stage.trained)
    )


def needs_labels(slots: Slots) -> bool:
    """True if a task of the objective needs labels."""
    return any(term.method.labels for term in chosen("objective", slots.objective))


def needs_pairs(slots: Slots) -> bool:
    """True if a task of the objective needs pairs of modalities."""
    return any(term.method.pairs for term in chosen("objective", slots.objective))


#: Bytes of one stored value.
VALUE_BYTES = {"f16": 2, "f32": 4}
#: Most samples that go through a frozen part at a time.
TOGETHER = 32


class Prefix(NamedTuple):
    """Frozen parts of an encoder ahead of trained ones, in order: ``<m>/embed``, then ``depth`` stages.

    Each is followed by its ``lora/<part>``, if there is one.

    ``tokens``: how many of a sample's tokens are stored; fewer than there are where only the pooled ones are read.
    ``width``: of each. ``most``: values of a sample while the prefix grows by a stage.
    """

    parts: tuple[str, ...]
    depth: int
    tokens: int
    width: int
    most: int

    @property
    def steps(self) -> tuple[str, ...]:
        """The embedding and the stages alone."""
        return tuple(part for part in self.parts if not is_lora(part))


def prefixes(job: Job) -> dict[str, Prefix]:
    """Modality -> its prefix, of the modalities this stage has; none without ``hyper.cache``.

    None either in a stage with draws: by the next round the parts in front of the trained ones have changed.
    """
    if not job.hyper.cache or job.stage.draw:
        return {}
    present, trained = set(job.stage.present), set(job.stage.trained)
    found = {}
    for m, encoder in job.model.encoders.items():
        parts = [f"{m}/embed", *(f"{m}/stage{k}" for k in range(1, job.stage.depth + 1))]
        frozen: list[str] = []
        depth = -1
        for part in parts:
            together = with_lora(job.model, part)
            if part not in present or trained.intersection(together):
                break
            frozen += together
            depth += 1
        if frozen and not shares_attention(job.model):
            pooled = depth == job.stage.depth and encoder.pool != "mean" and not fuses_tokens(job.model)
            shapes = [state_shape(job.model, m, k) for k in range(depth + 1)]
            tokens, width = shapes[-1]
            tokens = kind_of(encoder).pooled if pooled else tokens
            most = max(map(prod, shapes)) if depth else tokens * width
            found[m] = Prefix(tuple(frozen), depth, tokens, width, most)
    return found


def can_cache(job: Job) -> bool:
    """True if the job has a frozen prefix."""
    return bool(prefixes(with_cache(job, "f16")))


def with_cache(job: Job, cache: Cache) -> Job:
    """The job with its prefixes stored in ``cache``: "f16", "f32", or "" for not stored."""
    return msgspec.structs.replace(job, hyper=msgspec.structs.replace(job.hyper, cache=cache))


def built_parts(job: Job) -> tuple[str, ...]:
    """Parts in memory during training: those present, without stored prefixes."""
    gone = {part for prefix in prefixes(job).values() for part in prefix.parts}
    return tuple(part for part in job.stage.present if part not in gone)


def is_rehearsed(job: Job, weights_bytes: int) -> bool:
    """Whether a trainer runs a warm-up round of ``job`` before the measured ones.

    ``weights_bytes``: of the parts present. A warm-up of larger models would take seconds, and memory of libraries is
    little beside their step.
    """
    return weights_bytes <= REHEARSED_BYTES and not job.model.declared and not is_closing(job.stage)


def rows_of_step(job: Job) -> int:
    """Samples encoded at once in a training step, and at most in any other pass of its device."""
    return job.hyper.micro_batch or job.hyper.batch_size


def together_in(job: Job) -> int:
    """Samples in one forward pass of a frozen part: no more than in a training step."""
    return min(TOGETHER, rows_of_step(job))


def stored_bytes(job: Job, samples: Mapping[str, int]) -> int:
    """Most bytes on disk for the prefixes of ``samples`` (modality -> how many have it).

    While they grow by a stage every modality's rows of before may be there, with all their tokens, and of the one that
    grows two kinds at once.
    """
    if not job.hyper.cache:
        return 0
    each = VALUE_BYTES[job.hyper.cache]
    sizes = [samples.get(m, 0) * prefix.most * each for m, prefix in prefixes(job).items()]
    return sum(sizes) + max(sizes, default=0)
