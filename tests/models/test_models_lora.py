"""Low-rank terms of linear maps: the equation, the first output, and what they merge to."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
import transformers
from test_models_families import CONFIGS, spec_for
from test_models_leading import SPECS, samples

from edgefl.errors import ModelError
from edgefl.models.check import spec_problems
from edgefl.models.checkpoints import initial_parts
from edgefl.models.low_rank import merged
from edgefl.models.own_checkpoint import own_parts, save_encoders
from edgefl.models.parts import load_part, loaded, part_tensors
from edgefl.models.spec import (
    EncoderSpec,
    HeadSpec,
    LoraSpec,
    ModelSpec,
    adaptable_parts,
    is_encoder,
    is_lora,
    modality_of,
    part_names,
)
from edgefl.models.staged import StagedModel, build
from edgefl.plan.stages import encoder_stage

torch.set_num_threads(1)
KINDS = {
    **SPECS,
    "bag": EncoderSpec("text", (9,), width=16, depth=2, heads=2, vocabulary=30, arch="bag"),
    "bands": EncoderSpec("audio", (24, 16), width=16, depth=2, heads=2, patch=8, arch="bands"),
    "table": EncoderSpec("table", (3, 2), width=16, depth=2, heads=2),
}
QUICK = {"roberta", "beit", "wav2vec2", "modernbert", "albert"}


def adapted(spec: ModelSpec, **changes: object) -> ModelSpec:
    """The model with low-rank terms of rank 2 in everything that can have some."""
    return msgspec.structs.replace(
        spec, lora=LoraSpec(**{"rank": 2, "alpha": 6.0, "parts": tuple(adaptable_parts(spec))} | changes)
    )


def plain(spec: ModelSpec) -> ModelSpec:
    return msgspec.structs.replace(spec, lora=msgspec.UNSET)


def of_kind(name: str, **changes: object) -> ModelSpec:
    return ModelSpec({"m": KINDS[name]}, 2, HeadSpec(width=8, out=4), **changes)


@torch.no_grad()
def trained(model: StagedModel) -> StagedModel:
    """B as if it had been trained."""
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if name.endswith(".B"):
            parameter.normal_(std=0.1)
    return model.eval()


def projected(model: StagedModel, x: torch.Tensor) -> torch.Tensor:
    return model.project("m", model.encode("m", x)).detach()


def test_a_linear_map_adds_what_the_paper_says() -> None:
    model = trained(build(adapted(of_kind("sensor"))))
    layer, x = model.part("m/stage1").get_submodule("blocks.0.mlp.0"), torch.randn(5, 16)
    a, b = (model.part("lora/m/stage1").get_parameter(f"blocks.0.mlp.0.{name}") for name in "AB")
    assert (a.shape, b.shape) == ((2, 16), (64, 2))
    expected = x @ layer.weight.T + layer.bias + 6.0 / 2 * (x @ a.T @ b.T)
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_merged_weights_give_the_same_as_the_terms_beside_them(name: str) -> None:
    spec, x = adapted(of_kind(name)), samples(KINDS[name])
    base, model = build(plain(spec)).eval(), build(spec).eval()
    first = projected(base, x)
    assert torch.equal(projected(model, x), first)  # B begins at zero
    trained(model)
    parts = merged({part: part_tensors(model, part) for part in part_names(spec)}, spec.lora)
    whole = loaded(plain(spec), part_names(plain(spec)), parts)
    torch.testing.assert_close(projected(whole, x), projected(model, x), rtol=1e-6, atol=1e-6)
    assert (projected(whole, x) - first).abs().max() > 1e-3
    maps = [path for path, layer in base.part("m/stage1").named_modules() if isinstance(layer, torch.nn.Linear)]
    assert maps == [n for n, layer in model.part("lora/m/stage1").named_modules() if hasattr(layer, "scale")]
    assert base.part("m/stage1").state_dict().keys() == model.part("m/stage1").state_dict().keys()


def test_merged_weights_of_shared_attention() -> None:
    sensors = dict.fromkeys("ab", SPECS["sensor"])
    spec = adapted(ModelSpec(sensors, 2, HeadSpec(width=8, out=4), encoder_sharing="multiway"))
    assert "shared/stage2" in spec.lora.parts
    model, x = trained(build(spec)), samples(SPECS["sensor"])
    parts = merged({part: part_tensors(model, part) for part in part_names(spec)}, spec.lora)
    whole = loaded(plain(spec), part_names(plain(spec)), parts)
    rows, inputs = dict.fromkeys("ab"), {"a": x, "b": x.flip(0)}
    first, second = (each.encode_batch(inputs, rows, 5) for each in (model, whole))
    for m, h in first.items():
        torch.testing.assert_close(h, second[m], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in CONFIGS])
def test_every_family_of_the_library_takes_them(name: str, tmp_path) -> None:
    config, values = CONFIGS[name]
    transformers.AutoModel.from_config(getattr(transformers, config)(**values)).save_pretrained(tmp_path)
    spec = adapted(spec_for(name, tmp_path))
    model = build(spec)
    for part, tensors in initial_parts(spec):
        load_part(model, part, tensors)
    encoder = spec.encoders["m"]
    x = (
        torch.randint(3, 49, (3, *encoder.input_shape))
        if encoder.kind == "text"
        else torch.rand(3, *encoder.input_shape)
    )
    first = projected(model.eval(), x)
    trained(model)
    parts = merged({part: part_tensors(model, part) for part in part_names(spec)}, spec.lora)
    whole = loaded(plain(spec), part_names(plain(spec)), parts)
    torch.testing.assert_close(projected(whole, x), projected(model, x), rtol=1e-5, atol=2e-6)
    assert (projected(whole, x) - first).abs().max() > 1e-3


def test_names_of_parts() -> None:
    spec = adapted(ModelSpec({"a": SPECS["sensor"], "stage1": SPECS["sensor"]}, 2, HeadSpec(8, 4)))
    extra = [part for part in part_names(spec) if is_lora(part)]
    assert extra == [
        f"lora/{p}" for p in ("a/stage1", "a/stage2", "head/a", "stage1/stage1", "stage1/stage2", "head/stage1")
    ]
    assert [part for part in part_names(spec, through=1) if is_lora(part)] == [extra[i] for i in (0, 2, 3, 5)]
    assert [modality_of(part) for part in extra] == ["a"] * 3 + ["stage1"] * 3
    assert [is_encoder(part) for part in extra] == [True, True, False] * 2
    assert [encoder_stage(part) for part in extra] == [1, 2, None] * 2


def test_weights_depend_on_the_seed_and_the_name_alone() -> None:
    spec = adapted(of_kind("sensor"))
    alone, whole, other = (build(spec, parts, seed=s) for parts, s in ((["lora/m/stage2"], 1), (None, 1), (None, 2)))
    one, same, another = (part_tensors(model, "lora/m/stage2") for model in (alone, whole, other))
    assert all(np.array_equal(one[name], same[name]) for name in same)
    assert not np.array_equal(one["blocks.0.out.A"], another["blocks.0.out.A"])
    bound = 1 / 16**0.5  # Kaiming uniform with a = sqrt(5): 1 / sqrt(inputs)
    assert 0.8 * bound < np.abs(one["blocks.0.out.A"]).max() <= bound
    assert not any(value.any() for name, value in one.items() if name.endswith(".B"))


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        (["*q_lin", "nothing"], "'nothing' fits no linear map of m/stage1, m/stage2, head/m"),
        (["*q_lin"], r"none of \*q_lin fits a linear map of head/m"),
    ],
)
def test_patterns_that_fit_no_map_name_what_there_is(maps: list[str], message: str) -> None:
    spec = adapted(of_kind("distilbert"), maps=tuple(maps))
    with pytest.raises(ModelError, match=message) as caught:
        list(initial_parts(spec))
    assert ("blocks.0.attention.q_lin" if "nothing" in maps else "0, 4, 8") in caught.value.remedy
    some = adapted(of_kind("distilbert"), maps=("*q_lin", "*v_lin"), parts=("m/stage2",))
    tensors = dict(initial_parts(some))["lora/m/stage2"]
    assert sorted(tensors) == [f"blocks.0.attention.{name}_lin.{t}" for name in "qv" for t in "AB"]


def test_faults_of_a_received_specification() -> None:
    spec = adapted(of_kind("sensor"), rank=0, parts=("m/norm", "m/stage1"))
    assert [str(problem) for problem in spec_problems(spec)] == [
        "lora.rank: is 0; use 1 to 1024",
        "lora.parts: 'm/norm' cannot be adapted; choose among m/stage1, m/stage2, head/m",
    ]


def test_an_own_file_holds_the_merged_encoder(tmp_path) -> None:
    spec = adapted(of_kind("sensor"))
    model, x = trained(build(spec)), samples(SPECS["sensor"])
    save_encoders(tmp_path / "m.safetensors", model)
    encoder = msgspec.structs.replace(SPECS["sensor"], pretrained=str(tmp_path / "m.safetensors"))
    again = build(ModelSpec({"m": encoder}, 2, HeadSpec(width=8, out=4)))
    for part, tensors in own_parts(again.spec, "m"):
        load_part(again, part, tensors)
    torch.testing.assert_close(again.eval().encode("m", x), model.encode("m", x), rtol=1e-6, atol=1e-6)
