"""Adapters of pretrained generators for completion (FedMVP, arXiv 2406.11048): image to text, text to image.

transformers: the class, the answers to three questions about the image, then a caption, joined to one text and
tokenized as the text encoder wants it. diffusers: a prompt to a picture of the image encoder's size. They run once; the
trainer keeps what they made. Nothing is left to chance: words are the likeliest ones, and the noise that a picture
begins with is drawn by its prompt, so that the same sample gets the same half on every device and in every run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.data.dataset import Encoder
from edgefl.data.tokens import DEFAULT_LENGTH, tokenizer
from edgefl.errors import DataError, MissingDependencyError
from edgefl.storage.checkpoint_paths import is_own, located

Array = npt.NDArray[np.generic]


class Made(NamedTuple):
    """Generated values, [n, *shape]. ``other``: class -> how many of its samples got a half of another class."""

    values: Array
    other: Mapping[str, int] = {}


Make = Callable[[str, str, Array, Sequence[str]], Made | None]

#: Asked after the caption, one after the other.
QUESTIONS = ("what is the main object?", "what color is it?", "what is in the background?")
#: Tokens of one answer.
_ANSWER_TOKENS = 20


def image_to_text(checkpoint: str, encoders: Mapping[str, Encoder]) -> Make:
    """Texts from images by an image-text-to-text checkpoint, such as BLIP. Raises DataError when it cannot be read."""
    try:
        from transformers import AutoModelForImageTextToText, AutoProcessor
    except ImportError:
        raise MissingDependencyError("transformers", "train") from None
    processor, model = _load(checkpoint, AutoProcessor), _load(checkpoint, AutoModelForImageTextToText)
    if not (hasattr(processor, "image_processor") and hasattr(processor, "tokenizer")):
        raise DataError(
            f"the generator {checkpoint!r} has no processor that takes an image and a question",
            remedy="Give a checkpoint that has one, such as BLIP.",
        )
    model.eval()

    def make(source: str, target: str, values: Array, classes: Sequence[str]) -> Made | None:
        if (encoders[source].kind, encoders[target].kind) != ("vision", "text"):
            return None
        encode = tokenizer(encoders[target].vocabulary, encoders[target].pretrained)
        length = next(iter(encoders[target].input_shape), DEFAULT_LENGTH)
        texts = [_describe(processor, model, picture) for picture in values]
        named = [prompt_of(name, text) if name else text for name, text in zip(classes, texts, strict=True)]
        return Made(np.stack([encode(text, length) for text in named]))

    return make


def text_to_image(checkpoint: str, encoders: Mapping[str, Encoder]) -> Make:
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

    def make(source: str, target: str, values: Array, classes: Sequence[str]) -> Made | None:
        if (encoders[source].kind, encoders[target].kind) != ("text", "vision"):
            return None
        height, width, channels = encoders[target].input_shape
        made = []
        texts = _words(encoders[source], values)
        for prompt in (prompt_of(name, text) for name, text in zip(classes, texts, strict=True)):
            noise = torch.Generator().manual_seed(zlib.crc32(prompt.encode()))
            picture = pipeline(prompt, output_type="pil", generator=noise).images[0]
            picture = picture.convert("RGB" if channels == 3 else "L").resize((width, height))
            made.append(np.asarray(picture, np.float32).reshape(height, width, channels) / 255)
        return Made(np.stack(made))

    return make


GENERATORS: dict[str, Callable[[str, Mapping[str, Encoder]], Make]] = {
    "transformers": image_to_text,
    "diffusers": text_to_image,
}


def prompt_of(name: str, text: str) -> str:
    """The prompt of a picture, or start of a text: the paper's, with one class name (the paper's has two levels)."""
    return f"A photo of {name}, {text}" if name else f"A photo of {text}"


def _describe(processor: Any, model: Any, values: Array) -> str:
    """The answers to the questions and a caption, as one text."""
    import torch

    picture = np.clip(np.asarray(values, np.float32) * 255, 0, 255).astype(np.uint8)
    picture = np.repeat(picture, 3, axis=2) if picture.shape[2] == 1 else picture
    said = []
    with torch.no_grad():
        for prompt in (*QUESTIONS, None):
            words = {} if prompt is None else {"text": prompt}
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

    texts: list[str] = _load(encoder.pretrained, AutoTokenizer).batch_decode(values, skip_special_tokens=True)
    return texts


def _load(checkpoint: str, kind: Any) -> Any:
    try:
        return kind.from_pretrained(located(checkpoint))
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        raise DataError(
            f"the generator {checkpoint!r} can not be read: {str(error).splitlines()[0]}",
            remedy="Give a folder that holds a checkpoint of this kind, or a name that can be downloaded or is cached.",
        ) from None
