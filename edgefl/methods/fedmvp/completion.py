"""Completion (FedMVP, arXiv 2406.11048): samples that lack a modality get one made from another, once, before training.

A generator is ``make(source, target, values [n, *shape], classes [n]) -> Made or None``; None: it cannot make this.
``classes``: the names of the samples' classes, "" where there is none. As in the paper's prompts (section 3.2), which
name the class, what is made is of the sample's own class. What cannot be made stays absent.
nearest: of the local samples that have both and are of the same class, the most alike lends its other half; where the
class has none, the most alike of any class, which is counted. pool: the same from public samples that no device holds.
transformers: the class, the answers to questions about the image (the paper has three for each data set, and asks
BLIP-2), then a caption, joined to one text and tokenized as the text encoder wants it. diffusers: a prompt to a picture
of the image encoder's size. Nothing is left to chance: words are the likeliest ones, and the noise that a picture
begins with is drawn by its prompt, so that the same sample gets the same half on every device and in every run.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.data.dataset import Dataset
from edgefl.data.encoders import Encoder
from edgefl.data.label_sets import classes_in, in_words
from edgefl.data.tokens import DEFAULT_LENGTH, padding_id, swapped, tokenizer
from edgefl.errors import ConfigError, DataError, MissingDependencyError, Problem
from edgefl.methods.fedmvp.public_pool import public_pool
from edgefl.methods.stand_ins import zero
from edgefl.models.spec import EncoderSpec
from edgefl.registry import Option, Recipe, register
from edgefl.roles import StandIn
from edgefl.storage.checkpoint_paths import is_own, located

Array = npt.NDArray[np.generic]

#: Token counts are kept in this many bins: enough to tell short texts apart.
_TOKEN_BINS = 512
#: Rows compared at once, so that the distances of a large share stay small in memory.
_ROWS = 256
#: Asked before the caption, one after the other, where a recipe has none of its own.
QUESTIONS = ("what is the main object?", "what color is it?", "what is in the background?")
#: A question as BLIP-2 and its like were taught to answer it (arXiv 2301.12597, section 4.2).
QUESTION = "Question: {} Answer:"
#: Types of checkpoints that are loaded without what answers questions.
CAPTION_ONLY = ("blip",)
#: Tokens of one answer.
_ANSWER_TOKENS = 20


class Made(NamedTuple):
    """Generated values, [n, *shape]. ``other``: class -> how many of its samples got a half of another class."""

    values: Array
    other: Mapping[str, int] = {}


Make = Callable[[str, str, Array, Sequence[str]], Made | None]
#: (encoder of the source, of the target, values, classes) -> the target's values.
Generate = Callable[[Encoder, Encoder, Array, Sequence[str]], Array]


class Completed(NamedTuple):
    """The data with what was made, and how many samples got each modality.

    ``other``: by modality and class, how many got one of another class, since no complete sample at hand is of theirs.
    """

    dataset: Dataset
    made: dict[str, int]
    other: dict[str, Counter[str]]

    def metrics(self) -> dict[str, float]:
        """How many halves were made, and how many of them are of another class."""
        lent = sum(sum(counts.values()) for counts in self.other.values())
        return {"completed": float(sum(self.made.values())), "completed_other_class": float(lent)}

    def reason(self) -> str:
        """Which classes got halves of others, and why; "": none."""
        told = [f"{n} of {name} lacking {m}" for m, of in self.other.items() for name, n in sorted(of.items())]
        why = "completed from other classes, since no complete sample at hand is of theirs"
        return f"{why}: {', '.join(told)}" if told else ""


def complete(dataset: Dataset, encoders: Mapping[str, Encoder], make: Make) -> Completed:
    """Every absent modality of ``encoders`` made from the first of them that a sample has.

    The made ones count as present. A modality that no sample here has is made too, if the generator can.
    """
    modalities, present, made = dict(dataset.modalities), dict(dataset.present), {}
    whole: dict[str, Array] = {}
    other: dict[str, Counter[str]] = {}
    for target, encoder in encoders.items():
        lacking = ~dataset.has(target)
        absent = lacking.copy()
        for source in (m for m in encoders if m != target):
            rows = np.flatnonzero(absent & dataset.has(source))
            if not len(rows):
                continue
            found = make(source, target, dataset.modalities[source][rows], _classes(dataset, rows))
            if found is None:
                continue
            if found.other:
                other.setdefault(target, Counter()).update(found.other)
            if target not in whole:
                if target not in modalities:
                    dtype = np.int64 if encoder.kind == "text" else np.float32
                    modalities[target] = np.zeros((len(dataset), *found.values.shape[1:]), dtype)
                modalities[target] = whole[target] = np.array(modalities[target])
            whole[target][rows] = found.values
            absent[rows] = False
        if target in modalities:
            present[target] = ~absent
        made[target] = int(lacking.sum() - absent.sum())
    return Completed(replace(dataset, modalities=modalities, present=present), made, other)


def _classes(dataset: Dataset, rows: npt.NDArray[np.int64]) -> list[str]:
    if dataset.labels is None:
        return [""] * len(rows)
    if (several := classes_in(dataset.label_names)) is not None and dataset.sets is not None:
        return [in_words(dataset.sets[row], several) if dataset.labels[row] >= 0 else "" for row in rows]
    return [dataset.label_names[label] if label >= 0 else "" for label in dataset.labels[rows]]


def nearest(dataset: Dataset) -> Make:
    """The generator that needs no model: other halves of these samples, of the device itself or a pool's."""

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
        distance = (known**2).sum(1) - 2 * wanted @ known.T  # squared, but for |wanted|^2, the same for all
        chosen.append(distance.argmin(axis=1))
    return np.concatenate(chosen)


def _features(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """[n, F]: what is compared. Numbers as they are, f32; token ids as counts, wherever they stand."""
    if not np.issubdtype(values.dtype, np.integer):
        return values.reshape(len(values), -1)
    counts = np.zeros((len(values), _TOKEN_BINS), np.float32)
    rows, columns = np.nonzero(values)
    np.add.at(counts, (rows, values[rows, columns] % _TOKEN_BINS), 1)
    return counts


def image_to_text(checkpoint: str, questions: Sequence[str] = QUESTIONS) -> Generate:
    """Texts from images by an image-text-to-text checkpoint, such as BLIP-2. Raises DataError where it cannot."""
    try:
        from transformers import AutoModelForImageTextToText, AutoProcessor
    except ImportError:
        raise MissingDependencyError("transformers", "train") from None
    processor, model = _load(checkpoint, AutoProcessor), _load(checkpoint, AutoModelForImageTextToText)
    if not (hasattr(processor, "image_processor") and hasattr(processor, "tokenizer")):
        raise DataError(
            f"the generator {checkpoint!r} has no processor that takes an image and a question",
            remedy="Give a checkpoint that has one, such as BLIP-2.",
        )
    if questions and model.config.model_type in CAPTION_ONLY:
        raise DataError(
            f"the generator {checkpoint!r} ({model.config.model_type}) captions images, and answers no questions",
            remedy='Give one that answers them, such as BLIP-2, or set questions: "".',
        )
    model.eval()

    def generate(source: Encoder, target: Encoder, values: Array, classes: Sequence[str]) -> Array:
        encode = tokenizer(target.vocabulary, target.pretrained, target.arch, target.config)
        length = next(iter(target.input_shape), DEFAULT_LENGTH)
        texts = [_describe(processor, model, picture, questions) for picture in values]
        named = [prompt_of(name, text) if name else text for name, text in zip(classes, texts, strict=True)]
        return np.stack([encode(text, length) for text in named])

    return generate


def text_to_image(checkpoint: str, questions: Sequence[str] = ()) -> Generate:
    """Images from texts by a diffusion pipeline. Token ids have to be a checkpoint's own: hashed words do not go back.

    Raises MissingDependencyError without diffusers, DataError when the checkpoint cannot be read.
    """
    try:
        import torch
        from diffusers import AutoPipelineForText2Image
    except ImportError:
        raise MissingDependencyError("diffusers", "completion") from None
    pipeline = _load(checkpoint, AutoPipelineForText2Image)
    pipeline.set_progress_bar_config(disable=True)

    def generate(source: Encoder, target: Encoder, values: Array, classes: Sequence[str]) -> Array:
        height, width, channels = target.input_shape
        made = []
        texts = _words(source, values)
        for prompt in (prompt_of(name, text) for name, text in zip(classes, texts, strict=True)):
            noise = torch.Generator().manual_seed(zlib.crc32(prompt.encode()))
            picture = pipeline(prompt, output_type="pil", generator=noise).images[0]
            picture = picture.convert("RGB" if channels == 3 else "L").resize((width, height))
            made.append(np.asarray(picture, np.float32).reshape(height, width, channels) / 255)
        return np.stack(made)

    return generate


#: Generators that lend the halves of other samples: the device's own, or a pool's.
LENDERS = ("nearest", "pool")
#: Pretrained generators: the kinds of encoder from and for which they make values, and how one is loaded.
GENERATORS: dict[str, tuple[tuple[str, str], Callable[[str, Sequence[str]], Generate]]] = {
    "transformers": (("vision", "text"), image_to_text),
    "diffusers": (("text", "vision"), text_to_image),
}


def generator_of(
    name: str,
    checkpoint: str,
    dataset: Dataset,
    encoders: Mapping[str, Encoder],
    *,
    pool: str = "",
    questions: Sequence[str] = QUESTIONS,
) -> Make:
    """The generator a recipe names. Raises ConfigError for an unknown one, MissingDependencyError for its package."""
    if name == "nearest":
        return nearest(dataset)
    if name == "pool":
        return nearest(public_pool(pool, encoders, dataset.label_names))
    if name not in GENERATORS:
        known = ", ".join((*LENDERS, *GENERATORS))
        raise ConfigError("recipe", [Problem("missing.completion.generator", f"unknown {name!r}; valid: {known}")])
    kinds, load = GENERATORS[name]
    generate = load(checkpoint, questions)

    def make(source: str, target: str, values: Array, classes: Sequence[str]) -> Made | None:
        own, wanted = encoders[source], encoders[target]
        return Made(generate(own, wanted, values, classes)) if (own.kind, wanted.kind) == kinds else None

    return make


def prompt_of(name: str, text: str) -> str:
    """The prompt of a picture, or start of a text: the paper's, with one class name (the paper's has two levels)."""
    return f"A photo of {name}, {text}" if name else f"A photo of {text}"


def asked(questions: str) -> list[str]:
    """The questions of an option's text, which has them one after the other, each ended by its question mark."""
    return [f"{text.strip()}?" for text in questions.split("?") if text.strip()]


def _describe(processor: Any, model: Any, values: npt.NDArray[Any], questions: Sequence[str]) -> str:
    """The answers to the questions and a caption, as one text."""
    import torch

    picture = np.clip(values * 255, 0, 255).astype(np.uint8)
    picture = np.repeat(picture, 3, axis=2) if picture.shape[2] == 1 else picture
    said = []
    with torch.no_grad():
        for prompt in (*questions, None):
            words = {} if prompt is None else {"text": QUESTION.format(prompt)}
            inputs = processor(images=picture, return_tensors="pt", **words)
            ids = model.generate(**inputs, max_new_tokens=_ANSWER_TOKENS, do_sample=False, num_beams=1)
            text = processor.batch_decode(ids, skip_special_tokens=True)[0]
            asked = processor.batch_decode(inputs.get("input_ids", []), skip_special_tokens=True)
            said.append(text.removeprefix("".join(asked)).strip())  # some say the question first, as its tokens do
    return ". ".join(part for part in said if part)


def _words(encoder: Encoder, values: Array) -> list[str]:
    """The texts behind token ids. Raises DataError for hashed words."""
    if not encoder.pretrained or is_own(encoder.pretrained):
        raise DataError(
            "text to image needs the texts themselves, and hashed token ids have no way back",
            remedy="Give the text encoder a pretrained checkpoint with a tokenizer, or set generator: nearest.",
        )
    from transformers import AutoTokenizer

    ids = swapped(values.astype(np.int64), padding_id(encoder.config))
    texts: list[str] = _load(encoder.pretrained, AutoTokenizer).batch_decode(ids, skip_special_tokens=True)
    return texts


def _load(checkpoint: str, kind: Any) -> Any:
    try:
        return kind.from_pretrained(located(checkpoint))
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        raise DataError(
            f"the generator {checkpoint!r} cannot be read: {str(error).splitlines()[0]}",
            remedy="Give a folder that holds a checkpoint of this kind, or a name that can be downloaded or is cached.",
        ) from None


def completed_data(
    dataset: Dataset,
    encoders: Mapping[str, Encoder],
    *,
    generator: str,
    checkpoint: str,
    pool: str,
    questions: str,
) -> Completed:
    """A device's data, completed by the generator that its recipe names."""
    make = generator_of(generator, checkpoint, dataset, encoders, pool=pool, questions=asked(questions))
    return complete(dataset, encoders, make)


def completed_counts(
    samples: Mapping[str, int], encoders: Mapping[str, EncoderSpec], *, generator: str
) -> dict[str, int]:
    """``samples`` (modality -> how many have it, "" -> all) with those that the generator will make.

    A pretrained generator makes its one kind of modality from its other; a pool, taken to hold every modality, any;
    ``nearest`` makes what a local sample has beside another modality, and some do if there are more modalities than
    samples.
    """
    outside = generator != "nearest"
    kinds = GENERATORS[generator][0] if generator in GENERATORS else None
    total = samples.get("", 0)
    paired = sum(samples.get(m, 0) for m in encoders) > total
    found = dict(samples)
    for target, spec in encoders.items():
        sources = [m for m in encoders if m != target and (kinds is None or (encoders[m].kind, spec.kind) == kinds)]
        if outside or (paired and samples.get(target)):
            made = sum(samples.get(m, 0) for m in sources)
            found[target] = min(total, samples.get(target, 0) + made)
    return {m: count for m, count in found.items() if count or m in samples}


def _checkpoint(recipe: Recipe) -> list[Problem]:
    options = recipe["missing"]["completion"]
    generator = options.get("generator")
    if generator == "nearest" or options.get("pool" if generator == "pool" else "checkpoint"):
        return []
    if generator == "pool":
        text = "completion by pool needs public samples; name them by pool: PATH, as they lie on each device"
        return [Problem("missing", text)]
    return [Problem("missing", f"completion by {generator} needs a checkpoint; name one")]


register(
    StandIn(
        "completion",
        "generated from the modality at hand, once, before training (FedMVP); nothing is generated for the test set: "
        "with one modality, the joint fusion sees that one and the token of an absent one",
        {
            "generator": Option(
                "nearest",
                "nearest: the complete local sample that is most alike lends its other half; pool: the same from "
                "samples that no device holds; transformers: image to text; diffusers: text to image",
                (*LENDERS, *GENERATORS),
            ),
            "checkpoint": Option("", "the generator's name or folder"),
            "pool": Option("", "source of the pool's public samples (.npz, folder or data set) on each device"),
            "questions": Option(" ".join(QUESTIONS), "of transformers: questions about each image, ended by '?'"),
        },
        conflicts=_checkpoint,
        completed_counts=completed_counts,
        completed_data=completed_data,
        make=zero,
    ),
)
