"""What methods declare: defaults, the rules that several terms share, and what they refuse in a recipe."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable

import pytest
from training_fixture import job, model_spec

from edgefl.errors import Problem
from edgefl.methods import cluster, fusion
from edgefl.methods.missing import completion
from edgefl.methods.objective import apromfl, pmcmfl, terms
from edgefl.methods.optimise import portfolio
from edgefl.methods.repair.poverty_substitution import observe
from edgefl.methods.weight import samples
from edgefl.models.staged import build
from edgefl.registry import ROLES, Option, Recipe, Rule, default, method, methods

#: The options that a role's methods have, by name: the default, of whichever method has one of that name.
DEFAULTS = {
    (role, name): one.default for role in ROLES for m in methods(role).values() for name, one in m.options.items()
}


@pytest.mark.parametrize("role", ROLES)
def test_a_functions_own_defaults_are_those_of_the_options(role: str) -> None:
    """Else a caller without a recipe would get another method than a recipe that says nothing."""
    for one in methods(role).values():
        functions = [getattr(one, field.name) for field in dataclasses.fields(one)]
        for function in (each for each in functions if inspect.isfunction(each)):
            for name, parameter in inspect.signature(function).parameters.items():
                if parameter.default not in (inspect.Parameter.empty, None):
                    own = one.options.get(name)
                    told = own.default if own else DEFAULTS[role, name]
                    assert (one.name, name, parameter.default) == (one.name, name, told)


# ---- what several terms have in common


@pytest.mark.parametrize(
    ("shared", "needed", "start"),
    [
        (lambda: (terms.needs_joint("gmc"),), ("objective", "labels"), "gmc needs the joint representation"),
        (
            lambda: pmcmfl._needs_class_means("modality_contrast"),
            ("prototypes", "classes"),
            "modality_contrast needs class",
        ),
        (
            lambda: (apromfl._needs_adaptive("prototype_transfer"),),
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
LABELS: dict[str, dict[str, object]] = {"cross_entropy": {}, "cluster_contrast": {}}
CONFLICTS: list[tuple[Callable[[Recipe], list[Problem]], Recipe, list[tuple[str, str]]]] = [
    (cluster.own_models, recipe(cluster={"lsh": {"models": "own"}}), []),
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
    (fusion._one_projection, recipe(), []),
    (fusion._one_projection, recipe(objective=LABELS), [("fusion", MAPPING.format("cluster_contrast"))]),
    (fusion._one_projection, recipe(objective={"clip": {}, "cluster_contrast": {}}), []),
    (fusion._one_projection, recipe(weight={"relationship": {}}), [("fusion", MAPPING.format("relationship"))]),
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


@pytest.mark.parametrize(("options", "exact"), [({"form": "exact"}, True), ({"form": "optimiser"}, False), ({}, False)])
def test_an_observer_holds_copies_in_the_exact_form(options: dict[str, str], exact: bool) -> None:
    made = job(model_spec(stages=1))
    observer = observe(made, build(made.model, made.stage.present), **options)
    observer.batch(True, {})
    with observer.step(None, True):  # type: ignore[arg-type]
        pass
    assert (observer._exact, observer.complete) == (exact, True)
