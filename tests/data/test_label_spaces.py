"""Label sets of their own: which set a label name says, and what data with labels of several look like."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.data.label_sets import plain_names
from edgefl.data.sources import load
from edgefl.label_spaces import spaces_in


def test_every_name_says_its_set_or_none_does() -> None:
    names = ("@topic:world", "@group:food: hot", "@topic:art")
    assert spaces_in(names) == {"group": (1,), "topic": (0, 2)}
    assert plain_names(names) == ("topic:world", "group:food: hot", "topic:art")
    assert plain_names(names[1:2]) == ("food: hot",)
    for odd in ("world", "@topic", "@topic:", "@:world", "@to pic:world", "topic:world"):
        assert spaces_in((*names, odd)) == {}
        assert plain_names((*names, odd)) == (*names, odd)
    assert spaces_in(()) == {}


def test_data_say_how_many_samples_have_a_label_of_each_set(tmp_path: Path) -> None:
    lines = ['{"x": [1, 2], "label": "@group:food"}', '{"x": [2, 1], "label": "@topic:art"}', '{"x": [2, 2]}']
    (tmp_path / "manifest.jsonl").write_text("\n".join([*lines, '{"x": [3, 1], "label": "@topic:world"}']))
    read = load(tmp_path)
    assert read.samples() == {"": 4, "x": 4, "@group": 1, "@topic": 2}
    read.save_npz(tmp_path / "same.npz")
    again = Dataset.load_npz(tmp_path / "same.npz")
    assert again.samples() == read.samples()
    assert [again.label_words(row) for row in range(4)] == ["group:food", "topic:art", None, "topic:world"]
    one = again.relabelled(("@topic:world", "@topic:art"))  # of a model that knows one set
    np.testing.assert_array_equal(np.asarray(one.labels), [-1, 1, -1, 0])
    assert one.label_words(1) == "art"
