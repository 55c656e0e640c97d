"""Several modalities at hand: all of them are matched, and their scores averaged before the class is chosen."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from mask_oracle import in_torch, stand_in

from edgefl.prototypes import mask
from edgefl.prototypes.mask import TEMPERATURES, Matcher
from edgefl.prototypes.table import ClassMeans

#: Cosines with these of (.8, .6): .8, .6, -.8; of (0, 1): 0, 1, 0.
OWN = np.array([[1, 0], [0, 1], [-1, 0]], np.float32)
OTHER = np.array([[10, 0], [0, 10], [5, 5]], np.float32)
H = {"a": np.array([[0.8, 0.6]], np.float32), "b": np.array([[0, 1]], np.float32)}
METRICS = ("cosine", "l1", "l2")


def table(means: np.ndarray, present: tuple[int, ...] = (1, 1, 1)) -> ClassMeans:
    return ClassMeans(means * np.array(present, np.float32)[:, None], np.array(present, np.float32))


def by_equations(h: dict[str, np.ndarray], tables: dict[str, ClassMeans], matcher: Matcher) -> np.ndarray:
    return stand_in(h, "c", tables, matcher)


def made_of(
    h: dict[str, np.ndarray], tables: dict[str, ClassMeans], matcher: Matcher, has: dict[str, list[bool]] | None = None
) -> np.ndarray:
    return in_torch(h, "c", tables, matcher, has=has).values.numpy()


def test_the_average_of_two_by_hand():
    # means .4, .8, -.4: a alone chooses the first class, both the second.
    # The best two at T = .5: softmax(1.6, .8) = 1 / (1 + e^-.8) = .68997, .31003
    tables = {"a": table(OWN), "b": table(OWN), "c": table(OTHER)}
    for made in (by_equations, made_of):
        assert made({"a": H["a"]}, tables, Matcher(k=1)).tolist() == [[10, 0]]
        assert made(H, tables, Matcher(k=1)).tolist() == [[0, 10]]
        np.testing.assert_allclose(made(H, tables, Matcher(k=2, temperature=0.5)), [[3.1003, 6.8997]], atol=1e-4)


def test_a_class_that_only_one_of_them_knows_has_that_one_s_score():
    # b has no prototype of the second class: scores .4, .6 (of a alone), -.4
    tables = {"a": table(OWN), "b": table(OWN, (1, 0, 1)), "c": table(OTHER)}
    for made in (by_equations, made_of):
        assert made(H, tables, Matcher(k=1)).tolist() == [[0, 10]]
        assert made(H, {m: tables[m] for m in "bc"}, Matcher(k=1)).tolist() == [[10, 0]]  # a has no table


def test_networks_are_averaged_too():
    # probabilities softmax(2, 0, 0) and softmax(0, 3, 0): means .416, .508, .076
    said = {"a": [[2.0, 0, 0]], "b": [[0, 3.0, 0]]}
    networks = {m: [(1.0, lambda r, absent, m=m: torch.tensor(said[m]))] for m in "ab"}
    tables = {"c": table(OTHER)}
    for made in (stand_in, lambda *given: in_torch(*given).values.numpy()):
        assert made(H, "c", tables, Matcher("classifier", k=1), networks).tolist() == [[0, 10]]
        # the best two by the means of the probabilities, not of their logarithms: .507975 and .416132 of .924107
        found = made(H, "c", tables, Matcher("classifier", k=2), networks)
        np.testing.assert_allclose(found, [[4.50307, 5.49693]], atol=1e-4)
        # one of the two has no network: the other is heard alone
        alone = {"a": networks["a"], "b": []}
        assert made(H, "c", tables, Matcher("classifier", k=1), alone).tolist() == [[10, 0]]


def drawn(seed: int) -> tuple[dict[str, np.ndarray], dict[str, ClassMeans]]:
    """Projections of a, b and d, and tables of all four modalities, each lacking some class."""
    rng = np.random.default_rng(seed)
    h = {m: rng.standard_normal((7, 6)).astype(np.float32) for m in "abd"}
    tables = {}
    for i, m in enumerate("abdc"):
        counts = (np.arange(5) != i).astype(np.float32)
        tables[m] = ClassMeans(rng.standard_normal((5, 6)).astype(np.float32) * counts[:, None], counts)
    return h, tables


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("seed", range(3))
def test_their_order_does_not_matter(metric: str, seed: int):
    h, tables = drawn(seed)
    wanted = by_equations(h, tables, Matcher(metric))
    for order in permutations("abd"):
        found = made_of({m: h[m] for m in order}, tables, Matcher(metric))
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("metric", METRICS)
def test_one_at_hand_is_matched_by_itself(metric: str):
    h, tables = drawn(2)
    found = made_of({"a": h["a"]}, tables, Matcher(metric))
    np.testing.assert_allclose(found, by_equations({"a": h["a"]}, tables, Matcher(metric)), atol=1e-4)
    scores = mask.Scores(torch.rand(7, 5), torch.rand(5) < 0.5)
    assert mask.averaged([scores]) is scores  # to the bit


@pytest.mark.parametrize("metric", METRICS)
def test_each_row_of_a_batch_averages_what_it_has(metric: str):
    h, tables = drawn(1)
    has = {m: [True] * 7 for m in h}
    has["a"][0] = has["b"][0] = has["b"][1] = False  # the first has d alone, the second a and d
    shown = {m: r * np.array(has[m], np.float32)[:, None] for m, r in h.items()}
    found = made_of(shown, tables, Matcher(metric), has)
    for row in range(7):
        given = {m: r[row : row + 1] for m, r in h.items() if has[m][row]}
        np.testing.assert_allclose(found[row : row + 1], by_equations(given, tables, Matcher(metric)), atol=1e-4)


def test_every_metric_has_a_rule():
    assert set(TEMPERATURES) == {*METRICS, "classifier", "prior"}
