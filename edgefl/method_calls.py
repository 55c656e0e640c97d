"""Calls of a method's functions by the core, checked when the method registers.

A function gets the values named here by position, in this order, and by keyword those of the method's options that it
has a parameter for (``edgefl.registry.Choice.bind``).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any

#: role -> function -> what the core passes. What fills a role without functions is built by the core itself.
CALLS: dict[str, dict[str, str]] = {
    "schedule": {"stages": "model rounds"},
    "pace": {"judge": "rounds", "fewest": "", "observe": "state previous now"},
    "sharing": {},
    "fusion": {"build": "model"},
    "cluster": {"group": "signatures generator", "own_models": ""},
    "select": {"draw": "devices generator history"},
    "missing": {
        "make": "modality at_hand",
        "build": "model",
        "offered": "model tables",
        "completed_data": "dataset encoders",
        "completed_counts": "samples encoders",
    },
    "prototypes": {
        "local": "job model auxiliary dataset generator",
        "merge": "loaders previous generator",
        "start": "model generator",
        "rows": "model",
        "local_rows": "job candidate modalities",
        "candidates": "",
    },
    "objective": {"loss": "forward", "keep": "kept received trained"},
    "repair": {
        "mend": "updates state store clusters weights",
        "unlikely": "samples modalities",
        "observe": "job model",
        "unreadable": "optimizer",
        "period": "",
        "ask": "members",
        "lend": "updates needs store clusters",
    },
    "upload": {"send": "trained generator", "most": "part_bytes"},
    "weight": {"weigh": "samples modalities", "similarity": "outputs", "personal": "loaders"},
    "combine": {
        "screen": "changes",
        "accumulate": "layout",
        "merge": "loaders layout",
        "keeps": "",
        "resolve": "devices rounds",
        "noise": "",
        "account": "spent uploads",
    },
    "optimise": {"step": "state previous combined", "adjust": "history clusters weights"},
}
_SIGNATURE = {"sign": "dataset classes seed", "layout": "class_counts", "check": "tensors"}
#: Functions that no options are passed to; ``make`` finds them in what is at hand.
_WITHOUT_OPTIONS = {"make", "offered", "conflicts", *(f"signature.{name}" for name in _SIGNATURE)}
#: role -> functions, one of which every method of the role must have.
_NEEDED = {
    "schedule": ("stages",),
    "fusion": ("build",),
    "select": ("draw",),
    "missing": ("make",),
    "objective": ("loss",),
    "weight": ("weigh", "similarity"),
    "combine": ("accumulate", "merge"),
    "optimise": ("step",),
}
#: A field -> those that it is not called or not priced without.
_BESIDE = {
    "group": ("signature",),
    "signature": ("group",),
    "local": ("rows", "local_rows"),
    "completed_data": ("completed_counts",),
    "period": ("ask", "lend"),
    "judge": ("fewest",),
    "most": ("send",),
    "noise": ("account", "accumulate", "screen"),
    "account": ("noise", "screen"),
}


#: Characters of a stand-in's name in a ledger.
_LONGEST_STAND_IN = 16


def misfit(role: str, method: Any) -> str:
    """Why the core cannot call a method as it calls this role's, and the right call; "": it can."""
    needed = _NEEDED.get(role, ())
    if needed and all(getattr(method, name) is None for name in needed):
        return f"has no function {' or '.join(needed)}, which every run calls; give it one"
    for name, others in _BESIDE.items():
        if getattr(method, name, None) is not None and any(getattr(method, other) is None for other in others):
            return f"has {name} without {' and '.join(others)}; give it these as well"
    if role == "missing" and len(method.name) > _LONGEST_STAND_IN:
        return f"has a name of more than {_LONGEST_STAND_IN} characters, which evaluations are kept under; shorten it"
    if getattr(method, "account", None) is not None and not method.per_round:
        return "has account without per_round=True, and an account counts whole rounds; declare it"
    for name, function, given in _functions(role, method):
        options = () if name in _WITHOUT_OPTIONS else method.options
        if why := _refusal(function, given, options):
            asked = ", ".join([*given, *(["*", *options] if options else [])])
            return f"has a function {name} that cannot be called: {why}; make it {name}({asked})"
    return ""


def _functions(role: str, method: Any) -> Iterator[tuple[str, Any, list[str]]]:
    """(name, function, what it is given) of a method's functions."""
    calls = {name: (getattr(method, name), given) for name, given in CALLS[role].items()}
    if signature := getattr(method, "signature", None):
        calls |= {f"signature.{name}": (getattr(signature, name), given) for name, given in _SIGNATURE.items()}
    calls |= {"conflicts": (method.conflicts, "recipe"), "shape": (method.shape, "encoders")}
    for name, (function, given) in calls.items():
        if function is not None:
            yield name, function, given.split()


def _refusal(function: Any, given: Collection[str], options: Collection[str]) -> str:
    """Why a function does not take these values and options, in words; "": it does."""
    try:
        takes = inspect.signature(function)
    except TypeError:
        return f"it is {type(function).__name__}, not a function"
    except ValueError:
        return "it does not tell its parameters"
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.parameters.values())
    try:
        takes.bind(*given, **{name: None for name in options if every or name in takes.parameters})
    except TypeError as error:
        return str(error)
    return ""
