"""The command ``edgefl-coordinator``: execute a run for the devices of a fleet."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from coordinator.fleet_commands import enroll_command, enrollments_command, init_command, rename_command
from coordinator.group_commands import app as group_app
from coordinator.host_commands import app as host_app
from coordinator.options import DEBUG, IDENTITY
from coordinator.runtime.queue_file import QUEUE
from edgefl.console import fit_outputs, guarded, say, show_version, write_data
from edgefl.errors import EdgeFLError, StoreError, missing_dependency
from edgefl.log_lines import line_writer
from edgefl.run_records import EventRow
from edgefl.storage.disk import ledger_file

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


FILES = typer.Argument(
    metavar="RUN.yaml",
    help="Run file or the name of a shipped one; several are executed one after another. Not needed with --resume.",
)
BROKER = typer.Option(
    envvar="EDGEFL_BROKER",
    help="mqtt://user:password@host:port, mqtts://…, or auto: start one. Default: what the run file says.",
)
FLEET = typer.Option(help="Name of the fleet; its agents use the same. Default: the identity's, else default.")
INSECURE = typer.Option("--insecure", envvar="EDGEFL_INSECURE", help="Accept a broker elsewhere without TLS.")
DIRECTORY = typer.Option(help="Where runs are kept, one folder each.")
RUN = typer.Option("--run", metavar="RUN", help="Id of the new run; default: its name, date and time.")
RESUME = typer.Option(metavar="RUN", help="Go on with this run where it stopped; queue: with the queue.")
UNLESS_STOPPED = typer.Option("--unless-stopped", help="With --resume: not if its operator has stopped it (code 22).")
LEDGER = typer.Option(metavar="URL", help="Database of the ledger, such as postgresql://…; default: a file.")
SET = typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the run file: round.quorum=0.8")
LOG_FORMAT = typer.Option(
    metavar="text|json", help="Log lines on stderr instead of a display: key=value, or one JSON object an event."
)
TRACK = typer.Option(
    "--track", metavar="KIND", help="Write scalars: tensorboard[:DIR] or mlflow[:URI]; in the run's folder. Repeatable."
)
EVENTS = typer.Option("--events", help="Print events as JSON lines instead of a display.")
WEB = typer.Option("--web", help="Show the run on a page while it goes on: open the address that is printed.")
WEB_AT = typer.Option(metavar="HOST:PORT", help="Where that page is; elsewhere than on this machine, by a link only.")
WEB_CONTROL = typer.Option("--web-control", help="Let the page pause, resume and stop the run and leave devices out.")
OBJECTS_AT = typer.Option(
    metavar="HOST:PORT", help="Large parts go by HTTP past the broker: this server, as devices dial it. Default: off."
)
VERBOSE = typer.Option("--verbose", "-v", help="Show every event with its figures, not one line a round.")
VERSION = typer.Option(
    "--version", callback=show_version("edgefl-coordinator"), is_eager=True, help="Show the version."
)


@app.callback()
def commands(version: Annotated[bool, VERSION] = False) -> None:
    """Coordinate a fleet: offer work to devices, collect their updates, keep the ledger.

    Needs no GPU; what needs torch runs in a worker process.
    """


@app.command("run")
def run_command(
    files: Annotated[list[str] | None, FILES] = None,
    broker: Annotated[str, BROKER] = "",
    fleet: Annotated[str, FLEET] = "",
    directory: Annotated[Path, DIRECTORY] = Path("runs"),
    run: Annotated[str, RUN] = "",
    resume: Annotated[str, RESUME] = "",
    ledger: Annotated[str, LEDGER] = "",
    overrides: Annotated[list[str] | None, SET] = None,
    identity: Annotated[Path | None, IDENTITY] = None,
    insecure: Annotated[bool, INSECURE] = False,
    web: Annotated[bool, WEB] = False,
    web_at: Annotated[str, WEB_AT] = "",
    web_control: Annotated[bool, WEB_CONTROL] = False,
    objects_at: Annotated[str, OBJECTS_AT] = "",
    events: Annotated[bool, EVENTS] = False,
    log_format: Annotated[Literal["text", "json"] | None, LOG_FORMAT] = None,
    track: Annotated[list[str] | None, TRACK] = None,
    unless_stopped: Annotated[bool, UNLESS_STOPPED] = False,
    verbose: Annotated[bool, VERBOSE] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Execute a run: wait for devices, train stage by stage, evaluate, report.

    Agents connect to the same broker with `edgefl-agent run --broker URL --fleet NAME`. Ctrl-C stops the run;
    --resume RUN goes on where it stopped.

    Several run files are a queue, whose runs begin one after another for the same agents; one that fails or is stopped
    does not keep the next from beginning. `edgefl runs queue` shows it, --resume queue goes on with it after an end.
    The exit code is that of the first run that failed.
    """
    named = files or []
    queued = len(named) > 1 or (resume == QUEUE and ledger_file(directory / QUEUE) is None)
    if run and (queued or run == QUEUE):
        raise typer.BadParameter(
            "runs of the queue are named after their files, and none is `queue`", param_hint="--run"
        )
    log = line_writer(log_format, program="coordinator") if log_format else None
    with guarded(debug, tell=log if log_format == "json" else None):
        show = partial(showing, events, silent=log is not None, verbose=verbose)
        tell = (lambda text: log("notice", text=text)) if log else say
        with contextlib.nullcontext() if queued else show() as emit:
            from coordinator.runtime.start import RunOptions, execute  # here: a missing package is an event too

            page = web_at if web or web_at or web_control else None
            options = RunOptions(
                "" if queued else "".join(named),
                run,
                resume,
                broker,
                fleet,
                directory,
                overrides or (),
                ledger,
                identity,
                insecure,
                page,
                web_control,
                log,
                track or (),
                unless_stopped,
                objects_at=objects_at,
            )
            if emit is None:
                from coordinator.runtime.queue import execute_queue

                raise typer.Exit(execute_queue(named, options, show, tell, tell if events or log else typer.echo))
            report = execute(options, emit, tell)
        if not events and log is None:
            typer.echo(f"run {report.run} is {report.status}: edgefl report {directory / report.run}")


app.add_typer(host_app, name="host")
app.add_typer(group_app, name="group")
app.command("init")(init_command)
app.command("enroll")(enroll_command)
app.command("rename")(rename_command)
app.command("enrollments")(enrollments_command)


@app.command("backup")
def backup_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id; not needed with --all.")] = "",
    out: Annotated[
        Path, typer.Option(help="File to write; one of this name is replaced when the copy is whole.")
    ] = Path("edgefl-backup.tar"),
    every: Annotated[bool, typer.Option("--all", help="All runs there are.")] = False,
    directory: Annotated[Path, DIRECTORY] = Path("runs"),
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Copy runs into one file, also while they go on: ledger, model, shares, bundles. Not the fleet's identity.

    Example: edgefl-coordinator backup --all --out /mnt/backup/runs.tar
    """
    with guarded(debug):
        from coordinator.runtime.backup import back_up

        if bool(run) == every:
            raise typer.BadParameter("name a run, or --all", param_hint="RUN")
        there = sorted(path.parent for path in map(ledger_file, directory.glob("*")) if path is not None)
        chosen = [path for path in there if every or path.name == run]
        if not chosen:
            known = ", ".join(path.name for path in there) or "none"
            raise StoreError(f"there is no run {run!r} in {directory}", remedy=f"Runs there are: {known}.")
        made = back_up(chosen, out)
        for path in chosen:
            if str(path.resolve()) not in made.runs.values():
                say(f"{path.name} has not begun: there is nothing to copy of it")
        say(f"{', '.join(made.runs)}: {len(made.files)} files, {sum(one.size for one in made.files.values())} bytes")


@app.command("restore")
def restore_command(
    file: Annotated[Path, typer.Argument(help="A file that `backup` has written.")],
    into: Annotated[Path, typer.Option(help="Where runs are kept; each gets its folder.")] = Path("runs"),
    ledger: Annotated[str, LEDGER] = "",
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Write the runs of a copy, after all of it was read and found right. `run --resume RUN` goes on with one.

    Example: edgefl-coordinator restore /mnt/backup/runs.tar --into runs
    """
    with guarded(debug):
        from coordinator.runtime.restore import restore

        for run in restore(file, into, ledger).runs:
            typer.echo(into / run)


@contextlib.contextmanager
def showing(events: bool, *, silent: bool = False, verbose: bool = False) -> Iterator[Callable[[EventRow], None]]:
    """Something that shows events: JSON lines on stdout, or the live display; nothing if it is to be ``silent``."""
    if events:
        import msgspec

        told: set[str] = set()

        def write(row: EventRow) -> None:
            told.add(row.kind)
            try:
                write_data(msgspec.json.encode(row).decode() + "\n")
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
    if silent:
        yield lambda _: None
        return
    from edgefl.report.live import LiveView

    with LiveView(verbose=verbose) as view:
        yield view.feed


def main() -> None:
    """The console script."""
    fit_outputs()
    app()


if __name__ == "__main__":
    main()
