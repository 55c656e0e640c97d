"""Recipe files, and the slots of a run file: which methods fill each role, their options, and rules between them."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import pydantic
from pydantic import Field

from edgefl.config.yaml_files import Name, Values, valid_names
from edgefl.errors import Problem
from edgefl.registry import Option, Recipe, chosen, default, methods, unloaded
from edgefl.roles import ROLES

Slot = dict[str, dict[str, float | str]]


def parse_slot(role: str, value: object) -> Slot:
    """``value`` as {choice: options with defaults}. Accepts ``zero``, ``{zero: {}}`` and, for objective, a list.

    Raises ValueError naming the valid choices.
    """
    plural = ROLES[role].plural
    if isinstance(value, str):
        value = {value: {}}
    if isinstance(value, list) and plural:
        value = {name: {} for name in value} if all(isinstance(name, str) for name in value) else value
    if not isinstance(value, dict) or not value or not all(isinstance(name, str) for name in value):
        names = ", ".join(methods(role))
        raise ValueError(f"give one of {names}, alone or with options as {{choice: {{option: value}}}}")
    if len(value) > 1 and not plural:
        raise ValueError(f"takes one choice, not {len(value)}: {', '.join(value)}")
    return {name: _options(role, name, {} if options is None else options) for name, options in value.items()}


def _options(role: str, name: str, given: object) -> dict[str, float | str]:
    known = methods(role)
    if name not in known:
        raise ValueError(f"unknown choice {name!r}{unloaded()}; {valid_names(name, list(known))}")
    options = known[name].options
    if not isinstance(given, dict):
        raise ValueError(f"the options of {name} are {{option: value}}, not {given!r}")
    for option in given:
        if option not in options:
            raise ValueError(f"{name} has no option {option!r}; {valid_names(str(option), list(options))}")
    return {key: _value(f"{name}.{key}", option, given.get(key, option.default)) for key, option in options.items()}


def _value(name: str, spec: Option, value: object) -> float | str:
    if isinstance(spec.default, str) and not spec.choices:
        if not isinstance(value, str):
            raise ValueError(f"{name} is {value!r}, not text")
        return value
    if isinstance(spec.default, str):
        if value not in spec.choices:
            raise ValueError(f"{name} is {value!r}; {valid_names(str(value), list(spec.choices))}")
        return str(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 reads 1e-3 as text
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} is {value!r}, not a number")
    if not spec.least <= value <= spec.most:
        most = f" to {spec.most:g}" if math.isfinite(spec.most) else " upwards"
        raise ValueError(f"{name} is {value!r}; give a number from {spec.least:g}{most}")
    return float(value)


def conflicts(recipe: Recipe) -> list[Problem]:
    """Every rule that ``recipe`` (role -> {choice: options}) breaks, with the way out. What no rule names mixes."""
    found = [
        problem for role in ROLES for one in chosen(role, recipe[role]) for problem in one.method.problems(role, recipe)
    ]
    if not any(term.method.task for term in chosen("objective", recipe["objective"])):
        tasks = ", ".join(name for name, term in methods("objective").items() if term.task)
        found.insert(0, Problem("objective", f"no term gives the model a task; add one of {tasks}"))
    return found


def headless(recipe: Recipe) -> list[Problem]:
    """Choices of a recipe without a meaning for a model without projection heads (model.head.kind: none)."""
    found = []
    for role in ROLES:
        without = "leave the term out" if ROLES[role].plural else f"another slots.{role}"
        for one in chosen(role, recipe[role]):
            if one.method.headless:
                text = f"{one.method.headless}; set model.head.kind: mlp, or {without}"
                found.append(Problem("model.head.kind", text))
    return found


def late_conflicts(recipe: Recipe, *, asynchronous: bool) -> list[Problem]:
    """Choices without a meaning for updates made from an earlier model (rounds: async, round.late: keep)."""
    path, way_on = ("rounds", "lockstep") if asynchronous else ("round.late", "drop")
    found = []
    for role in ROLES:
        allowed = [name for name, one in methods(role).items() if not (one.per_round or one.partial)]
        for choice in chosen(role, recipe[role]):
            one = choice.method
            if one.per_round or (asynchronous and one.partial):
                why = "chooses the devices of a round" if one.partial else "needs the devices of one round together"
                text = f"{role}: {one.name} {why}; set slots.{role} to {_or(allowed)}, or {path}: {way_on}"
                found.append(Problem(path, text))
    return found


def _or(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


class RecipeConfig(Values):
    """A method: a name, where it comes from, and what fills each slot (``RecipeFile`` has a field for each role)."""

    name: Name = Field(description="the recipe's name")
    source: str = Field("", description="paper or page that describes the method")
    summary: str = Field("", description="one sentence: what it does")

    @property
    def slots(self) -> dict[str, Slot]:
        """Role -> what fills its slot."""
        return {role: getattr(self, role) for role in ROLES}

    def conflicts(self) -> list[Problem]:
        """Slots that need, or exclude, one another."""
        return conflicts(self.slots)


def _parse(value: object, info: pydantic.ValidationInfo) -> Slot:
    return parse_slot(str(info.field_name), value)


def _parse_given(value: object, info: pydantic.ValidationInfo) -> Slot | None:
    return None if value is None else _parse(value, info)  # a run file as resolved names every slot


def _fields(kind: object, filled: Callable[[str], Slot | None]) -> dict[str, Any]:
    return {role: (kind, Field(filled(role), description=one.decides)) for role, one in ROLES.items()}


RecipeFile = pydantic.create_model(
    "RecipeConfig",
    __base__=RecipeConfig,
    __doc__="A method: a name, where it comes from, and what fills each slot.",
    __validators__={"parse": pydantic.field_validator(*ROLES, mode="before")(_parse)},
    **_fields(Slot, lambda role: parse_slot(role, default(role))),
)
SlotsConfig = pydantic.create_model(
    "SlotsConfig",
    __base__=Values,
    __doc__="Slots that differ from the recipe's; each as in a recipe file.",
    __validators__={"parse": pydantic.field_validator(*ROLES, mode="before")(_parse_given)},
    **_fields(Slot | None, lambda role: None),
)
