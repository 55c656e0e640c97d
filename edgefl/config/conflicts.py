"""Which slots need, or exclude, one another. What is not named here mixes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgefl.errors import Problem

#: Terms that give the model a task of its own; without one there is nothing to learn.
TASKS = ("cross_entropy", "clip", "margin")
_CLASS_TERMS = ("modality_contrast", "prototype_contrast")
Recipe = Mapping[str, Mapping[str, Mapping[str, Any]]]


def conflicts(recipe: Recipe) -> list[Problem]:
    """Every rule that ``recipe`` (role -> {choice: options}) breaks, with the way out."""
    return [*_objective(recipe), *_prototypes(recipe), *_missing(recipe), *_fusion(recipe), *_server(recipe)]


def _objective(recipe: Recipe) -> list[Problem]:
    terms, found = recipe["objective"], []
    if not any(task in terms for task in TASKS):
        found.append(Problem("objective", f"no term gives the model a task; add one of {', '.join(TASKS)}"))
    for term in _CLASS_TERMS:
        if term in terms and "class_mean" not in recipe["prototypes"]:
            advice = "set prototypes: class_mean, or leave the term out"
            found.append(Problem("objective", f"{term} needs class prototypes; {advice}"))
    for term in ("prototype_transfer", "cluster_contrast"):
        if term in terms and "adaptive" not in recipe["prototypes"]:
            advice = "set prototypes: adaptive, or leave the term out"
            found.append(Problem("objective", f"{term} needs adaptive prototypes; {advice}"))
    if "model_transfer" in terms and "relationship" not in recipe["weight"]:
        advice = "set weight: relationship, or leave the term out"
        found.append(Problem("objective", f"model_transfer needs a mapping of the device's own; {advice}"))
    if "cluster_contrast" in terms and not {"clip", "margin"} & set(terms):
        text = "cluster_contrast is trained by devices without labels, whose task is of pairs; add margin or clip"
        found.append(Problem("objective", text))
    if "regulariser" in terms and "cluster_contrast" not in terms:
        found.append(Problem("objective", "regulariser needs the private copy that cluster_contrast trains; add it"))
    for term in ("ram", "mcm", "gmc"):
        if term in terms and "cross_entropy" not in terms:
            text = f"{term} needs the joint representation, which is learned with labels; add the term cross_entropy"
            found.append(Problem("objective", text))
    return found


def _prototypes(recipe: Recipe) -> list[Problem]:
    if "class_mean" in recipe["prototypes"] and "cross_entropy" not in recipe["objective"]:
        advice = "add the term cross_entropy, or set prototypes: none"
        return [Problem("prototypes", f"class_mean needs labels, which no term of the objective uses; {advice}")]
    return []


def _missing(recipe: Recipe) -> list[Problem]:
    missing, found = recipe["missing"], []
    if "prototype" in missing and "class_mean" not in recipe["prototypes"]:
        advice = "set prototypes: class_mean, or another missing"
        found.append(Problem("missing", f"prototype needs class prototypes; {advice}"))
    if "reconstruction" in missing and "reconstruction" not in recipe["objective"]:
        found.append(Problem("missing", "reconstruction needs the term of the same name in the objective; add it"))
    if (options := missing.get("completion")) is not None:
        named = bool(options.get("checkpoint"))
        if options.get("generator") != "nearest" and not named:
            found.append(Problem("missing", f"completion by {options.get('generator')} needs a checkpoint; name one"))
    return found


def _fusion(recipe: Recipe) -> list[Problem]:
    """Joint fusion has one projection for all modalities, so that none has a mapping that could be its own."""
    own = [("objective", "cluster_contrast"), ("weight", "relationship")]
    if "joint" not in recipe["fusion"] or "cross_entropy" not in recipe["objective"]:
        return []
    text = "joint has one projection for all modalities, and {} keeps a mapping of each; set fusion: concat or mean"
    return [Problem("fusion", text.format(choice)) for role, choice in own if choice in recipe[role]]


def _server(recipe: Recipe) -> list[Problem]:
    weight, found = next(iter(recipe["weight"])), []
    if "pacfl" in recipe["cluster"] and "cross_entropy" not in recipe["objective"]:
        text = "pacfl compares the devices class by class, and no term of the objective has classes; set cluster: lsh"
        found.append(Problem("cluster", text))
    if weight == "own":
        for role, nothing in (("cluster", "none"), ("prototypes", "none"), ("repair", "none"), ("optimise", "plain")):
            if nothing not in recipe[role]:
                found.append(Problem(role, f"weight: own exchanges nothing; set {role}: {nothing}"))
    own_models = any(options.get("models") == "own" for options in recipe["cluster"].values())
    if own_models and weight == "relationship":
        found.append(Problem("cluster", "weight: relationship gives each device a model already; set models: shared"))
    if "poverty" in recipe["repair"] and weight == "relationship":
        advice = "set another weight, or repair: none"
        found.append(Problem("repair", f"poverty mends one model for all, relationship makes one for each; {advice}"))
    if "poverty" in recipe["repair"] and "ignore" in recipe["missing"]:
        found.append(Problem("repair", "poverty needs samples that lack a modality, missing: ignore leaves them out"))
    if weight == "cka" and "mixed" in recipe["schedule"]:
        text = "cka compares models at the whole depth, which with schedule: mixed some do not have; set another weight"
        found.append(Problem("weight", text))
    if "fedadagrad_mpo" in recipe["optimise"]:
        options = recipe["optimise"]["fedadagrad_mpo"]
        if options["beta"] + 1 / options["temperature"] > 1:
            found.append(Problem("optimise", "beta + 1/temperature of fedadagrad_mpo exceeds 1; raise temperature"))
    return found


def headless(recipe: Recipe) -> list[Problem]:
    """Settings of a recipe without a meaning for a model without projection heads (model.head.kind: none)."""
    path, way_on = "model.head.kind", "set model.head.kind: mlp"
    if "relationship" in recipe["weight"]:
        text = (
            f"weight: relationship exchanges the mappings, the heads, and without them nothing is left to map; {way_on}"
        )
        return [Problem(path, f"{text}, or another slots.weight")]
    if "cluster_contrast" in recipe["objective"]:
        text = f"cluster_contrast trains a copy of the mappings, the heads, and without them there is none; {way_on}"
        return [Problem(path, f"{text}, or leave the term out")]
    return []


#: What makes something of all devices of one round together, or of how one round differs from the last: role, choice.
_OF_ONE_ROUND = {
    "cluster": ("lsh", "pacfl"),
    "select": ("banzhaf", "banzhaf_sampled"),
    "prototypes": ("adaptive",),
    "repair": ("poverty",),
    "weight": ("cka", "relationship", "own"),
    "optimise": ("fedadagrad_mpo",),
}
_INSTEAD = {
    "cluster": "none",
    "select": "all",
    "prototypes": "none or class_mean",
    "repair": "none",
    "weight": "samples or fediot",
    "optimise": "plain, momentum, fedadagrad, fedadam or fedyogi",
}


def late_conflicts(recipe: Recipe, *, asynchronous: bool) -> list[Problem]:
    """What of a recipe has no meaning for updates made from an earlier model (rounds: async, round.late: keep)."""
    path, way_on = ("rounds", "lockstep") if asynchronous else ("round.late", "drop")
    found = []
    for role, choices in _OF_ONE_ROUND.items():
        barred = (*choices, "random") if role == "select" and asynchronous else choices
        for choice in recipe[role]:
            if choice in barred:
                why = (
                    "chooses the devices of a round" if role == "select" else "needs the devices of one round together"
                )
                text = f"{role}: {choice} {why}; set slots.{role} to {_INSTEAD[role]}, or {path}: {way_on}"
                found.append(Problem(path, text))
    return found
