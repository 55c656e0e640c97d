"""The staged model: its parts, the way through them, first weights, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from edgefl.errors import ModelError
from edgefl.models.check import check_spec, encoder_of_size
from edgefl.models.encoder import TokenState
from edgefl.models.heads import projection_head
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec, part_names
from edgefl.models.staged import StagedModel, build

torch.set_num_threads(1)

HEAD = HeadSpec(width=24, out=16)
SHAPES: dict[str, tuple[int, ...]] = {"sensor": (50, 3), "vision": (8, 12, 1), "text": (10,), "audio": (37, 20)}


def tiny(kind: str, shape: tuple[int, ...] = (), **changes: object) -> EncoderSpec:
    return encoder_of_size(kind, "tiny", shape or SHAPES[kind], **changes)


def four_kinds(**changes: object) -> ModelSpec:
    encoders = {"acc": tiny("sensor"), "image": tiny("vision"), "words": tiny("text"), "sound": tiny("audio")}
    return ModelSpec(**{"encoders": encoders, "head": HEAD, "fusion_width": 12, "classes": 5, **changes})


def batch(spec: ModelSpec, rows: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, encoder in spec.encoders.items():
        shape = (rows, *encoder.input_shape)
        if encoder.kind == "text":
            made[name] = torch.randint(1, encoder.vocabulary, shape, generator=generator).to(device)
        else:
            made[name] = torch.rand(shape, generator=generator).to(device)
    return made


def forward(model: StagedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    projections = {m: model.project(m, model.encode(m, x)) for m, x in inputs.items()}
    return model.classify(model.fuse(projections))


def test_parts_are_those_of_the_specification_in_its_order():
    spec = four_kinds()
    assert build(spec, device="meta").parts_present == tuple(part_names(spec))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_forward_and_backward_reach_every_parameter(device: str):
    spec = four_kinds()
    model = build(spec, device=device)
    with FlopCounterMode(display=False) as flops:
        logits = forward(model, batch(spec, 4, device))
        logits.square().sum().backward()
    assert logits.shape == (4, 5)
    assert flops.get_total_flops() > 0
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_encode_is_its_pieces_one_by_one(depth: int):
    spec = four_kinds()
    model = build(spec).eval()
    for modality, x in batch(spec, 2).items():
        state = model.embed(modality, x)
        for k in range(1, depth + 1):
            state = model.stage(modality, k, state)
        expected = model.pool(modality, state)
        assert expected.shape == (2, 32)
        torch.testing.assert_close(model.encode(modality, x, depth), expected)


def test_one_row_gives_what_it_gives_in_a_batch():
    spec = four_kinds()
    model = build(spec).eval()
    inputs = batch(spec, 3)
    alone = forward(model, {m: x[1:2] for m, x in inputs.items()})
    torch.testing.assert_close(alone[0], forward(model, inputs)[1], atol=1e-5, rtol=1e-5)


def test_a_part_has_the_same_weights_whatever_else_is_built():
    spec = four_kinds()
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    whole = build(spec, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's generator moved"
    for part in ("acc/stage3", "sound/embed", "head/image", "task"):
        alone = part_tensors(build(spec, [part], seed=7), part)
        for name, tensor in part_tensors(whole, part).items():
            assert (tensor == alone[name]).all()
    other = part_tensors(build(spec, ["acc/stage3"], seed=8), "acc/stage3")
    assert (other["blocks.0.qkv.weight"] != part_tensors(whole, "acc/stage3")["blocks.0.qkv.weight"]).any()


def test_stages_of_one_encoder_differ_in_their_weights():
    model = build(four_kinds(), ["acc/stage1", "acc/stage2"])
    first, second = (part_tensors(model, f"acc/stage{k}")["blocks.0.qkv.weight"] for k in (1, 2))
    assert (first != second).any()


def test_only_named_parts_exist():
    spec = four_kinds()
    model = build(spec, ["head/acc", "acc/stage2"])
    assert model.parts_present == ("acc/stage2", "head/acc")
    with pytest.raises(ModelError, match="'acc/embed' is not in this model"):
        model.encode("acc", torch.zeros(1, 50, 3))


def test_a_cached_prefix_goes_on_from_its_tokens():
    spec = four_kinds()
    whole = build(spec).eval()
    rest = build(spec, ["words/stage6", "words/norm"]).eval()
    x = batch(spec, 2)["words"]
    x[:, 6:] = 0
    state = whole.embed("words", x)
    for k in range(1, 6):
        state = whole.stage("words", k, state)
    again = rest.pool("words", rest.stage("words", 6, TokenState(state.tokens, state.mask)))
    torch.testing.assert_close(again, whole.encode("words", x))


def test_padding_does_not_change_a_text():
    spec = ModelSpec(encoders={"words": tiny("text")}, head=HEAD)
    shorter = ModelSpec(encoders={"words": tiny("text", shape=(4,), positions=10)}, head=HEAD)
    ids = torch.tensor([[7, 8, 9, 3]])
    padded = torch.cat((ids, torch.zeros(1, 6, dtype=torch.int64)), dim=1)
    h = build(shorter).eval().encode("words", ids)
    torch.testing.assert_close(build(spec).eval().encode("words", padded), h, atol=1e-5, rtol=1e-5)


def test_a_row_of_zeros_gives_finite_numbers_and_gradients():
    spec = four_kinds()
    model = build(spec)
    out = sum(model.encode(m, torch.zeros_like(x)).sum() for m, x in batch(spec, 2).items())
    out.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_sensor_tokens_by_hand():
    """T = 5 in patches of 2: three patches, the last filled with a zero; token = W·patch + b + position."""
    spec = ModelSpec(encoders={"acc": EncoderSpec(input_shape=(5, 1), width=4, heads=1, depth=1, patch=2)}, stages=1)
    model = build(spec, ["acc/embed"]).eval()
    embed = model.part("acc/embed")
    x = torch.arange(1.0, 6.0).reshape(1, 5, 1)
    tokens = model.embed("acc", x).tokens
    assert tokens.shape == (1, 4, 4)
    last = embed.project.weight @ torch.tensor([5.0, 0.0]) + embed.project.bias + embed.position_embeddings[0, 3]
    torch.testing.assert_close(tokens[0, 3], last)
    torch.testing.assert_close(tokens[0, 0], embed.cls_token[0, 0] + embed.position_embeddings[0, 0])


def test_a_single_token_attends_to_itself_only():
    """With one key the softmax is 1, so attention returns v: block(x) = x + out(v) + mlp(...)."""
    spec = ModelSpec(encoders={"acc": tiny("sensor", depth=1)}, stages=1)
    block = build(spec, ["acc/stage1"]).eval().part("acc/stage1").blocks[0]
    x = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0))
    v = block.qkv(block.attention_norm(x))[..., 64:]
    middle = x + block.out(v)
    torch.testing.assert_close(block(x), middle + block.mlp(block.mlp_norm(middle)))


def test_sensor_attention_equals_torchs_own():
    block = build(ModelSpec(encoders={"acc": tiny("sensor", depth=1)}, stages=1), ["acc/stage1"]).part("acc/stage1")
    block = block.blocks[0].eval()
    own = torch.nn.MultiheadAttention(32, 2, batch_first=True)
    own.load_state_dict(
        {
            "in_proj_weight": block.qkv.weight,
            "in_proj_bias": block.qkv.bias,
            "out_proj.weight": block.out.weight,
            "out_proj.bias": block.out.bias,
        }
    )
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    normed = block.attention_norm(x)
    middle = x + own(normed, normed, normed)[0]
    torch.testing.assert_close(block(x), middle + block.mlp(block.mlp_norm(middle)))


@pytest.mark.parametrize("kind", SHAPES)
def test_dropout_acts_in_training_only(kind: str):
    spec = ModelSpec(encoders={"m": tiny(kind, dropout=0.5)}, head=HEAD)
    model = build(spec, ["m/embed", "m/stage1", "m/norm"])
    x = batch(spec, 2)["m"]
    assert not torch.equal(model.encode("m", x, 1), model.encode("m", x, 1))
    assert all(layer.p == 0.5 for layer in model.modules() if isinstance(layer, torch.nn.Dropout))
    model.eval()
    torch.testing.assert_close(model.encode("m", x, 1), model.encode("m", x, 1), rtol=0, atol=0)


def test_first_weights_by_hand():
    """Xavier uniform: bound sqrt(6 / (in + out)); a patch convolution counts as the Linear it is."""
    spec = four_kinds()
    image = part_tensors(build(spec, ["image/embed"]), "image/embed")
    patches = image["embeddings.patch_embeddings.projection.weight"]  # [32, 1, 4, 4]: 16 in, 32 out
    bound = (6 / 48) ** 0.5
    assert 0.95 * bound < abs(patches).max() <= bound
    assert (image["embeddings.patch_embeddings.projection.bias"] == 0).all()
    assert 0.01 < image["embeddings.position_embeddings"].std() < 0.03
    words = part_tensors(build(spec, ["words/embed"]), "words/embed")["embeddings.word_embeddings.weight"]
    assert (words[0] == 0).all()
    assert 0.019 < words[1:].std() < 0.021


def test_projection_head_follows_the_papers_layers():
    head = build(four_kinds(), ["head/acc"]).part("head/acc")
    assert [type(layer).__name__ for layer in head] == [
        *(["Linear", "Dropout", "BatchNorm1d", "ReLU"] * 2),
        "Linear",
        "BatchNorm1d",
    ]
    assert all(layer.bias is None for layer in head if isinstance(layer, torch.nn.Linear))
    r = head(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(r.mean(0), torch.zeros(16), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("norm", "layers"),
    [("layer", [*(["Linear", "Dropout", "LayerNorm", "ReLU"] * 2), "Linear", "LayerNorm"]),
     ("none", [*(["Linear", "Dropout", "ReLU"] * 2), "Linear"])],
)  # fmt: skip
def test_heads_without_batch_norm_hold_no_statistics_and_train_on_one_row(norm, layers):
    head = projection_head(32, HeadSpec(width=24, out=16, norm=norm))
    assert [type(layer).__name__ for layer in head] == layers
    assert [layer.bias is not None for layer in head if isinstance(layer, torch.nn.Linear)] == [norm == "none"] * 3
    assert not list(head.buffers())
    r = head.train()(torch.randn(1, 32, generator=torch.Generator().manual_seed(0)))
    assert r.shape == (1, 16)
    if norm == "layer":  # the last one without parameters: mean 0, variance 1 over each row
        assert not list(head[-1].parameters())
        torch.testing.assert_close(r.mean(1), torch.zeros(1), atol=1e-5, rtol=0)


def test_a_stored_head_without_a_norm_has_batch_norm():
    assert msgspec.json.decode(b'{"width": 8, "out": 4}', type=HeadSpec) == HeadSpec(8, 4, norm="batch")
    with pytest.raises(ModelError, match=r"head\.norm: 'group' is unknown; choose batch, layer, none"):
        check_spec(msgspec.structs.replace(four_kinds(), head=HeadSpec(8, 4, norm="group")))


def test_fusion_concatenates_in_the_order_of_the_specification():
    model = build(four_kinds(), ["fusion"]).eval()
    parts = {m: torch.full((1, 16), float(i)) for i, m in enumerate(model.spec.encoders)}
    backwards = dict(reversed(parts.items()))
    expected = torch.nn.Sequential(*model.part("fusion"))(torch.cat(list(parts.values()), dim=1))
    torch.testing.assert_close(model.fuse(backwards), expected)
    with pytest.raises(ModelError, match=r"fusion needs the modalities"):
        model.fuse({"acc": parts["acc"]})


def test_fusion_by_hand():
    """Weights 1 and -1, then the identity: gelu(2) = 1.9545, gelu(-2) = -0.0455."""
    spec = ModelSpec(
        encoders={"a": tiny("sensor"), "b": tiny("sensor")}, head=HeadSpec(4, 1), fusion_width=2, classes=2
    )
    model = build(spec, ["fusion"])
    ones = np.float32([[1, 1], [-1, -1]])
    zeros = np.zeros(2, np.float32)
    load_part(
        model, "fusion", {"0.weight": ones, "0.bias": zeros, "2.weight": np.eye(2, dtype=np.float32), "2.bias": zeros}
    )
    fused = model.fuse({"a": torch.tensor([[0.5]]), "b": torch.tensor([[1.5]])})
    torch.testing.assert_close(fused, torch.tensor([[1.9545, -0.0455]]), atol=1e-4, rtol=0)


def test_wrong_sample_shape_names_modality_and_both_shapes():
    model = build(four_kinds(), ["image/embed"])
    with pytest.raises(ModelError, match=r"'image': samples of shape \[9, 9, 1\], but the model takes \[8, 12, 1\]"):
        model.embed("image", torch.zeros(2, 9, 9, 1))


def test_unknown_part_lists_the_parts():
    with pytest.raises(ModelError, match="no part 'acc/stage7'") as caught:
        build(four_kinds(), ["acc/stage7"])
    assert "acc/stage6" in caught.value.remedy


def _fresh(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["sensor", "vision", "audio", "text", "table"])
def test_a_model_that_starts_at_random_never_imports_transformers(kind):
    """Its blocks would bring 147 MiB, sympy and torch's compiler among it."""
    _fresh(
        "import sys, torch\n"
        "from edgefl.models.staged import build\n"
        "from edgefl.models.checkpoints import initial_parts\n"
        "from edgefl.models.check import encoder_of_size\n"
        "from edgefl.models.spec import HeadSpec, ModelSpec\n"
        "shape = {'sensor': (16, 3), 'vision': (16, 16, 3), 'audio': (32, 16), 'text': (8,), 'table': (4, 2)}\n"
        f"spec = ModelSpec(encoders={{'m': encoder_of_size('{kind}', 'tiny', shape['{kind}'])}}, head=HeadSpec(8, 8))\n"
        f"kind = torch.long if '{kind}' == 'text' else torch.float32\n"
        f"build(spec).eval().encode('m', torch.ones(1, *shape['{kind}'], dtype=kind))\n"
        "list(initial_parts(spec))\n"
        "assert not {'transformers', 'sympy', 'scipy', 'torch._dynamo'} & set(sys.modules)\n"
    )


def test_describing_a_model_imports_no_torch():
    _fresh(
        "import sys\n"
        "import edgefl.models.spec, edgefl.models.spec, edgefl.models.check\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
