"""The server's slots: for each role of a round, the methods a recipe can name. Closed dictionaries, no class paths.

Roles in the order of a round. A method's options are its keyword parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from edgefl.aggregation import combine, optimise, select, weight
from edgefl.errors import ConfigError, Problem
from edgefl.records import Manifest

#: What a recipe says for the server: role -> {method: options}.
Recipe = Mapping[str, Mapping[str, Mapping[str, float]]]


def one_cluster(devices: Sequence[str]) -> list[list[str]]:
    """No clustering: all devices are one audience."""
    return [sorted(devices)]


def no_repair(manifests: Mapping[str, Manifest]) -> dict[str, Manifest]:
    """Updates (device -> manifest) as they came."""
    return dict(manifests)


#: (devices) -> audiences, each a list of devices.
CLUSTER: dict[str, Callable[..., list[list[str]]]] = {"none": one_cluster}
#: (devices, rng, **options) -> the devices of the round.
SELECT: dict[str, Callable[..., list[str]]] = {"all": select.everyone, "random": select.at_random}
#: ({device: manifest}) -> the same after mending.
REPAIR: dict[str, Callable[..., dict[str, Manifest]]] = {"none": no_repair}
#: ({device: samples of the part}) -> {device: weight}, sum 1; empty when nobody trained it.
WEIGHT: dict[str, Callable[..., dict[str, float]]] = {"samples": weight.by_samples}
#: (layout of the part) -> an accumulator with add(weight, tensors) and result().
COMBINE: dict[str, Callable[..., combine.WeightedMean]] = {"mean": combine.WeightedMean}
#: (loader of the previous tensors, combined tensors) -> next tensors.
OPTIMISE: dict[str, Callable[..., dict[str, combine.Tensor]]] = {"plain": optimise.plain}

ROLES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "cluster": CLUSTER,
    "select": SELECT,
    "repair": REPAIR,
    "weight": WEIGHT,
    "combine": COMBINE,
    "optimise": OPTIMISE,
}
#: What a recipe gets that does not name a role: federated averaging.
DEFAULTS = {
    "cluster": "none",
    "select": "all",
    "repair": "none",
    "weight": "samples",
    "combine": "mean",
    "optimise": "plain",
}


class Choice(NamedTuple):
    """One filled slot: the method's name, its options, and the function with the options bound."""

    name: str
    options: dict[str, float]
    method: Callable[..., Any]


def choose(role: str, recipe: Recipe) -> Choice:
    """What ``recipe`` puts in the slot ``role``. Raises ConfigError that lists what there is for a misspelt name."""
    chosen = recipe.get(role) or {DEFAULTS[role]: {}}
    if len(chosen) != 1:
        raise ConfigError("recipe", [Problem(role, f"needs exactly one method, got {', '.join(sorted(chosen))}")])
    name, options = next(iter(chosen.items()))
    methods = ROLES[role]
    if name not in methods:
        raise ConfigError("recipe", [Problem(role, f"unknown method '{name}'; choose one of: {', '.join(methods)}")])
    parameters = inspect.signature(methods[name]).parameters.values()
    allowed = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    unknown = sorted(set(options or {}) - set(allowed))
    if unknown:
        raise ConfigError(
            "recipe",
            [
                Problem(f"{role}.{name}.{option}", f"unknown option; choose from: {', '.join(allowed) or 'no options'}")
                for option in unknown
            ],
        )
    return Choice(name, dict(options or {}), partial(methods[name], **(options or {})))
