"""The pretrained generators on real checkpoints with random weights, tiny and saved by the tests themselves."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from edgefl.data.dataset import Dataset
from edgefl.data.tokens import hashed
from edgefl.errors import DataError, MissingDependencyError
from edgefl.methods.fedmvp.completion import complete, generator_of, prompt_of
from edgefl.models.spec import EncoderSpec

LENGTH, SIDE = 24, 12
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", "what", "is", "the", "main", "object", "?")
WORDS += ("color", "it", "in", "background", "a", "dog", "red", "sky", "photo", "of")


def spec(channels: int = 3, pretrained: str = "") -> dict[str, EncoderSpec]:
    return {
        "picture": EncoderSpec(kind="vision", input_shape=(SIDE, SIDE, channels)),
        "words": EncoderSpec(kind="text", input_shape=(LENGTH,), vocabulary=100, pretrained=pretrained),
    }


def data(pictures: list[int], texts: list[int], ids: np.ndarray, channels: int = 3) -> Dataset:
    """One sample a row; those of ``pictures`` are there, and those of ``texts``."""
    rows = len(pictures)
    shade = np.linspace(0, 1, rows)[:, None, None, None]
    values = (0.2 * np.random.default_rng(0).random((rows, SIDE, SIDE, channels)) + 0.8 * shade).astype(np.float32)
    present = {"picture": np.array(pictures, bool), "words": np.array(texts, bool)}
    held = {"picture": values * present["picture"][:, None, None, None], "words": ids * present["words"][:, None]}
    return Dataset(held, present, np.arange(rows) % 2, ("x", "y"), [str(row) for row in range(rows)])


def bert_tokenizer():
    from transformers import BertTokenizerFast

    vocabulary = {word: i for i, word in enumerate(WORDS)}
    return BertTokenizerFast(vocab=vocabulary, bos_token="[DEC]", model_max_length=LENGTH)


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import (
        BlipConfig,
        BlipForConditionalGeneration,
        BlipImageProcessor,
        BlipProcessor,
        BlipTextConfig,
        BlipVisionConfig,
    )

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 5, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
    text = BlipTextConfig(vocab_size=len(WORDS), encoder_hidden_size=16, max_position_embeddings=64, **small, **ids)
    vision = BlipVisionConfig(image_size=16, patch_size=8, **small)
    torch.manual_seed(1)
    model = BlipForConditionalGeneration(BlipConfig(text_config=text.to_dict(), vision_config=vision.to_dict()))
    for parameter in model.parameters():  # as initialised they are too small for the picture to make a difference
        torch.nn.init.normal_(parameter)
    directory = tmp_path_factory.mktemp("blip")
    BlipProcessor(BlipImageProcessor(size={"height": 16, "width": 16}), bert_tokenizer()).save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def spoken(checkpoint: Path, picture: np.ndarray) -> str:
    """The checkpoint's caption: the same as the adapter, token by token, with nothing but the model itself."""
    from transformers import AutoProcessor, BlipForConditionalGeneration

    processor = AutoProcessor.from_pretrained(checkpoint)
    model = BlipForConditionalGeneration.from_pretrained(checkpoint).eval()
    image = processor.image_processor((picture * 255).astype(np.uint8), return_tensors="pt")["pixel_values"]
    seen = model.vision_model(image)[0]
    ids = [5]
    while len(ids) <= 20 and ids[-1] != 3:
        with torch.no_grad():
            logits = model.text_decoder(torch.tensor([ids]), encoder_hidden_states=seen).logits
        ids.append(int(logits[0, -1].argmax()))
    return str(processor.tokenizer.decode(ids[1:], skip_special_tokens=True)).strip()


@pytest.fixture(scope="module")
def blip2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        BlipImageProcessor,
        OPTConfig,
    )

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 5, "eos_token_id": 3, "pad_token_id": 0}
    image = BlipImageProcessor(size={"height": 16, "width": 16})
    processor = Blip2Processor(image, bert_tokenizer(), num_query_tokens=4)
    words = len(processor.tokenizer)
    parts = {
        "vision_config": Blip2VisionConfig(image_size=16, patch_size=8, intermediate_size=16, **small),
        "qformer_config": Blip2QFormerConfig(encoder_hidden_size=16, intermediate_size=16, vocab_size=words, **small),
        "text_config": OPTConfig(vocab_size=words, ffn_dim=16, word_embed_proj_dim=16, **small, **ids),
    }
    token = processor.tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(1)
    model = Blip2ForConditionalGeneration(Blip2Config(**parts, num_query_tokens=4, image_token_index=token))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    directory = tmp_path_factory.mktemp("blip2")
    processor.save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def answered(checkpoint: Path, picture: np.ndarray, question: str | None) -> str:
    from transformers import Blip2ForConditionalGeneration, Blip2Processor

    processor = Blip2Processor.from_pretrained(checkpoint)
    model = Blip2ForConditionalGeneration.from_pretrained(checkpoint).eval()
    inputs = processor(images=(picture * 255).astype(np.uint8), text=question, return_tensors="pt")
    said = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]
    said = said[inputs["input_ids"].shape[1] :] if question else said
    return str(processor.decode(said, skip_special_tokens=True)).strip()


def test_questions_are_answered_by_a_real_checkpoint(blip2: Path) -> None:
    share = data([1, 1, 1], [0, 1, 0], np.tile(hashed("a dog", LENGTH, 100), (3, 1)))
    question = "what color is it?"
    make = generator_of("transformers", str(blip2), share, spec(), questions=[question])
    made = complete(share, spec(), make).dataset.modalities["words"]
    for i in (0, 2):
        picture, name = share.modalities["picture"][i], share.label_names[share.labels[i]]
        answer = answered(blip2, picture, "Question: what color is it? Answer:")
        text = prompt_of(name, f"{answer}. {answered(blip2, picture, None)}")
        assert made[i].tolist() == hashed(text, LENGTH, 100).tolist()


def test_a_checkpoint_that_takes_a_question_for_a_captions_start_is_refused(blip: Path) -> None:
    """Of one that answered questions the part that reads them would be left out, without an error."""
    with pytest.raises(DataError, match=r"\(blip\) captions images") as raised:
        generator_of("transformers", str(blip), data([1], [0], np.zeros((1, LENGTH), np.int64)), spec())
    assert "BLIP-2" in raised.value.remedy
    assert 'questions: ""' in raised.value.remedy


def test_texts_are_made_of_images_by_a_real_checkpoint(blip: Path) -> None:
    share = data([1, 1, 1], [0, 1, 0], np.tile(hashed("a dog", LENGTH, 100), (3, 1)))
    done = complete(share, spec(), generator_of("transformers", str(blip), share, spec(), questions=()))
    assert done.made == {"picture": 0, "words": 2}
    assert done.dataset.has("words").all()
    made, pictures = done.dataset.modalities["words"], share.modalities["picture"]
    assert made.dtype == np.int64
    names = [share.label_names[label] for label in share.labels]
    texts = [prompt_of(name, spoken(blip, picture)) for name, picture in zip(names, pictures, strict=True)]
    assert texts[0].startswith("A photo of ")
    assert texts[0] != texts[2]  # it looks at the picture
    assert made[0].tolist() == hashed(texts[0], LENGTH, 100).tolist()
    assert made[2].tolist() == hashed(texts[2], LENGTH, 100).tolist()
    assert made[1].tolist() == hashed("a dog", LENGTH, 100).tolist()  # its own text stays
    again = complete(share, spec(), generator_of("transformers", str(blip), share, spec(), questions=()))
    np.testing.assert_array_equal(again.dataset.modalities["words"], made)


def test_a_grey_picture_has_a_text_too_and_a_sensor_has_none(blip: Path) -> None:
    share = data([1, 1], [0, 0], np.zeros((2, LENGTH), np.int64), channels=1)
    done = complete(
        share, spec(channels=1), generator_of("transformers", str(blip), share, spec(channels=1), questions=())
    )
    assert done.made["words"] == 2
    encoders = {"picture": EncoderSpec(kind="sensor", input_shape=(SIDE, SIDE)), "words": spec()["words"]}
    make = generator_of("transformers", str(blip), share, encoders, questions=())
    assert make("picture", "words", np.zeros((1, SIDE, SIDE), np.float32), [""]) is None


def test_a_checkpoint_that_only_captions_is_refused_with_the_way_out(tmp_path: Path) -> None:
    from transformers import BertConfig, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = ViTConfig(image_size=16, patch_size=8, **small)
    text = BertConfig(vocab_size=len(WORDS), is_decoder=True, add_cross_attention=True, **small)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    VisionEncoderDecoderModel(config).save_pretrained(tmp_path)
    bert_tokenizer().save_pretrained(tmp_path)
    share = data([1], [0], np.zeros((1, LENGTH), np.int64))
    with pytest.raises(DataError, match="no processor that takes an image and a question") as raised:
        generator_of("transformers", str(tmp_path), share, spec())
    assert "BLIP" in raised.value.remedy


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import diffusers as d
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    known = ("<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters))
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(known)}, merges=[], model_max_length=32)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    torch.manual_seed(1)
    parts = {
        "text_encoder": CLIPTextModel(
            CLIPTextConfig(vocab_size=len(known), max_position_embeddings=32, **small, **ids)
        ),
        "vae": d.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=16),
        "unet": d.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
        ),
        "scheduler": d.DDIMScheduler(num_train_timesteps=60, clip_sample=False),
    }
    safety = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    directory = tmp_path_factory.mktemp("diffusion")
    d.StableDiffusionPipeline(tokenizer=tokenizer, **parts, **safety).save_pretrained(directory)
    return directory


NO_DIFFUSERS = "diffusers is not installed (extra: completion), so that text to image cannot be tried"
needs_diffusers = pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason=NO_DIFFUSERS)


@needs_diffusers
@pytest.mark.filterwarnings("ignore")  # of diffusers and what it imports: not this project's to mend
@pytest.mark.parametrize("channels", [pytest.param(3, marks=pytest.mark.slow), 1])
def test_images_are_made_of_texts_by_a_real_pipeline(diffusion: Path, tmp_path: Path, channels: int) -> None:
    from transformers import BertConfig

    BertConfig(vocab_size=len(WORDS)).save_pretrained(tmp_path)
    bert_tokenizer().save_pretrained(tmp_path)
    encode = bert_tokenizer()
    texts = ["a red dog", "the sky", "a red dog"]
    ids = np.array(encode(texts, padding="max_length", max_length=LENGTH)["input_ids"])
    share, encoders = data([0, 0, 0], [1, 1, 1], ids, channels), spec(channels, str(tmp_path))
    done = complete(share, encoders, generator_of("diffusers", str(diffusion), share, encoders))
    assert done.made == {"picture": 3, "words": 0}
    made = done.dataset.modalities["picture"]
    assert (made.shape, made.dtype) == ((3, SIDE, SIDE, channels), np.float32)
    assert 0 <= made.min() < made.max() <= 1
    np.testing.assert_array_equal(made[0], made[2])  # the same prompt, the same picture
    assert np.abs(made[0] - made[1]).max() > 0.01
    torch.manual_seed(123)  # whatever was drawn before
    again = complete(share, encoders, generator_of("diffusers", str(diffusion), share, encoders))
    np.testing.assert_array_equal(again.dataset.modalities["picture"], made)


@needs_diffusers
@pytest.mark.filterwarnings("ignore")
def test_hashed_words_have_no_way_back(diffusion: Path) -> None:
    share = data([0], [1], np.tile(hashed("a dog", LENGTH, 100), (1, 1)))
    with pytest.raises(DataError, match="no way back"):
        complete(share, spec(), generator_of("diffusers", str(diffusion), share, spec()))


def test_the_prompt_names_the_class() -> None:
    assert prompt_of("animals-nature", "a red dog") == "A photo of animals-nature, a red dog"
    assert prompt_of("", "a red dog") == "A photo of a red dog"


def test_without_diffusers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    share = data([0], [1], np.zeros((1, LENGTH), np.int64))
    with pytest.raises(MissingDependencyError, match="diffusers") as raised:
        generator_of("diffusers", "any", share, spec())
    assert "edgefl-toolkit[completion]" in raised.value.remedy
