"""Resolved settings of runs, and their differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from edgefl.registry import methods
from edgefl.report.writers import without_secrets
from edgefl.roles import ROLES
from edgefl.run_records import RunReport

#: In place of the value of a setting that a run does not have. A dash is a figure that was not measured.
NOT_SET = "not set"


class Setting(NamedTuple):
    """A setting that differs, with each run's value as text; None: the run has no such setting."""

    path: str
    values: tuple[str | None, ...]


def configured(run: RunReport) -> dict[str, object]:
    """The resolved run file and the recipe's slots, without paths and names."""
    whole = without_secrets(run.config)
    config: dict[str, object] = whole if isinstance(whole, dict) else {}
    settings, recipe = config.get("run", config), config.get("recipe")
    found = {**settings, "data": _without(settings.get("data"), "test")} if isinstance(settings, dict) else {}
    if not isinstance(recipe, dict):
        return _without(found, "name", "recipe")
    slots = {"recipe": _without(recipe, "name", "summary", "source")}
    return {**_without(found, "name", "recipe", "slots"), **slots}  # the recipe holds what the run file set in slots


def schedule(run: RunReport) -> str:
    """The schedule's name; "" if not on record."""
    recipe = configured(run).get("recipe")
    slot = recipe.get("schedule") if isinstance(recipe, dict) else None
    return next(iter(slot), "") if isinstance(slot, dict) else ""


def _without(values: object, *names: str) -> dict[str, object]:
    return {key: value for key, value in values.items() if key not in names} if isinstance(values, dict) else {}


def differing(values: Sequence[object], path: str = "") -> Iterator[Setting]:
    """Settings that differ between runs. A group missing in one is one setting; named entries are matched by name."""
    values = [_by_name(value) for value in values]
    role = path.removeprefix("recipe.")
    if role in ROLES and role != path and len({tuple(value) for value in values if isinstance(value, dict)}) > 1:
        yield Setting(role, tuple(_chosen(role, value) for value in values))  # options of several methods are no pairs
    elif all(isinstance(value, dict) for value in values):
        dicts = [value for value in values if isinstance(value, dict)]
        for key in dict.fromkeys(key for one in dicts for key in one):
            yield from differing([one.get(key) for one in dicts], f"{path}.{key}".lstrip("."))
    elif len({msgspec.json.encode(value) for value in values}) > 1:
        yield Setting(path, tuple(None if value is None else setting_text(value) for value in values))


def _by_name(value: object) -> object:
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return {str(item["name"]): _without(item, "name") for item in value}
    return value


def _chosen(role: str, slot: object) -> str | None:
    """The methods in a slot with non-default options: "layerwise {embed: frozen}"."""
    if not isinstance(slot, dict):
        return None
    known, texts = methods(role), []
    for name, options in slot.items():
        usual = {key: option.default for key, option in known[name].options.items()} if name in known else {}
        own = {key: value for key, value in dict(options or {}).items() if usual.get(key) != value}
        texts.append(f"{name} {setting_text(own)}" if own else str(name))
    return " + ".join(texts)


def setting_text(value: object) -> str:
    """A value as one line of YAML, without nulls and empty values: {kind: sensor, width: 16}."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{key}: {setting_text(one)}" for key, one in value.items() if one not in (None, "")) + "}"
        )
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
