"""What the pretrained generators are asked, and what is made of their answers: their libraries are stand-ins here."""

from __future__ import annotations

import sys
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from edgefl.data.dataset import Dataset
from edgefl.data.tokens import DEFAULT_LENGTH, hashed
from edgefl.errors import ConfigError, DataError, MissingDependencyError
from edgefl.methods.fedmvp import completion
from edgefl.methods.fedmvp.completion import QUESTIONS, completed_counts, generator_of
from edgefl.models.spec import EncoderSpec

F32 = np.float32


def encoders(channels: int = 3, length: int = 16, pretrained: str = "") -> dict[str, EncoderSpec]:
    return {
        "picture": EncoderSpec("vision", (2, 3, channels)),
        "words": EncoderSpec("text", (length,) if length else (), vocabulary=100, pretrained=pretrained),
    }


NO_DATA = Dataset({}, {}, None, (), [])


class Speaker:
    """A processor and a model in one: an answer is its question, in some mouths, and a word for each question."""

    image_processor = tokenizer = None
    config = SimpleNamespace(model_type="blip-2")
    asked: list[dict[str, Any]]
    repeats = True

    def eval(self) -> None:
        self.asked = []

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        self.inputs = inputs
        told = {"pixel_values": inputs["images"], "return_tensors": inputs["return_tensors"]}
        return told | ({"input_ids": [inputs["text"]]} if "text" in inputs else {})

    def generate(self, **asked: Any) -> list[str]:
        self.asked.append(asked)
        question = asked.get("input_ids", [""])[0]
        return [(question if self.repeats else "") + f" word{len(self.asked)} ", "of another"]

    def batch_decode(self, ids: list[str], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens is True
        return list(ids)


class Reader(Speaker):
    """A tokenizer of two texts."""

    def batch_decode(self, ids: np.ndarray, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens is True
        return [{1: "a dog", 2: "a cat"}[int(row[0])] for row in ids]


def transformers(monkeypatch: pytest.MonkeyPatch, processor: object, model: object = None) -> None:
    def by(found: object) -> object:
        return SimpleNamespace(from_pretrained=lambda name: found if name == "folder" else None)

    kinds = {"AutoProcessor": by(processor), "AutoModelForImageTextToText": by(model or processor)}
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(**kinds, AutoTokenizer=by(processor)))


@pytest.mark.parametrize("repeats", [True, False], ids=["says the question first", "answers only"])
def test_a_picture_is_described_by_three_answers_and_a_caption(monkeypatch: pytest.MonkeyPatch, repeats: bool) -> None:
    speaker = Speaker()
    speaker.repeats = repeats
    transformers(monkeypatch, speaker)
    make = generator_of("transformers", "folder", NO_DATA, encoders())
    picture = np.array([[[-0.1, 0.5, 2.0]]], F32)  # beyond 0..1 it is cut
    made = make("picture", "words", np.stack([picture, picture]), ["cat", ""])
    assert made is not None
    first = "A photo of cat, word1. word2. word3. word4"
    assert made.values.tolist() == [hashed(text, 16, 100).tolist() for text in (first, "word5. word6. word7. word8")]
    assert made.other == {}
    assert [one.get("input_ids", [None])[0] for one in speaker.asked] == [
        *(f"Question: {one} Answer:" for one in QUESTIONS),
        None,
    ] * 2
    for one in speaker.asked:
        assert (one["pixel_values"].dtype, one["pixel_values"].tolist()) == (np.uint8, [[[0, 127, 255]]])
        assert one["return_tensors"] == "pt"
        assert (one["max_new_tokens"], one["do_sample"], one["num_beams"]) == (20, False, 1)  # the likeliest words


def test_a_grey_picture_is_shown_in_three_channels_and_silence_is_no_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Speaker()
    transformers(monkeypatch, speaker)
    answers = iter([["", ""], [" grey ", ""], ["  ", ""], ["end", ""]])
    monkeypatch.setattr(Speaker, "generate", lambda self, **asked: self.asked.append(asked) or next(answers))
    make = generator_of("transformers", "folder", NO_DATA, encoders(channels=1, length=0))
    made = make("picture", "words", np.array([[[[0.0], [1.0]]]], F32), [""])
    assert made is not None
    assert made.values.tolist() == [hashed("grey. end", DEFAULT_LENGTH, 100).tolist()]
    assert speaker.asked[0]["pixel_values"].tolist() == [[[0, 0, 0], [255, 255, 255]]]


def test_texts_are_tokenized_as_the_text_encoder_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers(monkeypatch, Speaker())
    told: list[object] = []

    def encode(text: str, length: int) -> np.ndarray:
        told.append((text, length))
        return np.zeros(length, np.int64)

    monkeypatch.setattr(completion, "tokenizer", lambda *of: told.append(of) or encode)
    make = generator_of("transformers", "folder", NO_DATA, encoders(pretrained="some/bert"))
    make("picture", "words", np.zeros((1, 2, 3, 3), F32), ["cat"])
    assert told == [(100, "some/bert", "distilbert", ""), ("A photo of cat, word1. word2. word3. word4", 16)]


@pytest.mark.parametrize("lacking", ["image_processor", "tokenizer"])
def test_a_processor_has_to_take_images_and_questions(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    has = {"image_processor", "tokenizer"} - {lacking}
    transformers(monkeypatch, SimpleNamespace(**dict.fromkeys(has)))
    with pytest.raises(DataError) as caught:
        generator_of("transformers", "folder", NO_DATA, encoders())
    assert caught.value.message == "the generator 'folder' has no processor that takes an image and a question"
    assert caught.value.remedy == "Give a checkpoint that has one, such as BLIP-2."


class Painter:
    """A pipeline: a picture of one colour, which it draws by its generator."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.bar: object = None

    def set_progress_bar_config(self, disable: object) -> None:
        self.bar = disable

    def __call__(self, prompt: str, output_type: str, generator: torch.Generator) -> SimpleNamespace:
        self.asked.append((prompt, output_type, generator.initial_seed()))
        # 4 wide, 6 high; (255, 0, 0) is 76 of 255 in grey (299 thousandths)
        return SimpleNamespace(images=[Image.new("RGB", (4, 6), (255, 0, 0)), None])


@pytest.mark.parametrize(("channels", "pixel"), [(3, [1.0, 0.0, 0.0]), (1, [76 / 255])])
def test_a_text_is_painted_by_its_own_noise_in_the_encoders_size(
    monkeypatch: pytest.MonkeyPatch, channels: int, pixel: list[float]
) -> None:
    painter = Painter()
    by = SimpleNamespace(from_pretrained=lambda name: painter if name == "folder" else None)
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(AutoPipelineForText2Image=by))
    transformers(monkeypatch, Reader())
    make = generator_of("diffusers", "folder", NO_DATA, encoders(channels, pretrained="folder"))
    made = make("words", "picture", np.array([[1], [2]]), ["pet", ""])
    assert made is not None
    assert painter.bar is True
    prompts = ["A photo of pet, a dog", "A photo of a cat"]
    assert painter.asked == [(text, "pil", zlib.crc32(text.encode())) for text in prompts]
    assert made.values.dtype == F32
    np.testing.assert_allclose(made.values, np.broadcast_to(np.array(pixel, F32), (2, 2, 3, channels)), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "source", "values"),
    [("transformers", "picture", np.zeros((2, 2, 3, 3), F32)), ("diffusers", "words", np.array([[1], [2]]))],
)
def test_each_value_has_a_class_of_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str, source: str, values: np.ndarray
) -> None:
    by = SimpleNamespace(from_pretrained=lambda _: Painter())
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(AutoPipelineForText2Image=by))
    transformers(monkeypatch, Reader() if name == "diffusers" else Speaker())
    known = encoders(pretrained="folder" if name == "diffusers" else "")
    make, (target,) = generator_of(name, "folder", NO_DATA, known), known.keys() - {source}
    with pytest.raises(ValueError, match="argument 2 is longer"):
        make(source, target, values, ["cat"])
    assert make(target, source, values, ["cat", "cat"]) is None, "the other way it makes nothing"


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("transformers", "transformers", "train"), ("diffusers", "diffusers", "completion")]
)
def test_a_generator_whose_package_is_not_there_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError) as caught:
        generator_of(name, "folder", NO_DATA, encoders())
    expected = MissingDependencyError(package, extra)
    assert (caught.value.message, caught.value.remedy) == (expected.message, expected.remedy)


def test_the_generator_that_a_recipe_names() -> None:
    whole = np.ones(2, bool)
    data = Dataset(
        {"a": np.eye(2, dtype=F32), "b": np.eye(2, dtype=F32)}, {"a": whole, "b": whole}, None, (), ["p", "q"]
    )
    made = generator_of("nearest", "", data, {})("a", "b", np.array([[0.0, 0.9]], F32), [""])
    assert made is not None
    assert made.values.tolist() == [[0.0, 1.0]]
    with pytest.raises(ConfigError) as caught:
        generator_of("magic", "", data, {})
    expected = "unknown 'magic'; valid: nearest, pool, transformers, diffusers"
    assert [(one.path, one.message) for one in caught.value.problems] == [("missing.completion.generator", expected)]
    assert caught.value.message.startswith("recipe")


# ---- what is made, as the planner counts it


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        ({"": 10, "picture": 10, "words": 4}, {"": 10, "picture": 10, "words": 10}),
        ({"": 10, "picture": 6, "words": 6}, {"": 10, "picture": 10, "words": 10}),  # at least two have both
        ({"": 10, "picture": 6, "words": 4}, {"": 10, "picture": 6, "words": 4}),  # perhaps none has both
        ({"": 10, "picture": 10}, {"": 10, "picture": 10}),  # nobody has words to lend
        ({"": 10, "picture": 10, "words": 0}, {"": 10, "picture": 10, "words": 0}),
        ({}, {}),
    ],
)
def test_nearest_completes_where_some_sample_has_both(samples: dict[str, int], found: dict[str, int]) -> None:
    assert completed_counts(samples, encoders(), generator="nearest") == found
    sound = EncoderSpec("sensor", (4, 1))
    assert completed_counts(samples, {**encoders(), "sound": sound}, generator="nearest") == found, "of no sample here"


def test_a_pretrained_generator_makes_its_one_kind_of_its_other() -> None:
    samples = {"": 10, "picture": 6, "words": 1, "sound": 10}
    known = {**encoders(), "sound": EncoderSpec("sensor", (4, 1))}
    assert completed_counts(samples, known, generator="transformers") == {**samples, "words": 7}
    assert completed_counts(samples, known, generator="diffusers") == {**samples, "picture": 7}
    assert completed_counts({"": 5, "picture": 5}, known, generator="transformers") == {"": 5, "picture": 5, "words": 5}
    assert completed_counts({"": 5, "sound": 5}, known, generator="transformers") == {"": 5, "sound": 5}
    assert completed_counts({"": 5, "picture": 4, "words": 3}, known, generator="diffusers")["picture"] == 5
