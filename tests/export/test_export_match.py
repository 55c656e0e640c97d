"""The match inside a bundle's graph, and the check that compares it with numpy's."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from export_fixture import some_state, some_tables, two_sensors

from edgefl.errors import ExportError
from edgefl.export import parity
from edgefl.export.graph import BundleGraph, Matching
from edgefl.export.manifest import (
    MATCHED,
    WEIGHTS,
    Check,
    input_ports,
    table_name,
    valid_name,
)
from edgefl.export.match_parity import mixed, shortfall, weight_difference
from edgefl.models.spec import ModelSpec
from edgefl.models.staged import StagedModel, build
from edgefl.prototypes import torch_mask as matching
from edgefl.prototypes.mask import masked, prototype_mask, scored
from edgefl.prototypes.matcher import TEMPERATURE, TEMPERATURES, TOP_K, Matcher
from edgefl.prototypes.matching import METRICS, Scored, match
from edgefl.prototypes.table import ClassMeans
from edgefl.prototypes.torch_mask import Table
from edgefl.training.scoring import answers


def table(rows: list[list[float]], valid: list[bool]) -> Table:
    return Table(torch.tensor(rows), torch.tensor(valid))


def stand_in(
    r: torch.Tensor, own: Table, other: Table, k: int, temperature: float, metric: str = "cosine"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the graph makes of one modality at hand: stand-ins, rows and weights."""
    return matching.mixed(matching.SCORES[metric](r, own.rows), own.valid & other.valid, other.rows, k, temperature)


# The graph's mask


def test_the_stand_in_by_hand():
    # cosines of r = (2, 0) with (3, 0), (0, 1), (-1, 0): 1, 0, -1
    # the best two at T = 1: softmax(1, 0) = 0.7311, 0.2689
    own = table([[3.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [9.0, 9.0]], [True, True, True, False])
    other = table([[10.0, 0.0], [0.0, 10.0], [5.0, 5.0], [9.0, 9.0]], [True, True, True, True])
    mixed, rows, weights = stand_in(torch.tensor([[2.0, 0.0]]), own, other, 2, 1.0)
    assert rows.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights.numpy(), [[0.7311, 0.2689]], atol=1e-4)
    np.testing.assert_allclose(mixed.numpy(), [[7.311, 2.689]], atol=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_the_stand_in_is_the_prototype_mask_of_evaluation(seed: int):
    rng = np.random.default_rng(seed)
    own, other = (
        ClassMeans(rng.standard_normal((5, 8)).astype(np.float32), (rng.random(5) < 0.6).astype(np.float32))
        for _ in range(2)
    )
    r = rng.standard_normal((6, 8)).astype(np.float32)
    spare = [(0, 3), (0, 0)]  # three unused rows of a larger capacity
    padded = [
        Table(torch.from_numpy(np.pad(t.means, spare)), torch.from_numpy(np.pad(t.present, 3)[3:]))
        for t in (own, other)
    ]
    mixed, rows, weights = stand_in(torch.from_numpy(r), *padded, TOP_K, TEMPERATURE)
    np.testing.assert_allclose(mixed.numpy(), prototype_mask(r, own, other), atol=1e-6)
    both = own.present & other.present
    np.testing.assert_allclose(weights.sum(1).numpy(), float(both.any()), atol=1e-6)
    assert all(both[row] for row in rows.flatten().tolist() if row >= 0)


@pytest.mark.parametrize("metric", list(METRICS))
def test_each_metric_s_scores_and_stand_ins_are_those_of_the_library(metric: str):
    # r = (1, 0): cosines .99, 0, .58; L1 -9, -1, -1.2; L2 -sqrt(65), -1, -sqrt(.74)
    rows = np.array([[9.0, 1.0], [0.0, 0.0], [0.5, 0.7]], np.float32)
    wanted = {
        "cosine": [9 / 82**0.5, 0.0, 0.5 / 0.74**0.5],
        "l1": [-9.0, -1.0, -1.2],
        "l2": [-(65**0.5), -1.0, -(0.74**0.5)],
    }
    r = np.array([[1.0, 0.0]], np.float32)
    scores = matching.SCORES[metric](torch.from_numpy(r), torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(scores, [wanted[metric]], atol=1e-6)
    np.testing.assert_allclose(METRICS[metric](r, rows), [wanted[metric]], atol=1e-6)
    rng = np.random.default_rng(1)
    tables = [ClassMeans(50 * rng.standard_normal((5, 8)).astype(np.float32), np.ones(5, np.float32)) for _ in "ab"]
    tables[0].counts[3] = 0
    h = 50 * rng.standard_normal((6, 8)).astype(np.float32)
    own, other = (Table(torch.from_numpy(t.means), torch.from_numpy(t.present)) for t in tables)
    matcher = Matcher(metric)
    found, index, _ = stand_in(torch.from_numpy(h), own, other, matcher.k, matcher.temperature, metric)
    np.testing.assert_allclose(found.numpy(), prototype_mask(h, *tables, matcher), rtol=1e-4, atol=1e-3)
    assert 3 not in index


def test_a_score_far_below_any_cosine_still_matches():
    # L1 distances of 40,000 and 50,000: further than a cosine can be, nearer than a row that must not match
    own = Table(torch.tensor([[4e4], [5e4], [0.0]]), torch.tensor([True, True, False]))
    other = Table(torch.tensor([[1.0], [2.0], [9.0]]), torch.ones(3, dtype=torch.bool))
    found, rows, weights = stand_in(torch.zeros(1, 1), own, other, 3, 1.0, "l1")
    assert found.tolist() == [[1.0]]
    assert rows.tolist() == [[0, 1, -1]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


def test_no_row_valid_in_both_tables_gives_the_zero_mask():
    own = table([[1.0, 0.0], [0.0, 1.0]], [True, False])
    other = table([[1.0, 0.0], [0.0, 1.0]], [False, True])
    mixed, rows, weights = stand_in(torch.ones(3, 2), own, other, 2, 0.1)
    assert mixed.abs().max() == 0
    assert weights.abs().max() == 0
    assert (rows == -1).all()


# The check of the file's match


def nearly_tied(off: float) -> Scored:
    """Cosines [1, 4] of which the third and the fourth are ``off`` apart, and with which classes they may match."""
    return Scored(np.array([[0.9, 0.895, 0.88 + off, 0.88]], np.float32), np.ones(4, bool))


def softmaxed(scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
    powers = np.exp(np.take_along_axis(scores.astype(np.float64), rows, axis=1) / TEMPERATURE)
    return powers / powers.sum(axis=1, keepdims=True)


def test_either_of_two_rows_that_rounding_can_swap_is_right_and_nothing_else():
    found = nearly_tied(2e-6)
    for rows, worst in (([0, 1, 2], 0.0), ([0, 1, 3], 2e-6), ([1, 3, 0], 2e-6), ([0, 2, 3], 0.015)):
        assert shortfall(found, np.array([rows]), 3) == pytest.approx(worst, abs=1e-7)
    for rows in ([0, 1, -1], [0, 0, 1]):
        assert shortfall(found, np.array([rows]), 3) == math.inf
    assert shortfall(found, np.array([[0, 1]]), 2) == 0
    found.among[2] = False
    assert shortfall(found, np.array([[0, 1, 2]]), 3) == math.inf
    assert shortfall(found, np.array([[0, 1, 3]]), 3) == 0


def test_weights_are_compared_as_the_scores_they_stand_for():
    found = nearly_tied(0.0)
    rows = np.array([[0, 1, 2]])
    right = softmaxed(found.scores, rows)

    def off(chosen: np.ndarray, weights: np.ndarray) -> float:
        return weight_difference(found, chosen, weights, TEMPERATURE)

    assert off(rows, right) < 1e-7
    rounded = softmaxed(found.scores + np.array([[0, 4e-6, 0, 0]]), rows)
    assert 2e-6 < off(rows, rounded) < 4e-6 < np.abs(rounded - right).max()
    assert off(rows, right[:, ::-1]) > 0.01
    assert math.isnan(off(rows, right * np.nan))
    none = np.full((1, 3), -1)
    assert off(none, np.zeros((1, 3), np.float32)) == 0
    assert off(none, np.full((1, 3), 0.25, np.float32)) == 0.75  # their sum, which should be 0
    assert off(np.array([[0, 1, -1]]), np.array([[0.6, 0.3, 0.1]], np.float32)) >= 0.1
    assert off(rows, np.float32(1.01) * right) == pytest.approx(0.01)  # no rounding gives that
    assert off(rows, np.array([[0.6, 0.5, -0.1]], np.float32)) >= 0.1


def test_distances_are_compared_as_shares_of_the_largest():
    # -101 left out for -102: 1 / 102 nearer. Weights softmax(-100, -101) = .7311, .2689; ln(.5 / .2689) = .6201 / 102
    found = Scored(np.array([[-100.0, -101.0, -102.0]], np.float32), np.ones(3, bool))
    assert shortfall(found, np.array([[0, 2]]), 2) == pytest.approx(1 / 102)
    even = np.array([[0.5, 0.5]], np.float32)
    assert weight_difference(found, np.array([[0, 1]]), even, 1.0) == pytest.approx(0.620115 / 102, abs=1e-6)


def test_the_mix_leaves_out_what_has_no_row():
    other = ClassMeans(np.array([[8.0, 0.0], [0.0, 8.0]], np.float32), np.ones(2, np.float32))
    found = mixed(np.array([[1, 0], [0, -1]]), np.array([[0.75, 0.25], [0.5, 0.5]], np.float32), other)
    np.testing.assert_array_equal(found, [[2, 6], [4, 0]])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("classes", [1, 2, 6])
@pytest.mark.parametrize("metric", list(METRICS))
def test_the_reference_s_own_match_is_found_right(seed: int, classes: int, metric: str):
    rng = np.random.default_rng(seed)
    own, other = (
        ClassMeans(rng.standard_normal((6, 8)).astype(np.float32), (np.arange(6) < classes).astype(np.float32))
        for _ in range(2)
    )
    r = rng.standard_normal((5, 8)).astype(np.float32)
    matcher = Matcher(metric)
    index, weights = match(r, own, metric, matcher.k, matcher.temperature, own.present)
    spare = [(0, 0), (0, TOP_K - index.shape[1])]
    rows, weights = np.pad(index, spare, constant_values=-1), np.pad(weights, spare)
    found = scored(r, own, other, matcher)
    assert shortfall(found, rows, matcher.k) == 0
    assert weight_difference(found, rows, weights, matcher.temperature) < 1e-6
    np.testing.assert_allclose(mixed(rows, weights, other), prototype_mask(r, own, other, matcher), atol=1e-6)


# Right and wrong graphs

CAPACITY = 6


@functools.cache
def model_of(metric: str) -> tuple[ModelSpec, StagedModel]:
    spec = two_sensors(matching=metric if metric in ("classifier", "prior") else "none")
    return spec, some_state(spec)[0]


@functools.cache
def networks(metric: str, seeds: tuple[int, ...] = (1, 2)) -> tuple[tuple[float, StagedModel], ...]:
    """Two devices' networks of acc, of weights 3 and 1, that are sure enough of something."""
    if metric in METRICS:
        return ()
    spec, _ = model_of(metric)
    found = []
    for weight, seed in zip((3.0, 1.0), seeds, strict=True):
        one = build(spec, ["match/acc"], seed=seed).requires_grad_(False).eval()
        for parameter in one.parameters():
            parameter.mul_(3)
        found.append((weight, one))
    return tuple(found)


def tables_of(metric: str) -> dict[str, ClassMeans]:
    spare = [(0, CAPACITY - 4), (0, 0)]
    found = {m: t for m, t in some_tables(two_sensors()).items() if metric in METRICS or m == "gyro"}
    return {m: ClassMeans(np.pad(t.means, spare), np.pad(t.counts, spare[0])) for m, t in found.items()}


def subject(metric: str = "cosine") -> parity.Subject:
    spec, model = model_of(metric)
    inputs, axes = input_ports(spec, ("acc",))
    masks = ("prototype", "zero")
    return parity.Subject(
        model, 2, ("acc",), inputs, axes, tables_of(metric), masks, Matcher(metric), {"acc": networks(metric)}
    )


Answer = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def in_torch(metric: str = "cosine", speakers: tuple[tuple[float, StagedModel], ...] | None = None) -> Answer:
    """What a right file answers, from the graph before its export."""
    matching = Matching(Matcher(metric), {"acc": networks(metric) if speakers is None else speakers})
    graph = BundleGraph(model_of(metric)[1], 2, ("acc",), matching)

    def answer(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tables = []
        for m, t in tables_of(metric).items():
            tables += [feeds.get(table_name(m), t.means), feeds.get(valid_name(m), t.present)]
        with torch.no_grad():
            found = graph((torch.from_numpy(feeds["acc"]),), (), tuple(torch.from_numpy(t) for t in tables))
        return dict(zip(("logits", "probabilities", "matched", "weights"), (f.numpy() for f in found), strict=True))

    return answer


def checked(monkeypatch: pytest.MonkeyPatch, answer: Answer, metric: str = "cosine") -> tuple[Check, ...]:
    monkeypatch.setattr(parity, "run", lambda _, feeds: answer(feeds))
    return parity.check(None, subject(metric), 1e-4)


@pytest.mark.parametrize("metric", list(TEMPERATURES))
def test_a_right_answer_passes_and_every_output_is_compared(monkeypatch: pytest.MonkeyPatch, metric: str):
    checks = checked(monkeypatch, in_torch(metric), metric)
    assert {one.mask for one in checks} == {"prototype", "zero", "override"}
    for one in checks:
        assert set(one.differences) == {"logits", "probabilities", MATCHED, WEIGHTS}
        assert max(one.differences.values()) < 1e-5


@pytest.mark.parametrize("metric", list(TEMPERATURES))
def test_a_graph_answers_as_the_evaluation_does(metric: str):
    spec, model = model_of(metric)
    x = np.random.default_rng(0).standard_normal((7, 12, 3)).astype(np.float32)
    small = {("acc", "gyro"): answers(networks(metric), "acc", "gyro")} if networks(metric) else None
    with torch.no_grad():
        given = {"acc": model.project("acc", model.encode("acc", torch.from_numpy(x))).numpy()}
        both = some_tables(spec)
        filled = masked(given, list(spec.encoders), both, "prototype", 8, Matcher(metric), small)
        logits = model.classify(model.fuse({m: torch.from_numpy(r) for m, r in filled.items()})).numpy()
    found = in_torch(metric)({"acc": x})
    np.testing.assert_allclose(found["logits"], logits, atol=1e-5)
    assert found["matched"].max() < 4  # no spare row


Mixed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
MIXED = matching.mixed


def flatter(scores: torch.Tensor, among: torch.Tensor, rows: torch.Tensor, k: int, temperature: float) -> Mixed:
    return MIXED(scores, among, rows, k, 2 * temperature)


def furthest(scores: torch.Tensor, among: torch.Tensor, rows: torch.Tensor, k: int, temperature: float) -> Mixed:
    return MIXED(-scores, among, rows, k, temperature)


def fewer(scores: torch.Tensor, among: torch.Tensor, rows: torch.Tensor, k: int, temperature: float) -> Mixed:
    return MIXED(scores, among, rows, k - 1, temperature)


def louder(scores: torch.Tensor, among: torch.Tensor, rows: torch.Tensor, k: int, temperature: float) -> Mixed:
    made, index, weights = MIXED(scores, among, rows, k, temperature)
    return 1.0099 * made, index, 1.0099 * weights


def negative(scores: torch.Tensor, among: torch.Tensor, rows: torch.Tensor, k: int, temperature: float) -> Mixed:
    _, index, weights = MIXED(scores, among, rows, k, temperature)
    least = (weights == weights.min(dim=1, keepdim=True).values) & (index >= 0)
    weights = torch.where(least, -0.5, weights)
    return (weights.unsqueeze(2) * rows[index.clamp(min=0)]).sum(1), index, weights


def anywhere(scores: torch.Tensor, among: torch.Tensor, rows: torch.Tensor, k: int, temperature: float) -> Mixed:
    return MIXED(scores, torch.ones_like(among), rows, k, temperature)


@pytest.mark.parametrize("metric", list(TEMPERATURES))
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (flatter, WEIGHTS),
        (furthest, WEIGHTS),  # all that may match are chosen: only their order is wrong
        (fewer, MATCHED),
        (anywhere, MATCHED),
        (louder, WEIGHTS),
        (negative, WEIGHTS),
    ],
)
def test_a_graph_that_matches_wrongly_and_goes_on_consistently_is_refused(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Mixed], said: str, metric: str
):
    monkeypatch.setattr("edgefl.export.graph.mixed", wrong)
    monkeypatch.setattr("edgefl.prototypes.torch_mask.mixed", wrong)
    with pytest.raises(ExportError, match=f"acc: '{re.escape(said)}' differs by"):
        checked(monkeypatch, in_torch(metric), metric)


@pytest.mark.parametrize(("metric", "other"), [("cosine", "l2"), ("l1", "l2"), ("l2", "l1"), ("l2", "cosine")])
def test_a_graph_that_measures_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch, metric: str, other: str):
    monkeypatch.setitem(matching.SCORES, metric, matching.SCORES[other])
    with pytest.raises(ExportError, match=r"acc: '(matched|weights)\.score' differs by"):
        checked(monkeypatch, in_torch(metric), metric)


@pytest.mark.parametrize("metric", ["classifier", "prior"])
@pytest.mark.parametrize(
    "speakers",
    [
        lambda metric: networks(metric)[:1],
        lambda metric: tuple((4 - weight, network) for weight, network in networks(metric)),
        lambda metric: networks(metric, (3, 2)),
    ],
    ids=["one alone", "other weights", "another network"],
)
def test_a_graph_to_which_other_networks_speak_is_refused(
    monkeypatch: pytest.MonkeyPatch, metric: str, speakers: Callable[[str], tuple]
):
    with pytest.raises(ExportError, match=r"acc: '(matched|weights)\.score' differs by"):
        checked(monkeypatch, in_torch(metric, speakers(metric)), metric)


def test_a_graph_that_takes_the_softmax_of_probabilities_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("edgefl.export.graph.logarithms", lambda scores: scores)
    with pytest.raises(ExportError, match=r"acc: 'weights\.score' differs by"):
        checked(monkeypatch, in_torch("classifier"), "classifier")


def test_a_graph_weighs_by_a_classifier_s_probabilities():
    """p = .99, .005, .005, 0 by one network: the best three weigh that much."""
    p = torch.tensor([[0.99, 0.005, 0.005, 0.0]])
    every = torch.ones(4, dtype=torch.bool)
    made, rows, weights = matching.mixed(matching.logarithms(p), every, torch.eye(4), 3, 1.0)
    assert rows[0, 0] == 0
    assert sorted(rows[0, 1:].tolist()) == [1, 2]
    np.testing.assert_allclose(weights.numpy(), [[0.99, 0.005, 0.005]], atol=1e-6)
    np.testing.assert_allclose(made.numpy(), p.numpy(), atol=1e-6)


def test_a_classifier_s_logits_are_no_probabilities(monkeypatch: pytest.MonkeyPatch):
    wrong, plain = in_torch("classifier"), torch.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, dim: x if x.shape[1] == 4 else plain(x, dim))
    with pytest.raises(ExportError, match=r"acc: '(matched|weights)\.score' differs by"):
        checked(monkeypatch, wrong, "classifier")


@pytest.mark.parametrize(
    ("output", "change", "said"),
    [
        ("matched", lambda value: np.where(value >= 0, value + 6, value), "'matched.score' differs by inf"),
        ("matched", lambda value: np.where(value < 0, -2, value), "'matched.score' differs by inf"),
        ("matched", lambda value: value[:, :, :1], "'matched.score' differs by inf"),
        ("weights", lambda value: value[:, :, :1], "'weights.score' differs by inf"),
        ("weights", lambda value: value * np.float32(0.9), "'weights.score' differs by 0.1"),
        ("probabilities", lambda value: value + np.float32(2e-4), "'probabilities' differs by 0.0002"),
        ("logits", lambda value: value[:-1], "'logits' differs by inf"),
        ("logits", lambda value: np.full_like(value, np.nan), "'logits' differs by nan"),
    ],
)
def test_an_output_that_is_off_is_named(
    monkeypatch: pytest.MonkeyPatch, output: str, change: Callable[..., np.ndarray], said: str
):
    right = in_torch()

    def off(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = right(feeds)
        return {**outputs, output: change(outputs[output])}

    with pytest.raises(ExportError, match=re.escape(said)):
        checked(monkeypatch, off)
