"""Bundles and checkpoints of adapted models: the low-rank terms are in the weights, and nothing else has changed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import torch
import transformers
from export_fixture import stage_of, two_sensors

from edgefl.export.bundle import export_bundles
from edgefl.export.drafts import TrainedState
from edgefl.models.checkpoints import initial_parts
from edgefl.models.parts import loaded
from edgefl.models.spec import EncoderSpec, HeadSpec, LoraSpec, ModelSpec, adaptable_parts, part_names
from edgefl.models.way_back import write_checkpoint


def learned(spec: ModelSpec) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(2)
    return {
        part: {n: rng.normal(0, 0.1, v.shape).astype(np.float32) if n.endswith(".B") else v for n, v in tensors.items()}
        for part, tensors in initial_parts(spec, seed=1)
    }


def adapted(spec: ModelSpec) -> ModelSpec:
    return msgspec.structs.replace(spec, lora=LoraSpec(2, 4.0, tuple(adaptable_parts(spec))))


@pytest.mark.slow
def test_the_graph_of_a_bundle_is_that_of_the_model_without_low_rank_terms(tmp_path: Path) -> None:
    nodes = {}
    for name, spec in (("plain", two_sensors()), ("adapted", adapted(two_sensors()))):
        rows = export_bundles(TrainedState(spec, stage_of(spec), learned(spec)), tmp_path / name, mask="zero")
        assert all(row.max_difference < 1e-5 for row in rows)
        found = onnx.load(str(tmp_path / name / "acc" / "model.onnx")).graph
        nodes[name] = Counter(node.op_type for node in found.node), sum(len(t.raw_data) for t in found.initializer)
    assert nodes["adapted"] == nodes["plain"]


def test_a_checkpoint_of_the_library_holds_the_merged_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=12, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    encoder = EncoderSpec(
        *("text", (9,), 16, 2, 2, 2.0), vocabulary=30, positions=12, arch="bert", pretrained=str(tmp_path / "bert")
    )
    spec = adapted(ModelSpec({"t": encoder}, 2, HeadSpec(8, 4)))
    parts = learned(spec)
    write_checkpoint(spec, "t", parts, tmp_path / "back")
    again = transformers.AutoModel.from_pretrained(tmp_path / "back").eval()
    ids = torch.randint(1, 30, (3, 9), generator=torch.Generator().manual_seed(1))
    model = loaded(spec, part_names(spec), parts)
    with torch.no_grad():
        ours, theirs = model.encode("t", ids), again(ids).last_hidden_state[:, 0]
        before = transformers.AutoModel.from_pretrained(tmp_path / "bert").eval()(ids).last_hidden_state[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (theirs - before).abs().max() > 1e-2
