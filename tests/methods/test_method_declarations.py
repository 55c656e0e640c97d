"""What methods declare: defaults, the rules that several terms share, and what they refuse in a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from training_fixture import job, model_spec

from edgefl.aggregation.history import Memory, Track
from edgefl.errors import Problem
from edgefl.methods import cluster, fediot, gmc, terms
from edgefl.methods.apromfl import margin, transfer
from edgefl.methods.fedavg import samples
from edgefl.methods.fedmvp import completion, joint
from edgefl.methods.mmic import banzhaf, portfolio
from edgefl.methods.mmic.poverty import observe
from edgefl.methods.pmcmfl import contrast
from edgefl.models.staged import build
from edgefl.prototypes.mask import Table
from edgefl.registry import Option, Recipe, Rule, default, method
from edgefl.roles import ROLES

AXES = {"a": torch.eye(3, 4), "b": torch.tensor([[1.0, 1, 0, 0], [1.0, 2, 1, 0], [0.0, 1, 1, 2]])}
ALL = dict.fromkeys("ab", torch.ones(3, dtype=torch.bool))
TABLES = {m: Table(rows, torch.ones(3, dtype=torch.bool)) for m, rows in AXES.items()}
LABELS = torch.tensor([0, 1, 1])
MOVED = {"momentum.w": np.full(2, 0.5, np.float32), "second.w": np.full(2, 0.3, np.float32)}
LOSSES = Memory(rounds=2, devices={"a": Track(returns={1: -0.25, 2: -0.5})})
CORE = Memory(rounds=100, devices={name: Track(core=n, selected=8) for n, name in enumerate("abcdefgh")})


def stepped(name: str, **options: float) -> object:
    one = method("optimise", name)
    return one.step(MOVED, {"w": np.zeros(2, np.float32)}, {"w": np.array([1, 2], np.float32)}, **options)[0]["w"]


def drawn(**options: float) -> object:
    return [banzhaf.banzhaf(list("abcdefgh"), np.random.default_rng(seed), CORE, **options) for seed in range(40)]


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (partial(stepped, "momentum"), {"lr": 1.0, "beta": 0.9}),
        (partial(stepped, "fedadagrad"), {"lr": 0.05, "beta": 0.9, "epsilon": 1e-3}),
        (partial(stepped, "fedadam"), {"beta2": 0.99}),
        (partial(stepped, "fedyogi"), {"beta2": 0.99}),
        (partial(portfolio.portfolio, LOSSES, {"a": 0}, {"a": 1.0}), {"beta": 0.9, "risk": 0.5, "temperature": 10.0}),
        (drawn, {"share": 0.5, "warmup_rounds": 100, "temperature": 2.0}),
        (partial(fediot.fediot, {"a": 1, "b": 1}, {"a": 2, "b": 1}), {"factor": 100.0}),
        (partial(gmc.gmc, AXES["b"], AXES, ALL), {"temperature": 0.1}),
        (partial(margin.margin, AXES, ALL), {"positive": 0.8, "negative": 0.2}),
        (
            partial(contrast.prototype_contrast, AXES["b"], TABLES["a"], LABELS),
            {"temperature": 0.07, "class_level": False},
        ),
        (partial(transfer.prototype_transfer, AXES, ALL, TABLES), {"temperature": 0.07}),
        (partial(transfer.model_transfer, AXES, {"a": AXES["b"], "b": AXES["a"]}, ALL, 1.0), {"temperature": 1.0}),
    ],
)
def test_what_a_caller_leaves_open_is_as_the_paper_has_it(
    call: Callable[..., object], options: dict[str, float]
) -> None:
    assert str(call()) == str(call(**options))
    for name, value in options.items():
        assert str(call(**{name: value + (-0.05 if name.startswith("beta") else 1)})) != str(call()), (
            f"{name} does not matter here"
        )


# ---- what several terms have in common


@pytest.mark.parametrize(
    ("shared", "needed", "start"),
    [
        (lambda: (terms.needs_joint("gmc"),), ("objective", "labels"), "gmc needs the joint representation"),
        (
            lambda: contrast._needs_class_means("modality_contrast"),
            ("prototypes", "candidates"),
            "modality_contrast needs class",
        ),
        (
            lambda: (transfer._needs_adaptive("prototype_transfer"),),
            ("prototypes", "merge"),
            "prototype_transfer needs adaptive",
        ),
    ],
)
def test_a_rule_that_terms_share_names_the_term_that_has_it(
    shared: Callable[[], tuple[Rule]], needed: tuple[str, str], start: str
) -> None:
    (made,) = shared()
    assert (made.role, made.trait, made.wanted) == (*needed, True)
    assert made.text.startswith(start)
    assert made in method("objective", start.partition(" ")[0]).rules


def test_a_temperature_is_above_zero() -> None:
    assert terms.softmax_temperature(0.07) == Option(0.07, "softmax temperature", (), 0.001, math.inf)


# ---- what a method refuses in a recipe


def recipe(**slots: dict[str, dict[str, object]]) -> Recipe:
    return {**{role: {default(role): {}} for role in ROLES}, **slots}  # type: ignore[dict-item]


def mpo(beta: float, temperature: float) -> Recipe:
    return recipe(optimise={"fedadagrad_mpo": {"beta": beta, "temperature": temperature}})


MAPPING = "joint has one projection for all modalities, and {} keeps a mapping of each; set fusion: concat or mean"
TERMS: dict[str, dict[str, object]] = {"cross_entropy": {}, "cluster_contrast": {}}
CONFLICTS: list[tuple[Callable[[Recipe], list[Problem]], Recipe, list[tuple[str, str]]]] = [
    (cluster.two_models, recipe(cluster={"lsh": {"models": "own"}}), []),
    (completion._checkpoint, recipe(missing={"completion": {"generator": "nearest", "checkpoint": ""}}), []),
    (completion._checkpoint, recipe(missing={"completion": {"generator": "nearest", "checkpoint": "x"}}), []),
    (completion._checkpoint, recipe(missing={"completion": {"generator": "diffusers", "checkpoint": "x"}}), []),
    (
        completion._checkpoint,
        recipe(missing={"completion": {"generator": "diffusers", "checkpoint": ""}}),
        [("missing", "completion by diffusers needs a checkpoint; name one")],
    ),
    (portfolio._bounded, mpo(0.9, 10.0), []),
    (portfolio._bounded, mpo(0.5, 2.0), []),
    (portfolio._bounded, mpo(0.0, 1.0), []),
    (
        portfolio._bounded,
        mpo(0.75, 3.0),
        [("optimise", "beta + 1/temperature of fedadagrad_mpo exceeds 1; raise temperature")],
    ),
    (joint._one_projection, recipe(), []),
    (joint._one_projection, recipe(objective=TERMS), [("fusion", MAPPING.format("cluster_contrast"))]),
    (joint._one_projection, recipe(objective={"clip": {}, "cluster_contrast": {}}), []),
    (joint._one_projection, recipe(weight={"relationship": {}}), [("fusion", MAPPING.format("relationship"))]),
    (samples._alone, recipe(), []),
    (
        samples._alone,
        recipe(**{role: {name: {}} for role, name in (("cluster", "lsh"), ("prototypes", "adaptive"))}),
        [
            ("cluster", "weight: own exchanges nothing; set cluster: none"),
            ("prototypes", "weight: own exchanges nothing; set prototypes: none"),
        ],
    ),
    (
        samples._alone,
        recipe(repair={"poverty": {}}, optimise={"momentum": {}}),
        [
            ("repair", "weight: own exchanges nothing; set repair: none"),
            ("optimise", "weight: own exchanges nothing; set optimise: plain"),
        ],
    ),
]


@pytest.mark.parametrize(("conflicts", "made", "told"), CONFLICTS)
def test_what_a_recipe_cannot_have_beside_a_method(
    conflicts: Callable[[Recipe], list[Problem]], made: Recipe, told: list[tuple[str, str]]
) -> None:
    assert [(one.path, one.message) for one in conflicts(made)] == told


# ---- what a method is handed


@pytest.mark.parametrize(("form", "exact"), [("exact", True), ("optimiser", False)])
def test_an_observer_holds_copies_in_the_exact_form(form: str, exact: bool) -> None:
    made = job(model_spec(stages=1))
    observer = observe(made, build(made.model, made.stage.present), form=form)
    observer.batch(True, {})
    with observer.step(None, True):  # type: ignore[arg-type]
        pass
    assert (observer._exact, observer.complete) == (exact, True)
