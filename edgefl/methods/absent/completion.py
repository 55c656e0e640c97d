"""Completion (FedMVP): samples that lack a modality get one made from a modality they have, once, before training.

A generator is ``make(source, target, values [n, *shape], classes [n]) -> Made or None``; None: it cannot make this.
``classes``: the names of the samples' classes, "" where there is none. As in the paper's prompts (section 3.2), which
name the class, what is made is of the sample's own class.
nearest: of the local samples that have both and are of the same class, the most alike lends its other half; where the
class has none, the most alike of any class, which is counted. The others run a pretrained model
(``edgefl.methods.absent.generators``). What cannot be made stays absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgefl.data.dataset import Dataset, Encoder
from edgefl.errors import ConfigError, Problem
from edgefl.methods.absent.generators import GENERATORS, Array, Made, Make
from edgefl.methods.absent.stand_ins import zero
from edgefl.models.spec import EncoderSpec
from edgefl.registry import Options, Recipe, StandIn, register

#: What a pretrained generator makes from what.
_GENERATED = {"transformers": ("vision", "text"), "diffusers": ("text", "vision")}
#: Token counts are kept in this many bins: enough to tell short texts apart.
_TOKEN_BINS = 512
#: Rows compared at once, so that the distances of a large share stay small in memory.
_ROWS = 256


class Completion(Options, frozen=True):
    """Options of generated modalities."""

    generator: Annotated[
        Literal["nearest", "transformers", "diffusers"],
        Meta(
            description=(
                "nearest: the complete local sample that is most alike lends its other half; transformers: image to "
                "text; diffusers: text to image"
            )
        ),
    ] = "nearest"
    checkpoint: Annotated[str, Meta(description="the generator's name or folder")] = ""


class Completed(NamedTuple):
    """The data with what was made, and how many samples got each modality.

    ``other``: by modality and class, how many got one of another class, since no complete sample here is of theirs.
    """

    dataset: Dataset
    made: dict[str, int]
    other: dict[str, dict[str, int]]

    def metrics(self) -> dict[str, float]:
        """How many halves were made, and how many of them are of another class."""
        lent = sum(sum(counts.values()) for counts in self.other.values())
        return {"completed": float(sum(self.made.values())), "completed_other_class": float(lent)}

    def reason(self) -> str:
        """Which classes got halves of others, and why; "": none."""
        told = [f"{n} of {name} lacking {m}" for m, of in self.other.items() for name, n in sorted(of.items())]
        why = "completed from other classes, since no complete sample here is of theirs"
        return f"{why}: {', '.join(told)}" if told else ""


def complete(dataset: Dataset, encoders: Mapping[str, Encoder], make: Make) -> Completed:
    """Every absent modality of ``encoders`` made from the first of them that a sample has.

    The made ones count as present. A modality that no sample here has is made too, if the generator can.
    """
    modalities, present, made = dict(dataset.modalities), dict(dataset.present), {}
    whole: dict[str, Array] = {}
    other: dict[str, dict[str, int]] = {}
    for target, encoder in encoders.items():
        absent, count = ~dataset.has(target), 0
        for source in encoders:
            rows = np.flatnonzero(absent & dataset.has(source)) if source != target else np.empty(0, np.int64)
            found = (
                make(source, target, dataset.modalities[source][rows], _classes(dataset, rows)) if len(rows) else None
            )
            if found is None:
                continue
            values = found.values
            for name, lent in found.other.items():
                counts = other.setdefault(target, {})
                counts[name] = counts.get(name, 0) + lent
            if target not in whole:
                dtype = np.int64 if encoder.kind == "text" else np.float32
                nothing = np.zeros((len(dataset) if target not in modalities else 0, *values.shape[1:]), dtype)
                modalities[target] = whole[target] = np.array(modalities.get(target, nothing))
            whole[target][rows] = values
            absent[rows] = False
            count += len(rows)
        if target in modalities:
            present[target] = ~absent
        made[target] = count
    return Completed(replace(dataset, modalities=modalities, present=present), made, other)


def _classes(dataset: Dataset, rows: npt.NDArray[np.int64]) -> list[str]:
    labels = np.full(len(rows), -1) if dataset.labels is None else dataset.labels[rows]
    return [dataset.label_names[label] if label >= 0 else "" for label in labels]


def nearest(dataset: Dataset) -> Make:
    """The generator that needs no model: other halves of the local samples themselves."""

    def make(source: str, target: str, values: Array, classes: Sequence[str]) -> Made | None:
        donors = np.flatnonzero(dataset.has(source) & dataset.has(target))
        if not len(donors):
            return None
        own, wanted = np.array(_classes(dataset, donors)), np.array(classes)
        chosen, other = np.empty(len(values), np.int64), {}
        for name in sorted(set(classes)):
            rows, alike = np.flatnonzero(wanted == name), donors[own == name] if name else donors
            if not len(alike):
                other[name], alike = len(rows), donors
            chosen[rows] = alike[_closest(values[rows], dataset.modalities[source][alike])]
        return Made(dataset.modalities[target][chosen], other)

    return make


def _closest(values: Array, among: Array) -> npt.NDArray[np.int64]:
    """[n]: which of ``among`` each of ``values`` [n, *shape] is most like."""
    known = _features(among)
    chosen = []
    for start in range(0, len(values), _ROWS):
        wanted = _features(values[start : start + _ROWS])
        distance = (wanted**2).sum(1)[:, None] - 2 * wanted @ known.T + (known**2).sum(1)
        chosen.append(distance.argmin(axis=1))
    return np.concatenate(chosen)


def generator_of(name: str, checkpoint: str, dataset: Dataset, encoders: Mapping[str, Encoder]) -> Make:
    """The generator a recipe names. Raises ConfigError for an unknown one, MissingDependencyError for its package."""
    if name == "nearest":
        return nearest(dataset)
    if name not in GENERATORS:
        known = ", ".join(("nearest", *GENERATORS))
        raise ConfigError("recipe", [Problem("missing.completion.generator", f"unknown {name!r}; valid: {known}")])
    return GENERATORS[name](checkpoint, encoders)


def _features(values: Array) -> npt.NDArray[np.float32]:
    """[n, F]: what is compared. Numbers as they are; token ids as counts, wherever they stand."""
    if not np.issubdtype(values.dtype, np.integer):
        return values.reshape(len(values), -1).astype(np.float32)
    counts = np.zeros((len(values), _TOKEN_BINS), np.float32)
    rows, columns = np.nonzero(values)
    tokens = values[rows, columns].astype(np.int64) % _TOKEN_BINS
    np.add.at(counts, (rows, tokens), 1)
    return counts


def completed_counts(
    samples: Mapping[str, int], encoders: Mapping[str, EncoderSpec], *, generator: str = "nearest"
) -> dict[str, int]:
    """``samples`` (modality -> how many have it, "" -> all) with those that the generator will make.

    A pretrained generator makes its one kind of modality from its other; ``nearest`` makes what a local sample has
    beside another modality, and some do if there are more modalities than samples.
    """
    kinds = _GENERATED.get(generator)
    paired = sum(samples.get(m, 0) for m in encoders) > samples.get("", 0)
    found = dict(samples)
    for target, spec in encoders.items():
        sources = [m for m in encoders if m != target and (kinds is None or (encoders[m].kind, spec.kind) == kinds)]
        if kinds is not None or (paired and samples.get(target, 0)):
            made = sum(samples.get(m, 0) for m in sources)
            found[target] = min(samples.get("", 0), samples.get(target, 0) + made)
    return {m: count for m, count in found.items() if count or m in samples}


def completed_data(
    dataset: Dataset, encoders: Mapping[str, EncoderSpec], *, generator: str, checkpoint: str
) -> Completed:
    """The data with what the recipe's generator makes of it."""
    return complete(dataset, encoders, generator_of(generator, checkpoint, dataset, encoders))


def _checkpoint(recipe: Recipe) -> list[Problem]:
    options = recipe["missing"]["completion"]
    if options.get("generator") == "nearest" or options.get("checkpoint"):
        return []
    return [Problem("missing", f"completion by {options.get('generator')} needs a checkpoint; name one")]


register(
    StandIn(
        "completion",
        (
            "generated from the modality at hand, once, before training (FedMVP); nothing is generated for the test "
            "set: with one modality, the joint fusion sees that one and the token of an absent one"
        ),
        Completion,
        conflicts=_checkpoint,
        completed_counts=completed_counts,
        completed_data=completed_data,
        make=zero,
    ),
)
