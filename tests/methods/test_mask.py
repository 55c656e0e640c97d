"""The prototype mask: hand-computed mixtures, the equations in numpy, and what small trained networks say."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from mask_oracle import METRICS, in_torch, stand_in

from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec
from edgefl.plan.job import Slots
from edgefl.prototypes import mask
from edgefl.prototypes.mask import (
    DEFAULT_MATCHER,
    SCORES,
    TEMPERATURE,
    TEMPERATURES,
    TOP_K,
    Matcher,
    Mixture,
    Network,
    Scores,
    Table,
)
from edgefl.prototypes.table import ClassMeans, empty
from edgefl.training.matching import matching

torch.set_num_threads(1)
ORACLE = next(
    case
    for case in json.loads((Path(__file__).parents[1] / "oracles/oracles.json").read_text())["cases"]
    if case["id"] == "protomix-1"
)


def table(means, counts=None) -> ClassMeans:
    rows = np.array(means, np.float32)
    return ClassMeans(rows, np.ones(len(rows), np.float32) if counts is None else np.array(counts, np.float32))


def by_tables(h, own: ClassMeans, other: ClassMeans, matcher: Matcher = DEFAULT_MATCHER) -> Mixture:
    """The mixture of b for projections ``h`` of a; the same stand-ins as the equations in numpy give."""
    r, tables = {"a": np.array(h, np.float32)}, {"a": own, "b": other}
    found = in_torch(r, "b", tables, matcher)
    np.testing.assert_allclose(found.values, stand_in(r, "b", tables, matcher), rtol=1e-4, atol=1e-5)
    return found


def by_networks(other: ClassMeans, matcher: Matcher, *networks: tuple[float, Network], size: int = 1) -> Mixture:
    """The mixture of b for ``size`` samples of a, whose projections do not matter."""
    r = {"a": np.zeros((size, 5), np.float32)}
    found = in_torch(r, "b", {"b": other}, matcher, {"a": networks})
    wanted = stand_in(r, "b", {"b": other}, matcher, {"a": networks})
    np.testing.assert_allclose(found.values, wanted, rtol=1e-4, atol=1e-5)
    return found


def says(*row: float) -> Network:
    """A network that answers every sample with ``row``."""
    return lambda r, absent: torch.tensor(row, dtype=torch.float32).expand(len(r), -1)


# By the modality's own table


def test_the_hand_computed_mask_by_an_l2_matcher():
    given, expect = ORACLE["inputs"], ORACLE["expect"]
    matcher = Matcher("l2", k=given["k"], temperature=1.0)
    found = by_tables([given["h"]], table(given["image_prototypes"]), table(given["text_prototypes"]), matcher)
    assert found.rows.tolist() == [expect["index"]]
    np.testing.assert_allclose(found.weights, [expect["weights"]], atol=1e-6)
    np.testing.assert_allclose(found.values, [expect["mask"]], atol=1e-6)


def test_the_stand_in_by_hand():
    # cosines of r = (2, 0) with (3, 0), (0, 1), (-1, 0): 1, 0, -1
    # the best two at T = 1: softmax(1, 0) = 0.7311, 0.2689
    own = table([[3, 0], [0, 1], [-1, 0], [9, 9]], [1, 1, 1, 0])
    found = by_tables([[2, 0]], own, table([[10, 0], [0, 10], [5, 5], [9, 9]]), Matcher("cosine", 2, 1.0))
    assert found.rows.tolist() == [[0, 1]]
    np.testing.assert_allclose(found.weights, [[0.7311, 0.2689]], atol=1e-4)
    np.testing.assert_allclose(found.values, [[7.311, 2.689]], atol=1e-3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("metric", METRICS)
def test_stand_ins_are_those_of_the_equations(metric: str, seed: int):
    rng = np.random.default_rng(seed)
    own, other = (table(10 * rng.standard_normal((5, 8)), (rng.random(5) < 0.7).astype(np.float32)) for _ in range(2))
    h = 10 * rng.standard_normal((6, 8)).astype(np.float32)
    found = by_tables(h, own, other, Matcher(metric))
    both = own.present & other.present
    np.testing.assert_allclose(found.weights.sum(1), float(both.any()), atol=1e-6)
    assert all(both[row] for row in found.rows.flatten().tolist() if row >= 0)
    # three unused rows of a larger capacity change nothing
    spare = [ClassMeans(np.pad(t.means, [(0, 3), (0, 0)]), np.pad(t.counts, (0, 3))) for t in (own, other)]
    np.testing.assert_allclose(by_tables(h, *spare, Matcher(metric)).values, found.values, atol=1e-5)


@pytest.mark.parametrize("metric", METRICS)
def test_each_metric_s_scores(metric: str):
    # r = (1, 0): cosines .99, 0, .58; L1 -9, -1, -1.2; L2 -sqrt(65), -1, -sqrt(.74)
    rows = torch.tensor([[9.0, 1.0], [0.0, 0.0], [0.5, 0.7]])
    wanted = {
        "cosine": [9 / 82**0.5, 0.0, 0.5 / 0.74**0.5],
        "l1": [-9.0, -1.0, -1.2],
        "l2": [-(65**0.5), -1.0, -(0.74**0.5)],
    }
    np.testing.assert_allclose(SCORES[metric](torch.tensor([[1.0, 0.0]]), rows), [wanted[metric]], atol=1e-6)
    chosen = {"cosine": 1, "l1": 2, "l2": 3}
    found = by_tables([[1, 0]], table(rows.numpy()), table([[1], [2], [3]]), Matcher(metric, k=1))
    assert found.values.tolist() == [[chosen[metric]]]


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_finds_a_prototype_from_itself_and_its_weights_fall(metric: str):
    means = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    found = by_tables(means, table(means), table(means), Matcher(metric, 3, 0.1))
    assert found.rows[:, 0].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(found.weights.sum(1), 1, atol=1e-6)
    assert (found.weights.diff(dim=1) <= 0).all()


@pytest.mark.parametrize(
    ("metric", "temperature", "difference"),
    [("l1", 1.0, 7 - 1), ("l2", 1.0, 5 - 1), ("l2", 2.0, (5 - 1) / 2), ("cosine", 0.5, (1 - 0.6) / 0.5)],
)
def test_the_weights_follow_the_metric_and_the_temperature(metric: str, temperature: float, difference: float):
    h, prototypes = ([[0, 0]], [[3, 4], [0, 1]]) if metric != "cosine" else ([[0, 2]], [[4, 3], [0, 1]])
    found = by_tables(h, table(prototypes), table([[1], [2]]), Matcher(metric, 2, temperature))
    assert found.rows.tolist() == [[1, 0]]
    np.testing.assert_allclose(found.weights[0, 0], 1 / (1 + np.exp(-difference)), atol=1e-6)


def test_only_classes_that_both_modalities_hold_are_matched_and_k_is_clamped():
    own, other = table([[1, 0], [0, 1], [9, 0]], [1, 1, 0]), table([[7], [8], [9]], [0, 1, 1])
    assert by_tables([[1, 0]], own, other, Matcher(k=1)).values.tolist() == [[8]]
    found = by_tables([[1, 0]], own, other, Matcher(k=5))
    assert found.rows.tolist() == [[1, -1, -1]]
    assert found.weights.tolist() == [[1, 0, 0]]


def test_a_score_far_below_any_cosine_still_matches():
    # L1 distances of 40,000 and 50,000: further than a cosine can be, nearer than a row that must not match
    found = by_tables([[0]], table([[4e4], [5e4], [0]], [1, 1, 0]), table([[1], [2], [9]]), Matcher("l1"))
    assert found.values.tolist() == [[1.0]]
    assert found.rows.tolist() == [[0, 1, -1]]
    assert found.weights.tolist() == [[1.0, 0.0, 0.0]]


def test_no_row_in_both_tables_gives_zeros():
    found = by_tables(np.ones((3, 2)), table([[1, 0], [0, 1]], [1, 0]), table([[1, 0], [0, 1]], [0, 1]), Matcher(k=2))
    assert found.values.abs().max() == 0
    assert found.weights.abs().max() == 0
    assert (found.rows == -1).all()


def test_without_a_table_nothing_is_made():
    r, whole = {"a": torch.ones(2, 2)}, Table(torch.eye(2), torch.ones(2, dtype=torch.bool))
    assert mask.stand_in("b", r, {}, {"a": whole}, Matcher(), {}) is None
    assert mask.stand_in("b", r, {}, {"b": whole}, Matcher(), {}) is None
    assert mask.stand_in("b", r, {}, {}, Matcher("prior"), {}) is None


# By small networks


def test_each_metric_has_a_temperature_of_its_own():
    # probabilities .6 and .3 of the best two: .6 / (.6 + .3) = 2/3, the rest 1/3
    logits = np.log([0.6, 0.3, 0.1]).tolist()
    found = by_networks(table([[1, 0], [0, 1], [9, 9]]), Matcher("classifier", k=2), (1.0, says(*logits)))
    np.testing.assert_allclose(found.values, [[2 / 3, 1 / 3]], atol=1e-6)
    # a prior's cosines .8 and .6 as they are: 1 / (1 + e^-.2) = .549834
    found = by_networks(table([[1, 0], [0, 1]]), Matcher("prior"), (1.0, says(3, 4)))
    np.testing.assert_allclose(found.values, [[0.450166, 0.549834]], atol=1e-6)
    assert {metric: Matcher(metric).temperature for metric in TEMPERATURES} == {
        **dict.fromkeys(("l1", "l2", "classifier", "prior"), 1.0),
        "cosine": 0.01,
    }
    assert Matcher() == Matcher("cosine", TOP_K, TEMPERATURE) == Matcher("cosine", 3, 0.01)
    assert Matcher("l2", temperature=0.3).temperature == 0.3
    for options, temperature in (({"match": "l2"}, 1.0), ({"match": "l2", "temperature": 0.0}, 1.0), ({"k": 2}, 0.01)):
        matcher, networks = matching(ModelSpec(), {}, Slots(prototypes={"class_mean": options}), {})
        assert (matcher.temperature, networks) == (temperature, {})


def test_a_classifiers_probabilities_are_the_weights():
    """p = .99, .005, .005 over e1, e2, e3: they are the weights. Their softmax would be .572, .214, .214."""
    p = (0.99, 0.005, 0.005)
    told = (1.0, says(*np.log(p)))
    found = by_networks(table(np.eye(3)), Matcher("classifier", k=3), told)
    np.testing.assert_allclose(found.values, [p], atol=1e-6)
    # the best two, and where the first has no prototype: renormalised
    found = by_networks(table(np.eye(3)), Matcher("classifier", k=2), told)
    assert found.rows[0, 0] == 0
    np.testing.assert_allclose(found.weights, [[0.99 / 0.995, 0.005 / 0.995]], atol=1e-6)
    found = by_networks(table(np.eye(3), [0, 1, 1]), Matcher("classifier"), told)
    np.testing.assert_allclose(found.values, [[0, 0.5, 0.5]], atol=1e-6)


def test_a_probability_of_zero_weighs_nothing():
    """Logits 0 and -1000: f32 has 0 for e^-1000; a classifier so sure of a class without a prototype tells nothing."""
    sure = (1.0, says(0, -1000, -1000))
    np.testing.assert_allclose(
        by_networks(table(np.eye(3)), Matcher("classifier"), sure).values, [[1, 0, 0]], atol=1e-6
    )
    found = by_networks(table(np.eye(3), [0, 1, 1]), Matcher("classifier"), sure)
    np.testing.assert_allclose(found.values, [[0, 0.5, 0.5]], atol=1e-6)


def test_a_temperature_sharpens_a_classifiers_probabilities():
    """Logits ln 1, ln 2, ln 5: probabilities 1/8, 2/8, 5/8; of the best two at T = .5, weights 5^2 : 2^2."""
    told, matcher = (1.0, says(*np.log([1, 2, 5]))), Matcher("classifier", k=2, temperature=0.5)
    found = by_networks(table([[1, 0], [0, 1], [1, 1]]), matcher, told, size=4)
    np.testing.assert_allclose(found.values, [[25 / 29, 1]] * 4, atol=1e-6)


def test_a_priors_scores_are_cosines_with_the_other_modalitys_prototypes():
    """Prior (3, 4): cosines with (2, 0), (0, 1), (-1, 0) are .6, .8, -.6; of the best two, weights 1 : exp(-.2 / T)."""
    found = by_networks(table([[2, 0], [0, 1], [-1, 0]]), Matcher("prior", 2, 0.1), (2.0, says(3, 4)))
    first = 1 / (1 + np.exp(-2))
    assert found.rows.tolist() == [[1, 0]]
    np.testing.assert_allclose(found.values, [[2 * (1 - first), first]], atol=1e-6)


def test_a_classifier_never_guesses_a_class_without_a_prototype_or_a_spare_row():
    sure = (1.0, says(1, 8, 2))
    other = table([[1, 0], [9, 9], [0, 1]], [1, 0, 1])
    assert by_networks(other, Matcher("classifier", k=1), sure, size=2).values.tolist() == [[0, 1]] * 2
    spare = table([[1, 0], [9, 9], [0, 1], [5, 5]], [1, 0, 1, 1])
    found = by_networks(spare, Matcher("classifier", k=4), sure)
    assert sorted(found.rows[0].tolist()) == [-1, -1, 0, 2]
    assert by_networks(empty(3, 2), Matcher("classifier", k=1), sure, size=2).values.tolist() == [[0, 0]] * 2


def test_the_networks_of_the_modalities_at_hand_are_asked_what_the_absent_one_is():
    asked = []

    def spy(r: torch.Tensor, absent: str) -> torch.Tensor:
        asked.append((float(r[0, 0]), absent))
        return torch.tensor([[0.0, 5.0]])

    h = {"a": np.full((1, 2), 1), "b": np.full((1, 2), 2)}
    tables, matcher = {"c": table([[1, 0], [0, 1]])}, Matcher("classifier", k=1)  # a needs no table of its own
    assert in_torch(h, "c", tables, matcher, {"b": [(1.0, spy)]}).values.tolist() == [[0, 1]]
    assert asked == [(2.0, "c")]
    in_torch(h, "c", tables, matcher, {"b": [(1.0, spy)], "a": [(1.0, spy)]})
    assert asked == [(2.0, "c"), (1.0, "c"), (2.0, "c")]
    with pytest.raises(ModelError, match="what 'c' is from a or b"):
        in_torch(h, "c", tables, matcher, {})


def test_several_networks_say_the_weighted_mean_of_their_scores():
    """Weights 3 : 1 of (.8, .2) and (0, 1): (.6, .4)."""
    each = [(3.0, says(np.log(8), np.log(2))), (1.0, says(0, 99))]
    found = by_networks(table([[1, 0], [0, 1]]), Matcher("classifier", 2, 1.0), *each)
    np.testing.assert_allclose(found.values, [[0.6, 0.4]], atol=1e-6)


@pytest.mark.parametrize("metric", ["classifier", "prior"])
def test_the_order_of_the_devices_does_not_matter_and_equal_ones_are_one(metric: str):
    other, rows = table(np.random.default_rng(1).normal(size=(4, 4))), np.random.default_rng(2).normal(size=(3, 4))
    each = [(weight, says(*row)) for weight, row in zip((1.0, 5.0, 2.0), rows, strict=True)]
    whole = by_networks(other, Matcher(metric), *each).values
    for order in permutations(each):
        np.testing.assert_allclose(by_networks(other, Matcher(metric), *order).values, whole, atol=1e-6)
    same = by_networks(other, Matcher(metric), *((weight, each[0][1]) for weight, _ in each)).values
    np.testing.assert_allclose(same, by_networks(other, Matcher(metric), each[0]).values, atol=1e-6)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0]])
def test_weights_that_are_no_shares_are_errors(weights: list[float]):
    networks = {"a": [(weight, says(0, 1)) for weight in weights]}
    with pytest.raises(ModelError, match="not shares"):
        in_torch({"a": np.zeros((1, 2))}, "b", {"b": table(np.eye(2))}, Matcher("classifier"), networks)


# Its steps


def test_a_choice_is_mixed_without_the_rows_that_are_none():
    rows, weights = torch.tensor([[1, 0], [0, -1]]), torch.tensor([[0.75, 0.25], [1.0, 0.0]])
    whole = Table(torch.tensor([[8.0, 0.0], [0.0, 8.0]]), torch.ones(2, dtype=torch.bool))
    assert mask.mix(rows, weights, whole).tolist() == [[2, 6], [8, 0]]


def test_rows_that_differ_between_samples_may_be_left_out():
    scores = Scores(torch.tensor([[3.0, 2.0], [3.0, 2.0]]), torch.tensor([[True, True], [False, True]]))
    rows, weights = mask.choose(scores, Matcher("l1", k=1), 2)
    assert (rows.tolist(), weights.tolist()) == ([[0], [1]], [[1], [1]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Matcher("cosinus"), "cosine, l1, l2, classifier, prior"),
        (lambda: Matcher(k=0), "k >= 1"),
        (lambda: Matcher(temperature=-1), "temperature >= 0"),
    ],
)
def test_wrong_settings_are_errors(make, message: str):
    with pytest.raises(ModelError) as caught:
        make()
    assert message in caught.value.message + caught.value.remedy
