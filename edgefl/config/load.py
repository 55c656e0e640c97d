"""The front door of configuration: run, recipe and device files by path or by shipped name, with overrides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from edgefl.config.files import Lines, override, read_yaml, validate
from edgefl.config.slots import SLOTS, valid_names
from edgefl.config.values import DeviceProfile, RecipeConfig, RunConfig
from edgefl.errors import ConfigError, Problem


def profiles_folder() -> Path:
    """Folder of the shipped profiles: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "profiles"
    return inside if inside.is_dir() else package.parent / "profiles"


def shipped(kind: str) -> list[str]:
    """Names of the shipped profiles of a kind: runs, recipes or devices."""
    return sorted(file.stem for file in (profiles_folder() / kind).glob("*.yaml"))


def find(kind: str, name: str) -> Path:
    """File of a profile given by shipped name or by path. Raises ConfigError with the valid names."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return Path(name)
    names = shipped(kind)
    if name not in names:
        known = valid_names(name, names)
        raise ConfigError(name, [Problem(kind, f"there is no file and no shipped profile of this name; {known}")])
    return profiles_folder() / kind / f"{name}.yaml"


def load_device(name: str, overrides: Sequence[str] = ()) -> DeviceProfile:
    """A device profile by shipped name or path. Raises ConfigError."""
    file = find("devices", name)
    values, lines = read_yaml(file)
    return validate(DeviceProfile, override(values, overrides), str(file), lines)


def load_recipe(name: str, slots: dict[str, Any] | None = None) -> RecipeConfig:
    """A recipe by shipped name or path, with ``slots`` in place of its own. Raises ConfigError."""
    file = find("recipes", name)
    values, lines = read_yaml(file)
    return validate(RecipeConfig, {**values, **(slots or {})}, str(file), lines)


def load_run(name: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, RecipeConfig]:
    """A run file by shipped name or path, and its recipe with the run's own slots. Raises ConfigError.

    Problems of the run file, its recipe and its fleet's device profiles are reported together.
    """
    file = find("runs", name)
    values, lines = read_yaml(file)
    values = override(values, overrides)
    problems: list[Problem] = []
    config = _collect(problems, lambda: validate(RunConfig, values, str(file), lines))
    recipe = None
    used = values.get("recipe", "end_to_end")
    if isinstance(used, str):
        recipe = _collect(problems, lambda: load_recipe(used, _valid_slots(values)), "recipe", lines)
    for index, device in enumerate(values.get("fleet") or []):
        if isinstance(device, dict) and isinstance(profile := device.get("profile", "cpu"), str):
            where = ("fleet", str(index), "profile")
            _collect(problems, partial(fleet_profile, profile, device.get("budget")), ".".join(where), lines)
    if problems or config is None or recipe is None:
        raise ConfigError(str(file), problems or [Problem("recipe", "must be a name or a file")])
    return config, recipe


def fleet_profile(profile: str, budget: dict[str, Any] | None) -> DeviceProfile:
    """The profile of a device of local mode, with its own budget fields. Raises ConfigError."""
    return load_device(profile, [f"budget.{field}={value}" for field, value in (budget or {}).items()])


def _valid_slots(values: dict[str, Any]) -> dict[str, Any]:
    slots = values.get("slots") or {}
    return {role: choice for role, choice in slots.items() if role in SLOTS} if isinstance(slots, dict) else {}


def _collect(problems: list[Problem], load: Any, prefix: str = "", lines: Lines | None = None) -> Any:
    try:
        return load()
    except ConfigError as error:
        line = (lines or {}).get(tuple(prefix.split(".")), 0)
        for problem in error.problems:
            if prefix:
                problem = Problem(prefix, f"{error.file}: {problem}", line)
            if str(problem) not in map(str, problems):
                problems.append(problem)
        return None
