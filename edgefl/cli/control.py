"""The verbs that control a run which is going on: pause, resume and stop it, leave devices out and take them in."""

from __future__ import annotations

import contextlib
from pathlib import Path

import typer

from edgefl.api.runs import find_run, read_run
from edgefl.cli.options import show
from edgefl.errors import ControlError
from edgefl.report.grid import Record
from edgefl.storage.disk import is_held, ledger_of


def ask_run(verb: str, run: str, runs: Path, device: str = "", lines: int = 0, after: int = 0) -> Record:
    """The answer of a run's coordinator to a request, most often its status. Raises RunError, ControlError."""
    import msgspec

    from coordinator.runtime.control_socket import Ask, request

    directory = find_run(run, runs)
    if not is_held(directory):
        text = f"run {directory.name} is not running"
        raise ControlError(text, remedy="`edgefl runs` says how it ended; --resume goes on with one that is not done.")
    status: Record = msgspec.json.decode(request(directory, Ask(verb, device=device, lines=lines, after=after)))
    return status


def standing(directory: Path) -> Record:
    """Where the run stands, by its coordinator; {} where none answers: then there is the ledger, up to a minute old."""
    import msgspec

    from coordinator.runtime.control_socket import Ask, request

    if is_held(directory):
        with contextlib.suppress(ControlError):
            status: Record = msgspec.json.decode(request(directory, Ask("status")))
            return status
    return {}


def pause(run: str, runs: Path, form: str) -> None:
    """Pause a run, and say when it will be."""
    status = ask_run("pause", run, runs)
    name, later = status["run"], status["phase"] != "paused"
    when = f"pauses when round {status['round']} of stage {status['stage']} is over" if later else "is paused"
    _tell(form, status, f"{name} {when}; `edgefl runs resume {name}` goes on")


def resume(run: str, runs: Path, form: str) -> None:
    """End a run's pause; of one that is stopped, and that no coordinator holds, the stop."""
    directory = find_run(run, runs)
    if not is_held(directory) and (report := read_run(directory)).status == "stopped":
        from coordinator.ledger.ledger import Ledger

        with Ledger(ledger_of(directory), create=False) as ledger:
            ledger.undo_stop(report.run)
        text = f"{report.run} is not stopped any more: its unit goes on with it when that is started, as --resume does"
        _tell(form, {"run": report.run, "phase": "interrupted"}, text)
        return
    status = ask_run("resume", run, runs)
    _tell(form, status, f"{status['run']} goes on")


def stop(run: str, runs: Path, form: str) -> None:
    """Stop a run."""
    status = ask_run("stop", run, runs)
    _tell(form, status, f"{status['run']} is stopped; --resume {status['run']} goes on, from the same round")


def drop(run: str, device: str, runs: Path, form: str) -> None:
    """Leave a device out of a run."""
    status = ask_run("leave_out", run, runs, device)
    name = status["run"]
    _tell(form, status, f"{device} is left out of {name}; `edgefl devices restore {name} {device}` takes it in")


def restore(run: str, device: str, runs: Path, form: str) -> None:
    """Take a device in again."""
    status = ask_run("take_in", run, runs, device)
    known = status["devices"][device]
    _tell(form, status, f"{device} is taken in again" + ("" if known["online"] else ", and asked once it is connected"))


def _tell(form: str, status: Record, text: str) -> None:
    if form == "json":
        show(form, status)
    else:
        typer.echo(text)
