"""Execution of a queue: run after run over one broker, whatever becomes of each.

Every run of the queue has its directory and its resolved run file from the start; it is begun the way a run goes on
that was killed before its first round.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import msgspec

from coordinator.ledger.database import NoLedgerError
from coordinator.runtime.queue_file import QUEUE, Entry, Queue, edit, read, taken
from coordinator.runtime.start import RUN_FILE, Emit, RunOptions, broker_kept, execute, planned, write_run_file
from edgefl.errors import (
    BrokerError,
    ConfigError,
    ControlError,
    DamagedObjectError,
    EdgeFLError,
    IdentityError,
    MessageSizeError,
    Problem,
    StoreError,
    missing_dependency,
)
from edgefl.report.units import public_url
from edgefl.storage.disk import hold_directory, make_private
from edgefl.transport.address import parse_url

Say = Callable[[str], None]
Show = Callable[[], AbstractContextManager[Emit]]


def execute_queue(files: Sequence[str], options: RunOptions, show: Show, say: Say, tell: Say) -> int:
    """Execute run files one after another, or go on with the queue (``options.resume``); the first failure's exit code.

    A run that fails or is stopped does not keep the next from beginning. Raises EdgeFLError for a faulty run file,
    before the first run, and for a fault that all runs share; KeyboardInterrupt on SIGINT and SIGTERM. ``show``: the
    display of one run; ``tell`` takes one line a run at the end.
    """
    runs = options.directory
    remedy = "`edgefl runs add FILE` appends to it."
    with hold_directory(runs / QUEUE, what="another coordinator works through the queue", remedy=remedy):
        queue = _begun(files, options)
        if not queue.of("running", "waiting"):
            say(f"every run of the queue in {runs} has ended")
            return 0
        wanted = options.broker or queue.broker
        if not wanted and options.identity is None:
            text = "name the URL that the queue was started with (EDGEFL_BROKER): its password is not kept"
            raise ConfigError(QUEUE, [Problem("--broker", text)], remedy="Resume with the options of the start.")
        try:
            with broker_kept(options._replace(broker=wanted or "auto"), runs / QUEUE / "broker", say) as url:
                queue = _worked_through(options._replace(url=url, overrides=()), show, say)
        except KeyboardInterrupt as error:
            way_on = f"Go on with the queue by the same options and --resume {QUEUE}."
            raise KeyboardInterrupt(way_on) from error
        finally:
            for entry in read(runs).entries:
                tell(_sentence(entry, options))
    return next((entry.code for entry in queue.of("failed")), 0)


def add(file: str, options: RunOptions) -> Queue:
    """Check a run file and append its run to the queue; the queue. Raises EdgeFLError."""
    return _admitted([file], options, fresh=False)


def _begun(files: Sequence[str], options: RunOptions) -> Queue:
    queue = read(options.directory)
    if options.resume and (queue.entries or not files):
        if not queue.entries:
            text = f"there is no queue in {options.directory}"
            raise StoreError(text, remedy="Name the run files that shall be executed, in their order.")
        return queue
    if left := queue.of("running", "waiting"):
        text = (
            f"the queue in {options.directory} has {len(left)} run{'' if len(left) == 1 else 's'} that have not ended"
        )
        remedy = f"Go on with them by --resume {QUEUE}; `edgefl runs cancel RUN` takes out one that waits."
        raise StoreError(text, remedy=remedy)
    return _admitted(files, options, fresh=True)


def _admitted(files: Sequence[str], options: RunOptions, *, fresh: bool) -> Queue:
    """The queue with a run of each file behind it, ``fresh``: alone; nothing is left of them when a file is faulty."""
    entries: list[Entry] = []
    before = Queue() if fresh else read(options.directory)
    given = "://" in options.broker if fresh else before.given or (not before.broker and bool(before.entries))
    broker = before.broker
    if fresh and given and not parse_url(options.broker).password:
        broker = options.broker
    if before.identity:
        options = options._replace(identity=Path(before.identity))
    identity = str(options.identity.resolve()) if options.identity is not None else ""
    with contextlib.ExitStack() as undo:
        for file in files:
            with _naming(file):
                plan, named = planned(options._replace(file=file, run="", resume=""), lambda _: None)
                directory = options.directory / plan.run
                undo.callback(shutil.rmtree, directory, ignore_errors=True)
                make_private(directory)
                write_run_file(plan, directory / RUN_FILE)
                named = options.broker or named
                if not given and named not in {"auto", broker or named}:
                    text = f"is {public_url(named)}, and the queue's is {public_url(broker)}: its runs share one"
                    raise ConfigError(file, [Problem("broker", text)], remedy="Name one broker for all: --broker URL.")
            broker = broker if given else broker or named
            entries.append(Entry(plan.run, file))

        def change(queue: Queue) -> Queue:
            return Queue(broker, (*(() if fresh else queue.entries), *entries), given, identity)

        queue = edit(options.directory, change)
        undo.pop_all()
    return queue


@contextlib.contextmanager
def _naming(file: str) -> Iterator[None]:
    try:
        yield
    except EdgeFLError as error:
        if file not in error.message:
            error.message = f"{file}: {error.message}"
        raise


def _worked_through(options: RunOptions, show: Show, say: Say) -> Queue:
    """Execute what waits until nothing does, also what is added meanwhile."""
    while (queue := edit(options.directory, taken)).of("running"):
        entry = queue.of("running")[0]
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # each run's event loop leaves its default behind
        ended = msgspec.structs.asdict(_executed(entry, options, show, say))
        edit(options.directory, partial(Queue.noted, **ended))
    return queue


def _executed(entry: Entry, options: RunOptions, show: Show, say: Say) -> Entry:
    """The entry with the end of its run. Raises what ends the whole queue."""
    say(f"run {entry.run} of the queue: {entry.file}")
    try:
        with show() as emit:
            report = execute(options._replace(resume=entry.run, unless_stopped=True), emit, say)
        return msgspec.structs.replace(entry, status=report.status)
    except ControlError:  # stopped, and killed before the queue had it
        return msgspec.structs.replace(entry, status="stopped")
    except Exception as raised:
        error = raised if isinstance(raised, EdgeFLError) else missing_dependency(raised)
        if error is not None and _is_shared(error):
            raise
        error = error or EdgeFLError(f"{type(raised).__name__}: {raised}")
        say(f"run {entry.run} failed: {error.message}\nwhat to do: {error.remedy}")
        return msgspec.structs.replace(entry, status="failed", code=error.exit_code, error=error.message)


def _is_shared(error: EdgeFLError) -> bool:
    """Whether a fault is of what all runs stand on: broker, identity, disk or database."""
    of_one = isinstance(error, DamagedObjectError | MessageSizeError | NoLedgerError)
    return isinstance(error, BrokerError | IdentityError | StoreError) and not of_one


def _sentence(entry: Entry, options: RunOptions) -> str:
    if entry.status in {"waiting", "cancelled"}:
        return f"run {entry.run} is {entry.status}"
    ends = {"running": "is interrupted", "failed": f"has failed (code {entry.code})"}
    end = ends.get(entry.status, f"is {entry.status}")
    return f"run {entry.run} {end}; see it with: edgefl report {options.directory / entry.run}"
