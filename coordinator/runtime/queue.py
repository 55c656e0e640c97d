"""Execution of a queue: run after run over one broker, whatever becomes of each.

Every run of the queue has its directory and its resolved run file from the start; it is begun the way a run goes on
that was killed before its first round.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import msgspec

from coordinator.ledger.database import NoLedgerError
from coordinator.runtime.queue_file import QUEUE, Entry, Queue, edit, read, taken
from coordinator.runtime.start import (
    RUN_FILE,
    Emit,
    RunOptions,
    Shared,
    broker_kept,
    execute,
    page_kept,
    planned,
    write_run_file,
)
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

#: What a system, and SQLite, says of a disk or of this process, and not of one file.
_BY_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE})
_FULL = ("disk is full", "disk I/O error", "readonly database", "unable to open")

Say = Callable[[str], None]
Show = Callable[[], AbstractContextManager[Emit]]


def execute_queue(files: Sequence[str], options: RunOptions, show: Show, say: Say, tell: Say) -> int:
    """Execute a queue of run files, or resume one; the first failure's exit code.

    ``options.resume``: go on with the queue there is; ``show``: the display of one run; ``tell`` takes a line a run at
    the end. A run that fails or is stopped does not keep the next from beginning. Raises EdgeFLError for a faulty run
    file, before the first run, and for a fault that all runs share; KeyboardInterrupt on SIGINT and SIGTERM.
    """
    runs = options.directory
    remedy = "`edgefl runs add FILE` appends to it."
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with hold_directory(runs / QUEUE, what="another coordinator works through the queue", remedy=remedy):
            queue = _begun(files, options, say)
            if not queue.of("running", "waiting"):
                say(f"every run of the queue in {runs} has ended")
                return 0
            return _executed_all(queue, options, show, say, tell)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"Go on with the queue by the same options and --resume {QUEUE}.") from error


def _executed_all(queue: Queue, options: RunOptions, show: Show, say: Say, tell: Say) -> int:
    """Execute a queue over one broker; the first failure's exit code."""
    if queue.identity and options.identity is None:
        options = options._replace(identity=Path(queue.identity))
    wanted = options.broker or queue.broker
    if not wanted and options.identity is None:
        text = "name the URL that the queue was started with (EDGEFL_BROKER): its password is not kept"
        raise ConfigError(QUEUE, [Problem("--broker", text)], remedy="Resume with the options of the start.")
    place = options.directory / QUEUE / "broker"
    try:
        with (
            broker_kept(options._replace(broker=wanted or "auto"), place, say) as url,
            page_kept(options) as door,
        ):
            shared = Shared(url, door, partial(_waiting, options.directory))
            queue = _worked_through(options._replace(queue=shared, overrides=()), show, say)
    finally:
        for entry in read(options.directory).entries:
            tell(_sentence(entry, options))
    return next((entry.code for entry in queue.of("failed")), 0)


def add(file: str, options: RunOptions) -> Queue:
    """Check a run file and append its run to the queue; the queue. Raises EdgeFLError."""
    return _admitted([file], options, fresh=False)


def _begun(files: Sequence[str], options: RunOptions, say: Say) -> Queue:
    """The present queue, or a new one of these files."""
    queue = read(options.directory)
    if options.resume and not (queue.entries or files):
        text = f"there is no queue in {options.directory}"
        raise StoreError(text, remedy="Name the run files that shall be executed, in their order.")
    left, new = queue.of("running", "waiting"), set(files) - {entry.file for entry in queue.entries}
    if options.resume and (left or not new):  # a unit names its file at each start, also after a reboot
        if unused := sorted(new) if left else files:
            say(f"{', '.join(unused)} is not used: the queue is there already; `edgefl runs add FILE` appends to it")
        return queue
    if left:
        text = (
            f"the queue in {options.directory} has {len(left)} run{'' if len(left) == 1 else 's'} that have not ended"
        )
        remedy = f"Go on with them by --resume {QUEUE}; `edgefl runs cancel RUN` takes one out."
        raise StoreError(text, remedy=remedy)
    return _admitted(files, options, fresh=True)


def _admitted(files: Sequence[str], options: RunOptions, *, fresh: bool) -> Queue:
    """The queue with a run of each file appended.

    ``fresh``: without those that have ended. A faulty file leaves nothing behind.
    """
    entries: list[Entry] = []
    before = Queue() if fresh else read(options.directory)
    given = "://" in options.broker if fresh else before.given
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
            added = queue.of("waiting") if fresh else []  # meanwhile, by a terminal
            return Queue(broker, (*(() if fresh else queue.entries), *entries, *added), given, identity)

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


def _waiting(runs: Path) -> tuple[str, ...]:
    """Runs that wait, for the live page; none while the queue's file cannot be read."""
    try:
        return tuple(entry.run for entry in read(runs).of("waiting"))
    except StoreError:  # the queue itself ends by it
        return ()


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
        if error is not None and _is_shared(error, options.directory / entry.run):
            raise
        if error is None:  # a defect
            say(traceback.format_exc())
            error = EdgeFLError(f"{type(raised).__name__}: {raised}")
        say(f"run {entry.run} failed: {error.message}\nwhat to do: {error.remedy}")
        return msgspec.structs.replace(entry, status="failed", code=error.exit_code, error=error.message)


def _is_shared(error: EdgeFLError, directory: Path) -> bool:
    """True for a fault that all runs share: of broker, identity, disk or database.

    ``directory``: of the run; what is damaged or held in it is the run's own.
    """
    of_one = isinstance(error, DamagedObjectError | MessageSizeError | NoLedgerError)
    if isinstance(error, StoreError) and str(directory) in error.message.partition(": ")[0]:
        cause = error.__cause__
        by_disk = cause.errno in _BY_DISK if isinstance(cause, OSError) else any(map(error.message.count, _FULL))
        of_one = of_one or not by_disk
    return isinstance(error, BrokerError | IdentityError | StoreError) and not of_one


def _sentence(entry: Entry, options: RunOptions) -> str:
    if entry.status in {"waiting", "cancelled"}:
        return f"run {entry.run} is {entry.status}"
    ends = {
        "running": f"is interrupted; `edgefl runs cancel {entry.run}` takes it out",
        "failed": f"has failed (code {entry.code})",
    }
    end = ends.get(entry.status, f"is {entry.status}")
    return f"run {entry.run} {end}: edgefl report {options.directory / entry.run}"
