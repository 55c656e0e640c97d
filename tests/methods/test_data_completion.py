"""Completion: what the nearest complete sample lends, what cannot be made, and the pretrained generators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, ModelError
from edgefl.methods.fedmvp.completion import Made, _closest, _features, complete, generator_of, nearest
from edgefl.models.spec import EncoderSpec

ENCODERS = {
    "a": EncoderSpec(kind="sensor", input_shape=(2, 1)),
    "words": EncoderSpec(kind="text", input_shape=(4,), vocabulary=50),
}


def some(a_present, words_present) -> Dataset:
    a = np.array([[[0.0], [0]], [[1], [1]], [[9], [9]], [[8], [9]]], np.float32)
    words = np.array([[1, 5, 6, 0], [1, 7, 8, 0], [1, 9, 3, 0], [1, 8, 7, 0]])
    present = {"a": np.array(a_present, bool), "words": np.array(words_present, bool)}
    values = {"a": a * present["a"][:, None, None], "words": words * present["words"][:, None]}
    return Dataset(values, present, np.arange(4) % 2, ("x", "y"), list("pqrs"))


def test_the_nearest_complete_sample_lends_its_other_half():
    # row 3 = (8, 9) lacks words: its nearest by a is row 2 = (9, 9), not row 1 = (1, 1); no sample has a label
    data = replace(some([1, 1, 1, 1], [1, 1, 1, 0]), labels=None)
    done = complete(data, ENCODERS, nearest(data))
    assert done.made == {"a": 0, "words": 1}
    assert done.dataset.modalities["words"][3].tolist() == [1, 9, 3, 0]
    assert done.dataset.has("words").all()
    assert data.modalities["words"][3].tolist() == [0, 0, 0, 0]  # the data itself is as it was


def test_texts_are_alike_by_their_words_wherever_they_stand():
    # row 3 has the words 8, 7 of row 1 in another order
    data = some([1, 1, 1, 0], [1, 1, 1, 1])
    done = complete(data, ENCODERS, nearest(data))
    assert done.dataset.modalities["a"][3].ravel().tolist() == [1, 1]


def test_what_is_compared_by_hand():
    """Distances of (2, 0) and (0, 3): to (1, 1) 2 and 5, to (0, 3) 13 and 0, to (3, 3) 10 and 9."""
    known = np.array([[1, 1], [0, 3], [3, 3]], np.float32)
    assert _closest(np.array([[2, 0], [0, 3]], np.float32), known).tolist() == [0, 1]
    many = np.repeat(np.array([[0, 3], [2, 0]], np.float32), 300, axis=0)  # more than are compared at once
    assert _closest(many, known).tolist() == [1] * 300 + [0] * 300
    pictures = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    assert _features(pictures).tolist() == [list(range(6)), list(range(6, 12))]
    counts = _features(np.array([[5, 9, 5, 0], [517, 0, 0, 0]]))  # 517 = 512 + 5 shares a bin with 5; 0 is no word
    assert (counts.shape, counts.dtype) == ((2, 512), np.float32)
    assert {(int(r), int(c)): counts[r, c] for r, c in np.argwhere(counts)} == {(0, 5): 2, (0, 9): 1, (1, 5): 1}


def test_words_in_another_order_are_more_alike_than_near_numbers():
    words = np.array([[9, 5, 0, 0], [5, 8, 0, 0], [5, 9, 0, 0]])
    assert _closest(words[2:], words[:2]).tolist() == [0]


def test_each_sample_is_made_of_the_first_modality_that_it_has_and_that_can_make_it():
    """c of sample 0 by b, since a makes none; a is of no sample, and neither stops the search."""
    flags = {"a": [0, 1], "b": [1, 1], "c": [0, 0]}
    present = {m: np.array(own, bool) for m, own in flags.items()}
    zeros = {m: np.zeros((2, 1), np.float32) for m in flags}
    data = Dataset(zeros, present, np.array([-1, 0]), ("x",), ["p", "q"])
    encoders = {m: EncoderSpec(kind="sensor", input_shape=(1,)) for m in ("a", "b", "c")}
    asked = []

    def make(source, target, values, classes):
        asked.append((source, target, classes))
        return Made(np.full((len(values), 1), 7.0)) if source == "b" else None

    done = complete(data, encoders, make)
    assert asked == [("b", "a", [""]), ("a", "c", ["x"]), ("b", "c", ["", "x"])]
    assert done.made == {"a": 1, "b": 0, "c": 2}
    assert done.dataset.modalities["a"].tolist() == [[7.0], [0.0]]
    asked.clear()
    complete(replace(data, present={**present, "a": np.zeros(2, bool)}), encoders, make)
    assert [source for source, target, _ in asked if target == "c"] == ["b"]


def test_what_nobody_here_has_stays_absent():
    data = some([1, 1, 1, 1], [0, 0, 0, 0])
    done = complete(data, ENCODERS, nearest(data))
    assert done.made == {"a": 0, "words": 0}
    assert not done.dataset.has("words").any()


@pytest.mark.parametrize(("target", "kind"), [("words", np.int64), ("a", np.float32)])
def test_a_modality_that_is_not_in_the_data_at_all_is_made_of_the_other(target: str, kind: type) -> None:
    data = some([1, 1, 1, 1], [1, 1, 1, 1])
    kept = next(m for m in ENCODERS if m != target)
    alone = replace(data, modalities={kept: data.modalities[kept]}, present={kept: data.present[kept]})
    wide = data.modalities[target].shape

    def make(source, wanted, values, classes):
        assert (source, wanted, classes) == (kept, target, ["x", "y", "x", "y"])
        return Made(np.ones(wide))

    done = complete(alone, ENCODERS, make)
    made = done.dataset.modalities[target]
    assert (made.shape, made.dtype, made.min()) == (wide, np.dtype(kind), 1)
    assert done.made == {target: 4, kept: 0}
    assert done.dataset.has(target).all()
    assert target not in complete(alone, ENCODERS, lambda *_: None).dataset.modalities


def test_complete_data_is_left_alone():
    data = some([1, 1, 1, 1], [1, 1, 1, 1])
    done = complete(data, ENCODERS, nearest(data))
    assert done.made == {"a": 0, "words": 0}
    assert done.dataset.modalities["a"] is data.modalities["a"]


def test_an_unknown_generator_lists_the_known_ones():
    with pytest.raises(ConfigError, match="valid: nearest, pool, transformers, diffusers"):
        generator_of("magic", "", some([1] * 4, [1] * 4), ENCODERS)


def test_a_generator_that_can_not_be_read_is_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere': there is no such folder"):
        generator_of("transformers", str(tmp_path / "nowhere"), some([1] * 4, [1] * 4), ENCODERS)
