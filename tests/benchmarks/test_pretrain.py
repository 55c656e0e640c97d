"""The pretraining script: which samples it trains on, that it learns, that its file starts a model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data_fixture import needed

from benchmarks.accuracy import pretrain
from edgefl.data.dataset import Dataset
from edgefl.data.named import named
from edgefl.errors import ModelError
from edgefl.models.checkpoints import check_pretrained
from edgefl.models.spec import EncoderSpec, ModelSpec

torch.set_num_threads(1)


def dataset(groups: list[str] | None, count: int = 80) -> Dataset:
    """Two classes that differ in the sign of the mean."""
    rng = np.random.default_rng(0)
    labels = np.arange(count, dtype=np.int64) % 2
    values = (rng.normal(size=(count, 8, 2)) + (2 * labels - 1)[:, None, None]).astype(np.float32)
    flags = {m: np.ones(count, np.bool_) for m in "ab"}
    ids = [str(i) for i in range(count)]
    return Dataset(
        {"a": values, "b": -values}, flags, labels, ("x", "y"), ids, None if groups is None else np.array(groups)
    )


def test_the_share_by_hand():
    """Of 10 groups 0.3 are the first three by name; of 4 samples without groups 0.5 are the first two."""
    groups = [f"p{i:02d}" for i in range(10, 0, -1)] * 2
    kept = pretrain.first_share(dataset(groups, 20), 0.3)
    assert sorted(set(kept.groups)) == ["p01", "p02", "p03"]
    assert len(kept) == 6
    assert pretrain.first_share(dataset(None, 4), 0.5).ids == ["0", "1"]
    assert sorted(set(pretrain.first_share(dataset(groups, 20), 0.01).groups)) == ["p01"]


@pytest.mark.parametrize("multiway", [False, True])
def test_it_learns_and_repeats(multiway: bool):
    encoder = EncoderSpec(input_shape=(8, 2), width=8, depth=2, heads=2, patch=4)
    encoders = {"a": encoder, "b": encoder} if multiway else {"a": encoder}
    data = dataset(None)
    found = []
    for _ in range(2):
        model = pretrain.model_of(encoders, multiway=multiway, seed=0)
        heads = pretrain.pretrain(model, data, pretrain.How(epochs=8, batch=16, lr=1e-2))
        found.append([pretrain.accuracy(model, heads, m, data) for m in encoders])
    assert min(found[0]) > 0.9
    assert found[0] == found[1]


def test_what_it_refuses():
    encoder = EncoderSpec(input_shape=(8, 2), width=8, depth=2, heads=2, patch=4)
    with pytest.raises(ModelError, match="one by one"):
        pretrain.model_of({"a": encoder, "b": encoder}, multiway=False, seed=0)
    model = pretrain.model_of({"a": encoder}, multiway=False, seed=0)
    with pytest.raises(ModelError, match="8 samples do not fill a batch of 32"):
        pretrain.pretrain(model, dataset(None, 8), pretrain.How(epochs=1))


def test_the_encoder_is_that_of_a_run_file():
    fields = {"kind": "sensor", "width": 16, "depth": 4, "heads": 2, "patch": 16}
    made = pretrain.encoder(fields, (128, 3))
    assert made == EncoderSpec(input_shape=(128, 3), width=16, depth=4, heads=2, patch=16)
    assert pretrain.encoder({"kind": "vision", "size": "tiny"}, (28, 28, 1)).kind == "vision"


@pytest.fixture
def har() -> None:
    needed("har_hapt")


@pytest.mark.data
@pytest.mark.usefixtures("har")
def test_no_test_window_of_either_split_is_trained_on():
    train, _ = pretrain.training_data("har_hapt", 1.0)
    for options in ({}, {"clients": 30}):
        whole = named("har_hapt", options)
        assert set(train.ids) <= set(whole.train.ids)
        assert not set(train.ids) & set(whole.test.ids)
    assert len(np.unique(pretrain.training_data("har_hapt", 0.3)[0].groups)) == 6  # of the authors' 21
    train, _ = pretrain.training_data({"har_hapt": {"clients": 10}}, 1.0)
    assert set(train.ids) == set(named("har_hapt", {"clients": 10}).train.ids)


@pytest.mark.data
@pytest.mark.usefixtures("har")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "acc.safetensors"
    encoder = "{kind: sensor, width: 8, depth: 2, heads: 2, patch: 32}"
    source = "{har_hapt: {mini: true}}"
    words = ["pretrain", source, "acc", "--encoder", encoder, "--out", str(out), "--epochs", "1", "--share", "0.7"]
    monkeypatch.setattr(sys, "argv", words)
    pretrain.main()
    assert "acc: test accuracy " in capsys.readouterr().out
    spec = EncoderSpec(input_shape=(128, 3), width=8, depth=2, heads=2, patch=32, pretrained=str(out))
    check_pretrained(ModelSpec({"gyro": spec}, stages=2))
