"""A fleet that trains low-rank terms of checkpoints alone: what travels, what stays, and what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import edgefl
from coordinator.ledger.ledger import Ledger
from edgefl.api.export_run import export_checkpoints, export_run
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, ModelError
from edgefl.pricing.end_to_end import price_end_to_end
from edgefl.storage.disk import LEDGER

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, and pictures with words whose class shows in either."""
    root = tmp_path_factory.mktemp("lora")
    vit = transformers.ViTConfig(image_size=16, patch_size=8, **SIZES)
    transformers.ViTModel(vit, add_pooling_layer=False).save_pretrained(root / "vit")
    transformers.BertModel(transformers.BertConfig(vocab_size=30, **SIZES)).save_pretrained(root / "bert")
    rng, classes = np.random.default_rng(1), np.arange(72) % 3
    pictures = np.clip(rng.normal(0.2 + 0.3 * classes[:, None, None, None], 0.1, (72, 16, 16, 3)), 0, 1)
    words = rng.integers(3, 12, (72, 6)) + 8 * classes[:, None]
    values = {"photo": pictures.astype(np.float32), "words": words.astype(np.int64)}
    present = {m: np.ones(72, bool) for m in values}
    Dataset(values, present, classes.astype(np.int64), tuple("xyz"), [str(i) for i in range(72)]).save_npz(
        root / "a.npz"
    )
    return root


def fields(place: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": "lora",
        "seed": 3,
        "data": {"source": place / "a.npz", "missing": {"devices": {"only-words": ["photo"]}}},
        "slots": {"schedule": "layerwise"},
        "model": {
            "stages": 2,
            "encoders": {
                "photo": {"kind": "vision", "pretrained": str(place / "vit")},
                "words": {"kind": "text", "pretrained": str(place / "bert"), "length": 6},
            },
            "head": {"width": 12, "out": 8},
            "fusion_width": 8,
            "lora": {"rank": 2},
            **more.pop("model", {}),
        },
        "training": {"rounds": [1, 1], "batch_size": 6, "epochs": 3, "lr": {"encoder": 0.01, "head": 0.01}},
        "round": {"devices": 2, "join_s": 60},
        "fleet": [{"name": "whole"}, {"name": "only-words"}],
        **more,
    }


@pytest.fixture(scope="module")
def run(place: Path) -> edgefl.Run:
    return edgefl.run(fields(place), directory=place / "runs", in_process=True, export=False, page=False)


def test_the_terms_travel_alone_and_what_they_adapt_stays(run: edgefl.Run) -> None:
    with Ledger(run.directory / LEDGER, create=False) as ledger:
        states, plan = ledger.states(run.id), ledger.plan(run.id)
    first, middle, last = states[0, 0], states[1, 1], states[2, 1]
    base = [part for part in last if part.startswith(("photo/", "words/"))]
    assert len(base) == 8
    assert all(first[part].id == middle[part].id == last[part].id for part in base)
    moved = [part for part in first if first[part].id != last[part].id]
    assert set(moved) == {*plan.stages[0].trained, *plan.stages[1].trained}
    assert middle["lora/words/stage1"].id == last["lora/words/stage1"].id != first["lora/words/stage1"].id
    for row in run.report.record.assignments:
        held = middle if row.stage == 1 else last
        own = [p for p in plan.stages[row.stage - 1].trained if row.device == "whole" or "photo" not in p]
        assert row.measured["payload_up_bytes"].value == sum(held[part].size for part in own)
        assert row.measured["payload_up_bytes"].value == row.predicted["payload_up_bytes"].value
        assert row.measured["flops"].value == pytest.approx(row.predicted["flops"].value, rel=1e-6)
    priced = price_end_to_end(plan, run.report.record.devices)["whole"]
    assert priced.payload_bytes > sum(last[part].size for part in base)  # end to end all weights are trained
    whole = sum(last[part].size for part in base if "stage" in part)
    assert sum(last[part].size for part in last if part.startswith("lora/")) < 0.3 * whole


@pytest.mark.slow
def test_bundles_of_it_answer_as_the_run_did(run: edgefl.Run, place: Path) -> None:
    rows = export_run(run.directory).rows
    assert max(row.max_difference for row in rows) < 1e-5
    test = Dataset.load_npz(run.directory / "shares" / "test.npz")
    answers = edgefl.load_bundle(run.directory / "bundles" / "photo+words").predict(test.modalities)
    assert np.mean(np.array(answers.classes) == test.labels) == run.accuracy
    folders = export_checkpoints(run.directory, output=place / "checkpoints")
    for modality, kind in (("photo", "vit"), ("words", "bert")):
        before, after = (transformers.AutoModel.from_pretrained(f) for f in (place / kind, folders[modality]))
        changed = [name for name, value in before.state_dict().items() if (value != after.state_dict()[name]).any()]
        assert changed
        assert not [n for n in set(changed) - {"pooler.dense.weight"} if "layer" not in n or not n.endswith("weight")]


def planned(place: Path, **more: Any) -> Any:
    return edgefl.plan_run(fields(place, **more))


def test_a_plan_shows_what_is_saved(place: Path) -> None:
    of_lora, whole = planned(place), planned(place, model={"lora": None})
    assert "LoRA of its stage" in of_lora.to_html()
    assert "LoRA" not in whole.to_html()
    for adapted, plain in zip(of_lora.price.schedules, whole.price.schedules, strict=True):
        if adapted.schedule != "heads" and adapted.rounds:
            assert adapted.payload_up_bytes < 0.6 * plain.payload_up_bytes
            assert adapted.step_peak_bytes < plain.step_peak_bytes


@pytest.mark.parametrize(
    ("lora", "more", "error", "message"),
    [
        (
            {"where": ["*/block*"]},
            {},
            ConfigError,
            "'\\*/block\\*' fits no part that can be adapted; there are: photo/stage1",
        ),
        ({"rank": 0}, {}, ConfigError, "rank"),
        ({"maps": ["*q_lin"]}, {}, ModelError, "'\\*q_lin' fits no linear map of photo/stage1"),
        ({}, {"recipe": "mmic"}, ConfigError, "poverty compares whole layers"),
        ({"where": ["head/*"]}, {"recipe": "apromfl"}, ConfigError, "adapts heads, and"),
        ({"where": ["head/*"]}, {"recipe": "fedadam", "model": {"head": {"norm": "batch"}}}, ConfigError, "statistics"),
    ],
    ids=["part", "rank", "map", "repair", "mappings", "statistics"],
)
def test_what_does_not_go_together_is_refused(
    lora: dict[str, Any], more: dict[str, Any], error: type[Exception], message: str, place: Path
) -> None:
    more = {"slots": {}, **more, "model": {**more.get("model", {}), "lora": lora}}
    with pytest.raises(error, match=message):
        planned(place, **more)


def test_terms_of_random_weights_are_warned_of(place: Path) -> None:
    fresh = {"kind": "vision", "width": 16, "depth": 2, "heads": 2, "patch": 8}
    encoders = {**fields(place)["model"]["encoders"], "photo": fresh}
    warnings = planned(place, model={"encoders": encoders}).price.warnings
    assert "model.lora never trains encoders, and these start from random weights: photo" in " ".join(warnings)
