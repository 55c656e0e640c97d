"""YAML files to checked values: every problem of a file at once, each with its path, its line and the way out."""

from __future__ import annotations

import datetime as dt
import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, get_args, get_origin

import pydantic
import yaml
from pydantic import Field

from edgefl.encoder_kinds import EncoderKind, name_of
from edgefl.errors import ConfigError, Problem
from edgefl.groups import PREFIX, group_of
from edgefl.records import MODALITY_RULE, is_modality
from edgefl.storage.disk import read_at_most

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

#: A run file of the largest fleet we know of is under 200 KB; a limit keeps a wrong path from filling the memory.
MAX_FILE_BYTES = 2 * 2**20
#: Fields of a file, also once its anchors are written out: nine nested anchors can stand for a billion of them. A node
#: takes about a kilobyte.
MAX_FIELDS = 100_000
#: Levels of fields in each other; ours have six.
MAX_DEPTH = 64
#: Characters of a number, a date and the like. YAML 1.1 reads 1:00:00 to the base of 60, however long it is.
MAX_NUMBER = 64

_YAML_REMEDY = (
    "Mend the line named above, or the one before it: one `field: value` a line, what belongs to a field two spaces "
    "deeper, brackets closed, and quotation marks around a text that holds ': ' or ' #'."
)

Lines = dict[tuple[str, ...], int]
#: Fields in place of a file's own: as ``--set`` has them, ``a.b=c`` with c as YAML; or a path to its value.
Overrides = Sequence[str] | Mapping[str, object]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Values(pydantic.BaseModel):
    """Base of every configuration value: frozen, no unknown fields, and no number that is not finite."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def conflicts(self) -> list[Problem]:
        """Fields that are right alone and wrong together; each at the path of the field to mend."""
        return []


Model = TypeVar("Model", bound=Values)
T = TypeVar("T")


def parse_bytes(value: T) -> T | int:
    """An amount of memory: a number of bytes, or text such as ``600 MiB``. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not an amount of bytes; write 1048576, 600 MiB or 1.5 GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def named(value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value) is None:
        rule = "letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 64"
        raise ValueError(f"{value!r} cannot be a name; use {rule}")
    return value


def device_or_group(value: str) -> str:
    group = group_of(value)
    return f"{PREFIX}{named(group)}" if group else named(value)


def modality_name(value: str) -> str:
    if not is_modality(value):
        raise ValueError(f"{value!r} cannot be a modality's name; use {MODALITY_RULE}")
    return value


def as_text(value: object) -> object:
    return value.isoformat() if isinstance(value, dt.date) else value  # YAML reads 2026-11-30 as a date


Bytes = Annotated[int, pydantic.BeforeValidator(parse_bytes), Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0)]
Name = Annotated[str, pydantic.AfterValidator(named)]
DeviceOrGroup = Annotated[str, pydantic.AfterValidator(device_or_group)]
Modality = Annotated[str, pydantic.AfterValidator(modality_name)]


class _Loader(yaml.SafeLoader):
    """YAML as a person writes it: of bounded size and depth, with text as keys, and without tags."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """One node with all that is in it, unless it is one too many."""
        event = self.peek_event()  # type: ignore[no-untyped-call] # the one method that has no types
        mark = event.start_mark
        self._nodes += 1
        self._depth += 1
        if self._nodes > MAX_FIELDS:
            raise yaml.MarkedYAMLError(problem=f"holds more than {MAX_FIELDS} fields", problem_mark=mark)
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="is nested too deeply", problem_mark=mark)
        if getattr(event, "tag", None) not in {None, "!"}:
            raise yaml.MarkedYAMLError(problem=f"has the tag {event.tag}; leave it out", problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):  # looked at where it was written: again for each alias is quadratic
            return node
        number = isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:str"
        if node is not None and number and len(node.value) > MAX_NUMBER:
            problem = f"has a number of {len(node.value)} characters; put a text in quotation marks"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="has a field whose name is no text", problem_mark=key.start_mark)
        return node


def parse_yaml(text: str) -> tuple[object, Lines, list[Problem]]:
    """The value of a YAML text, the line of each of its paths, and the fields that are given twice.

    Raises yaml.YAMLError, ValueError (a date that is none).
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: Lines = {}
        problems: list[Problem] = []
        _collect_lines(node, (), lines, problems, itertools.count(1))
        return None if node is None else loader.construct_document(node), lines, problems
    finally:
        loader.dispose()


def read_text(file: Path, limit: int) -> str:
    """A text file of at most ``limit`` bytes. Raises ConfigError."""
    try:
        return read_at_most(file, limit).decode("utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a name that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        problem = Problem("file", f"cannot be read: {reason}")
        name = str(file).encode("utf-8", "backslashreplace").decode()
        raise ConfigError(name, [problem], remedy="Check the file's name and its permissions.") from error


def yaml_text(values: object, width: int = 80) -> str:
    """``values`` as a YAML document, fields in their order."""
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=width)
    return text


def read_yaml(file: Path) -> tuple[dict[str, object], Lines]:
    """The file's mapping, and the line of each of its paths. Raises ConfigError."""
    text = read_text(file, MAX_FILE_BYTES)
    try:
        value, lines, problems = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error)  # a ValueError: a date or number that is none
        if isinstance(error, RecursionError):
            reason = "is nested too deeply"
        problem = Problem("YAML", str(reason), mark.line + 1 if mark is not None else 0)
        raise ConfigError(str(file), [problem], remedy=_YAML_REMEDY) from error
    if not isinstance(value, dict):
        raise ConfigError(str(file), [Problem("file", "must hold a mapping of fields, such as 'name: my-run'")])
    if problems:
        raise ConfigError(str(file), problems)
    return value, lines


def _collect_lines(
    node: yaml.Node | None, path: tuple[str, ...], lines: Lines, problems: list[Problem], count: Iterator[int]
) -> None:
    """Fill ``lines``; a field that is given twice, of which YAML would keep the last, is a problem."""
    children: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, child) for key, child in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), child, child) for index, child in enumerate(node.value)]
    for name, start, child in children:
        here, line = (*path, name), start.start_mark.line + 1
        if here in lines:
            problems.append(Problem(".".join(here), f"is given twice, first on line {lines[here]}", line))
        if next(count) > MAX_FIELDS:
            raise yaml.YAMLError(f"holds more than {MAX_FIELDS} fields")
        lines[here] = line
        _collect_lines(child, here, lines, problems, count)


def override(values: dict[str, object], overrides: Overrides, lines: Lines | None = None) -> dict[str, object]:
    """``values`` with each override applied. Raises ConfigError.

    Fields that are overridden lose their place in ``lines``: what is wrong with them is not wrong in the file.
    """
    pairs = plain(overrides, "").items() if isinstance(overrides, Mapping) else map(_assignment, overrides)
    for path, value in pairs:
        keys = path.strip().split(".")
        values = {**values, keys[0]: _with(values.get(keys[0]), keys[1:], value, path)}
        if lines is not None:
            for known in [known for known in lines if list(known[: len(keys)]) == keys]:
                del lines[known]
            lines[tuple(keys)] = 0
    return values


def _assignment(item: str) -> tuple[str, object]:
    """Path and value of ``a.b=c``. Raises ConfigError."""
    path, equals, text = item.partition("=")
    if not equals or not path.strip():
        raise ConfigError("--set", [Problem(item, "is not of the form field.subfield=value")])
    try:
        value, _, problems = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError("--set", [Problem(path, f"has a value that is not YAML: {text[:200]!r}")]) from error
    if problems:
        raise ConfigError("--set", problems)
    return path, value


def plain(values: Mapping[str, object], where: str) -> dict[str, object]:
    """Fields that a program gives, as a file would have them; kinds of encoder by their names. Raises ConfigError."""
    return {str(key): _plain(value, f"{where}.{key}" if where else str(key), 1) for key, value in values.items()}


def _plain(value: object, path: str, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise ConfigError("the run", [Problem(path.partition(".")[0], "is nested too deeply")])
    if value is None or isinstance(value, (bool, int, float, str, dt.date)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{path}.{key}", depth + 1) for key, inner in value.items()}
    if isinstance(value, EncoderKind):
        return name_of(value) if path.endswith(".kind") else {"kind": name_of(value)}
    if isinstance(value, (list, tuple, range)):
        return [_plain(inner, f"{path}.{index}", depth + 1) for index, inner in enumerate(value)]
    text = f"is a {type(value).__name__}; give texts, numbers, lists and mappings"
    raise ConfigError("the run", [Problem(path, text)])


def _with(values: object, keys: list[str], value: object, path: str) -> object:
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(values, list):
        if not key.isdigit() or int(key) >= len(values):
            raise ConfigError("--set", [Problem(path, f"{key!r} is not an index below {len(values)}")])
        return [_with(old, rest, value, path) if i == int(key) else old for i, old in enumerate(values)]
    old = values if isinstance(values, dict) else {}
    return {**old, key: _with(old.get(key), rest, value, path)}


def valid_names(wrong: str, names: list[str]) -> str:
    """A hint for an error: the closest name, then all of them."""
    if not names:
        return "it takes no options"
    close = difflib.get_close_matches(wrong, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid: {', '.join(names)}"


def validate(model: type[Model], values: dict[str, object], file: str, lines: Lines | None = None) -> Model:
    """``values`` as ``model``. Raises ConfigError with every problem found."""
    try:
        result = model.model_validate(values)
    except pydantic.ValidationError as error:
        found: dict[tuple[str, ...], list[str]] = {}
        for item in error.errors(include_url=False):
            path = _path(item["loc"], values, missing=item["type"] == "missing")
            found.setdefault(path, []).append(_message(item, model, path))
        problems = [Problem(".".join(path), ", or ".join(dict.fromkeys(told))) for path, told in found.items()]
        raise ConfigError(file, [_placed(problem, lines or {}) for problem in problems]) from error
    if conflicts := result.conflicts():
        raise ConfigError(file, [_placed(problem, lines or {}) for problem in conflicts])
    return result


def _placed(problem: Problem, lines: Lines) -> Problem:
    """With the line of its field, or of the nearest one around it."""
    path = tuple(problem.path.split("."))
    line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), 0)
    return Problem(problem.path or "file", problem.message, line)


def _path(loc: Sequence[str | int], values: object, *, missing: bool) -> tuple[str, ...]:
    """``loc`` without what pydantic adds to it: the names of a union's branches, and ``[key]``."""
    path: list[str] = []
    for key in loc:
        inside: object = dict(enumerate(values)) if isinstance(values, list) else values
        if isinstance(inside, dict) and key in inside:
            values = inside[key]
        elif not (missing and key == loc[-1]):
            continue
        path.append(str(key))
    return tuple(path)


def _message(item: ErrorDetails, model: type[pydantic.BaseModel], path: tuple[str, ...]) -> str:
    message: str = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return f"unknown field; {valid_names(path[-1], _fields(model, item['loc'][:-1]))}"
    if item["type"] == "missing":
        return "is required"
    if item["type"] == "value_error":
        return message
    if item["type"] == "list_type":
        one = item["input"] if isinstance(item["input"], int | float | str) else "…"
        return f"should be a list, one value after the other in brackets, such as [{one}, {one}], not {item['input']!r}"
    if item["type"] in {"model_type", "dict_type"}:
        message = "Input should be a mapping of fields"
    told = message.removeprefix("Input should").strip()
    own = "" if isinstance(item["input"], dict | list) else f", not {item['input']!r}"
    return f"should {told}{own}" if told != message else f"{message[0].lower()}{message[1:]}{own}"


def _fields(model: type[pydantic.BaseModel], loc: Sequence[str | int]) -> list[str]:
    """Names of the fields at ``loc``: those of the innermost model on the way there; of a union, the one it names."""
    among: list[type[pydantic.BaseModel]] = []
    for key in loc:
        if key in model.model_fields:
            among = list(_models(model.model_fields[str(key)].annotation)) or [model]
            model = among[0]
        model = next((one for one in among if one.__name__ == key), model)
    return list(model.model_fields)


def _models(annotation: object) -> Iterator[type[pydantic.BaseModel]]:
    """The models in a field's type, such as ``dict[str, EncoderConfig]`` or ``LeanConfig | None``."""
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, Values):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
