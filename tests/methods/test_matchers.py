"""The matcher as a value, small trained models in it and how devices' ones are combined; and their training."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from scipy.special import softmax
from torch import nn

from edgefl.errors import DataError, ModelError, RunError
from edgefl.methods.objectives.clip import clip_loss
from edgefl.methods.prototypes.matcher_networks import (
    MatcherSettings,
    _batches,
    in_numpy,
    train_classifier,
    train_prior,
)
from edgefl.models.spec import ModelSpec
from edgefl.plan.job import Slots
from edgefl.prototypes.mask import masked, prototype_mask, trained_mask
from edgefl.prototypes.matcher import TEMPERATURE, TEMPERATURES, TOP_K, Matcher
from edgefl.prototypes.matching import (
    average_parameters,
    ensemble,
    largest,
    match_scores,
    mix,
    trained_scores,
)
from edgefl.prototypes.table import ClassMeans, empty
from edgefl.training.scoring import matching

torch.set_num_threads(1)
ORACLES = {
    case["id"]: case for case in json.loads((Path(__file__).parents[1] / "oracles/oracles.json").read_text())["cases"]
}
EVERY = np.ones(3, bool)


def table(means, counts=None) -> ClassMeans:
    rows = np.array(means, np.float32)
    return ClassMeans(rows, np.ones(len(rows), np.float32) if counts is None else np.array(counts, np.float32))


def says(*row: float):
    """A small model that answers every sample with ``row``."""
    return lambda h: np.tile(np.array(row, np.float32), (len(h), 1))


def gen(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# The matcher


def test_the_hand_computed_mask_by_an_l2_matcher():
    given, expect = ORACLES["protomix-1"]["inputs"], ORACLES["protomix-1"]["expect"]
    image, text = table(given["image_prototypes"]), table(given["text_prototypes"])
    h = np.array([given["h"]], np.float32)
    matcher = Matcher("l2", k=given["k"], temperature=1.0)
    np.testing.assert_allclose(prototype_mask(h, image, text, matcher), [expect["mask"]], atol=1e-6)
    tables = {"image": image, "text": text}
    filled = masked({"image": h}, ["image", "text"], tables, "prototype", 2, matcher)
    np.testing.assert_allclose(filled["text"], [expect["mask"]], atol=1e-6)
    assert Matcher() == Matcher("cosine", TOP_K, TEMPERATURE) == Matcher("cosine", 3, 0.01)


def test_each_metric_has_a_temperature_of_its_own():
    # probabilities .6 and .3 of the best two: .6 / (.6 + .3) = 2/3, the rest 1/3
    logits = np.log([0.6, 0.3, 0.1])
    other = table([[1, 0], [0, 1], [9, 9]])
    found = trained_mask(np.zeros((1, 5), np.float32), other, Matcher("classifier", k=2), [(1.0, says(*logits))])
    np.testing.assert_allclose(found, [[2 / 3, 1 / 3]], atol=1e-6)
    # a prior's cosines .8 and .6 as they are: 1 / (1 + e^-.2) = .549834
    found = trained_mask(np.zeros((1, 5), np.float32), table([[1, 0], [0, 1]]), Matcher("prior"), [(1.0, says(3, 4))])
    np.testing.assert_allclose(found, [[0.450166, 0.549834]], atol=1e-6)
    assert {metric: Matcher(metric).temperature for metric in TEMPERATURES} == {
        **dict.fromkeys(("l1", "l2", "classifier", "prior"), 1.0),
        "cosine": 0.01,
    }
    assert Matcher("l2", temperature=0.3).temperature == 0.3
    for options, temperature in (({"match": "l2"}, 1.0), ({"match": "l2", "temperature": 0.0}, 1.0), ({"k": 2}, 0.01)):
        matcher, small = matching(ModelSpec(), {}, Slots(prototypes={"class_mean": options}), {})
        assert (matcher.temperature, small) == (temperature, None)


@pytest.mark.parametrize("metric", ["cosine", "l1", "l2"])
def test_each_metric_without_a_model_is_its_own(metric):
    """h = (1, 0): the cosine chooses (9, 1), L1 (0, 0) at distance 1 from (.5, .7) at 1.2, L2 (.5, .7) at .86."""
    own = table([[9, 1], [0, 0], [0.5, 0.7]])
    other = table([[1], [2], [3]])
    chosen = {"cosine": 1, "l1": 2, "l2": 3}
    stand_in = prototype_mask(np.array([[1, 0]], np.float32), own, other, Matcher(metric, k=1))
    assert stand_in.tolist() == [[chosen[metric]]]


def test_only_classes_that_both_modalities_hold_are_matched():
    own, other = table([[1, 0], [0, 1], [9, 0]], [1, 1, 0]), table([[7], [8], [9]], [0, 1, 1])
    assert prototype_mask(np.array([[1, 0]], np.float32), own, other, Matcher(k=1)).tolist() == [[8]]


def test_a_classifiers_probabilities_are_the_weights():
    """p = .99, .005, .005 over e1, e2, e3: they are the weights. Their softmax would be .572, .214, .214."""
    p, other = (0.99, 0.005, 0.005), table(np.eye(3))
    stand_in = trained_mask(np.zeros((1, 4), np.float32), other, Matcher("classifier", k=3), [(1.0, says(*np.log(p)))])
    np.testing.assert_allclose(stand_in, [p], atol=1e-6)
    # the best two, and where the first has no prototype: renormalised
    stand_in = trained_mask(np.zeros((1, 4), np.float32), other, Matcher("classifier", k=2), [(1.0, says(*np.log(p)))])
    np.testing.assert_allclose(stand_in, [[0.99 / 0.995, 0.005 / 0.995, 0]], atol=1e-6)
    lacking = table(np.eye(3), [0, 1, 1])
    stand_in = trained_mask(np.zeros((1, 4), np.float32), lacking, Matcher("classifier"), [(1.0, says(*np.log(p)))])
    np.testing.assert_allclose(stand_in, [[0, 0.5, 0.5]], atol=1e-6)


def test_a_probability_of_zero_weighs_nothing():
    """Logits 0 and -1000: f32 has 0 for e^-1000; a classifier so sure of a class without a prototype tells nothing."""
    sure = [(1.0, says(0, -1000, -1000))]
    np.testing.assert_allclose(
        trained_mask(np.zeros((1, 2), np.float32), table(np.eye(3)), Matcher("classifier"), sure),
        [[1, 0, 0]],
        atol=1e-6,
    )
    lacking = table(np.eye(3), [0, 1, 1])
    found = trained_mask(np.zeros((1, 2), np.float32), lacking, Matcher("classifier"), sure)
    np.testing.assert_allclose(found, [[0, 0.5, 0.5]], atol=1e-6)


def test_a_temperature_sharpens_a_classifiers_probabilities():
    """Logits ln 1, ln 2, ln 5: probabilities 1/8, 2/8, 5/8; of the best two at T = .5, weights 5^2 : 2^2."""
    other = table([[1, 0], [0, 1], [1, 1]])
    logits = np.log([[1, 2, 5]])
    np.testing.assert_allclose(trained_scores("classifier", logits, other), softmax(logits, axis=1), atol=1e-6)
    matcher = Matcher("classifier", k=2, temperature=0.5)
    stand_in = trained_mask(np.zeros((4, 7), np.float32), other, matcher, [(1.0, says(*logits[0]))])
    np.testing.assert_allclose(stand_in, [[25 / 29, 1]] * 4, atol=1e-6)


def test_a_priors_scores_are_cosines_with_the_other_modalitys_prototypes():
    """Prior (3, 4): cosines with (2, 0), (0, 1), (-1, 0) are .6, .8, -.6; of the best two, weights 1 : exp(-.2 / T)."""
    other = table([[2, 0], [0, 1], [-1, 0]])
    np.testing.assert_allclose(trained_scores("prior", [[3, 4]], other), [[0.6, 0.8, -0.6]], atol=1e-6)
    stand_in = trained_mask(np.zeros((1, 5), np.float32), other, Matcher("prior", 2, 0.1), [(2.0, says(3, 4))])
    first = 1 / (1 + np.exp(-2))
    np.testing.assert_allclose(stand_in, [[2 * (1 - first), first]], atol=1e-6)


def test_scores_match_like_tables_do():
    index, weights = match_scores([[0.1, 0.7, 0.2], [0.5, 0.5, 0.0]], EVERY, k=2)
    assert index.tolist() == [[1, 2], [0, 1]]  # of equals the lower class first
    np.testing.assert_allclose(weights, softmax([[0.7, 0.2], [0.5, 0.5]], axis=1), atol=1e-6)
    index, weights = match_scores([[0.1, 0.7, 0.2]], np.array([True, False, True]), k=5)
    assert index.tolist() == [[2, 0]]
    np.testing.assert_allclose(weights, softmax([[0.2, 0.1]], axis=1), atol=1e-6)


def test_classes_without_a_prototype_are_never_guessed_and_without_any_the_mask_is_zero():
    other = table([[1, 0], [9, 9], [0, 1]], [1, 0, 1])
    sharp = Matcher("classifier", k=1)
    assert trained_mask(np.zeros((2, 3), np.float32), other, sharp, [(1, says(1, 8, 2))]).tolist() == [[0, 1]] * 2
    assert trained_mask(np.zeros((2, 3), np.float32), empty(3, 2), sharp, [(1, says(1, 8, 2))]).tolist() == [[0, 0]] * 2
    with pytest.raises(ModelError, match="no class has a prototype"):
        match_scores([[1, 2, 3]], ~EVERY)


def test_the_small_models_of_the_modalities_at_hand_are_asked():
    tables = {"c": table([[1, 0], [0, 1]])}  # a classifier needs no table of its own modality
    h = {"a": np.full((1, 2), 1, np.float32), "b": np.full((1, 2), 2, np.float32)}
    asked = []

    def spy(r):
        asked.append(float(r[0, 0]))
        return np.array([[0, 5]], np.float32)

    one = Matcher("classifier", k=1)
    filled = masked(h, ["a", "b", "c"], tables, "prototype", 2, one, {("b", "c"): [(1.0, spy)]})
    assert filled["c"].tolist() == [[0, 1]]
    assert asked == [2.0]
    masked(h, ["a", "b", "c"], tables, "prototype", 2, one, {("b", "c"): [(1.0, spy)], ("a", "c"): [(1.0, spy)]})
    assert asked == [2.0, 1.0, 2.0]
    assert masked(h, ["a", "b", "d"], tables, "prototype", 2, one)["d"].tolist() == [[0, 0]]  # no table: zeros
    with pytest.raises(ModelError, match="what 'c' is from a or b"):
        masked(h, ["a", "b", "c"], tables, "prototype", 2, one)
    with pytest.raises(ModelError, match="needs a small model"):
        trained_mask(h["a"], tables["c"], one, [])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Matcher("cosinus"), "cosine, l1, l2, classifier, prior"),
        (lambda: Matcher(k=0), "k >= 1"),
        (lambda: Matcher(temperature=-1), "temperature >= 0"),
        (lambda: trained_scores("l1", [[1.0]], table([[1]])), "classifier, prior"),
        (lambda: trained_scores("classifier", [[1.0, 2.0]], table([[1]])), "a classifier gave [1, 2], expected [B, 1]"),
        (lambda: trained_scores("prior", [[1.0]], table([[1, 2]])), "a prior gave [1, 1], expected [B, 2]"),
        (lambda: match_scores([[1.0, 2.0]], EVERY), "[1, 2] do not fit 3 classes"),
        (lambda: match_scores([[1.0, 2.0, 3.0]], EVERY, k=0), "k >= 1"),
        (lambda: masked({"a": np.zeros((1, 2), np.float32)}, ["a"], {}, "zeros", 2), "unknown mask 'zeros'"),
    ],
)
def test_wrong_settings_are_errors(make, message):
    with pytest.raises(ModelError) as caught:
        make()
    assert message in caught.value.message + caught.value.remedy


# Several devices' small models


def test_an_ensemble_is_the_weighted_mean_of_the_scores():
    """Weights 3 : 1 of (.8, .2) and (0, 1): (.6, .4)."""
    assert ensemble([[[0.8, 0.2]], [[0, 1]]], [30, 10]).tolist() == [pytest.approx([0.6, 0.4])]
    other = table([[1, 0], [0, 1]])
    models = [(3.0, says(np.log(8), np.log(2))), (1.0, says(0, 99))]
    stand_in = trained_mask(np.zeros((1, 2), np.float32), other, Matcher("classifier", 2, 1.0), models)
    np.testing.assert_allclose(stand_in, [[0.6, 0.4]], atol=1e-6)


def test_the_order_of_the_devices_does_not_matter_and_equal_ones_are_one():
    scores, weights = gen().random((3, 4, 5)), np.array([1, 5, 2])
    whole = ensemble(scores, weights)
    for order in permutations(range(3)):
        np.testing.assert_allclose(ensemble(scores[list(order)], weights[list(order)]), whole, atol=1e-6)
    np.testing.assert_allclose(whole, np.average(scores, axis=0, weights=weights), atol=1e-6)
    np.testing.assert_allclose(ensemble(np.stack([scores[0]] * 3), weights), scores[0], atol=1e-6)


def test_the_largest_client_speaks_and_of_equals_the_first():
    assert largest([2, 5, 5]) == 1
    assert largest([0.5]) == 0


def test_averaged_parameters_of_linear_models_answer_with_the_mean_of_their_answers():
    made = [nn.Linear(3, 2) for _ in range(3)]
    x, weights = torch.randn(4, 3), [1, 4, 5]
    tensors = [{name: p.detach().numpy() for name, p in model.named_parameters()} for model in made]
    mean = average_parameters(tensors, weights)
    answer = x.numpy() @ mean["weight"].T + mean["bias"]
    each = np.stack([model(x).detach().numpy() for model in made])
    np.testing.assert_allclose(answer, ensemble(each, weights), atol=1e-6)
    assert average_parameters([{"w": np.array([2.0])}, {"w": np.array([6.0])}], [1, 3])["w"].tolist() == [5.0]


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [np.nan, 1], [np.inf, 1], [], 1.0])
def test_weights_that_are_no_shares_are_errors(weights):
    with pytest.raises(ModelError, match="not shares"):
        largest(weights)


def test_models_that_do_not_belong_together_are_errors():
    with pytest.raises(ModelError, match="of 3 devices"):
        ensemble(np.zeros((2, 1, 4)), [1, 1, 1])
    with pytest.raises(ModelError, match="2 small models, 1 weights"):
        average_parameters([{"w": np.zeros(1)}] * 2, [1])
    with pytest.raises(ModelError, match="differ"):
        average_parameters([{"w": np.zeros(1)}, {"w": np.zeros(2)}], [1, 1])


# Training


def toy(samples: int = 60, seed: int = 0):
    """Three separable classes in a of width 4; b is a linear map of a, of width 5."""
    generator = gen(seed)
    labels = np.arange(samples) % 3
    r_a = 2 * np.eye(4)[labels] + 0.1 * generator.normal(size=(samples, 4))
    r_b = r_a @ gen(9).normal(size=(4, 5))
    return (torch.tensor(r, dtype=torch.float32) for r in (r_a, r_b)), torch.from_numpy(labels)


def small(out: int, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, out))


QUICK = MatcherSettings(batch_size=16, lr=1e-2)


def test_a_classifier_learns_separable_classes_and_the_mask_then_finds_the_true_prototype():
    (r_a, r_b), labels = toy()
    module = small(3).requires_grad_(False)  # as a part that no schedule trains
    loss = train_classifier(module, r_a, labels, QUICK, gen())
    assert loss < 0.05
    assert loss == pytest.approx(float(F.cross_entropy(module(r_a), labels).detach()))
    assert not module.training
    assert all(p.grad is None for p in module.parameters())
    prototypes = table(np.stack([r_b[labels == c].mean(0).numpy() for c in range(3)]))
    (fresh, _), classes = toy(seed=3)
    found = trained_mask(fresh.numpy(), prototypes, Matcher("classifier", k=1), [(1.0, in_numpy(module))])
    np.testing.assert_allclose(found, prototypes.means[classes.numpy()], atol=1e-6)


def test_a_prior_learns_the_other_modality_and_the_mask_then_finds_the_true_prototype():
    (r_a, r_b), labels = toy()
    module = small(5)
    before = float(F.mse_loss(module(r_a), r_b).detach())
    loss = train_prior(module, r_a, r_b, QUICK, gen())
    assert loss < 0.1 * before
    assert loss == pytest.approx(float(F.mse_loss(module(r_a), r_b).detach()))
    prototypes = table(np.stack([r_b[labels == c].mean(0).numpy() for c in range(3)]))
    (fresh, _), classes = toy(seed=3)
    found = trained_mask(fresh.numpy(), prototypes, Matcher("prior", k=1), [(1.0, in_numpy(module))])
    np.testing.assert_allclose(found, prototypes.means[classes.numpy()], atol=1e-6)


def test_a_prior_takes_a_clip_step_and_then_a_squared_error_step_as_by_torch():
    (r_a, r_b), _ = toy(samples=6)
    settings = MatcherSettings(epochs=1, lr=0.02, weight_decay=0.3, temperature=0.2)
    module, reference = small(5), small(5)
    train_prior(module, r_a, r_b, settings, gen())
    for phase in ("clip", "error"):  # one batch holds them all, and neither loss minds the order
        optimizer = torch.optim.AdamW(reference.parameters(), lr=0.02, weight_decay=0.3)
        made = reference(r_a)
        unit = F.normalize(made, dim=1), F.normalize(r_b, dim=1)
        loss = clip_loss(*unit, 0.2) if phase == "clip" else F.mse_loss(made, r_b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_training_follows_its_generator_alone():
    (r_a, _), labels = toy(samples=30)
    modules = [small(3, dropout=0.5) for _ in range(3)]
    torch.manual_seed(7)
    state = torch.get_rng_state()
    for seed, module in zip((1, 1, 2), modules, strict=True):
        train_classifier(module, r_a, labels, MatcherSettings(epochs=2, batch_size=8), gen(seed))
        assert torch.equal(torch.get_rng_state(), state)  # and nobody else's draw is changed
        torch.rand(3)
        state = torch.get_rng_state()
    plain = small(3)
    train_classifier(plain, r_a, labels, MatcherSettings(epochs=2, batch_size=8), gen(1))
    first, again, other, whole = (module[0].weight for module in (*modules, plain))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, whole)  # its dropout was on


def test_samples_without_a_label_are_left_out_and_projections_get_no_gradient():
    (r_a, _), labels = toy(samples=12)
    one, two = small(3), small(3)
    settings = MatcherSettings(epochs=3, batch_size=4)
    more = torch.cat([r_a, torch.full((2, 4), 50.0)]).requires_grad_()
    loss = train_classifier(one, r_a, labels, settings, gen())
    assert loss == train_classifier(two, more, torch.cat([labels, torch.tensor([-1, -1])]), settings, gen())
    assert more.grad is None


def test_batches_are_even_and_hold_every_row_once_an_epoch():
    def sizes(count: int) -> list[int]:
        batches = list(_batches(count, MatcherSettings(epochs=2, batch_size=4), gen()))
        half = len(batches) // 2
        for epoch in (batches[:half], batches[half:]):
            assert sorted(torch.cat(epoch).tolist()) == list(range(count))
        return [len(rows) for rows in batches[:half]]

    assert sizes(11) == [6, 5]
    assert sizes(3) == [3]
    assert sizes(12) == [4, 4, 4]
    first, second = _batches(30, MatcherSettings(epochs=2), gen())
    assert first.tolist() != second.tolist() != list(range(30))


def test_too_little_to_learn_from_and_wrong_settings_are_errors():
    (r_a, r_b), labels = toy(samples=6)
    with pytest.raises(DataError, match="no sample with this modality has a label"):
        train_classifier(small(3), r_a, torch.full_like(labels, -1), QUICK, gen())
    with pytest.raises(DataError, match="two complete samples"):
        train_prior(small(5), r_a[:1], r_b[:1], QUICK, gen())
    with pytest.raises(DataError, match="6 and 5 rows"):
        train_prior(small(5), r_a, r_b[:5], QUICK, gen())
    for settings in (MatcherSettings(epochs=0), MatcherSettings(batch_size=1)):
        with pytest.raises(ModelError, match="batches of 2"):
            train_prior(small(5), r_a, r_b, settings, gen())
    with pytest.raises(RunError, match="became nan"):
        train_classifier(small(3), torch.full((4, 4), torch.inf), labels[:4], QUICK, gen())
    assert train_prior(small(5), r_a[:2], r_b[:2], MatcherSettings(epochs=1, batch_size=2), gen()) > 0


def test_a_small_model_in_numpy_leaves_no_graph():
    module = small(3)
    h = np.ones((2, 4), np.float32)
    answer = in_numpy(module)(h)
    assert answer.shape == (2, 3)
    np.testing.assert_allclose(answer, module(torch.from_numpy(h)).detach().numpy(), atol=1e-6)
    index, weights = match_scores(answer, EVERY, k=1)
    assert mix(index, weights, table([[1], [2], [3]])).shape == (2, 1)
