"""First tensors from `transformers` checkpoints: equal to the library's own output, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from edgefl.errors import ModelError
from edgefl.models.check import encoder_of_size
from edgefl.models.checkpoints import initial_parts, pretrained_parts
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec, part_names
from edgefl.models.staged import StagedModel, build

torch.set_num_threads(1)

SMALL = {"width": 32, "depth": 6, "heads": 2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small checkpoints, as a user would have them from `save_pretrained`: vision, text, audio."""
    common = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 128}
    vit = transformers.ViTConfig(**common, image_size=16, patch_size=8)
    ast = transformers.ASTConfig(
        **common, patch_size=8, frequency_stride=6, time_stride=6, max_length=30, num_mel_bins=20
    )
    bert = transformers.DistilBertConfig(
        vocab_size=50, max_position_embeddings=12, n_layers=6, n_heads=2, dim=32, hidden_dim=128
    )
    whole = transformers.BertConfig(**common, vocab_size=50, max_position_embeddings=12)
    made = {}
    for kind, model_class, config in (
        ("bert", transformers.BertModel, whole),
        ("vision", transformers.ViTModel, vit),
        ("text", transformers.DistilBertModel, bert),
        ("audio", transformers.ASTModel, ast),
    ):
        torch.manual_seed(5)
        model = model_class(config)
        with torch.no_grad():  # larger than the library's first weights, so that a wrong way through them shows
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        made[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(made[kind])
    return made


def encoder_for(kind: str, source: Path, **changes: object) -> EncoderSpec:
    fields = {
        "vision": {"input_shape": (16, 16, 3), "patch": 8},
        "text": {"input_shape": (10,), "vocabulary": 50},
        "bert": {"kind": "text", "arch": "bert", "input_shape": (10,), "vocabulary": 50},
        "audio": {"input_shape": (30, 20), "patch": 8, "stride": 6},
    }[kind]
    return EncoderSpec(**{"kind": kind, **SMALL, **fields, "pretrained": str(source), **changes})


def spec_for(kind: str, source: Path, **changes: object) -> ModelSpec:
    return ModelSpec(encoders={"m": encoder_for(kind, source, **changes)}, stages=3, head=HeadSpec(8, 4))


def loaded(spec: ModelSpec) -> StagedModel:
    model = build(spec)
    for part, tensors in initial_parts(spec):
        load_part(model, part, tensors)
    return model.eval()


def inputs(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    if kind in {"text", "bert"}:
        ids = torch.randint(1, 50, (3, 10), generator=generator)
        ids[0, 7:] = 0
        return ids
    return torch.rand((3, 16, 16, 3) if kind == "vision" else (3, 30, 20), generator=generator)


def original(kind: str, source: Path, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden state and pooled output of the library's own model."""
    if kind == "vision":
        out = transformers.ViTModel.from_pretrained(source).eval()(pixel_values=(x.permute(0, 3, 1, 2) - 0.5) / 0.5)
        return out.last_hidden_state, out.last_hidden_state[:, 0]
    if kind in {"text", "bert"}:
        model_class = transformers.BertModel if kind == "bert" else transformers.DistilBertModel
        out = model_class.from_pretrained(source).eval()(input_ids=x, attention_mask=(x != 0).long())
        return out.last_hidden_state, out.last_hidden_state[:, 0]
    out = transformers.ASTModel.from_pretrained(source).eval()(input_values=x)
    return out.last_hidden_state, out.pooler_output


@pytest.mark.parametrize("kind", ["vision", "text", "bert", "audio"])
@torch.no_grad()
def test_staged_encoder_equals_the_original(kind: str, checkpoints: dict[str, Path]):
    model = loaded(spec_for(kind, checkpoints[kind]))
    x = inputs(kind)
    hidden, pooled = original(kind, checkpoints[kind], x)
    state = model.embed("m", x)
    for k in (1, 2, 3):
        state = model.stage("m", k, state)
    tokens = model.part("m/norm")(state.tokens)
    real = torch.ones(tokens.shape[:2], dtype=torch.bool) if state.mask is None else state.mask
    torch.testing.assert_close(tokens[real], hidden[real], atol=1e-5, rtol=0)
    torch.testing.assert_close(model.encode("m", x), pooled, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["vision", "text", "bert", "audio"])
@torch.no_grad()
def test_training_drops_where_the_original_does(kind: str, checkpoints: dict[str, Path]):
    """From one seed both draw the same masks, if they draw them in the same places and of the same shapes."""
    names = {"text": ("dropout", "attention_dropout")}.get(
        kind, ("hidden_dropout_prob", "attention_probs_dropout_prob")
    )
    classes = {"vision": "ViTModel", "text": "DistilBertModel", "bert": "BertModel", "audio": "ASTModel"}
    library = getattr(transformers, classes[kind]).from_pretrained(checkpoints[kind], **dict.fromkeys(names, 0.3))
    model, x = loaded(spec_for(kind, checkpoints[kind], dropout=0.3)).train(), inputs(kind)
    key = {"vision": "pixel_values", "audio": "input_values"}.get(kind, "input_ids")
    theirs = {key: (x.permute(0, 3, 1, 2) - 0.5) / 0.5 if kind == "vision" else x}
    if key == "input_ids":
        theirs["attention_mask"] = (x != 0).long()
    torch.manual_seed(6)
    hidden = library.train()(**theirs).last_hidden_state
    torch.manual_seed(6)
    state = model.embed("m", x)
    for k in (1, 2, 3):
        state = model.stage("m", k, state)
    torch.testing.assert_close(model.part("m/norm")(state.tokens), hidden, atol=1e-5, rtol=0)
    assert not torch.allclose(hidden, library.eval()(**theirs).last_hidden_state, atol=0.1)


@pytest.mark.parametrize("kind", ["vision", "text", "bert", "audio"])
def test_initial_parts_are_all_parts_in_order(kind: str, checkpoints: dict[str, Path]):
    spec = spec_for(kind, checkpoints[kind])
    parts = dict(initial_parts(spec, seed=4))
    assert list(parts) == part_names(spec)
    head = part_tensors(build(spec, ["head/m"], seed=4), "head/m")
    assert all((parts["head/m"][name] == head[name]).all() for name in head)


def test_without_a_checkpoint_initial_parts_are_those_of_build():
    spec = ModelSpec(encoders={"acc": encoder_of_size("sensor", "tiny", (16, 3))}, head=HeadSpec(8, 4), classes=2)
    model = build(spec, seed=9)
    for part, tensors in initial_parts(spec, seed=9):
        expected = part_tensors(model, part)
        assert tensors.keys() == expected.keys()
        assert all((tensors[name] == expected[name]).all() for name in expected)


@torch.no_grad()
def test_another_pixel_scale_is_folded_into_the_projection(checkpoints: dict[str, Path], tmp_path: Path):
    mean, deviation = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    for file in checkpoints["vision"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = {"do_normalize": True, "image_mean": mean, "image_std": deviation}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    x = inputs("vision")
    scaled = ((x - torch.tensor(mean)) / torch.tensor(deviation)).permute(0, 3, 1, 2)
    expected = transformers.ViTModel.from_pretrained(tmp_path).eval()(pixel_values=scaled).last_hidden_state[:, 0]
    torch.testing.assert_close(loaded(spec_for("vision", tmp_path)).encode("m", x), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_rescale": False}, "it was made for pixels other than value / 255"),
        ({"rescale_factor": 1.0}, "it was made for pixels other than value / 255"),
        ({"image_mean": [0.5, 0.5]}, r"image_mean \[0.5, 0.5\] and image_std 0.5 are unusable"),
        ({"image_std": 0.0}, "image_std 0.0 are unusable"),
    ],
)
def test_a_pixel_scale_that_can_not_be_met_is_refused(
    settings: dict[str, object], message: str, checkpoints: dict[str, Path], tmp_path: Path
):
    for file in checkpoints["vision"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=message) as caught:
        list(initial_parts(spec_for("vision", tmp_path)))
    assert "for modality 'm'" in caught.value.message


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("vision", {"width": 64}, r"m/embed: the tensor 'embeddings.cls_token' has shape \[1, 1, 32\].* \[1, 1, 64\]"),
        ("vision", {"patch": 4}, r"embeddings.position_embeddings' has shape \[1, 5, 32\].* \[1, 17, 32\]"),
        ("vision", {"input_shape": (16, 16, 1)}, r"projection.weight' has shape \[32, 3, 8, 8\].* \[32, 1, 8, 8\]"),
        ("vision", {"mlp_ratio": 2.0}, r"m/stage1: the tensor 'blocks.0.mlp.fc1.weight' has shape \[128, 32\]"),
        ("vision", {"depth": 9}, r"has 6 transformer blocks, but the model needs depth 9 .*block 6"),
        ("vision", {"heads": 4}, r"has 2 attention heads, the model 4"),
        ("text", {"vocabulary": 60}, r"word_embeddings.weight' has shape \[50, 32\], but the model needs \[60, 32\]"),
        ("bert", {"vocabulary": 60}, r"word_embeddings.weight' has shape \[50, 32\], but the model needs \[60, 32\]"),
        (
            "bert",
            {"arch": "distilbert"},
            r"of type .bert., and the text encoder of type .distilbert.; set its arch",
        ),
        ("text", {"arch": "bert"}, r"it is of type 'distilbert', and the text encoder of type 'bert'; set its arch"),
        ("text", {"input_shape": (20,)}, r"position_embeddings.weight' has shape \[12, 32\].* \[20, 32\]"),
        ("audio", {"stride": 8}, r"its frequency_stride is 6, but the model computes with 8"),
        ("vision", {"input_shape": (8, 32, 3)}, r"its image_size is \[16, 16\], but the model computes with \[8, 32\]"),
        ("audio", {"input_shape": (20, 30)}, r"its max_length is 30, but the model computes with 20"),
        ("audio", {"input_shape": (30, 18)}, r"its num_mel_bins is 20, but the model computes with 18"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    kind: str, changes: dict[str, object], message: str, checkpoints: dict[str, Path]
):
    spec = spec_for(kind, checkpoints[kind], **changes)
    with pytest.raises(ModelError, match=message) as caught:
        list(pretrained_parts(spec, "m"))
    assert "for modality 'm'" in caught.value.message


def test_another_architecture_is_refused(checkpoints: dict[str, Path]):
    with pytest.raises(
        ModelError, match="of type 'distilbert', and the vision encoder of type 'vit'; taken: vit, deit"
    ):
        list(initial_parts(spec_for("vision", checkpoints["text"])))


def test_settings_the_specification_can_not_express_are_refused(checkpoints: dict[str, Path], tmp_path: Path):
    config = json.loads((checkpoints["audio"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    (tmp_path / "model.safetensors").write_bytes((checkpoints["audio"] / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="its hidden_act is 'relu', but the model computes with 'gelu'"):
        list(initial_parts(spec_for("audio", tmp_path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "its hidden_act is 'relu'"),
        ({"layer_norm_eps": 1e-6}, "its layer_norm_eps is 1e-06"),
        ({"type_vocab_size": 1}, "its type_vocab_size is 1"),
        ({"is_decoder": True}, "its is_decoder is True"),
        ({"position_embedding_type": "relative_key"}, "its position_embedding_type is 'relative_key'"),
    ],
)
def test_a_bert_of_another_make_is_refused(change, message, checkpoints: dict[str, Path], tmp_path: Path):
    config = json.loads((checkpoints["bert"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    (tmp_path / "model.safetensors").write_bytes((checkpoints["bert"] / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=message):
        list(initial_parts(spec_for("bert", tmp_path)))


def test_the_token_types_of_a_bert_are_its_own(checkpoints: dict[str, Path]):
    """All tokens are of the first type: its row is added to every token before the norm."""
    source = load_file(checkpoints["bert"] / "model.safetensors")
    name = "embeddings.token_type_embeddings.weight"
    embed = dict(pretrained_parts(spec_for("bert", checkpoints["bert"]), "m"))["m/embed"]
    np.testing.assert_array_equal(embed[name], source[name])
    assert embed["embeddings.position_embeddings.weight"].shape == (10, 32)  # of the checkpoint's 12


def test_a_missing_tensor_is_not_filled_with_random_numbers(checkpoints: dict[str, Path], tmp_path: Path):
    tensors = load_file(checkpoints["text"] / "model.safetensors")
    name = next(name for name in tensors if "layer.4" in name)
    kept = {key: np.ascontiguousarray(value) for key, value in tensors.items() if key != name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((checkpoints["text"] / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"it lacks the tensor '.*layer.4"):
        list(initial_parts(spec_for("text", tmp_path)))


def test_no_checkpoint_there(tmp_path: Path):
    with pytest.raises(ModelError, match=r"checkpoint '.*' for modality 'm' cannot be read") as caught:
        list(initial_parts(spec_for("text", tmp_path)))
    assert "config.json" in caught.value.remedy


def test_damaged_weights_are_reported(checkpoints: dict[str, Path], tmp_path: Path):
    (tmp_path / "config.json").write_bytes((checkpoints["text"] / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not a header")
    with pytest.raises(ModelError, match="cannot be read"):
        list(initial_parts(spec_for("text", tmp_path)))


def test_a_sensor_has_no_checkpoints():
    spec = ModelSpec(encoders={"acc": encoder_of_size("sensor", "tiny", (16, 3), pretrained="somewhere")})
    with pytest.raises(ModelError, match="our own sensor encoder has no public checkpoints"):
        list(initial_parts(spec))


@torch.no_grad()
def test_the_mean_of_the_real_tokens_stands_for_a_text(checkpoints: dict[str, Path]):
    x = inputs("bert")
    hidden, _ = original("bert", checkpoints["bert"], x)
    model = loaded(spec_for("bert", checkpoints["bert"], pool="mean"))
    expected = [tokens[: int((ids != 0).sum())].mean(dim=0) for tokens, ids in zip(hidden, x, strict=True)]
    torch.testing.assert_close(model.encode("m", x), torch.stack(expected), atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_mean_of_all_tokens_stands_for_an_image(checkpoints: dict[str, Path]):
    x = inputs("vision")
    hidden, _ = original("vision", checkpoints["vision"], x)
    model = loaded(spec_for("vision", checkpoints["vision"], pool="mean"))
    torch.testing.assert_close(model.encode("m", x), hidden.mean(dim=1), atol=1e-5, rtol=0)
