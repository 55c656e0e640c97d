"""docs/commands.md: every command with its arguments and options, and the exit codes."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from typer import Typer
from typer.models import ArgumentInfo, OptionInfo

from coordinator.cli import app as coordinator
from device_agent.cli import app as agent
from edgefl import errors
from edgefl.cli.main import HELP, VERBS
from edgefl.console import INTERRUPTED
from pages.markdown import GENERATED, flowing, table

WORDS = {str: "text", int: "whole number", float: "number", Path: "path"}


class Parameter(NamedTuple):
    """One argument or option of a command, from its function's signature."""

    info: ArgumentInfo | OptionInfo
    name: str
    kind: Any
    default: Any


def commands() -> Iterator[str]:
    """Lines of the page."""
    yield GENERATED
    yield "# Commands\n"
    yield "Look up here every command with its arguments, options and exit codes, as `--help` says them.\n"
    yield f"## edgefl\n\n{HELP.strip()}\n"
    yield "`--debug` may stand anywhere and shows where an error happened; `--version` shows the version.\n"
    for verb, (where, _) in VERBS.items():
        module, _, function = where.partition(":")
        yield from _command(f"edgefl {verb}", getattr(importlib.import_module(module), function))
    for program, app in (("edgefl-agent", agent), ("edgefl-coordinator", coordinator)):
        about = app.info.help if isinstance(app.info.help, str) else None
        callback = app.registered_callback.callback if app.registered_callback else None
        yield f"## {program}\n\n{about or flowing(callback)}\n"
        yield from _commands_of(program, app)
    yield from _exit_codes()


def _commands_of(name: str, app: Typer) -> Iterator[str]:
    for registered in app.registered_commands:
        if registered.callback is not None:
            word = registered.name or registered.callback.__name__.replace("_", "-")
            yield from _command(f"{name} {word}", registered.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from _commands_of(f"{name} {group.name}", group.typer_instance)


def _command(name: str, function: Callable[..., Any]) -> Iterator[str]:
    parameters = list(_parameters(function))
    arguments = [p for p in parameters if isinstance(p.info, ArgumentInfo)]
    options = [p for p in parameters if isinstance(p.info, OptionInfo)]
    words = [_name(p) if p.default is inspect.Parameter.empty else f"[{_name(p)}]" for p in arguments]
    yield f"### {name}\n"
    yield f"```\n{' '.join([name, *words, *(['[OPTIONS]'] if options else [])])}\n```\n"
    yield (inspect.getdoc(function) or "") + "\n"
    yield from table(
        ("argument or option", "value", "meaning"), [(f"`{_name(p)}`", _kind(p), _help(p)) for p in arguments + options]
    )


def _parameters(function: Callable[..., Any]) -> Iterator[Parameter]:
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if get_origin(hint) is not Annotated:  # a default of None makes it Optional[Annotated[…]] before Python 3.11
            hint = next(option for option in get_args(hint) if get_origin(option) is Annotated)
        kind, *notes = get_args(hint)
        info = next(note for note in notes if isinstance(note, ArgumentInfo | OptionInfo))
        yield Parameter(info, name, _plain(kind), parameter.default)


def _plain(kind: Any) -> Any:
    """The type without ``| None`` and without the list around it."""
    if get_origin(kind) in {Union, types.UnionType}:
        kind = next(option for option in get_args(kind) if option is not type(None))
    return get_args(kind)[0] if get_origin(kind) is list else kind


def _name(parameter: Parameter) -> str:
    if isinstance(parameter.info, ArgumentInfo):
        return str(parameter.info.metavar or parameter.name.upper())
    # In Annotated, the first word of typer.Option("-o", "--out") lands in ``default``.
    words = [word for word in (parameter.info.default, *(parameter.info.param_decls or ())) if _is_word(word)]
    if words:
        return ", ".join(words)
    word = parameter.name.replace("_", "-")
    return f"--{word} / --no-{word}" if parameter.kind is bool else f"--{word}"


def _is_word(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("-")


def _kind(parameter: Parameter) -> str:
    kind = parameter.kind
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return ", ".join(f"`{choice.value}`" for choice in kind)
    if kind is bool:
        return "flag"
    metavar = parameter.info.metavar if isinstance(parameter.info, OptionInfo) else None
    return str(metavar or WORDS[kind])


def _help(parameter: Parameter) -> str:
    told = [parameter.info.help or ""]
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    if default is inspect.Parameter.empty:
        told.append("Required.")
    elif default not in ("", None, False):
        told.append("On by default." if default is True else f"Default: {default}.")
    if parameter.info.envvar:
        told.append(f"Environment: {parameter.info.envvar}.")
    return " ".join(told)


def _exit_codes() -> Iterator[str]:
    yield "## Exit codes\n"
    yield "They never change, so that scripts can rely on them. Every error says what to do; in general:\n"
    rows = [
        ("0", "", "Done.", ""),
        ("1", "", "Something unexpected.", errors.EdgeFLError.remedy),
        ("2", "", "The command line is wrong.", "`--help` shows what is valid."),
    ]
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.EdgeFLError)]
    for kind in sorted(kinds, key=lambda kind: kind.exit_code):
        if kind is not errors.EdgeFLError:
            remedy = "Install the extra that is named." if kind is errors.MissingDependencyError else kind.remedy
            rows.append((str(kind.exit_code), f"`{kind.__name__}`", flowing(kind), remedy))
    rows.append((str(INTERRUPTED), "", "Interrupted by Ctrl-C.", "`--resume RUN` goes on."))
    yield from table(("code", "error", "what happened", "what to do"), rows)
