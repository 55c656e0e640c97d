"""YAML files to checked values: every problem of a file at once, each with its path, its line and the way out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from edgefl.config.slots import valid_names
from edgefl.errors import ConfigError, Problem

#: A run file of the largest fleet we know of is under 200 KB; a limit keeps a wrong path from filling the memory.
MAX_FILE_BYTES = 2 * 2**20

Model = TypeVar("Model", bound=pydantic.BaseModel)
Lines = dict[tuple[str, ...], int]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Values(pydantic.BaseModel):
    """Base of every configuration value: frozen, and no unknown fields."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


def parse_bytes(value: Any) -> Any:
    """An amount of memory: a number of bytes, or text such as ``600 MiB``. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not an amount of bytes; write 1048576, 600 MiB or 1.5 GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def read_yaml(file: Path) -> tuple[dict[str, Any], Lines]:
    """The file's mapping, and the line of each of its paths. Raises ConfigError."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(str(file), [Problem("file", f"is larger than {MAX_FILE_BYTES} bytes")])
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = Problem("file", f"cannot be read: {reason}")
        raise ConfigError(str(file), [problem], remedy="Check the file's name and its permissions.") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 0
        reason = getattr(error, "problem", None) or str(error)
        raise ConfigError(str(file), [Problem("YAML", str(reason), line)]) from error
    except RecursionError as error:
        raise ConfigError(str(file), [Problem("YAML", "is nested too deeply")]) from error
    if not isinstance(value, dict):
        raise ConfigError(str(file), [Problem("file", "must hold a mapping of fields, such as 'name: my-run'")])
    lines: Lines = {}
    _collect_lines(node, (), lines)
    return value, lines


def _collect_lines(node: yaml.Node | None, path: tuple[str, ...], lines: Lines) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            here = (*path, str(key.value))
            lines[here] = key.start_mark.line + 1
            _collect_lines(child, here, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            here = (*path, str(index))
            lines[here] = child.start_mark.line + 1
            _collect_lines(child, here, lines)


def override(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """``values`` with each ``a.b=c`` applied; c is read as YAML. Raises ConfigError."""
    for item in overrides:
        path, equals, text = item.partition("=")
        if not equals or not path.strip():
            raise ConfigError("--set", [Problem(item, "is not of the form field.subfield=value")])
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError("--set", [Problem(path, f"has a value that is not YAML: {text!r}")]) from error
        values = _with(values, path.strip().split("."), value, path)
    return values


def _with(values: Any, keys: list[str], value: Any, path: str) -> Any:
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(values, list):
        if not key.isdigit() or int(key) >= len(values):
            raise ConfigError("--set", [Problem(path, f"{key!r} is not an index below {len(values)}")])
        return [_with(old, rest, value, path) if i == int(key) else old for i, old in enumerate(values)]
    old = values if isinstance(values, dict) else {}
    return {**old, key: _with(old.get(key), rest, value, path)}


def validate(model: type[Model], values: dict[str, Any], file: str, lines: Lines | None = None) -> Model:
    """``values`` as ``model``. Raises ConfigError with every problem found."""
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError(file, [_problem(item, model, lines or {}) for item in error.errors()]) from error


def _problem(item: Any, model: type[pydantic.BaseModel], lines: Lines) -> Problem:
    path = tuple(str(key) for key in item["loc"])
    line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), 0)
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = f"unknown field; {valid_names(path[-1], _fields(model, path[:-1]))}"
    elif item["type"] == "missing":
        message = "is required"
    elif item["type"] != "value_error" and not isinstance(item["input"], dict | list):
        message = f"{message[0].lower()}{message[1:]}, not {item['input']!r}"
    return Problem(".".join(path) or "file", message, line)


def _fields(model: type[pydantic.BaseModel], path: tuple[str, ...]) -> list[str]:
    """Names of the fields at ``path``, from the model's JSON schema."""
    schema = model.model_json_schema()
    here: Any = schema
    for key in path:
        here = _resolve(schema, here)
        if here.get("type") == "array":
            here = here.get("items", {})
        elif key in here.get("properties", {}):
            here = here["properties"][key]
        else:
            patterns = list(here.get("patternProperties", {}).values())
            here = patterns[0] if patterns else here.get("additionalProperties", {})
    return list(_resolve(schema, here).get("properties", {}))


def _resolve(schema: Any, here: Any) -> Any:
    here = here if isinstance(here, dict) else {}
    for option in here.get("anyOf", []):
        if "$ref" in option or option.get("type") in {"object", "array"}:
            here = option
            break
    if "$ref" in here:
        here = schema["$defs"][here["$ref"].rsplit("/", 1)[1]]
    return here
