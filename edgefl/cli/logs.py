"""The verb logs: a run's events and its programs' logs, or a device's last log lines, asked for in a running run."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import typer

from edgefl.api.runs import RUNS, find_run
from edgefl.cli.control import ask_run
from edgefl.cli.options import Format, RunArgument, RunsOption
from edgefl.console import safe_text
from edgefl.protocol.messages import MOST_LOG_LINES
from edgefl.report.events import LiveState
from edgefl.run_records import EventRow
from edgefl.storage.disk import EVENTS, is_held

#: Programs of a run that write a log beside its events.
PROGRAMS = ("coordinator", "evaluator")
#: How often is looked for more; a device is asked as often.
LOOK_S = 2.0
#: Events shown at a look, should a run have had so many since the one before.
MOST_EVENTS = 1000


def command(
    run: RunArgument = "latest",
    device: Annotated[str, typer.Argument(help="A device of the run; without: the run's own events and logs.")] = "",
    runs: RunsOption = RUNS,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=200, help="How many of the last lines.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until the run ends.")] = False,
    format: Format = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """Show the last events of a run and what its coordinator and evaluator have logged; or a device's last log lines.

    A device is asked over MQTT while the run goes on; one started with --no-logs refuses, and a release before this one
    does not answer (exit code 22). Of a local run that has ended, the device's log is read from RUN's logs folder.

    Examples: edgefl logs latest --follow · edgefl logs latest cam-01 --lines 50
    """
    directory = find_run(run, runs)
    if not device:
        for name in PROGRAMS if format == "terminal" else ():
            _print_file(directory / "logs" / f"{name}.log", lines)
        with (directory / EVENTS).open("rb") as file:
            _print_events(file, lines, form=format)
            while follow and is_held(directory):
                time.sleep(LOOK_S)
                _print_events(file, MOST_EVENTS, form=format)
        return
    log = directory / "logs" / f"{device}.log"
    if not is_held(directory) and Path(device).name == device and log.is_file():
        _print_file(log, lines)
        return
    after = 0
    while True:
        found = ask_run("logs", run, runs, device, lines=lines, after=after)
        for line in [msgspec.json.encode(found).decode()] if format == "json" else found["lines"]:
            typer.echo(safe_text(line))
        time.sleep(LOOK_S if follow else 0.0)
        if not follow or not is_held(directory):
            return
        after, lines = found["count"], MOST_LOG_LINES


def _print_events(file: BinaryIO, lines: int, *, form: str) -> None:
    """The last of the events that the file has more of, each as a line of words or as it is."""
    state, found = LiveState(), deque[str](maxlen=lines)
    for raw in file:
        if not raw.endswith(b"\n"):  # it is being written
            file.seek(-len(raw), os.SEEK_CUR)
            break
        event = msgspec.json.decode(raw, type=EventRow)
        words = raw.decode().rstrip("\n") if form == "json" else state.apply(event)
        if words is not None:
            clock = "" if form == "json" else time.strftime("%H:%M:%S  ", time.localtime(event.at))
            found.append("\n".join(clock + safe_text(one) for one in words.split("\n")))
    for text in found:
        typer.echo(text)


def _print_file(file: Path, lines: int) -> None:
    if file.is_file():
        with file.open(encoding="utf-8", errors="replace") as opened:
            last = deque(opened, maxlen=lines)
        for line in [f"{file}:\n", *(f"  {one}" for one in last)] if last else []:
            typer.echo(safe_text(line.rstrip("\n")))
