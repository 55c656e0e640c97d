"""The slots of a recipe: which choices each role has, and the options of each choice. A closed dictionary."""

from __future__ import annotations

import contextlib
import difflib
import math
from typing import Any, NamedTuple


class Option(NamedTuple):
    """One option of a choice: text is one of ``choices``, a number lies between ``least`` and ``most``."""

    default: float | str
    doc: str
    choices: tuple[str, ...] = ()
    least: float = -math.inf
    most: float = math.inf


DROP = Option(0.0, "probability that a complete sample trains with one of its modalities hidden", least=0, most=1)
_WEIGHT = Option(1.0, "factor of the term", least=0)
_SHARE = Option(0.5, "share of the eligible devices, rounded up", least=0.01, most=1)

#: role -> (what it decides, {choice: (what it does, {option: Option})})
SLOTS: dict[str, tuple[str, dict[str, tuple[str, dict[str, Option]]]]] = {
    "schedule": (
        "which parts exist and are trained in each stage",
        {
            "end_to_end": ("every stage exists and is trained from the first round", {}),
            "progressive": ("stage s adds encoder stage s; everything present is trained", {}),
            "layerwise": (
                "stage s adds encoder stage s; only it, the heads and the final norms are trained",
                {
                    "embed": Option(
                        "auto",
                        "whether the embeddings are trained in the first stage; auto: yes unless they are pretrained",
                        ("auto", "first_stage", "frozen"),
                    )
                },
            ),
        },
    ),
    "cluster": ("how devices are grouped", {"none": ("all devices form one group", {})}),
    "select": (
        "who is asked in a round, among the eligible",
        {
            "all": ("every eligible device", {}),
            "random": ("a random share of them", {"share": _SHARE}),
        },
    ),
    "missing": (
        "what stands in for an absent modality during training",
        {
            "ignore": ("samples that lack a modality are left out", {}),
            "zero": ("zeros", {"drop": DROP}),
            "random": ("standard normal noise", {"drop": DROP}),
            "prototype": (
                "a global prototype (arXiv 2312.13508); zeros until there is one",
                {
                    "by": Option(
                        "label",
                        "whose: that of the sample's own class (the paper), or of the classes that the modality at "
                        "hand matches, as at inference",
                        ("label", "match"),
                    ),
                    "drop": DROP,
                },
            ),
        },
    ),
    "prototypes": (
        "class prototypes, computed on the devices and merged",
        {
            "none": ("none", {}),
            "class_mean": (
                "class means of each modality and of the fused representation (arXiv 2312.13508, eqs 1-3)",
                {
                    "weighting": Option(
                        "modality",
                        "weights of the merge: each device's samples of the modality, or of the class",
                        ("modality", "class"),
                    )
                },
            ),
        },
    ),
    "objective": (
        "terms of the local loss, summed",
        {
            "cross_entropy": (
                "classification of the fused representation",
                {"weight": _WEIGHT},
            ),
            "modality_contrast": (
                "each modality's projection against that modality's global class prototypes, from the second round on",
                {"weight": _WEIGHT, "temperature": Option(0.1, "softmax temperature", least=0.001)},
            ),
            "clip": (
                "contrast of two modalities' projections, labels unused (arXiv 2407.15426)",
                {"weight": _WEIGHT, "temperature": Option(0.05, "softmax temperature", least=0.001)},
            ),
        },
    ),
    "repair": ("what is replaced in uploads before they are combined", {"none": ("nothing", {})}),
    "weight": ("weights of the devices", {"samples": ("number of samples, per part", {})}),
    "combine": ("how uploads become one", {"mean": ("streaming weighted mean per part", {})}),
    "optimise": ("how the mean changes the global model", {"plain": ("it replaces it", {})}),
}
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
    if isinstance(spec.default, str):
        if value not in spec.choices:
            raise ValueError(f"{name} is {value!r}; {valid_names(str(value), list(spec.choices))}")
        return str(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 reads 1e-3 as text
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
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
