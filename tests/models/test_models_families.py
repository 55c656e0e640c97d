"""Encoders of `transformers` by naming their folder: the library's own features, cut into stages that train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from edgefl.config.encoder import EncoderConfig
from edgefl.encoder_families import FAMILIES, OWN_BLOCKS
from edgefl.errors import ModelError
from edgefl.models.adapter import library_inputs
from edgefl.models.check import token_count
from edgefl.models.checkpoints import check_pretrained, initial_parts
from edgefl.models.parts import load_part, part_size_bytes, part_tensors
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.models.staged import StagedModel, build
from edgefl.models.way_back import write_checkpoint
from edgefl.plan.checkpoint_fields import told
from edgefl.plan.preparation import encoder_spec

torch.set_num_threads(1)

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
TEXT: dict[str, Any] = {**COMMON, "vocab_size": 60, "max_position_embeddings": 20}
VISION: dict[str, Any] = {**COMMON, "image_size": 16, "patch_size": 8}
DINO = {name: value for name, value in VISION.items() if name != "intermediate_size"}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
MODERN = {**TEXT, **SPECIAL, "pad_token_id": 50, "local_attention": 4, "global_attn_every_n_layers": 2}
WAVE = {**COMMON, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "vocab_size": 20}
WAVE |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
WHISPER = {"d_model": 32, "encoder_layers": 4, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "vocab_size": 60}
WHISPER |= {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64, "num_mel_bins": 20}
WHISPER |= {"max_source_positions": 15, "max_target_positions": 10, "pad_token_id": 0, "bos_token_id": 1}
WHISPER |= {"eos_token_id": 2, "decoder_start_token_id": 1}
SERIES = {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 32}
SERIES |= {"num_hidden_layers": 4, "num_attention_heads": 2, "ffn_dim": 64}
#: Name -> (configuration class, its values); the name begins with its model_type or stands for it.
CONFIGS = {
    "roberta": ("RobertaConfig", TEXT),
    "xlm-roberta": ("XLMRobertaConfig", TEXT),
    "camembert": ("CamembertConfig", TEXT),
    "mpnet": ("MPNetConfig", TEXT),
    "electra": ("ElectraConfig", {**TEXT, "embedding_size": 16}),
    "albert": ("AlbertConfig", {**TEXT, "embedding_size": 16}),
    "modernbert": ("ModernBertConfig", MODERN),
    "deit": ("DeiTConfig", VISION),
    "dinov2": ("Dinov2Config", DINO),
    "dinov2_with_registers": ("Dinov2WithRegistersConfig", DINO),
    "clip": ("CLIPConfig", {"vision_config": VISION, "text_config": TEXT}),
    "clip_vision_model": ("CLIPVisionConfig", VISION),
    "siglip": ("SiglipConfig", {"vision_config": VISION, "text_config": TEXT}),
    "siglip_vision_model": ("SiglipVisionConfig", VISION),
    "beit": ("BeitConfig", {**VISION, "use_relative_position_bias": True}),
    "whisper": ("WhisperConfig", WHISPER),
    "wav2vec2": ("Wav2Vec2Config", WAVE),
    "hubert": ("HubertConfig", WAVE),
    "patchtst": ("PatchTSTConfig", SERIES),
}
#: Not in the table: the library's own modules are tried.
UNNAMED = {"nomic": ("RoFormerConfig", {**TEXT, "embedding_size": 32}), "vit_msn": ("ViTMSNConfig", VISION)}
STAGES = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small checkpoint of every family, as `save_pretrained` writes it."""
    made = {}
    for name, (config, values) in {**CONFIGS, **UNNAMED}.items():
        torch.manual_seed(5)
        model = transformers.AutoModel.from_config(getattr(transformers, config)(**values))
        with torch.no_grad():  # larger than the library's first weights, so that a wrong way through them shows
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
    return made


def encoder_for(name: str, folder: Path, **changes: Any) -> EncoderSpec:
    """The encoder of a run file that names the folder and nothing else."""
    kind = FAMILIES[name].kind if name in FAMILIES else {"nomic": "text", "vit_msn": "vision"}[name]
    config = EncoderConfig(kind=kind, pretrained=str(folder), **changes)
    shape = told(config).fields.get("input_shape") or {"text": (10,), "audio": (400, 1)}[kind]
    return encoder_spec(config, tuple(shape))


def spec_for(name: str, folder: Path, **changes: Any) -> ModelSpec:
    stages = 1 if name == "albert" else STAGES
    return ModelSpec(encoders={"m": encoder_for(name, folder, **changes)}, stages=stages, head=HeadSpec(8, 4))


def loaded(spec: ModelSpec) -> StagedModel:
    model = build(spec)
    for part, tensors in initial_parts(spec):
        load_part(model, part, tensors)
    return model.eval()


def sample(spec: EncoderSpec) -> torch.Tensor:
    torch.manual_seed(2)
    if spec.kind != "text":
        return torch.rand(3, *spec.input_shape)
    ids = torch.randint(3, 49, (3, *spec.input_shape))
    ids[0, 7:] = 0
    return ids


def library(folder: Path) -> Any:
    """The library's own encoder of the folder, by its own means."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "vision_config"):
        config = config.vision_config
    model = transformers.AutoModel.from_pretrained(folder, config=config).eval()
    return model.get_encoder() if model.config.is_encoder_decoder else model


@pytest.mark.parametrize("name", [*CONFIGS, "vit_msn"])
def test_features_are_those_of_the_library(name: str, folders: dict[str, Path]) -> None:
    spec = spec_for(name, folders[name])
    check_pretrained(spec)
    encoder, original = spec.encoders["m"], library(folders[name])
    x = sample(encoder)
    given = library_inputs(encoder, original.main_input_name, x)
    if encoder.kind == "text":
        padding = original.config.pad_token_id
        assert (given["input_ids"][0, 7:] == padding).all()
        given["attention_mask"] = (given["input_ids"] != padding).long()
    with torch.no_grad():
        theirs = original(**given)
        model = loaded(spec)
        state = model.encode_tokens("m", x)
        pooled = model.encode("m", x)
    assert state.tokens.shape[1] == token_count(encoder)
    real = torch.ones(state.tokens.shape[:2], dtype=torch.bool) if state.mask is None else state.mask
    if name.startswith("clip"):  # whose norm is of the pooled token alone
        torch.testing.assert_close(pooled, theirs.pooler_output, atol=1e-5, rtol=0)
    else:
        hidden = theirs.last_hidden_state.flatten(1, -2)
        torch.testing.assert_close(state.tokens[real], hidden[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_stages_train_and_are_priced_on_shapes(name: str, folders: dict[str, Path]) -> None:
    spec = spec_for(name, folders[name])
    model, x = loaded(spec).train(), sample(spec.encoders["m"])
    last = f"m/stage{spec.stages}"
    for part in model.parts_present:
        model.part(part).requires_grad_(part == last)
    before = part_tensors(model, last)
    optimizer = torch.optim.SGD(model.part(last).parameters(), lr=0.1)
    model.project("m", model.encode("m", x)).square().sum().backward()
    optimizer.step()
    after = part_tensors(model, last)
    changed = [name for name in before if (before[name] != after[name]).any()]
    assert len(changed) > len(before) // 2
    shapes = build(spec, device="meta")
    assert shapes.encode("m", x.to("meta")).shape == (3, 32)
    assert part_size_bytes(shapes, last) == part_size_bytes(model, last)


def test_every_family_of_the_table_is_tried() -> None:
    assert set(CONFIGS) == set(FAMILIES)
    assert not set(FAMILIES) & set(OWN_BLOCKS)


def test_what_cannot_be_cut_is_refused_with_the_reason(folders: dict[str, Path]) -> None:
    with pytest.raises(
        ModelError, match="'roformer' encoder cannot be cut into stages: its forward pass asks for values"
    ):
        check_pretrained(spec_for("nomic", folders["nomic"]))


def test_code_of_a_checkpoint_is_never_built(folders: dict[str, Path]) -> None:
    encoder = encoder_for("roberta", folders["roberta"])
    config = json.loads(encoder.config)
    for change, said in (({"model_type": "own_code"}, "does not know"), ({"_auto": 1}, "could load other code")):
        other = ModelSpec({"m": replaced(encoder, json.dumps({**config, **change}))}, 2, HeadSpec(8, 4))
        with pytest.raises(ModelError, match=said):
            build(other, ["m/norm"])
    folder = folders["roberta"].with_name("with_code")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "code.Model"}}))
    assert "auto_map" not in encoder_for("roberta", folder).config


def replaced(encoder: EncoderSpec, config: str) -> EncoderSpec:
    return EncoderSpec(**{**{name: getattr(encoder, name) for name in encoder.__struct_fields__}, "config": config})


def test_leading_tokens_are_those_of_all(folders: dict[str, Path]) -> None:
    spec = spec_for("deit", folders["deit"])
    model, x = loaded(spec), sample(spec.encoders["m"])
    assert isinstance(model.part("m/norm"), nn.LayerNorm)
    with torch.no_grad():
        torch.testing.assert_close(model.encode("m", x), model.encode_tokens("m", x).tokens[:, 0])


@pytest.mark.parametrize("name", ["roberta", "mpnet", "albert", "clip", "whisper", "wav2vec2", "patchtst"])
def test_a_trained_encoder_goes_back(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    spec = spec_for(name, folders[name])
    encoder, model = spec.encoders["m"], loaded(spec)
    with torch.no_grad():
        for name_of, parameter in model.named_parameters():
            if "relative_attention_bias" not in name_of:
                parameter.add_(0.05)
        x = sample(encoder)
        write_checkpoint(spec, "m", {part: part_tensors(model, part) for part in model.parts_present}, tmp_path)
        original = library(tmp_path)
        given = library_inputs(encoder, original.main_input_name, x)
        if encoder.kind == "text":
            given["attention_mask"] = (given["input_ids"] != original.config.pad_token_id).long()
        theirs = original(**given)
        state = model.encode_tokens("m", x)
        if name == "clip":
            torch.testing.assert_close(model.encode("m", x), theirs.pooler_output, atol=1e-5, rtol=0)
        else:
            real = torch.ones(state.tokens.shape[:2], dtype=torch.bool) if state.mask is None else state.mask
            hidden = theirs.last_hidden_state.flatten(1, -2)
            torch.testing.assert_close(state.tokens[real], hidden[real], atol=1e-5, rtol=0)
