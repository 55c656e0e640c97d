"""A checkpoint's folder alone in a run file: sizes from its config.json, contradictions named at once, no hub asked."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from edgefl.api.run_inputs import PlanOptions, price_of
from edgefl.config.profiles import load_run
from edgefl.errors import ConfigError, ModelError
from edgefl.plan.compile import compile_run

COMMON = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 96}
VIT = {"model_type": "vit", **COMMON, "image_size": 16, "patch_size": 8, "num_channels": 3}
BERT = {"model_type": "bert", **COMMON, "vocab_size": 60, "max_position_embeddings": 24, "pad_token_id": 0}


def folder(root: Path, config: dict[str, Any]) -> Path:
    place = root / str(config.get("model_type", "none"))
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return place


def run_file(root: Path, kind: str, pretrained: object, **fields: Any) -> Path:
    rng = np.random.default_rng(0)
    values = rng.integers(1, 60, (24, 10)) if kind == "text" else rng.random((24, 16, 16, 3), np.float32)
    np.savez(root / "own.npz", label=np.arange(24) % 2, m=values)
    encoder = {"kind": kind, "pretrained": str(pretrained), **fields}
    run = {
        "name": "own",
        "recipe": "end_to_end",
        "data": {"source": "own.npz"},
        "model": {"stages": 2, "encoders": {"m": encoder}},
        "training": {"rounds": [0, 1], "batch_size": 8},
        "fleet": [{"name": "a"}],
    }
    (root / "own.yaml").write_text(yaml.safe_dump(run))
    return root / "own.yaml"


def encoder_of(file: Path, shape: tuple[int, ...]) -> Any:
    config, recipe = load_run(file)
    return compile_run(config, recipe, run="r", shapes={"m": shape}, label_names=("0", "1")).model.encoders["m"]


def test_the_folder_alone_gives_every_size(tmp_path: Path) -> None:
    before = set(sys.modules)
    vision = encoder_of(run_file(tmp_path, "vision", folder(tmp_path, VIT)), (16, 16, 3))
    assert (vision.width, vision.depth, vision.heads, vision.mlp_ratio, vision.patch) == (32, 4, 2, 3.0, 8)
    assert not vision.config
    text = encoder_of(run_file(tmp_path, "text", folder(tmp_path, BERT)), (10,))
    assert (text.vocabulary, text.arch, text.depth, text.pool) == (60, "bert", 4, "token")
    pooling = tmp_path / "bert" / "1_Pooling"
    pooling.mkdir()
    (pooling / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert encoder_of(tmp_path / "own.yaml", (10,)).pool == "mean"
    assert "transformers" not in set(sys.modules) - before


def test_a_folder_beside_the_run_file_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, BERT)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert encoder_of(run_file(tmp_path, "text", "bert"), (10,)).vocabulary == 60


def test_all_contradictions_are_one_message_with_the_lines(tmp_path: Path) -> None:
    file = run_file(tmp_path, "text", folder(tmp_path, BERT), width=64, heads=4, vocabulary=2048, mlp_ratio=3.0)
    with pytest.raises(ConfigError) as caught:
        price_of(file, (), PlanOptions())
    (problem,) = caught.value.problems
    for line in ("width: 32", "heads: 2", "vocabulary: 60"):
        assert f"\n      {line}" in problem.message
    assert "mlp_ratio" not in problem.message
    assert "width 64" in problem.message


def test_what_is_not_taken_is_refused_with_all_that_is(tmp_path: Path) -> None:
    swin = {"model_type": "swin", **COMMON}
    for config, kind, said in (
        (swin, "vision", "change the number and the width of tokens; taken for vision: vit, deit, dinov2"),
        (BERT, "vision", "is of kind text; taken for vision: vit"),
        ({"hidden_size": 3}, "text", "names no model_type"),
        ({"model_type": "own"}, "text", "does not say its width, depth, heads"),
    ):
        with pytest.raises(ConfigError, match=said):
            price_of(run_file(tmp_path, kind, folder(tmp_path, config)), (), PlanOptions())


def test_a_longer_text_than_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="length: 24"):
        price_of(run_file(tmp_path, "text", folder(tmp_path, BERT), length=32), (), PlanOptions())


def test_a_path_that_is_not_there_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    (tmp_path / "ck").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("./bert", "ck/bert", "a/b/c", "~/bert", str(tmp_path / "none")):
        with pytest.raises(ModelError, match="there is no such folder"):
            price_of(run_file(tmp_path, "text", name), (), PlanOptions())


def test_plan_refuses_tensors_of_another_shape(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    place = folder(tmp_path, VIT)
    transformers.ViTModel(transformers.ViTConfig(**VIT)).save_pretrained(place)
    file = run_file(tmp_path, "vision", place)
    assert price_of(file, (), PlanOptions())
    tensors = load_file(place / "model.safetensors")
    name = next(name for name in tensors if ".3.intermediate" in name and "weight" in name)
    save_file({**tensors, name: np.zeros((64, 32), np.float32)}, place / "model.safetensors")
    with pytest.raises(ModelError, match=r"mlp.fc1.weight' of m/stage2 is \[64, 32\], and the model's \[96, 32\]"):
        price_of(file, (), PlanOptions())
