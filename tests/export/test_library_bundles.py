"""Bundles of encoders that run the library's own modules; moved ones of texts need neither network nor library."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers
from export_fixture import some_state, stage_of
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from edgefl.cli.main import main
from edgefl.config.encoder import EncoderConfig
from edgefl.data.readers import read_text, target
from edgefl.encoder_families import FAMILIES
from edgefl.errors import DataError, ExportError, MissingDependencyError
from edgefl.export.bundle import export_bundles
from edgefl.export.bundle_format import read_manifest
from edgefl.export.drafts import TrainedState
from edgefl.models.spec import HeadSpec, ModelSpec
from edgefl.plan.checkpoint_fields import told
from edgefl.plan.preparation import encoder_spec

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from test_models_families import CONFIGS

WORDS = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(56))]
QUICK = {"wav2vec2", "modernbert"}


def checkpoint(root: Path, name: str) -> Path:
    """A checkpoint's folder without weights; a text's has a tokenizer of 60 ids that pads with 1."""
    folder = root / name
    config, values = CONFIGS[name]
    getattr(transformers, config)(**values).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 2)])
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    return folder


def exported(root: Path, name: str) -> Path:
    """The only bundle of a model with one encoder of the family."""
    folder = checkpoint(root, name)
    config = EncoderConfig(kind=FAMILIES[name].kind, pretrained=str(folder))
    shape = told(config).fields.get("input_shape") or {"text": (10,), "audio": (400, 1)}[config.kind]
    stages = 1 if name == "albert" else 2
    encoder = encoder_spec(config, tuple(shape))
    spec = ModelSpec({"m": encoder}, stages, HeadSpec(8, 4), classes=2, label_names=("a", "b"))
    _, parts = some_state(spec, prototypes=False)
    state = TrainedState(spec, stage_of(spec, stages), parts)
    (row,) = export_bundles(state, root / "bundles", mask="zero")
    assert row.max_difference < 1e-4
    return root / "bundles" / row.name


@pytest.mark.parametrize("name", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in CONFIGS])
def test_onnxruntime_answers_as_torch(name: str, tmp_path: Path) -> None:
    exported(tmp_path, name)


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """A text's bundle in another place, its checkpoint gone."""
    bundle = exported(tmp_path / "made", "roberta")
    place = Path(shutil.copytree(bundle, tmp_path / "moved" / "m"))
    shutil.rmtree(tmp_path / "made")
    return place


def test_a_moved_bundle_reads_texts_by_itself(
    moved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "note.txt").write_text("w1 other w3")
    with pytest.raises(SystemExit) as end:
        main(["predict", str(moved), str(tmp_path / "note.txt")])
    assert end.value.code in {0, None}, capsys.readouterr().err
    encoder = read_manifest(moved).encoders["m"]
    ids = read_text("w1 other w3", target(encoder))
    # <s> is id 0 and <pad> id 1: they change places, so that 0 pads as everywhere here
    assert ids.tolist() == [1, 5, 3, 7, 2, 0, 0, 0, 0, 0]


def test_a_damaged_tokenizer_or_none_of_the_package_is_said(moved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = read_manifest(moved).encoders["m"]
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError, match="tokenizers"):
        target(encoder)
    monkeypatch.undo()
    (moved / "tokenizer.json").write_text("{}")
    with pytest.raises(ExportError, match="is not the tokenizer that the manifest names"):
        read_manifest(moved)
    with pytest.raises(DataError, match="holds no tokenizer"):
        target(encoder)


def test_the_file_gives_the_ids_of_the_library(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "roberta")
    config = EncoderConfig(kind="text", pretrained=str(folder))
    encoder: Any = encoder_spec(config, (7,))
    bundle = exported(tmp_path / "made", "roberta")
    beside = msgspec.structs.replace(read_manifest(bundle).encoders["m"], input_shape=(7,))
    for text in ("w1 w2", "w1 " * 12, "none of these"):
        np.testing.assert_array_equal(read_text(text, target(encoder)), read_text(text, target(beside)))
