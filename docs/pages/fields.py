"""Tables of a configuration model's fields, from its JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgefl.config.yaml_files import Values
from edgefl.roles import ROLES
from pages.markdown import table


def model_section(title: str, model: type[Values]) -> Iterator[str]:
    """A heading, and tables of every field."""
    yield f"## {title}\n"
    yield from _fields(model.model_json_schema(), "")


def _fields(schema: dict[str, Any], path: str, here: dict[str, Any] | None = None) -> Iterator[str]:
    """A table of the fields at ``path``, then one for each field that has fields of its own."""
    node, rows, below = here or schema, [], []
    for name, field in node["properties"].items():
        place = f"{path}{name}"
        required = name in node.get("required", ())
        inner = _inner(schema, field)
        default = "required" if required else _default(field, nested=bool(inner))
        rows.append((f"`{place}`", _type(schema, field, name), default, field.get("description", "")))
        below += [(f"{place}{suffix}", fields) for fields, suffix in inner]
    yield from table(("field", "type", "default", "meaning"), rows)
    for place, inner in below:
        yield f"### `{place}`\n"
        yield f"{inner.get('description', '')}\n"
        yield from _fields(schema, f"{place}.", inner)


def _resolved(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    reference = field.get("$ref") or next((part["$ref"] for part in field.get("allOf", ())), None)
    found: dict[str, Any] = schema["$defs"][reference.rsplit("/", 1)[1]] if reference else field
    return found


def _inner(schema: dict[str, Any], field: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """The fields below a field, and what to add to its path; of a field in one of several forms, those of each."""
    node = _resolved(schema, field)
    options = [option for option in node.get("anyOf", ()) if option.get("type") != "null"]
    if len(options) == 1:  # or nothing
        return _inner(schema, options[0])
    if "oneOf" in node:
        return [one for form in node["oneOf"] for one in _inner(schema, form)]
    if "properties" in node:
        return [(node, "")]
    for key, suffix in (("items", ".<n>"), ("additionalProperties", ".<name>")):
        if isinstance(node.get(key), dict) and "properties" in (found := _resolved(schema, node[key])):
            return [(found, suffix)]
    return []


def _type(schema: dict[str, Any], field: dict[str, Any], name: str = "") -> str:
    node = _resolved(schema, field)
    if forms := node.get("anyOf") or node.get("oneOf"):
        kinds = [_type(schema, option, name) for option in forms if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in node or "const" in node:
        return ", ".join(f"`{choice}`" for choice in node.get("enum", [node.get("const")]))
    if "properties" in node:
        return "fields below"
    if name in ROLES and node.get("type") != "number":
        return "a slot"
    if node.get("type") == "array":
        return f"list of {_type(schema, node['items'])}"
    if node.get("type") == "object":
        keys = node.get("propertyNames", {}).get("enum")
        return "mapping" if keys is None else f"one of {', '.join(f'`{key}`' for key in keys)}, with options"
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    kind = "bytes" if name.endswith("_bytes") else words.get(node.get("type", ""), "anything")
    return f"{kind}{_bounds(node)}"


def _bounds(node: dict[str, Any]) -> str:
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{word} {node[key]:g}" for key, word in words.items() if key in node and abs(node[key]) < 2**62]
    return f" {', '.join(found)}" if found else ""


def _default(field: dict[str, Any], *, nested: bool) -> str:
    value = field.get("default")
    if nested and value not in ([], {}):
        return "–"
    return "–" if value is None or value in ("", [], {}) else f"`{as_yaml(value)}`"


def as_yaml(value: Any) -> str:
    """A value as it stands in a run file."""
    if isinstance(value, dict):
        inside = {key: item for key, item in value.items() if item is not None}
        if len(inside) == 1 and next(iter(inside.values())) == {}:
            return str(next(iter(inside)))
        return "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in inside.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
