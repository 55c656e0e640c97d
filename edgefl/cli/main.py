"""The ``edgefl`` command: a closed table of verbs, each loaded only when it is used, so that help is quick."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn, cast

import typer
import typer.core
import typer.main

from edgefl.api.needs import NEEDS
from edgefl.console import fit_outputs, guarded, show_version

#: verb -> (where its function is, one line of help). The order is that of ``edgefl --help``.
VERBS: dict[str, tuple[str, str]] = {
    "init": ("edgefl.cli.init:command", "Look at data of your own, and write its manifest and a run file."),
    "run": ("edgefl.cli.run:run_command", "Train: start a broker, a coordinator and a local fleet from one run file."),
    "study": (
        "edgefl.cli.study:command",
        "Train a grid of settings and seeds, several cells at once: one table of all.",
    ),
    "simulate": ("edgefl.cli.simulate:command", "Train a fleet of any size in one process, and forecast a real one."),
    "plan": ("edgefl.cli.run:plan_command", "Predict what each stage costs on each device, and who can train it."),
    "recipes": ("edgefl.cli.show:recipes_command", "List the methods there are, or explain one slot by slot."),
    "runs": ("edgefl.cli.show:runs_command", "List the runs in ./runs."),
    "report": ("edgefl.cli.show:report_command", "Show a run: accuracy, every device's bill, refusals, rounds."),
    "compare": ("edgefl.cli.compare:command", "Show runs side by side: scores, memory, FLOPs, bytes, what differs."),
    "devices": ("edgefl.cli.devices:devices_command", "Show who is there, and what each device may and did spend."),
    "logs": ("edgefl.cli.logs:command", "Show a run's last events and logs, or a device's last log lines."),
    "export": ("edgefl.cli.bundles:command", "Write a run's model as ONNX bundles, checked against torch."),
    "data": ("edgefl.cli.run:data_command", "Show how a run's data is shared out to devices, and write the shares."),
    "data fetch": ("edgefl.cli.fetch:command", "Download a public data set, check it, and convert it for a run."),
    "predict": ("edgefl.cli.predict:command", "Run an exported bundle on a file."),
    "benchmark": ("edgefl.cli.benchmark:command", "Measure a bundle here: accuracy, time and memory in one table."),
    "serve": ("edgefl.cli.serve:command", "Answer requests with an exported bundle, over HTTP and MQTT."),
    "doctor": ("edgefl.cli.show:doctor_command", "Check this machine and, if asked, the connection to a broker."),
}
HELP = """
Train multimodal models across small devices inside each device's real budget, and see what every device spent.

Start with `edgefl run RUN.yaml`, then `edgefl report latest`. RUN is a run's id, the beginning of one, or `latest`.
"""
EPILOG = (
    "Add --debug anywhere to see where an error happened. Exit codes: 0 done, 1 unexpected or a check failed, 2 usage, "
    "10 configuration, 11 data, 12 model, 13 budget, 14 broker, 15 disk, 16 protocol, 17 run, 18 export, 19 package "
    "missing, 20 worker, 21 identity, 22 a request that a run does not meet, 130 interrupted."
)


class LazyGroup(typer.core.TyperGroup):
    """Lists stand-ins with the verbs' one line of help; imports a verb's module only when that verb is called."""

    debug = False

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb itself, loaded now."""
        name, stand_in, rest = super().resolve_command(ctx, with_page(verb_first(args)))
        return name, None if stand_in is None else load(str(name), debug=self.debug), rest


def verb_first(words: list[str]) -> list[str]:
    """The words of a command line with a verb of two words, such as ``data fetch``, as one."""
    pair = " ".join(words[:2])
    return [pair, *words[2:]] if pair in VERBS else words


def with_page(words: list[str]) -> list[str]:
    """The words of a command line, with an empty value where ``--html`` names no file.

    Only a word that ends in .html, or ``-``, is its file: in ``report --html latest``, latest is the run.
    """
    given: list[str] = []
    for word, after in zip(words, [*words[1:], ""], strict=True):
        given.append(word)
        if word == "--html" and after != "-" and not after.endswith(".html"):
            given.append("")
    return given


def load(verb: str, *, debug: bool = False) -> object:
    """The verb's command, its errors turned into words and exit codes. Imports the verb's module."""
    module, _, name = VERBS[verb][0].partition(":")
    function: Callable[..., object] = getattr(importlib.import_module(module), name)

    @functools.wraps(function)
    def body(*args: object, **kwargs: object) -> object:
        with guarded(debug, NEEDS.get(verb, ())):
            return function(*args, **kwargs)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(verb, help=inspect.getdoc(function), epilog=EPILOG)(body)
    return typer.main.get_command(app)


def _options(
    debug: bool = typer.Option(False, "--debug", help="Show where an error happened (may stand anywhere)."),
    version: bool = typer.Option(
        False, "--version", callback=show_version("edgefl"), is_eager=True, help="Show the version."
    ),
) -> None:
    """Options of the command itself; both are handled before a verb is reached."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the console script. Ends the program with an exit code."""
    fit_outputs()
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given[: given.index("--")] if "--" in given else given
    debug = "--debug" in own
    kept = [word for word in own if word != "--debug"] + given[len(own) :]
    app = typer.Typer(cls=LazyGroup, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback(help=HELP)(_options)
    with guarded(debug):
        group = cast(LazyGroup, typer.main.get_command(app))
        group.debug = debug
        group.commands = {verb: typer.core.TyperCommand(verb, help=text) for verb, (_, text) in VERBS.items()}
        group.main(args=kept, prog_name="edgefl")
    raise SystemExit(0)


if __name__ == "__main__":
    main()
