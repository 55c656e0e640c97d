"""The verbs that control a run which is going on: pause, resume and stop it, leave devices out and take them in."""

from __future__ import annotations

import contextlib
from pathlib import Path

import typer

from edgefl.api.runs import find_run, read_run
from edgefl.cli.options import show
from edgefl.errors import ControlError
from edgefl.groups import group_of
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
    """Leave a device out of a run, or those of a group."""
    for name in _devices(run, device, runs, left_out=False):
        status = ask_run("leave_out", run, runs, name)
        way_back = f"`edgefl devices restore {status['run']} {device}` takes it in"
        _tell(form, status, f"{name} is left out of {status['run']}; {way_back}")


def restore(run: str, device: str, runs: Path, form: str) -> None:
    """Take a device in again, or those of a group."""
    for name in _devices(run, device, runs, left_out=True):
        status = ask_run("take_in", run, runs, name)
        later = "" if status["devices"][name]["online"] else ", and asked once it is connected"
        _tell(form, status, f"{name} is taken in again{later}")


def _devices(run: str, named: str, runs: Path, *, left_out: bool) -> list[str]:
    """The device that is named, or the run's devices of a group which are (not) ``left_out``. Raises ControlError."""
    group = group_of(named)
    if not group:
        return [named]
    known, groups = ask_run("status", run, runs)["devices"], read_run(find_run(run, runs)).groups
    found = [name for name in groups.get(group, ()) if name in known and bool(known[name]["left_out_by"]) == left_out]
    if not found:
        state = "left out" if left_out else "to leave out"
        text = f"no device of group {group!r} is {state} in this run"
        raise ControlError(text, remedy=f"Groups of the run: {', '.join(groups) or 'none'}.")
    return found


def _tell(form: str, status: Record, text: str) -> None:
    if form == "json":
        show(form, status)
    else:
        typer.echo(text)
