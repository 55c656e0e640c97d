"""The page on label sets: its first sentence, its tables, and shares and precision of values that are known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.accuracy.label_sets import FIGURES, Row, Sets, concepts_in, figures_of, page, precision, shares_of
from edgefl.data.dataset import Dataset


def row(way: str, seed: int, **more: float) -> Row:
    return Row(way, seed, {**dict.fromkeys(FIGURES, 50.0), **more}, 2048.0)


def test_the_first_sentence_tells_what_is_beyond_the_interval() -> None:
    rows = [
        *(row("AproMFL", seed, recall_1=52.0 + 0.1 * seed, accuracy_group=49.0 + seed) for seed in (1, 2, 3)),
        *(row("each alone", seed, map_group=53.0) for seed in (1, 2, 3)),
        *(row("averaging", seed, recall_1=50.0 + 0.1 * seed) for seed in (1, 2, 3)),
    ]
    text = page(rows)
    assert "than each alone it is better in recall at 1 +2.2 and worse in MAP, group -3.0" in text
    assert "than averaging it is better in recall at 1 +2.0." in text  # accuracy: 1.0 ± 2.5
    assert "| AproMFL | 51.0 ± 1.0 | 50.0 ± 0.0 | 52.2 ± 0.1 | 50.0 ± 0.0 | 50.0 ± 0.0 | 50.0 ± 0.0 | 2.0 |" in text
    assert "| each alone | +1.0 ± 2.5 | +0.0 ± 0.0 | +2.2 ± 0.2 | +0.0 ± 0.0 | -3.0 ± 0.0 | +0.0 ± 0.0 |" in text


def test_a_figure_is_the_mean_of_the_devices_that_have_it() -> None:
    pairs = {"trained_map_group": 0.4, "trained_map_subgroup": 0.2}
    pairs |= {f"trained_{way}_recall_at_{k}": 0.1 for way in ("image_to_text", "text_to_image") for k in (1, 10)}
    found = figures_of(
        {
            "pictures-1": {"trained_accuracy_group": 0.5, "received_accuracy_group": 0.1},
            "pictures-2": {"trained_accuracy_group": 0.7},
            "texts-1": {"trained_accuracy_subgroup": 0.3},
            "pairs-1": {**pairs, "trained_image_to_text_recall_at_1": 0.3},
        }
    )
    assert found == pytest.approx(dict(zip(FIGURES, (60.0, 30.0, 20.0, 10.0, 40.0, 20.0), strict=True)))


def test_average_precision_counts_whatever_has_the_label_of_the_query() -> None:
    axes = np.eye(3)
    same = np.array([[1, 0, 1], [0, 1, 0], [1, 0, 1]], bool)
    near = np.array([[1.0, 0.2, 0.1], [0.0, 1.0, 0.0], [0.0, 0.3, 1.0]])  # of 0 and 2 the other right one is last
    assert precision(axes, near.T @ axes, same) == pytest.approx((5 / 6 + 1 + 5 / 6) / 3)


def test_each_kind_of_device_has_every_concept_once_and_its_own_labels() -> None:
    sets = Sets(("@group:x", "@group:y", "@subgroup:u", "@subgroup:v"), [0, 1] * 20, [2, 3] * 20)
    vendors, count = ("openmoji", "noto", "twemoji", "fxemoji"), 40
    ids = [f"{vendor}-{concept}" for vendor in vendors for concept in range(count)]
    values = {"image": np.zeros((160, 2, 2, 3), np.float32), "text": np.zeros((160, 4), np.int64)}
    groups = np.repeat(np.array(vendors), count)
    data = Dataset(values, {m: np.ones(160, bool) for m in values}, None, (), ids, groups)
    shares = shares_of(data, sets, seed=1)
    for kind, modalities, names in (
        ("pictures", {"image"}, {0, 1}),
        ("texts", {"text"}, {2, 3}),
        ("pairs", {*values}, {-1}),
    ):
        own = [share for name, share in shares.items() if name.startswith(kind)]
        assert sorted(int(c) for share in own for c in concepts_in(share)) == list(range(count))
        assert {m for share in own for m in share.modalities} == modalities
        assert {int(label) for share in own for label in np.asarray(share.labels)} == names
