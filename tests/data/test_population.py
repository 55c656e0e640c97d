"""A fleet's samples kept once: each device's rows give, value by value, what its own file would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.config.settings import DataConfig
from edgefl.data.dataset import Dataset
from edgefl.data.population import ALL, ROWS, Population
from edgefl.data.prepare import prepare_population, prepare_shares
from edgefl.errors import DataError
from edgefl.models.spec import EncoderSpec

FLEET = [f"device-{n}" for n in (3, 0, 1, 2, 5, 4)]
LACKING = {"rate": 0.3, "keep": "one", "devices": {"device-2": ["b"]}, "unlabelled": ["device-4"]}


def source(place: Path, label: str) -> Path:
    """60 samples of two modalities, of which some lack one."""
    rng = np.random.default_rng(4)
    labels = {
        "classes": rng.integers(0, 3, 60),
        "some": np.where(np.arange(60) % 3, rng.integers(0, 3, 60), -1),
        "levels": rng.normal(size=60),
        "sets": (rng.random((60, 3)) < 0.5).astype(np.int8),
    }
    arrays = {m: rng.normal(size=(60, 5, 2)).astype(np.float32) for m in "ab"}
    present = {f"{m}.present": rng.random(60) < 0.9 if m == "b" else np.ones(60, bool) for m in "ab"}
    groups = np.array([f"g{n % 7}" for n in range(60)])
    np.savez(place / "source.npz", **arrays, **present, label=labels[label], group=groups)  # type: ignore[arg-type]
    return place / "source.npz"


def same(one: Dataset, other: Dataset) -> None:
    assert one.modalities.keys() == other.modalities.keys() == one.present.keys() == other.present.keys()
    for m, values in one.modalities.items():
        assert values.dtype == other.modalities[m].dtype
        np.testing.assert_array_equal(values, other.modalities[m])
        np.testing.assert_array_equal(one.present[m], other.present[m])
    for name in ("labels", "groups", "targets", "sets", "recordings"):
        mine, its = getattr(one, name), getattr(other, name)
        assert (mine is None) == (its is None), name
        if mine is not None:
            assert mine.dtype == its.dtype
            np.testing.assert_array_equal(mine, its)
    assert (one.ids, one.label_names) == (other.ids, other.label_names)


@pytest.mark.parametrize("label", ["classes", "some", "levels", "sets"])
@pytest.mark.parametrize(
    "how",
    [
        {"partition": "uniform"},
        {"partition": "natural"},
        {"partition": {"dirichlet": {"alpha": 0.5}}},
        {"partition": {"shards": {"each": 2}}},
        {"partition": {"drawn": {"each": 9}}},
        {"partition": {"drawn": {"each": 9, "alpha": 0.2}}},
        {"partition": "uniform", "missing": LACKING},
        {"partition": {"drawn": {"each": 9}}, "missing": LACKING},
    ],
)
def test_rows_give_what_files_give(tmp_path: Path, label: str, how: dict[str, Any]) -> None:
    config = DataConfig(source=str(source(tmp_path, label)), **how)
    ready = prepare_shares(config, FLEET, tmp_path / "files", 3)
    prepared, first = prepare_population(config, FLEET, tmp_path / "rows", 3)
    first.save(tmp_path / "rows")
    assert sorted(path.name for path in (tmp_path / "rows").iterdir()) == sorted([ALL, ROWS, "test.npz"])
    assert (tmp_path / "rows" / "test.npz").read_bytes() == (tmp_path / "files" / "test.npz").read_bytes()
    population = Population.load(tmp_path / "rows", FLEET, config, 3)
    kinds = population.kinds().tolist()
    for share in ready.shares:
        data = population.share(share.device)
        same(data.as_saved(), Dataset.load_npz(share.path))
        same(first.share(share.device).as_saved(), Dataset.load_npz(share.path))
        assert population.counted(share.device).samples() == share.samples
        assert population.counted(share.device).class_counts() == share.class_counts
    facts = [(tuple(sorted(share.samples.items())), sum(share.class_counts)) for share in ready.shares]
    for a, one in enumerate(facts):
        for b, other in enumerate(facts):
            assert kinds[a] != kinds[b] or one == other, "devices of one kind say the same of their samples"
    assert prepared.shares == (), "which nobody has counted"
    assert (prepared.warnings, prepared.signature) == (ready.warnings, ready.signature)
    whole = population.shares(lambda samples: np.arange(len(samples)))
    if "drawn" not in config.partition:
        files = sorted(share.path for share in ready.shares)
        assert [i for part in whole for i in part.ids] == [i for file in files for i in Dataset.load_npz(file).ids]


def test_a_device_draws_the_same_whoever_else_is_there(tmp_path: Path) -> None:
    """So there may be more devices than samples, and no list of their rows."""
    config = DataConfig(source=str(source(tmp_path, "classes")), partition={"drawn": {"each": 9}})
    few, two = prepare_population(config, ["device-5", "z"], tmp_path / "few", 3)
    two.save(tmp_path / "few")
    many = [f"device-{n}" for n in range(5000)]
    prepare_population(config, many, tmp_path / "many", 3)[1].save(tmp_path / "many")
    one = Population.load(tmp_path / "few", ["device-5", "z"], config, 3)
    other = Population.load(tmp_path / "many", many, config, 3)
    np.testing.assert_array_equal(one.rows("device-5"), other.rows("device-5"))
    assert one.rows("device-5").tolist() != one.rows("z").tolist()
    assert len(set(one.rows("device-5"))) == 9, "without replacement"
    assert len(set(other.kinds().tolist())) < 9, "by how many of its samples have b"
    assert (tmp_path / "many" / ROWS).stat().st_size < 50_000, "the kinds alone"
    assert few.test_samples == 9
    plain = Population(Dataset.load_npz(tmp_path / "source.npz", {"a": EncoderSpec()}), many, config, 3)
    assert set(plain.kinds().tolist()) == {0}, "nothing distinguishes them"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "has no options, and there are 51 samples"),
        ({"each": 52}, "has each: 52, and there are 51 samples"),
        ({"each": 2.5}, "each: 2.5"),
        ({"each": 2, "alpha": -1}, "alpha: -1"),
        ({"each": 2, "minimum": 1}, "minimum: 1"),
    ],
)
def test_a_draw_that_cannot_be_is_refused(tmp_path: Path, options: dict[str, float], told: str) -> None:
    config = DataConfig(source=str(source(tmp_path, "classes")), partition={"drawn": options})
    with pytest.raises(DataError, match=told):
        prepare_population(config, FLEET, tmp_path / "rows", 3)
    assert not (tmp_path / "rows").exists()


def test_small_alpha_leaves_a_device_few_classes(tmp_path: Path) -> None:
    data = Dataset.load_npz(source(tmp_path, "classes"))

    def classes(**options: float) -> float:
        config = DataConfig(source="x.npz", partition={"drawn": {"each": 9, **options}})
        population = Population(data, FLEET, config, 3)
        return float(np.mean([np.count_nonzero(population.share(name).class_counts()) for name in FLEET]))

    assert classes(alpha=0.05) < 2 < classes(alpha=100.0) <= 3


def test_more_devices_than_samples_are_told_of_draws(tmp_path: Path) -> None:
    config = DataConfig(source=str(source(tmp_path, "classes")))
    with pytest.raises(DataError) as caught:
        prepare_population(config, [f"device-{n}" for n in range(100)], tmp_path / "rows", 3)
    assert "drawn: {each: 20}" in caught.value.remedy


def test_a_device_that_loses_every_sample_is_named_before_anything_is_written(tmp_path: Path) -> None:
    config = DataConfig(source=str(source(tmp_path, "classes")), missing={"devices": {"device-3": ["a", "b"]}})
    for prepare in (prepare_population, prepare_shares):
        with pytest.raises(DataError, match="'device-3' loses every sample"):
            prepare(config, FLEET, tmp_path / "rows", 3)
        assert not (tmp_path / "rows").exists()


def test_mapped_values_are_pages_of_the_file_and_give_the_same_shares(tmp_path: Path) -> None:
    """Of two modalities that lie at odd bytes of the file; the second is too small to be mapped."""
    draw, present = np.random.default_rng(0), np.arange(4000) % 5 > 0
    values = {"a": draw.normal(size=(4000, 40, 2)).astype(np.float32), "bc": draw.integers(0, 9, (4000, 4))}
    values["a"][~present] = 0
    data = Dataset(values, {"a": present, "bc": ~present | True}, None, (), [f"s{row}" for row in range(4000)])
    population = Population(data, ["x", "y"], DataConfig.model_validate({"missing": {"rate": 0.3, "keep": "one"}}), 3)
    population.save(tmp_path)
    config = DataConfig.model_validate({"missing": {"rate": 0.3, "keep": "one"}})
    mapped = Population.load(tmp_path, ["x", "y"], config, 3, mapped=True)
    assert {m: rows.flags.writeable for m, rows in mapped.data.modalities.items()} == {"a": False, "bc": True}
    for device in ("x", "y"):
        same(mapped.share(device).as_saved(), population.share(device).as_saved())
    path = tmp_path / ALL
    path.write_bytes(path.read_bytes()[: 2**20])
    with pytest.raises(DataError, match="not a readable"):
        Population.load(tmp_path, ["x", "y"], config, 3, mapped=True)
