"""Tasks with groups that no device holds, and the page that compares trainings seed by seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy import default_page, unseen
from benchmarks.accuracy.default import Row
from edgefl.data.dataset import Dataset
from edgefl.data.named import Named


def drawings(vendors: tuple[str, ...]) -> Dataset:
    count = 3 * len(vendors)
    values = {"image": np.zeros((count, 2, 2, 3), np.float32), "text": np.zeros((count, 4), np.int64)}
    flags = {m: np.ones(count, bool) for m in values}
    groups = np.repeat(np.array(vendors), 3)
    return Dataset(values, flags, np.zeros(count, np.int64), ("one",), [str(i) for i in range(count)], groups)


def test_a_vendor_that_no_device_holds_is_in_neither_training_nor_the_known_test(monkeypatch: pytest.MonkeyPatch):
    vendors = unseen.TASKS["emoji"].held
    whole = drawings(vendors)
    monkeypatch.setattr(unseen, "named", lambda *_: Named(whole, whole, whole.groups))
    for seed, held in enumerate(vendors, start=1):
        given = unseen.split("emoji", seed)
        others = set(vendors) - {held}
        assert [set(unseen.groups_of(part)) for part in given] == [others, others, {held}]
    values = unseen.run_file("emoji", {"missing": "zero"}, 1, given, Path("here"))
    names = [device["name"] for device in values["fleet"]]
    assert (set(names), values["data"]["missing"]["devices"]) == (others, {names[2]: ["text"]})
    assert values["slots"] == {"select": {"random": {"share": 0.5}}, "missing": "zero"}


def rows(training: str, values: dict[int, float]) -> list[Row]:
    """Of the test of known groups by the accelerometer alone; all else is even."""
    keys = [f"{test}/{given}" for test in ("known", "unseen") for given in ("acc/zero", "gyro/zero", "acc+gyro/none")]
    return [
        Row("har", "pretrained", training, seed, {**dict.fromkeys(keys, 0.5), "known/acc/zero": value})
        for seed, value in values.items()
    ]


def test_differences_are_paired_by_seed():
    """0.52 - 0.50, 0.64 - 0.60, 0.66 - 0.60: mean 4, deviation 2, half 4.303 · 2 / sqrt(3) = 4.97; no bar of seed 4."""
    bar, ours = {1: 0.50, 2: 0.60, 3: 0.60}, {1: 0.52, 2: 0.64, 3: 0.66, 4: 0.99}
    every = [*rows("zeros", bar), *rows("contrast", ours)]
    found = default_page.paired(every, "contrast", "zero", "pretrained")
    assert [(one.test, one.given) for one in found[:3]] == [("known", "acc"), ("known", "gyro"), ("known", "acc+gyro")]
    assert found[0].mean == pytest.approx(4)
    assert str(found[0]) == "+4.0 ± 5.0"
    assert str(found[1]) == "+0.0 ± 0.0"
    worse = default_page.paired(
        [*rows("zeros", ours), *rows("contrast", {1: 0.3, 2: 0.4})], *("contrast", "zero"), "pretrained"
    )
    assert str(worse[0]).endswith("**worse**")


def test_several_differences_are_averaged_over_the_seeds_that_all_of_them_have():
    """(2 + 0) / 2 and (4 + 2) / 2; a seed that one of them lacks does not count."""
    every = [*rows("zeros", dict.fromkeys((1, 2, 3), 0.5)), *rows("contrast", {1: 0.52, 2: 0.54, 3: 0.6})]
    found = default_page.paired(every, "contrast", "zero", "pretrained")[:2]
    points = default_page.averaged([found[0], found[1]._replace(each={1: 0.0, 2: 2.0})])
    assert points is not None
    assert (points.mean, points.seeds) == (pytest.approx(2.0), 2)
    assert default_page.averaged([found[0], found[1]._replace(each={4: 0.0})]) is None


def test_the_page_has_a_picture_and_what_is_lacking_is_left_out(tmp_path: Path):
    every = [*rows("zeros", {1: 0.5, 2: 0.6}), *rows("contrast", {1: 0.4, 2: 0.6})]
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "says.md").write_text("The one sentence.\n\nMore.\n")
    default_page.write(every, tmp_path / "default.md")
    page = (tmp_path / "default.md").read_text()
    assert page.index("The one sentence.") < page.index("default.svg") < page.index("| contrast | zeros | pretrained |")
    assert "<summary>har, pretrained</summary>" in page
    assert "<summary>av, pretrained</summary>" not in page
    assert (tmp_path / "default.svg").read_text().startswith("<?xml")
