"""Writes docs/configuration.md and docs/commands.md from the code, so that they can not drift: `make docs`.

``pages()`` is what the files must hold; a test compares. The text for people who read is here, every field, option,
choice and default comes from the models and the programs themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edgefl import errors
from edgefl.config.files import MAX_FILE_BYTES, Values
from edgefl.config.load import profiles_folder, shipped
from edgefl.config.recipe import RecipeConfig
from edgefl.config.slots import PLURAL, SLOTS
from edgefl.config.values import DeviceProfile, RunConfig
from edgefl.data.manifest import MAX_SAMPLES, SHOWN
from edgefl.data.named import NAMED
from edgefl.models.sizes import SIZES
from edgefl.report.console import INTERRUPTED

HERE = Path(__file__).resolve().parent
GENERATED = "<!-- Written by docs/generate.py from the code (`make docs`): change it there. -->\n"


def pages() -> dict[str, str]:
    """File name -> text of every generated page."""
    return {"configuration.md": "\n".join(_configuration()), "commands.md": "\n".join(_commands())}


def main() -> None:
    """Write the pages beside this file."""
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |"
    yield ""


# ---- configuration


def _configuration() -> Iterator[str]:
    yield GENERATED
    yield "# Configuration\n"
    yield (
        "A **run file** says what is trained, on which data, by which devices; it names a **recipe** (the method) and, for\n"
        "local mode, a **device profile** for each device. All three are YAML. A name without a folder or `.yaml` is a\n"
        "shipped one. `--set a.b=c` on a command line overrides a field, and may be repeated; lists take an index\n"
        "(`--set fleet.0.profile=gpu-box`).\n\n"
        "Every problem of a file is reported at once, with its line, its path and the valid choices; the exit code is 10.\n"
        "A field that is not listed here is an error, and so is one that is given twice. Amounts of bytes are numbers or\n"
        f"text such as `600 MiB`, `1.5 GiB` or `2 MB`. Files are at most {MAX_FILE_BYTES // 2**20} MiB.\n"
    )
    yield from _model("Run file", RunConfig)
    yield from _slots()
    yield from _model("Recipe file", RecipeConfig)
    yield from _model("Device profile", DeviceProfile)
    yield from _shipped()
    yield from _sizes()
    yield from _data()


def _model(title: str, model: type[Values]) -> Iterator[str]:
    yield f"## {title}\n"
    yield from _fields(model.model_json_schema(), "")


def _fields(schema: dict[str, Any], path: str, here: dict[str, Any] | None = None) -> Iterator[str]:
    """A table of the fields at ``path``, then one for each field that has fields of its own."""
    node, rows, below = here or schema, [], []
    for name, field in node["properties"].items():
        place = f"{path}{name}"
        required = name in node.get("required", ())
        inner, suffix = _inner(schema, field)
        default = "required" if required else _default(field, nested=inner is not None)
        rows.append((f"`{place}`", _type(schema, field, name), default, field.get("description", "")))
        if inner is not None:
            below.append((f"{place}{suffix}", inner))
    yield from _table(("field", "type", "default", "meaning"), rows)
    for place, inner in below:
        yield f"### `{place}`\n"
        yield f"{inner.get('description', '')}\n"
        yield from _fields(schema, f"{place}.", inner)


def _resolved(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    reference = field.get("$ref") or next((part["$ref"] for part in field.get("allOf", ())), None)
    found: dict[str, Any] = schema["$defs"][reference.rsplit("/", 1)[1]] if reference else field
    return found


def _inner(schema: dict[str, Any], field: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The fields below a field, and what to add to its path; None when it has none."""
    node = _resolved(schema, field)
    if "properties" in node:
        return node, ""
    for key, suffix in (("items", ".0"), ("additionalProperties", ".<name>")):
        if isinstance(node.get(key), dict) and "properties" in (found := _resolved(schema, node[key])):
            return found, suffix
    return None, ""


def _type(schema: dict[str, Any], field: dict[str, Any], name: str = "") -> str:
    node = _resolved(schema, field)
    if "anyOf" in node:
        kinds = [_type(schema, option, name) for option in node["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in node or "const" in node:
        return ", ".join(f"`{choice}`" for choice in node.get("enum", [node.get("const")]))
    if name in SLOTS:
        return "a slot, see below"
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
        return "see below"
    return "none" if value is None or value in ("", [], {}) else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        inside = {key: item for key, item in value.items() if item is not None}
        if len(inside) == 1 and next(iter(inside.values())) == {}:
            return str(next(iter(inside)))
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in inside.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _slots() -> Iterator[str]:
    yield "## Slots\n"
    yield (
        "A recipe fills each role with one of these choices, alone (`missing: zero`) or with options\n"
        "(`objective: {clip: {temperature: 0.1}}`). A run file's `slots` replace the recipe's, role by role.\n"
        f"Several choices at once: {', '.join(f'`{role}`' for role in PLURAL)} (its terms are summed).\n"
    )
    for role, (meaning, choices) in SLOTS.items():
        yield f"### `{role}`: {meaning}\n"
        rows = []
        for choice, (told, options) in choices.items():
            lines = [f"`{name}` = {option.default}: {option.doc}" + _range(option) for name, option in options.items()]
            rows.append((f"`{choice}`", told, "<br>".join(lines) or "none"))
        yield from _table(("choice", "what it does", "options"), rows)


def _range(option: Any) -> str:
    if option.choices:
        return f" ({', '.join(f'`{choice}`' for choice in option.choices)})"
    most = f" to {option.most:g}" if option.most < float("inf") else " upwards"
    return f" ({option.least:g}{most})"


def _shipped() -> Iterator[str]:
    yield "## What ships\n"
    rows = [
        (kind, name, _first_line(profiles_folder() / kind / f"{name}.yaml"))
        for kind in ("runs", "recipes", "devices")
        for name in shipped(kind)
    ]
    yield from _table(("kind", "name", "what it is"), rows)


def _first_line(file: Path) -> str:
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            return line.removeprefix("#").strip()
        if line.startswith(("summary:", "description:")):
            return line.partition(":")[2].strip().strip('"')
    return ""


def _sizes() -> Iterator[str]:
    yield "## Encoder sizes\n"
    yield "`edgefl plan --sizes` lists them too. A field given beside `size` wins.\n"
    rows = [
        (
            kind,
            f"`{size}`",
            ", ".join(f"{name} {_yaml(list(v) if isinstance(v, tuple) else v)}" for name, v in fields.items()),
        )
        for kind, sizes in SIZES.items()
        for size, fields in sizes.items()
    ]
    yield from _table(("kind", "size", "fields"), rows)


# ---- data

MANIFEST = """\
{"id": "w1", "label": "walking", "group": "anna", "acc": [[0.1, 0.0], [0.2, 0.1]], "gyro": [[1.0], [0.5]]}
{"id": "w2", "label": "resting", "group": "anna", "acc": [[0.0, 0.0], [0.0, 0.1]]}
{"id": "w3", "label": "walking", "group": "ben", "acc": null, "gyro": [[0.9], [0.4]]}
"""
NPZ = """\
import numpy as np

np.savez(
    "share.npz",
    acc=np.zeros((3, 2, 2), np.float32),  # [samples, time, channels]; zeros where a sample lacks it
    **{"acc.present": np.array([True, True, False])},  # may be left out when every sample has it
    gyro=np.zeros((3, 2, 1), np.float32),
    label=np.array([0, 1, 0]),  # numbers from 0; -1: none
    label_names=np.array(["walking", "resting"]),
    ids=np.array(["w1", "w2", "w3"]),  # optional, as is group
    group=np.array(["anna", "anna", "ben"]),
)
"""


def _data() -> Iterator[str]:
    from edgefl.data import readers

    yield "## Data\n"
    yield (
        "`data.source` (and `edgefl-agent run --data`) is a folder with `manifest.jsonl`, an `.npz` file, or a data set by\n"
        "name. A sample may lack any modality, but not all of them.\n\n"
        "### A folder: `manifest.jsonl`\n\n"
        "One JSON object a line; here the second sample has no gyroscope and the third no accelerometer:\n"
    )
    yield f"```json\n{MANIFEST}```\n"
    yield (
        "`id`, `label` (a name, or a number from 0), `group` (a person, a device: used by `partition: natural`) and `meta`\n"
        "(ignored) are optional; every other key is a modality. An absent key, or null, is a missing modality.\n"
        "`labels.json` beside it, a list of names, fixes the numbering of labels; without it the names found are sorted.\n"
        f"At most {MAX_SAMPLES:,} samples. Bad samples are named, {SHOWN} of them in full, and are an error, or with\n"
        "`bad_samples: skip` left out and counted. What a value may be:\n"
    )
    table = inspect.getdoc(readers) or ""
    yield "\n".join(line for line in table.splitlines() if line.startswith("|")) + "\n"
    yield (
        "A string is a path relative to the folder, which it can not leave; for text it is the text itself unless it is\n"
        "one word that ends in .txt or .npy.\n\n### A file: `.npz`\n\n"
    )
    yield f"```python\n{NPZ}```\n"
    yield "`edgefl data RUN --out shares` writes such a file for each device, and `test.npz`.\n"
    yield "### By name\n"
    yield "`source: {name: {option: value}}`; the option `part: test` takes the official test half.\n"
    for name, function in NAMED.items():
        options = ", ".join(f"`{p.name}` = {p.default}" for p in inspect.signature(function).parameters.values())
        yield f"**`{name}`** ({options or 'no options'}). {_flowing(function)}\n"
    yield (
        "### Sharing out\n\n"
        "`partition: natural` (by group), `uniform`, or `{dirichlet: {alpha: 0.5, minimum: 1}}`: a small alpha gives each\n"
        "device few classes. `missing: {rate: 0.2, keep: one, devices: {wrist: [gyro]}}` then takes modalities away. All\n"
        "of it follows from `seed`, whatever method trains on it.\n"
    )


def _flowing(function: Callable[..., Any]) -> str:
    return " ".join((inspect.getdoc(function) or "").replace("``", "`").split())


# ---- commands


def _commands() -> Iterator[str]:
    import typer.main

    from coordinator.cli import app as coordinator
    from device_agent.cli import app as agent
    from edgefl.cli.main import HELP, VERBS, load

    yield GENERATED
    yield "# Commands\n"
    yield "The same text as with `--help`.\n"
    yield f"## edgefl\n\n{HELP.strip()}\n"
    yield "`--debug` may stand anywhere and shows where an error happened; `--version` shows the version.\n"
    for verb in VERBS:
        yield from _command(f"edgefl {verb}", load(verb))
    for program, app in (("edgefl-agent", agent), ("edgefl-coordinator", coordinator)):
        group: Any = typer.main.get_command(app)
        yield f"## {program}\n\n{(group.help or '').strip()}\n"
        for name, command in group.commands.items():
            yield from _command(f"{program} {name}", command)
    yield from _exit_codes()


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    words = [_name(p) if p.required else f"[{_name(p)}]" for p in arguments]
    yield f"### {name}\n"
    yield f"```\n{' '.join([name, *words, *(['[OPTIONS]'] if options else [])])}\n```\n"
    yield inspect.cleandoc(command.help or "").strip() + "\n"
    rows = [(f"`{_name(p)}`", _kind(p), _help(p)) for p in (*arguments, *options)]
    if rows:
        yield from _table(("argument or option", "value", "meaning"), rows)


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return ", ".join([*parameter.opts, *parameter.secondary_opts])


def _kind(parameter: Any) -> str:
    choices = getattr(parameter.type, "choices", None)
    if choices:
        return ", ".join(f"`{getattr(choice, 'value', choice)}`" for choice in choices)
    if getattr(parameter, "is_flag", False):
        return "flag"
    words = {"integer": "whole number", "integer range": "whole number", "float": "number"}
    return str(parameter.metavar or words.get(parameter.type.name, parameter.type.name))


def _help(parameter: Any) -> str:
    told = [parameter.help or ""]
    default = parameter.default
    if parameter.required:
        told.append("Required.")
    elif (
        parameter.param_type_name == "option"
        and isinstance(default, str | int | float | Path)
        and default not in ("", False)
    ):
        told.append(f"Default: {getattr(default, 'value', default)}.")
    if parameter.envvar:
        told.append(f"Environment: {parameter.envvar}.")
    return " ".join(told)


def _exit_codes() -> Iterator[str]:
    yield "## Exit codes\n"
    yield "They never change, so that scripts can rely on them. Every error says what to do; in general:\n"
    rows = [("0", "", "Done.", ""), ("1", "", "Something unexpected.", errors.EdgeFLError.remedy)]
    rows += [("2", "", "The command line is wrong.", "`--help` shows what is valid.")]
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.EdgeFLError)]
    for kind in sorted(kinds, key=lambda kind: kind.exit_code):
        if kind is not errors.EdgeFLError:
            remedy = kind.remedy if "remedy" in vars(kind) else "Install the extra that is named."
            rows.append((str(kind.exit_code), f"`{kind.__name__}`", _flowing(kind), remedy))
    rows.append((str(INTERRUPTED), "", "Interrupted by Ctrl-C.", "`--resume RUN` goes on."))
    yield from _table(("code", "error", "what happened", "what to do"), rows)


if __name__ == "__main__":
    main()
