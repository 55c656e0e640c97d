"""Reading what a recipe puts in a slot: ``edgefl.config.choices`` is what there is."""

from __future__ import annotations

import contextlib
import difflib
import math
import sys
from typing import Any

from edgefl.config.choices import SLOTS, Option

__all__ = ["PLURAL", "SLOTS", "Option", "parse_slot", "valid_names"]

#: Roles that may hold several choices at once.
PLURAL = ("objective",)


def parse_slot(role: str, value: Any) -> dict[str, dict[str, float | str]]:
    """``value`` as {choice: options with defaults}. Accepts ``zero``, ``{zero: {}}`` and, for objective, a list.

    Raises ValueError naming the valid choices.
    """
    choices = SLOTS[role][1]
    if isinstance(value, str):
        value = {value: {}}
    if isinstance(value, list) and role in PLURAL:
        value = {name: {} for name in value} if all(isinstance(name, str) for name in value) else value
    if not isinstance(value, dict) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError(f"give one of {', '.join(choices)}, alone or with options as {{choice: {{option: value}}}}")
    if len(value) > 1 and role not in PLURAL:
        raise ValueError(f"takes one choice, not {len(value)}: {', '.join(value)}")
    return {name: _options(role, name, {} if options is None else options) for name, options in value.items()}


def _options(role: str, name: str, given: Any) -> dict[str, float | str]:
    choices = SLOTS[role][1]
    if name not in choices:
        raise ValueError(f"unknown choice {name!r}; {valid_names(name, list(choices))}")
    known = choices[name][1]
    if not isinstance(given, dict):
        raise ValueError(f"the options of {name} are {{option: value}}, not {given!r}")
    for option in given:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}; {valid_names(str(option), list(known))}")
    return {option: _value(f"{name}.{option}", spec, given.get(option, spec.default)) for option, spec in known.items()}


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
