"""Which samples a recipe can train on: what its terms need, what its generator makes, what is set apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgefl.models.spec import EncoderSpec
from edgefl.plan.job import Hyper, Slots, Stage
from edgefl.records import Refusal
from edgefl.registry import chosen

#: Reason of a refusal: an objective that learns from labels, and samples of which none has one.
UNLABELLED = "labels"
LABEL_THEM = (
    "Label the samples, or take a recipe that needs no labels (`edgefl recipes` lists them), such as lw-fedmml-clip."
)


def usable_samples(
    slots: Slots, samples: Mapping[str, int], modalities: Sequence[str], labelled: int | None = None
) -> int:
    """Most samples that can be trained on, by what the terms of the objective need: labels, or two modalities.

    ``labelled``: how many have a label; None: all.
    """
    counts = sorted((samples.get(m, 0) for m in modalities), reverse=True)
    some = min(samples.get("", 0), sum(counts))
    paired = counts[1] if len(counts) > 1 else 0
    if chosen("missing", slots.missing)[0].method.complete_only:
        some = paired = min(counts, default=0)
    known = some if labelled is None else min(some, labelled)
    return max(known if needs_labels(slots) else 0, paired if needs_pairs(slots) else 0)


def unlabelled(slots: Slots, samples: int, labelled: int) -> Refusal | None:
    """A refusal where ``samples`` are there, the objective learns from labels alone, and none is ``labelled``."""
    if not samples or labelled or needs_pairs(slots) or not needs_labels(slots):
        return None
    return Refusal(UNLABELLED, detail=f"{samples} samples, none has a label")


def held_out(hyper: Hyper, usable: int) -> int:
    """How many of the ``usable`` samples are only tested on: one batch at least stays for training."""
    return max(0, min(int(hyper.holdout * usable), usable - hyper.batch_size))


def after_completion(slots: Slots, samples: Mapping[str, int], encoders: Mapping[str, EncoderSpec]) -> dict[str, int]:
    """``samples`` (modality -> how many have it, "" -> all) as they are once the recipe has completed them."""
    missing = chosen("missing", slots.missing)[0]
    if missing.method.completed_counts is None:
        return dict(samples)
    found: dict[str, int] = missing.bind(missing.method.completed_counts)(samples, encoders)
    return found


def complete_only(slots: Slots) -> bool:
    """Whether only samples with every modality are trained on."""
    return chosen("missing", slots.missing)[0].method.complete_only or not needs_labels(slots)


def clusters_apart(slots: Slots, stage: Stage) -> bool:
    """Whether a device trains a private copy of its mappings to cluster with: one without labels, as in AproMFL.

    ``stage`` is the device's own: without labels it trains no classifier.
    """
    return (
        any(term.method.private_head for term in chosen("objective", slots.objective)) and "task" not in stage.trained
    )


def needs_labels(slots: Slots) -> bool:
    """Whether a task of the objective is learned from labels."""
    return any(term.method.labels for term in chosen("objective", slots.objective))


def needs_pairs(slots: Slots) -> bool:
    """Whether a task of the objective is learned from pairs of modalities."""
    return any(term.method.pairs for term in chosen("objective", slots.objective))
