"""The command ``edgefl-coordinator``: execute a run for the devices of a fleet."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from edgefl.errors import EdgeFLError, missing_dependency
from edgefl.report.console import guarded
from edgefl.report.rows import EventRow

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


FILE = typer.Argument(metavar="RUN.yaml", help="Run file or the name of a shipped one; not needed with --resume.")
BROKER = typer.Option(
    envvar="EDGEFL_BROKER",
    help="mqtt://user:password@host:port, mqtts://…, or auto: start one. Default: what the run file says.",
)
FLEET = typer.Option(help="Name of the fleet; its agents use the same.")
DIRECTORY = typer.Option(help="Where runs are kept, one folder each.")
RUN = typer.Option(metavar="RUN", help="Id of the new run; default: its name, date and time.")
RESUME = typer.Option(metavar="RUN", help="Go on with this run after its last finished round.")
LEDGER = typer.Option(metavar="URL", help="Database of the ledger, such as postgresql://…; default: a file.")
SET = typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the run file: round.quorum=0.8")
EVENTS = typer.Option("--events", help="Print events as JSON lines instead of a display.")
DEBUG = typer.Option("--debug", help="Show tracebacks.")


@app.callback()
def commands() -> None:
    """Coordinate a fleet: offer work to devices, collect their updates, keep the ledger.

    Needs no GPU; what needs torch runs in a worker process.
    """


@app.command("run")
def run_command(
    file: Annotated[str, FILE] = "",
    broker: Annotated[str, BROKER] = "",
    fleet: Annotated[str, FLEET] = "default",
    directory: Annotated[Path, DIRECTORY] = Path("runs"),
    run: Annotated[str, RUN] = "",
    resume: Annotated[str, RESUME] = "",
    ledger: Annotated[str, LEDGER] = "",
    overrides: Annotated[list[str] | None, SET] = None,
    events: Annotated[bool, EVENTS] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Execute a run: wait for devices, train stage by stage, evaluate, report.

    Agents connect to the same broker with `edgefl-agent run --broker URL --fleet NAME`. Ctrl-C stops the run;
    --resume RUN goes on after its last finished round.
    """
    with guarded(debug):
        with showing(events) as emit:
            from coordinator.start import execute  # inside: that a package is missing is told as an event, too

            report = execute(
                file,
                run=run,
                broker=broker,
                fleet=fleet,
                directory=directory,
                resume=resume,
                overrides=overrides or [],
                ledger=ledger,
                emit=emit,
                say=lambda text: typer.echo(text, err=True),
            )
        if not events:
            typer.echo(f"run {report.run} is {report.status}; see it with: edgefl report {directory / report.run}")


@contextlib.contextmanager
def showing(events: bool) -> Iterator[Callable[[EventRow], None]]:
    """Something that shows events: JSON lines on stdout, or the live display."""
    if events:
        import msgspec

        told: set[str] = set()

        def write(row: EventRow) -> None:
            told.add(row.kind)
            try:
                sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
                sys.stdout.flush()
            except BrokenPipeError as error:  # whoever watched is gone: stop, so that the run can be resumed
                sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - the interpreter flushes it at its end
                raise KeyboardInterrupt from error

        try:
            yield write
        except Exception as error:
            known = error if isinstance(error, EdgeFLError) else missing_dependency(error)
            if known is not None and "run_failed" not in told:  # not begun; whoever watches has only the events
                write(EventRow(time.time(), "run_failed", data={"text": known.message, "remedy": known.remedy}))
            raise
        return
    from edgefl.report.live import LiveView

    with LiveView() as view:
        yield view.feed


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
