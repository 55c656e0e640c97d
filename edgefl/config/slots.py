"""Reading what a recipe puts into a slot, and the rules between slots (``edgefl.registry`` has the methods)."""

from __future__ import annotations

import contextlib
import difflib
import math
import sys
from typing import Any

from edgefl.errors import Problem
from edgefl.registry import ROLES, Option, Recipe, chosen, methods


def parse_slot(role: str, value: Any) -> dict[str, dict[str, float | str]]:
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


def _options(role: str, name: str, given: Any) -> dict[str, float | str]:
    known = methods(role)
    if name not in known:
        raise ValueError(f"unknown choice {name!r}; {valid_names(name, list(known))}")
    options = known[name].fields
    if not isinstance(given, dict):
        raise ValueError(f"the options of {name} are {{option: value}}, not {given!r}")
    for option in given:
        if option not in options:
            raise ValueError(f"{name} has no option {option!r}; {valid_names(str(option), list(options))}")
    return {key: _value(f"{name}.{key}", option, given.get(key, option.default)) for key, option in options.items()}


def _value(name: str, spec: Option, value: Any) -> float | str:
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


def valid_names(wrong: str, names: list[str]) -> str:
    """A hint for an error: the closest name, then all of them."""
    if not names:
        return "it takes no options"
    close = difflib.get_close_matches(wrong, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid: {', '.join(names)}"


def conflicts(recipe: Recipe) -> list[Problem]:
    """Every rule that ``recipe`` (role -> {choice: options}) breaks, with the way out. What no rule names mixes."""
    found = [
        problem for role in ROLES for one in chosen(role, recipe[role]) for problem in one.method.conflicts(recipe)
    ]
    if not any(term.method.task for term in chosen("objective", recipe["objective"])):
        tasks = ", ".join(name for name, term in methods("objective").items() if term.task)
        found.insert(0, Problem("objective", f"no term gives the model a task; add one of {tasks}"))
    return found


def headless(recipe: Recipe) -> list[Problem]:
    """Choices of a recipe without a meaning for a model without projection heads (model.head.kind: none)."""
    return [
        Problem("model.head.kind", f"{one.method.headless}; set model.head.kind: mlp, or {_without(role)}")
        for role in ROLES
        for one in chosen(role, recipe[role])
        if one.method.headless
    ]


def _without(role: str) -> str:
    return "leave the term out" if ROLES[role].plural else f"another slots.{role}"


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
