"""plan, run, predict and serve with a text encoder from a checkpoint whose tokenizer is missing or another's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from serve_fixture import bundles

from edgefl.cli.main import main
from edgefl.errors import DataError, ModelError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(95))]


def checkpoint(folder: Path) -> Path:
    """The part of a checkpoint that texts need: 100 token ids, as the encoder of the bundle has."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "config.json").write_text('{"model_type": "bert"}')
    return folder


def run_file(place: Path, pretrained: Path) -> Path:
    lines = [{"id": f"s{i}", "label": "ab"[i % 2], "text": f"w{i} w{i % 2}"} for i in range(20)]
    (place / "own").mkdir()
    (place / "own" / "manifest.jsonl").write_text("\n".join(map(json.dumps, lines)))
    encoder = {"kind": "text", "vocabulary": 100, "pretrained": str(pretrained)}
    values = {
        "name": "own",
        "recipe": "end_to_end",
        "data": {"source": "own"},
        "model": {"encoders": {"text": encoder}},
    }
    values |= {"training": {"rounds": [0, 0, 0, 0, 0, 1]}}
    path = place / "own.yaml"
    path.write_text(yaml.safe_dump(values | {"fleet": [{"name": "one"}]}))
    return path


def bundle(place: Path, pretrained: Path) -> Path:
    folder = Path(shutil.copytree(bundles() / "text", place / "text"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["encoders"]["text"]["pretrained"] = str(pretrained)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_each_command_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrained = checkpoint(tmp_path / "checkpoint")
    run, text = run_file(tmp_path, pretrained), bundle(tmp_path, pretrained)
    (tmp_path / "note.txt").write_text("w1 w2")
    commands = (
        ("plan", run),
        ("run", run, "--runs", tmp_path / "runs"),
        ("predict", text, tmp_path / "note.txt"),
        ("serve", text, "--host", "127.0.0.1:0"),
    )

    def ended(*words: object) -> tuple[object, str]:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        return end.value.code, capsys.readouterr().err

    assert ended(*commands[2])[0] == 0
    for damage, error, said in (
        ("\n".join([*WORDS, "other"]), DataError, "has 101 token ids, the encoder 100"),
        (None, DataError, "knows no words"),
        ("", ModelError, "there is no such folder"),
    ):
        if damage:
            (pretrained / "vocab.txt").write_text(damage)
        elif damage is None:
            (pretrained / "vocab.txt").unlink()
        else:
            shutil.rmtree(pretrained)
        for words in commands:
            code, err = ended(*words)
            assert (code, said in err, str(pretrained) in err) == (error.exit_code, True, True), (words[0], err)
            assert "what to do:" in err
            assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()
