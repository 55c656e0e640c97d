"""load on files, and the preparation of a fleet's shares."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edgefl.config.settings import DataConfig
from edgefl.data import hold_out as held
from edgefl.data import prepare
from edgefl.data.dataset import Dataset
from edgefl.data.sources import load
from edgefl.errors import DataError
from edgefl.models.spec import EncoderSpec

FLEET = ["orin", "nano", "box", "tiny"]


def prepare_shares(source, devices, directory, seed=0, **options):
    source = source if isinstance(source, dict) else str(source)
    return prepare.prepare_shares(DataConfig(source=source, **options), devices, directory, seed)


def hold_out(data: Dataset, devices: int, **options: object) -> tuple[Dataset, Dataset, str]:
    return held.hold_out(data, DataConfig(**options), devices, 0)


def numbered(count: int, groups: int = 0) -> Dataset:
    acc = np.arange(count, dtype=np.float32)[:, None] * np.ones((1, 2), dtype=np.float32)
    owner = np.array([f"g{i % groups}" for i in range(count)]) if groups else None
    ids = [str(i) for i in range(count)]
    return Dataset({"acc": acc}, {"acc": np.ones(count, bool)}, np.arange(count) % 2, ("a", "b"), ids, owner)


def test_shares_of_basic_motions(tmp_path):
    ready = prepare_shares(
        {"basic_motions": {}},
        FLEET,
        tmp_path / "shares",
        partition={"dirichlet": {"alpha": 0.5}},
        missing={"rate": 0.2, "devices": {"tiny": ["gyro"]}},
        seed=1,
    )
    assert sorted(p.name for p in (tmp_path / "shares").iterdir()) == [f"{n}.npz" for n in sorted([*FLEET, "test"])]
    assert (ready.test_origin, ready.test_samples) == ("official", 240)
    assert sum(s.samples[""] + s.discarded for s in ready.shares) == 240
    seen: list[str] = []
    for share in ready.shares:
        data = load(share.path)
        assert data.samples() == share.samples
        assert data.class_counts() == share.class_counts
        assert data.label_names == ready.label_names
        seen += data.ids
    assert len(set(seen)) == len(seen)
    assert "gyro" not in ready.shares[3].samples
    assert load(ready.test).samples() == {"": 240, "acc": 240, "gyro": 240}


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        how = {"partition": {"uniform": {}}, "missing": {"rate": 0.3}, "seed": seed}
        prepare_shares("basic_motions", FLEET, tmp_path / name, **how)
    one, same, other = ([(tmp_path / d / f"{n}.npz").read_bytes() for n in FLEET] for d in "abc")
    assert one == same
    assert one != other


def test_natural_keeps_a_series_in_one_share(tmp_path):
    ready = prepare_shares("basic_motions", FLEET, tmp_path, partition={"natural": {}})
    owners = [set(load(share.path).groups) for share in ready.shares]
    assert sum(map(len, owners)) == len(set().union(*owners)) == 40


def test_a_folder_with_bad_samples_and_its_own_test_set(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    lines = [{"id": f"s{i}", "acc": [[i, 0]], "label": ["walk", "rest"][i % 2]} for i in range(20)]
    (root / "manifest.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"acc": "gone.npy"}])))
    with pytest.raises(DataError, match=r"manifest\.jsonl:21: acc: gone\.npy"):
        prepare_shares(root, ["a", "b"], tmp_path / "out", partition={"uniform": {}})
    ready = prepare_shares(root, ["a", "b"], tmp_path / "out", partition={"uniform": {}}, bad_samples="skip")
    assert (ready.test_origin, ready.test_samples) == ("samples", 4)
    assert len(ready.skipped) == 1
    acc, flags = np.ones((2, 1, 2), np.float32), np.ones(2, bool)
    test = Dataset({"acc": acc}, {"acc": flags}, np.array([0, 1]), ("walk", "rest"), ["x", "y"])
    test.save_npz(tmp_path / "mine.npz")
    ready = prepare_shares(
        root, ["a"], tmp_path / "out", partition={"uniform": {}}, bad_samples="skip", test=str(tmp_path / "mine.npz")
    )
    assert ready.test_origin == "given"
    assert load(ready.test).labels.tolist() == [1, 0]  # renumbered: the folder's names are sorted
    assert ready.shares[0].samples[""] == 20


def test_hold_out_by_groups_or_by_samples():
    train, test, origin = hold_out(numbered(20, groups=5), 5)
    assert origin == "groups"
    assert len(test) == 4
    assert not set(train.groups) & set(test.groups)
    train, test, origin = hold_out(numbered(20, groups=5), 5, partition={"natural": {}})
    assert origin == "samples"
    assert len(set(train.groups)) == 5
    _, test, origin = hold_out(numbered(20), 5)
    assert origin == "samples"
    assert test.class_counts() == (2, 2)
    with pytest.raises(DataError, match="too few"):
        hold_out(numbered(2), 1)


@pytest.mark.parametrize(
    ("devices", "message"),
    [([], "no device"), (["a", "a"], "named twice: a"), (["test"], "'test' cannot"), (["../a"], "cannot name")],
)
def test_device_names(tmp_path, devices, message):
    with pytest.raises(DataError, match=message):
        prepare_shares("basic_motions", devices, tmp_path, partition={"uniform": {}})
    assert not list(tmp_path.iterdir())


def test_an_empty_share_names_the_device(tmp_path):
    devices = [f"d{i}" for i in range(41)]
    with pytest.raises(DataError, match="share of device 'd40' would be empty: there are 40 groups for 41 devices"):
        prepare_shares("basic_motions", devices, tmp_path, partition={"natural": {}})
    lacking = {"devices": {"d1": ["acc", "gyro"]}}
    with pytest.raises(DataError, match="device 'd1' loses every sample"):
        prepare_shares("basic_motions", ["d0", "d1"], tmp_path, partition={"uniform": {}}, missing=lacking)
    assert not list(tmp_path.iterdir())  # nothing was written


def test_load_screens_npz_rows(tmp_path):
    path = tmp_path / "x.npz"
    acc = np.ones((4, 2), dtype=np.float32)
    acc[1, 0] = np.nan
    present = np.array([True, True, False, True])
    np.savez(path, **{"acc": acc, "acc.present": present, "text": np.array([[1], [2], [3], [9]])})
    text = EncoderSpec(kind="text", input_shape=(1,), vocabulary=9)
    encoders = {"acc": EncoderSpec(input_shape=(2, 1)), "text": text}
    with pytest.raises(DataError, match="2 problems") as caught:
        load(path, modalities=encoders)
    assert f"{path}:1: sample 1: acc: holds values that are not finite" in caught.value.message
    data = load(path, modalities=encoders, bad_samples="skip")
    assert data.ids == ["0", "2"]
    assert "token ids below 0 or above 8" in str(data.skipped[1])
    only = load(path, modalities={"acc": encoders["acc"]}, bad_samples="skip")
    assert only.ids == ["0", "3"]
    assert "has no modality of acc" in str(only.skipped[1])


def test_values_are_finite_whose_sum_is_not(tmp_path):
    acc = np.full((4, 2), 3e38, dtype=np.float32)
    acc[2], acc[3] = (np.inf, -np.inf), (np.nan, 1)
    np.savez(tmp_path / "x.npz", acc=acc)
    assert load(tmp_path / "x.npz", bad_samples="skip").ids == ["0", "1"]


def test_load_numbers_labels_as_the_model_does(tmp_path):
    path = tmp_path / "x.npz"
    numbered(4).save_npz(path)
    assert load(path, label_names=["b", "c", "a"]).labels.tolist() == [2, 0, 2, 0]
    with pytest.raises(DataError, match=r"x\.npz: labels not known to the model: a"):
        load(path, label_names=["b"])
    np.savez(path, acc=np.ones((2, 3)), label=np.array([0, 1]))
    assert load(path, label_names=["walk", "rest"]).label_names == ("walk", "rest")
    with pytest.raises(DataError, match="labels not known to the model: 1; it knows: walk"):
        load(path, label_names=["walk"])
