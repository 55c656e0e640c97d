"""Pretrained encoders of the named data sets: augmentations, simple features, a small entry from file to table."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import yaml
from data_fixture import needed
from safetensors.numpy import load_file

from benchmarks.accuracy import encoders
from benchmarks.accuracy.augment import AUGMENT
from benchmarks.accuracy.baselines import distinct, probe, simple
from edgefl.errors import DataError

SHAPES = {"vision": (8, 8, 3), "audio": (12, 10), "sensor": (16, 3), "text": (6,)}


@pytest.mark.parametrize("kind", AUGMENT)
def test_a_changed_batch_has_the_shape_and_repeats(kind: str):
    x = torch.rand(5, *SHAPES[kind])
    x = torch.randint(1, 9, x.shape) if kind == "text" else x
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(AUGMENT[kind](x))
    assert made[0].shape == x.shape
    assert made[0].dtype == x.dtype
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], x)


def test_what_a_change_leaves():
    torch.manual_seed(0)
    white = torch.ones(4, 8, 8, 3)
    assert torch.allclose(AUGMENT["vision"](white), white)
    x = torch.arange(1, 7).repeat(200, 1)
    told = AUGMENT["text"](x)
    assert (told[:, 0] == 1).all()
    assert 0.8 < (told[:, 1:] > 0).float().mean() < 0.9
    assert ((told == x) | (told == 0)).all()


def test_simple_features_by_hand():
    """A constant axis has its value as mean, least and most, no deviation, no change, and no energy in any band."""
    found = simple(np.full((2, 128, 3), 2.0, dtype=np.float32), "acc")[0].reshape(11, 3)
    assert found[:5, 0].tolist() == [2, 0, 2, 2, 0]
    assert np.allclose(found[5:], np.log(1e-6))
    picture = np.zeros((1, 64, 64, 3), dtype=np.float32)
    picture[0, :, 32:] = 1  # one upright edge in the middle, half black, half white
    colours = simple(picture, "image")[0]
    assert colours[:192].reshape(8, 8, 3)[:, :, 0].tolist() == [[0] * 4 + [1] * 4] * 8
    assert np.allclose(np.flatnonzero(colours[192:256]), [0, 63])
    assert np.allclose(colours[192:256][[0, 63]] ** 2, 0.5)
    edges = colours[256:].reshape(8, 4, 4)
    assert edges[0].sum() > 0
    assert edges[1:].sum() == 0
    words = simple(np.array([[5, 7, 5, 0]]), "text")[0]
    assert np.flatnonzero(words).tolist() == [5, 7]


def test_a_probe_and_distinct_rows():
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 2
    values = rng.normal(size=(200, 3)) + 6 * labels[:, None]
    assert probe((values[:100], labels[:100]), (values[100:], labels[100:])) == 1
    assert probe((values[:100], labels[:100]), (rng.normal(size=(100, 3)), labels[100:])) < 0.7
    assert distinct(np.array([[1, 2], [3, 4], [1, 2], [0, 0]])).tolist() == [0, 1, 3]


def test_every_entry_is_of_a_known_form():
    known = encoders.entries()
    assert {"har-acc", "har-gyro", "av-image", "av-audio", "av-multiway", "emoji-image", "emoji-minilm"} <= set(known)
    for entry in known.values():
        ((_, options),) = entry.source.items()
        assert 0 < options["reserve"] < 1
        assert not entry.how or encoders.How(**entry.how).augment


@pytest.mark.data
@pytest.mark.parametrize("multiway", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_entry_from_its_file_to_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiway: bool):
    needed("har_hapt")
    monkeypatch.setattr(encoders, "FOLDER", tmp_path)
    small = {"kind": "sensor", "width": 8, "depth": 2, "heads": 2, "patch": 32}
    modalities = {"acc": small, "gyro": small} if multiway else {"acc": small}
    source = {"har_hapt": {"mini": True, "reserve": 0.33}}
    how = {"epochs": 15, "batch": 8, "lr": 3e-3, "augment": True, "simple": 0.1}
    entry = encoders.Entry(source, modalities, how, multiway)
    seconds = encoders.make(entry, tmp_path / "small.safetensors")
    rows = list(encoders.measure("small", entry, seconds))
    assert [row.modality for row in rows] == list(modalities)
    assert min(min(row.probe, row.simple) for row in rows) > 0.3  # a sixth by chance
    assert {row.samples for row in rows} == {48}
    encoders.make(entry, tmp_path / "again.safetensors")
    first, again = (load_file(tmp_path / f"{name}.safetensors") for name in ("small", "again"))
    assert first.keys() == again.keys()
    assert all(np.array_equal(first[name], again[name]) for name in first)
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- table -->\nold\n<!-- end -->\nAfter.\n")
    (tmp_path / "small.json").write_bytes(msgspec.json.encode(rows))
    encoders.write_page(["small", "none"], page)
    assert "| small | acc | " in page.read_text()
    assert "old" not in page.read_text()
    assert page.read_text().startswith("Before.\n")
    assert page.read_text().endswith("<!-- end -->\nAfter.\n")


def test_an_entry_needs_a_reserved_share(tmp_path: Path):
    fields = {"acc": {"kind": "sensor", "width": 8, "depth": 2, "heads": 2, "patch": 10}}
    with pytest.raises(DataError, match="no share is reserved"):
        encoders.make(encoders.Entry({"basic_motions": {}}, fields, {"epochs": 1}), tmp_path / "x.safetensors")


def test_the_file_of_entries_is_plain():
    assert list(yaml.safe_load(encoders.ENCODERS.read_text())) == ["how", "sources", "encoders"]
