"""Run, recipe and device files by path or by shipped name, with overrides.

Paths in a run file are relative to its own folder, so that it can be used from anywhere. Files from before that were
written for the working directory still work from there, with a warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from edgefl.config.settings import DeviceProfile, FleetDevice, RunConfig
from edgefl.config.slots import RecipeConfig, RecipeFile, headless, late_conflicts, parse_slot
from edgefl.config.yaml_files import Lines, Overrides, override, plain, read_yaml, valid_names, validate
from edgefl.errors import ConfigError, Problem

T = TypeVar("T")
#: A run file by path or shipped name, or its fields.
RunSource = str | Path | Mapping[str, object]
_DEVICE = (
    "Name a shipped device profile or a YAML file, with fields as in docs/configuration.md; `edgefl-agent profile` "
    "measures a device and writes one."
)
_LOG = logging.getLogger(__name__)


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
    names = shipped(kind)
    if name.endswith((".yaml", ".yml")) or "/" in name or (name not in names and _is_file(name)):
        return Path(name)
    if name not in names:
        known = valid_names(name, names)
        raise ConfigError(name, [Problem(kind, f"there is no file and no shipped profile of this name; {known}")])
    return profiles_folder() / kind / f"{name}.yaml"


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # a name that is too long for one
        return False


def load_device(name: str, overrides: Sequence[str] = ()) -> DeviceProfile:
    """A device profile by shipped name or path. Raises ConfigError."""
    try:
        file = find("devices", name)
        values, lines = read_yaml(file)
        return validate(DeviceProfile, override(values, overrides, lines), str(file), lines)
    except ConfigError as error:
        remedy = _DEVICE if error.remedy == ConfigError.remedy else error.remedy
        raise ConfigError(error.file, error.problems, remedy=remedy) from error


def load_recipe(name: str, slots: dict[str, object] | None = None) -> RecipeConfig:
    """A recipe by shipped name or path, with ``slots`` in place of its own. Raises ConfigError."""
    file = find("recipes", name)
    values, lines = read_yaml(file)
    return validate(RecipeFile, {**values, **(slots or {})}, str(file), lines)


def source_name(source: RunSource) -> str:
    """Name of a run file in messages: its path, or the field ``name`` of one that a program gives as fields."""
    return f"the run {source.get('name', '')}".strip() if isinstance(source, Mapping) else str(source)


def load_run(source: RunSource, overrides: Overrides = ()) -> tuple[RunConfig, RecipeConfig]:
    """A run file by shipped name, path or fields, and its recipe with the run's own slots. Raises ConfigError.

    Paths in the file are relative to it, those in ``overrides`` and in fields to the working directory.
    Problems of the run file, its recipe and its fleet's device profiles are reported together.
    """
    values: dict[str, object]
    if isinstance(source, Mapping):
        file, label, values, lines = Path("run.yaml"), source_name(source), plain(source, ""), Lines()
    else:
        file = find("runs", str(source))
        label, (values, lines) = str(file), read_yaml(file)
    values = override(absolute(values, file), overrides, lines)
    values = absolute(values, Path.cwd() / file.name)  # what the overrides name: a run keeps full paths
    problems: list[Problem] = []
    config = _collect(problems, lambda: validate(RunConfig, values, label, lines))
    recipe = None
    used = values.get("recipe", RunConfig.model_fields["recipe"].default)
    if isinstance(used, str):
        recipe = _collect(problems, lambda: load_recipe(used, _valid_slots(values)), "recipe", lines)
    sound = set()  # of a thousand devices most are alike
    for path, profile, budget in _fleet(values):
        load = partial(fleet_profile, profile, budget)
        alike = profile, json.dumps(budget, default=str)
        if alike not in sound and _collect(problems, load, path, lines) is not None:
            sound.add(alike)
    if config is not None and recipe is not None:
        asynchronous = config.rounds == "async"
        late = asynchronous or config.round.late == "keep"
        found = late_conflicts(recipe.slots, asynchronous=asynchronous) if late else []
        found += headless(recipe.slots) if config.model.head.kind == "none" else []
        problems += [Problem(one.path, one.message, lines.get(tuple(one.path.split(".")), 0)) for one in found]
    if problems or config is None or recipe is None:
        raise ConfigError(label, problems or [Problem("recipe", "must be a name or a file")])
    return config, recipe


def fleet_profile(profile: str, budget: dict[str, object] | None) -> DeviceProfile:
    """The profile of a device of local mode, with its own budget fields. Raises ConfigError."""
    return load_device(profile, budget_overrides(budget or {}))


def budget_overrides(budget: dict[str, object]) -> list[str]:
    """Budget fields as ``--set`` takes them; JSON is YAML, and says None as null."""
    return [f"budget.{field}={json.dumps(value, default=str)}" for field, value in budget.items()]


def _fleet(values: dict[str, object]) -> Iterator[tuple[str, str, dict[str, object]]]:
    """(path, profile, budget) of each device, where these are well-formed; the run file's own check tells the rest."""
    fleet, place = values.get("fleet"), "fleet"
    if isinstance(fleet, dict):
        fleet, place = fleet.get("kinds"), "fleet.kinds"
    for index, device in enumerate(fleet if isinstance(fleet, list) else []):
        given = device if isinstance(device, dict) else {"profile": None}
        profile = given.get("profile", FleetDevice.model_fields["profile"].default)
        budget = given.get("budget", {})
        if isinstance(profile, str) and isinstance(budget, dict):
            yield f"{place}.{index}.{'budget' if budget else 'profile'}", profile, budget


def _valid_slots(values: dict[str, object]) -> dict[str, object]:
    """The run's own slots, but for wrong ones, which the run file's own check tells."""
    slots = values.get("slots")
    valid = {}
    for role, choice in slots.items() if isinstance(slots, dict) else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            parse_slot(role, choice)
            valid[role] = choice
    return valid


def _collect(problems: list[Problem], load: Callable[[], T], prefix: str = "", lines: Lines | None = None) -> T | None:
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


def absolute(values: dict[str, object], file: Path) -> dict[str, object]:
    """The values of the run file ``file`` with its paths made absolute; names of shipped profiles stay names."""
    folder, found = file.parent, dict(values)
    if isinstance(data := values.get("data"), dict):
        paths = {key: _path(data[key], folder, f"data.{key}") for key in ("source", "test") if key in data}
        found["data"] = {**data, **paths}
    if "recipe" in values:
        found["recipe"] = _path(values["recipe"], folder, "recipe", shipped("recipes"))
    if isinstance(model := values.get("model"), dict):
        paths = {"own": _path(model["own"], folder, "model.own")} if "own" in model else {}
        if isinstance(encoders := model.get("encoders"), dict):
            paths["encoders"] = {name: _beside(value, folder) for name, value in encoders.items()}
        found["model"] = {**model, **paths}
    if isinstance(fleet := values.get("fleet"), list):
        names = shipped("devices")
        found["fleet"] = [
            {**device, "profile": _path(device["profile"], folder, f"fleet.{i}.profile", names)}
            if isinstance(device, dict) and "profile" in device
            else device
            for i, device in enumerate(fleet)
        ]
    elif isinstance(fleet, dict) and isinstance(trace := fleet.get("trace"), dict):
        files = {
            name: _path(trace[name], folder, f"fleet.trace.{name}") for name in ("states", "links") if name in trace
        }
        found["fleet"] = {**fleet, "trace": {**trace, **files}}
    return found


def _beside(encoder: object, folder: Path) -> object:
    """The encoder with a checkpoint that lies beside the run file, and not below the working directory, as its path."""
    name = encoder.get("pretrained") if isinstance(encoder, dict) else None
    if not isinstance(encoder, dict) or not isinstance(name, str) or not name:
        return encoder
    try:
        there = not Path(name).exists() and (folder / name).exists()
    except (OSError, ValueError):  # a name that no file can have
        return encoder
    return {**encoder, "pretrained": str((folder / name).absolute())} if there else encoder


def _path(value: object, folder: Path, field: str, names: Sequence[str] = ()) -> object:
    """The path of what is there; a value that is no path, or a name, as it is."""
    if not isinstance(value, str) or not value or value in names or Path(value).is_absolute():
        return value
    try:
        own = (folder / value).absolute()
        if own.exists():
            return str(own)
        if Path(value).exists():
            _LOG.warning(
                "%s: there is no %s, and %r is taken from the working directory; paths of a run file are relative to "
                "the file",
                field, own, value,
            )  # fmt: skip
            return str(Path(value).absolute())
    except (OSError, ValueError):  # a name that no file can have
        return value
    named = "/" in value or own.suffix in {".npz", ".jsonl", ".yaml", ".yml", ".safetensors"}
    return str(own) if named else value
