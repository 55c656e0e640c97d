"""Declared models in a run file: what stays of a run's settings where devices train by their own code.

The coordinator then knows names, shapes and first weights of the parts, and nothing of data, loss or layers.
"""

from __future__ import annotations

from pathlib import Path

from edgefl.config.settings import DataConfig, ModelConfig, RatesConfig, RunConfig, TrainingConfig
from edgefl.config.yaml_files import Values
from edgefl.errors import ConfigError, ModelError, Problem
from edgefl.models.declared import declared_spec
from edgefl.models.spec import HeadSpec, ModelSpec
from edgefl.plan.stages import by_holdouts
from edgefl.registry import Recipe, choose, chosen, default

#: Fields of a section that the trainer gets (``edgefl.client.Round``) or the coordinator uses itself.
_USED = {
    "model": {"own"},
    "training": {"rounds", "epochs", "batch_size", "lr", "lr_fall", "lr_warmup", "lr_scale"},
    "training.lr": {"head"},
}
#: Roles whose methods act on the model, its loss or the devices' data.
_OF_TRAINING = ("objective", "missing", "prototypes", "repair", "fusion", "sharing", "cluster", "weight")
#: Setting without effect -> the one in its place.
_INSTEAD = {"training.lr.encoder": "; its rate is training.lr.head"}
_WHY = "and with model.own the devices' own code trains"


def declared_model(config: RunConfig, recipe: Recipe) -> ModelSpec:
    """The declared model of a run file with ``model.own``. Raises ConfigError for settings without effect on it."""
    problems = _unused(config) + _unfit(recipe)
    try:
        declared = declared_spec(Path(config.model.own))
    except ModelError as error:
        problems.append(Problem("model.own", f"{error.message}. {error.remedy}"))
    if problems:
        raise ConfigError(config.name, problems, remedy="Leave out what is named above, or train EdgeFL's own model.")
    return ModelSpec(stages=len(config.training.rounds), head=HeadSpec(kind="none"), declared=declared)


def _unused(config: RunConfig) -> list[Problem]:
    """Settings of EdgeFL's own training and models that are not at their defaults."""
    sections: list[tuple[str, Values, Values]] = [
        ("model", config.model, ModelConfig()),
        ("data", config.data, DataConfig()),
        ("training", config.training, TrainingConfig(rounds=[1])),
        ("training.lr", config.training.lr, RatesConfig()),
    ]
    found = [
        f"{section}.{field}"
        for section, given, plain in sections
        for field in type(given).model_fields
        if field not in _USED.get(section, set()) and getattr(given, field) != getattr(plain, field)
    ]
    return [Problem(path, f"has no effect, {_WHY}{_INSTEAD.get(path, '')}") for path in found]


def _unfit(recipe: Recipe) -> list[Problem]:
    """Methods that read or change what only EdgeFL's own training has."""
    acting = {role: choice.name for role in _OF_TRAINING for choice in chosen(role, recipe[role])}
    found = [
        Problem(f"slots.{role}", f"{name} acts on EdgeFL's own model and data, {_WHY}; leave it at {default(role)}")
        for role, name in acting.items()
        if name != default(role)
    ]
    for slot in by_holdouts(recipe):
        role, _, name = slot.partition(": ")
        text = f"{name} goes by hold-outs that EdgeFL's own training sets apart, {_WHY}; leave it at {default(role)}"
        found += [Problem(f"slots.{role}", text)] if role not in _OF_TRAINING else []
    if choose("schedule", recipe).method.by_budget:
        found.append(Problem("slots.schedule", f"goes by predicted budgets, {_WHY}; set end_to_end or layerwise"))
    return found
