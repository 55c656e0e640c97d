"""The server's slots: for each role of a round, the methods a recipe can name. Closed dictionaries, no class paths.

Roles in the order of a round. A method's options are its keyword parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from edgefl.aggregation import mean as combine
from edgefl.errors import ConfigError, Problem
from edgefl.methods.cluster import clustering as cluster
from edgefl.methods.optimise import fedopt as optimise
from edgefl.methods.prototypes import complete as completion
from edgefl.methods.select import selection as select
from edgefl.registry import method

#: What a recipe says for the server: role -> {method: options}.
Recipe = Mapping[str, Mapping[str, Mapping[str, float | str]]]


def nothing() -> None:
    """Of a choice that is no method by itself: where the round acts on its name."""


#: ({device: signature}, rng) -> {device: cluster}.
CLUSTER: dict[str, Callable[..., Any]] = {"none": nothing, "lsh": cluster.lsh, "pacfl": cluster.pacfl}
#: (devices, rng, memory) -> the devices of the round.
SELECT: dict[str, Callable[..., list[str]]] = {
    "all": select.everyone,
    "random": select.at_random,
    "banzhaf": select.banzhaf,
    "banzhaf_sampled": select.banzhaf_sampled,
}
#: Tables of the devices to global ones.
PROTOTYPES: dict[str, Callable[..., Any]] = {
    "none": nothing,
    "class_mean": nothing,
    "adaptive": completion.complete,
}
#: Acts by its name in ``edgefl.aggregation.history_update``.
REPAIR: dict[str, Callable[..., Any]] = {"none": nothing, "poverty": nothing}
#: Acts by its name in ``edgefl.aggregation.weights``.
WEIGHT: dict[str, Callable[..., Any]] = dict.fromkeys(("samples", "fediot", "cka", "relationship", "own"), nothing)
#: (layout of the part) -> an accumulator with add(weight, tensors) and result().
COMBINE: dict[str, Callable[..., combine.WeightedMean]] = {"mean": combine.WeightedMean}
#: (state, previous tensors, combined tensors) -> (next tensors, next state).
OPTIMISE: dict[str, Callable[..., Any]] = {
    "plain": optimise.plain,
    "momentum": optimise.momentum,
    "fedadagrad": optimise.fedadagrad,
    "fedadam": optimise.fedadam,
    "fedyogi": optimise.fedyogi,
    "fedadagrad_mpo": optimise.fedadagrad,
}

ROLES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "cluster": CLUSTER,
    "select": SELECT,
    "prototypes": PROTOTYPES,
    "repair": REPAIR,
    "weight": WEIGHT,
    "combine": COMBINE,
    "optimise": OPTIMISE,
}
#: What a recipe gets that does not name a role: federated averaging.
DEFAULTS = {
    "cluster": "none",
    "select": "all",
    "prototypes": "none",
    "repair": "none",
    "weight": "samples",
    "combine": "mean",
    "optimise": "plain",
}


class Choice(NamedTuple):
    """One filled slot: the method's name, its options, and the function with those options bound that it takes."""

    name: str
    options: dict[str, Any]
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
    known = method(role, name).fields
    unknown = sorted(set(options or {}) - set(known))
    if unknown:
        names = ", ".join(known) or "no options"
        found = [Problem(f"{role}.{name}.{option}", f"unknown option; choose from: {names}") for option in unknown]
        raise ConfigError("recipe", found)
    options = {option: spec.default for option, spec in known.items()} | dict(options or {})
    takes = inspect.signature(methods[name]).parameters
    bound = {option: value for option, value in options.items() if option in takes}
    return Choice(name, options, partial(methods[name], **bound))
