"""The match inside a bundle's graph, and the check of what the file chose."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from export_fixture import some_state, some_tables, two_sensors
from mask_oracle import METRICS, match
from mask_oracle import filled as filled_in

from edgefl.errors import ExportError
from edgefl.export import parity
from edgefl.export.bundle_format import (
    MATCHED,
    WEIGHTS,
    Check,
    Manifest,
    input_ports,
    table_name,
    table_ports,
    valid_name,
)
from edgefl.export.graph import BundleGraph
from edgefl.export.parity import shortfall, weight_difference
from edgefl.methods.pmcmfl.stand_in import prototype
from edgefl.models.spec import ModelSpec
from edgefl.models.staged import StagedModel, build
from edgefl.prototypes.mask import TEMPERATURE, TEMPERATURES, TOP_K, Matcher, Mixture, Scores, mix, scores_of
from edgefl.prototypes.mask import in_torch as in_torch_tables
from edgefl.prototypes.table import ClassMeans
from edgefl.training.fill import AtHand, Made, Make
from edgefl.training.matching import WeightedNetworks, answers

# The check of the file's match


def nearly_tied(off: float) -> Scores:
    """Cosines [1, 4] of which the third and the fourth are ``off`` apart, and with which classes they may match."""
    return Scores(torch.tensor([[0.9, 0.895, 0.88 + off, 0.88]]), torch.ones(4, dtype=torch.bool))


def softmaxed(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return (scores.double().gather(1, rows) / TEMPERATURE).softmax(dim=1)


def test_either_of_two_rows_that_rounding_can_swap_is_right_and_nothing_else():
    found = nearly_tied(2e-6)
    for rows, worst in (([0, 1, 2], 0.0), ([0, 1, 3], 2e-6), ([1, 3, 0], 2e-6), ([0, 2, 3], 0.015)):
        assert shortfall(found, torch.tensor([rows])) == pytest.approx(worst, abs=1e-7)
    for rows in ([0, 1, -1], [0, 0, 1]):
        assert shortfall(found, torch.tensor([rows])) == math.inf
    assert shortfall(found, torch.tensor([[0, 1]])) == 0
    found.among[2] = False
    assert shortfall(found, torch.tensor([[0, 1, 2]])) == math.inf
    assert shortfall(found, torch.tensor([[0, 1, 3]])) == 0
    found.among[:] = torch.tensor([True, True, False, False])
    assert shortfall(found, torch.tensor([[0, 1, -1]])) == 0
    assert math.isnan(shortfall(Scores(found.values * math.nan, torch.ones(4, dtype=torch.bool)), torch.tensor([[0]])))


def test_weights_are_compared_as_the_scores_they_stand_for():
    found = nearly_tied(0.0)
    rows = torch.tensor([[0, 1, 2]])
    right = softmaxed(found.values, rows)

    def off(chosen: torch.Tensor, weights: torch.Tensor) -> float:
        return weight_difference(found, chosen, weights, TEMPERATURE)

    assert off(rows, right) < 1e-7
    rounded = softmaxed(found.values + torch.tensor([[0, 4e-6, 0, 0]]), rows)
    assert 2e-6 < off(rows, rounded) < 4e-6 < float((rounded - right).abs().max())
    assert off(rows, right.flip(1)) > 0.01
    assert math.isnan(off(rows, right * math.nan))
    none = torch.full((1, 3), -1)
    assert off(none, torch.zeros(1, 3)) == 0
    assert off(none, torch.full((1, 3), 0.25)) == 0.75  # their sum, which should be 0
    assert off(torch.tensor([[0, 1, -1]]), torch.tensor([[0.6, 0.3, 0.1]])) >= 0.1
    assert off(rows, 1.01 * right) == pytest.approx(0.01)  # no rounding gives that
    assert off(rows, torch.tensor([[0.6, 0.5, -0.1]])) >= 0.1


def test_distances_are_compared_as_shares_of_the_largest():
    # -101 left out for -102: 1 / 102 nearer. Weights softmax(-100, -101) = .7311, .2689; ln(.5 / .2689) = .6201 / 102
    found = Scores(torch.tensor([[-100.0, -101.0, -102.0]]), torch.ones(3, dtype=torch.bool))
    assert shortfall(found, torch.tensor([[0, 2]])) == pytest.approx(1 / 102)
    even = torch.tensor([[0.5, 0.5]])
    assert weight_difference(found, torch.tensor([[0, 1]]), even, 1.0) == pytest.approx(0.620115 / 102, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("classes", [1, 2, 6])
@pytest.mark.parametrize("metric", list(METRICS))
def test_what_the_equations_choose_is_found_right(seed: int, classes: int, metric: str):
    rng = np.random.default_rng(seed)
    tables = {
        m: ClassMeans(rng.standard_normal((6, 8)).astype(np.float32), (np.arange(6) < classes).astype(np.float32))
        for m in "ab"
    }
    r = rng.standard_normal((5, 8)).astype(np.float32)
    matcher = Matcher(metric)
    chosen = [match({"a": row}, "b", tables, matcher) for row in r]
    spare = [-1] * (TOP_K - len(chosen[0]))
    rows = torch.tensor([[*one, *spare] for one in chosen])
    weights = torch.tensor([[*one.values(), *(0.0 for _ in spare)] for one in chosen])
    found = scores_of("b", {"a": torch.from_numpy(r)}, {}, in_torch_tables(tables), matcher, {})
    assert shortfall(found, rows) < 1e-6
    assert weight_difference(found, rows, weights, matcher.temperature) < 1e-6


# Right and wrong graphs

CAPACITY = 6


@functools.cache
def model_of(metric: str) -> tuple[ModelSpec, StagedModel]:
    spec = two_sensors(matching=metric if metric in ("classifier", "prior") else "none")
    return spec, some_state(spec)[0]


@functools.cache
def networks_of(metric: str, seeds: tuple[int, ...] = (1, 2)) -> WeightedNetworks:
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


def graph_of(metric: str, networks: WeightedNetworks | None = None) -> BundleGraph:
    """What a bundle of acc computes, before its export."""
    model = model_of(metric)[1]
    each = {"acc": networks_of(metric) if networks is None else networks}
    return BundleGraph(model, 2, ("acc",), prototype, Matcher(metric), each)


Answer = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def answering(graph: BundleGraph) -> Answer:
    """What a file of the ``graph`` answers."""

    def answer(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tables = []
        for m, t in tables_of(graph.matcher.metric).items():
            tables += [feeds.get(table_name(m), t.means), feeds.get(valid_name(m), t.present)]
        with torch.no_grad():
            found = graph((torch.from_numpy(feeds["acc"]),), (), tuple(torch.from_numpy(t) for t in tables))
        return dict(zip(("logits", "probabilities", "matched", "weights"), (f.numpy() for f in found), strict=True))

    return answer


def checked(monkeypatch: pytest.MonkeyPatch, answer: Answer, metric: str = "cosine") -> tuple[Check, ...]:
    monkeypatch.setattr(parity, "run", lambda _, feeds: answer(feeds))
    inputs, axes = input_ports(model_of(metric)[0], ("acc",))
    spec, tables = model_of(metric)[0], tables_of(metric)
    ports = table_ports(spec, tuple(tables), len(next(iter(tables.values())).counts))
    manifest = Manifest(inputs=inputs, axes=axes, masks=("prototype", "zero"), tables=ports)
    return parity.check(None, graph_of(metric), manifest, tables_of(metric), 1e-4)


@pytest.mark.parametrize("metric", list(TEMPERATURES))
def test_a_right_answer_passes_and_every_output_is_compared(monkeypatch: pytest.MonkeyPatch, metric: str):
    checks = checked(monkeypatch, answering(graph_of(metric)), metric)
    assert {one.mask for one in checks} == {"prototype", "zero", "override"}
    for one in checks:
        assert set(one.differences) == {"logits", "probabilities", MATCHED, WEIGHTS}
        assert max(one.differences.values()) < 1e-5


@pytest.mark.parametrize("metric", list(TEMPERATURES))
def test_a_graph_answers_as_the_equations_do(metric: str):
    spec, model = model_of(metric)
    x = np.random.default_rng(0).standard_normal((7, 12, 3)).astype(np.float32)
    with torch.no_grad():
        given = {"acc": model.project("acc", model.encode("acc", torch.from_numpy(x))).numpy()}
        networks = {"acc": answers(networks_of(metric), "acc")}
        filled = filled_in(given, list(spec.encoders), some_tables(spec), Matcher(metric), networks)
        logits = model.classify(model.fuse({m: torch.from_numpy(r) for m, r in filled.items()})).numpy()
    found = answering(graph_of(metric))({"acc": x})
    np.testing.assert_allclose(found["logits"], logits, atol=1e-4)
    assert found["matched"].max() < 4  # no spare row


Change = Callable[[Mixture, AtHand], tuple[torch.Tensor, torch.Tensor]]


def flatter(mixture: Mixture, given: AtHand) -> tuple[torch.Tensor, torch.Tensor]:
    """As by twice the temperature."""
    weights = mixture.weights.sqrt()
    return mixture.rows, weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-9)


def backwards(mixture: Mixture, given: AtHand) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights in the wrong order."""
    count = (mixture.rows >= 0).sum(dim=1, keepdim=True)
    order = (count - 1 - torch.arange(mixture.rows.shape[1])).clamp(min=0).expand_as(mixture.rows)
    return mixture.rows, torch.where(mixture.rows >= 0, mixture.weights.gather(1, order), 0.0)


def fewer(mixture: Mixture, given: AtHand) -> tuple[torch.Tensor, torch.Tensor]:
    return mixture.rows[:, :-1], mixture.weights[:, :-1] / mixture.weights[:, :-1].sum(1, keepdim=True).clamp(min=1e-9)


def louder(mixture: Mixture, given: AtHand) -> tuple[torch.Tensor, torch.Tensor]:
    return mixture.rows, 1.0099 * mixture.weights


def negative(mixture: Mixture, given: AtHand) -> tuple[torch.Tensor, torch.Tensor]:
    least = (mixture.weights == mixture.weights.min(dim=1, keepdim=True).values) & (mixture.rows >= 0)
    return mixture.rows, torch.where(least, -0.5, mixture.weights)


def anywhere(mixture: Mixture, given: AtHand) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that hold no prototype too."""
    return torch.where(mixture.rows >= 0, mixture.rows, CAPACITY - 1), mixture.weights


def made_by(change: Change) -> Make:
    """Stand-ins of a wrong choice, with which the graph goes on consistently."""

    def make(modality: str, given: AtHand) -> Made:
        found = prototype(modality, given).mixture
        rows, weights = change(found, given)
        values = mix(rows, weights, given.tables[modality])
        return Made(values, weights.sum(dim=1) > 0, Mixture(values, rows, weights))

    return make


@pytest.mark.parametrize("metric", list(TEMPERATURES))
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (flatter, WEIGHTS),
        (backwards, WEIGHTS),
        (fewer, MATCHED),
        (anywhere, MATCHED),
        (louder, WEIGHTS),
        (negative, WEIGHTS),
    ],
)
def test_a_graph_that_matches_wrongly_and_goes_on_consistently_is_refused(
    monkeypatch: pytest.MonkeyPatch, wrong: Change, said: str, metric: str
):
    graph = graph_of(metric)
    graph.make = made_by(wrong)
    with pytest.raises(ExportError, match=f"acc: '{re.escape(said)}' differs by"):
        checked(monkeypatch, answering(graph), metric)


@pytest.mark.parametrize(("metric", "other"), [("cosine", "l2"), ("l1", "l2"), ("l2", "l1"), ("l2", "cosine")])
def test_a_graph_that_measures_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch, metric: str, other: str):
    graph = graph_of(metric)
    graph.matcher = Matcher(other, temperature=Matcher(metric).temperature)
    with pytest.raises(ExportError, match=r"acc: '(matched|weights)\.score' differs by"):
        checked(monkeypatch, answering(graph), metric)


@pytest.mark.parametrize("metric", ["classifier", "prior"])
@pytest.mark.parametrize(
    "networks",
    [
        lambda metric: networks_of(metric)[:1],
        lambda metric: tuple((4 - weight, network) for weight, network in networks_of(metric)),
        lambda metric: networks_of(metric, (3, 2)),
    ],
    ids=["one alone", "other weights", "another network"],
)
def test_a_graph_of_other_networks_is_refused(
    monkeypatch: pytest.MonkeyPatch, metric: str, networks: Callable[[str], WeightedNetworks]
):
    with pytest.raises(ExportError, match=r"acc: '(matched|weights)\.score' differs by"):
        checked(monkeypatch, answering(graph_of(metric, networks(metric))), metric)


@pytest.mark.parametrize("change", [lambda p: p.clamp(min=1e-30), lambda p: 2 * p.log()], ids=["plain", "squared"])
def test_a_file_that_weighs_otherwise_than_by_probabilities_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]
):
    def wrong(mixture: Mixture, given: AtHand) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.where(mixture.rows >= 0, change(mixture.weights), -torch.inf).softmax(dim=1)
        return mixture.rows, weights.nan_to_num(0.0)

    graph = graph_of("classifier")
    graph.make = made_by(wrong)
    with pytest.raises(ExportError, match=r"acc: 'weights\.score' differs by"):
        checked(monkeypatch, answering(graph), "classifier")


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
    right = answering(graph_of("cosine"))

    def off(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = right(feeds)
        return {**outputs, output: change(outputs[output])}

    with pytest.raises(ExportError, match=re.escape(said)):
        checked(monkeypatch, off)
