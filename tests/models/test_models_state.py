"""Parts as tensors: out of a model, into another, and what is refused on the way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from edgefl.errors import ModelError
from edgefl.models.check import encoder_of_size
from edgefl.models.parts import load_part, named_tensors, part_size_bytes, part_tensors
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.models.tensor_names import stable_name

torch.set_num_threads(1)

SPEC = ModelSpec(
    encoders={
        "acc": encoder_of_size("sensor", "tiny", (16, 3)),
        "image": encoder_of_size("vision", "tiny", (8, 8, 1)),
        "words": encoder_of_size("text", "tiny", (6,), vocabulary=20),
        "sound": encoder_of_size("audio", "tiny", (16, 16)),
    },
    head=HeadSpec(width=8, out=4),
    classes=3,
)


def test_every_part_travels_from_one_model_to_another():
    source, target = build(SPEC, seed=1), build(SPEC, seed=2)
    for part in source.parts_present:
        load_part(target, part, part_tensors(source, part))
    x = torch.rand(2, 16, 3)
    source.eval()
    target.eval()
    torch.testing.assert_close(
        target.project("acc", target.encode("acc", x)), source.project("acc", source.encode("acc", x)), rtol=0, atol=0
    )


def test_text_norm_has_no_tensors_and_loads_as_such():
    model = build(SPEC, ["words/norm"])
    assert part_tensors(model, "words/norm") == {}
    load_part(model, "words/norm", {})


def test_a_linear_part_by_hand():
    spec = ModelSpec(encoders=SPEC.encoders, fusion_width=2, classes=3)
    model = build(spec, ["task"])
    load_part(model, "task", {"weight": np.eye(3, 2, dtype=np.float32), "bias": np.float32([0, 0, 5])})
    assert model.classify(torch.tensor([[1.0, 2.0]])).tolist() == [[1.0, 2.0, 5.0]]
    assert part_size_bytes(model, "task") == 4 * (3 * 2 + 3)


def test_head_tensors_hold_batch_norm_statistics():
    tensors = part_tensors(build(SPEC, ["head/acc"]), "head/acc")
    assert tensors["2.running_var"].tolist() == [1.0] * 8
    assert tensors["2.num_batches_tracked"].dtype == np.int64
    assert "9.weight" not in tensors  # the last batch norm has no affine parameters
    assert tensors["9.running_mean"].shape == (4,)


def test_tensors_are_copies():
    model = build(SPEC, ["task"])
    tensors = part_tensors(model, "task")
    before = tensors["weight"].copy()
    with torch.no_grad():
        model.part("task").weight.add_(1)
    assert (tensors["weight"] == before).all()


def test_read_only_and_half_precision_tensors_can_be_loaded():
    model = build(SPEC, ["task"])
    tensors = {name: t.astype(np.float16) for name, t in part_tensors(model, "task").items()}
    for tensor in tensors.values():
        tensor.setflags(write=False)
    load_part(model, "task", tensors)
    assert part_tensors(model, "task")["weight"].dtype == np.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": None}, r"task: the tensor 'weight' \[3, 256\] is missing"),
        ({"extra": np.zeros(2, np.float32)}, r"task: the tensor 'extra' \[2\] is not in the model"),
        ({"weight": np.zeros((3, 4), np.float32)}, r"'weight' has shape \[3, 4\], but the model needs \[3, 256\]"),
        ({"bias": np.zeros(3, np.int64)}, r"'bias' is int64, but the model has torch.float32"),
    ],
)
def test_tensors_that_do_not_fit_change_nothing(change: dict[str, np.ndarray | None], message: str):
    model = build(SPEC, ["task"], seed=1)
    before = part_tensors(model, "task")
    tensors = {**part_tensors(build(SPEC, ["task"], seed=2), "task"), **change}
    with pytest.raises(ModelError, match=message):
        load_part(model, "task", {name: t for name, t in tensors.items() if t is not None})
    after = part_tensors(model, "task")
    assert all((after[name] == before[name]).all() for name in before)


@pytest.mark.parametrize(
    ("old", "stable"),
    [
        ("blocks.0.attention.attention.query.weight", "blocks.0.attention.q_proj.weight"),
        ("blocks.1.attention.output.dense.bias", "blocks.1.attention.o_proj.bias"),
        ("blocks.0.intermediate.dense.weight", "blocks.0.mlp.fc1.weight"),
        ("blocks.0.output.dense.weight", "blocks.0.mlp.fc2.weight"),
        ("blocks.0.attention.out_lin.weight", "blocks.0.attention.out_lin.weight"),
    ],
)
def test_names_do_not_depend_on_the_version_of_transformers(old: str, stable: str):
    assert stable_name(old) == stable


def test_the_names_on_the_wire_are_pinned():
    model = build(SPEC, device="meta")
    names = {part: sorted(named_tensors(model.part(part))) for part in ("image/stage1", "words/stage1", "sound/embed")}
    vit = [f"attention.{p}_proj" for p in "koqv"] + ["layernorm_after", "layernorm_before", "mlp.fc1", "mlp.fc2"]
    bert = [f"attention.{p}_lin" for p in ("k", "out", "q", "v")]
    bert += ["ffn.lin1", "ffn.lin2", "output_layer_norm", "sa_layer_norm"]
    assert names["image/stage1"] == [f"blocks.0.{n}.{t}" for n in vit for t in ("bias", "weight")]
    assert names["words/stage1"] == [f"blocks.0.{n}.{t}" for n in bert for t in ("bias", "weight")]
    assert names["sound/embed"] == [
        "embeddings.cls_token",
        "embeddings.distillation_token",
        "embeddings.patch_embeddings.projection.bias",
        "embeddings.patch_embeddings.projection.weight",
        "embeddings.position_embeddings",
    ]


def test_the_names_of_bert_on_the_wire_are_pinned():
    """Its dense layers travel under ViT's names: all of them come from one rule of ``edgefl.models.parts``."""
    words = EncoderSpec("text", (9,), width=16, depth=1, heads=2, vocabulary=30, arch="bert")
    part = build(ModelSpec({"words": words}, 1, HeadSpec(8, 4)), device="meta").part("words/stage1")
    layers = [
        "attention.o_proj",
        "attention.output.LayerNorm",
        *(f"attention.self.{n}" for n in ("key", "query", "value")),
    ]
    layers += ["mlp.fc1", "mlp.fc2", "output.LayerNorm"]
    assert sorted(named_tensors(part)) == [f"blocks.0.{n}.{t}" for n in layers for t in ("bias", "weight")]


def test_constants_of_a_standardised_sensor_are_no_part_of_its_part():
    """They come with the specification: a part is as large, and has the same tensors, with and without."""
    plain = encoder_of_size("sensor", "tiny", (16, 3))
    scaled = replace(plain, standardize="fleet", mean=(1.0, 2.0, 3.0), std=(2.0, 4.0, 8.0))
    models = [build(ModelSpec({"acc": one}, head=HeadSpec(8, 4)), seed=1).eval() for one in (plain, scaled)]
    assert len({part_size_bytes(model, "acc/embed") for model in models}) == 1
    assert len({tuple(named_tensors(model.part("acc/embed"))) for model in models}) == 1
    x = torch.randn(2, 16, 3)
    raw = x * torch.tensor([2.0, 4.0, 8.0]) + torch.tensor([1.0, 2.0, 3.0])
    assert torch.allclose(models[0].embed("acc", x).tokens, models[1].embed("acc", raw).tokens, atol=1e-5)
    raw[0, 3, 1] = 1e30
    x[0, 3, 1] = 20.0
    assert torch.allclose(models[0].embed("acc", x).tokens, models[1].embed("acc", raw).tokens, atol=1e-5)
