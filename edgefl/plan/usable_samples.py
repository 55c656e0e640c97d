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
#: What a pretrained generator of ``edgefl.methods.absent.generators`` makes from what.
_GENERATED = {"transformers": ("vision", "text"), "diffusers": ("text", "vision")}


def usable_samples(
    slots: Slots, samples: Mapping[str, int], modalities: Sequence[str], labelled: int | None = None
) -> int:
    """Most samples that can be trained on, by what the terms of the objective need: labels, or two modalities.

    ``labelled``: how many have a label; None: all.
    """
    counts = sorted((samples.get(m, 0) for m in modalities), reverse=True)
    some = min(samples.get("", 0), sum(counts))
    paired = counts[1] if len(counts) > 1 else 0
    if "ignore" in slots.missing:
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
    """``samples`` (modality -> how many have it, "" -> all) with those that the recipe's generator will make.

    A pretrained generator makes its one kind of modality from its other; ``nearest`` makes what a local sample has
    beside another modality, and some do if there are more modalities than samples.
    """
    options = slots.missing.get("completion")
    if options is None:
        return dict(samples)
    kinds = _GENERATED.get(str(options.get("generator", "nearest")))
    paired = sum(samples.get(m, 0) for m in encoders) > samples.get("", 0)
    found = dict(samples)
    for target, spec in encoders.items():
        sources = [m for m in encoders if m != target and (kinds is None or (encoders[m].kind, spec.kind) == kinds)]
        if kinds is not None or (paired and samples.get(target, 0)):
            made = sum(samples.get(m, 0) for m in sources)
            found[target] = min(samples.get("", 0), samples.get(target, 0) + made)
    return {m: count for m, count in found.items() if count or m in samples}


def complete_only(slots: Slots) -> bool:
    """Whether only samples with every modality are trained on."""
    return "ignore" in slots.missing or not needs_labels(slots)


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
