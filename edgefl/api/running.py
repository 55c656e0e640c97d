"""A run in local mode from the file to bundles and page: ``edgefl run`` and ``edgefl.run``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from edgefl.api.export_run import export_run
from edgefl.api.given_data import FOLDER, Column, Given, GivenData, merged, with_data
from edgefl.api.local_run import Feed, LocalOptions, LocalRun
from edgefl.api.needs import explained
from edgefl.api.results import Report, Run
from edgefl.api.runs import PAGE, RUNS, priced, read_run, referenced, write_file
from edgefl.config.profiles import RunSource
from edgefl.config.yaml_files import Overrides
from edgefl.encoder_kinds import encoder_kind
from edgefl.models.spec import EncoderSpec

Begin = Callable[[], None]
T = TypeVar("T")


class Made(NamedTuple):
    """Products of a finished run: ONNX bundles, and the page. ``say`` takes the export's progress in words."""

    export: bool = True
    page: bool = True
    say: Callable[[str], None] = lambda _: None


def carry_out(options: LocalOptions, feed: Feed, made: Made, begin: Begin) -> Run:
    """Train, export and write the page. ``feed`` takes the run's events.

    ``begin`` is called in the event loop before anything starts. Raises EdgeFLError; KeyboardInterrupt, with the way on
    as its text, when the run was cancelled.
    """

    def finish(directory: Path) -> None:
        referenced(read_run(directory), directory)  # a live page shows it while it is open
        if made.export:
            export_run(directory, say=made.say)

    def check(encoders: Mapping[str, EncoderSpec]) -> None:
        if made.export and any(encoder_kind(one.kind).states for one in encoders.values()):
            from edgefl.export.rehearsal import rehearse

            rehearse(encoders)

    local = LocalRun(options, feed, finish, check)
    try:
        asyncio.run(_train(local, begin))
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        raise KeyboardInterrupt(local.way_on()) from error
    report = referenced(read_run(local.directory), local.directory)
    if made.page:
        from edgefl.report.writers import to_html

        report = priced(report, local.directory)
        write_file(local.directory / PAGE, to_html(report))
    return Run(local.directory, Report(report, local.directory))


async def _train(local: LocalRun, begin: Begin) -> None:
    begin()
    await local.train()


def in_thread(work: Callable[[Begin], T]) -> T:
    """The result of ``work``, carried out in a thread of its own: the caller's may have an event loop, as notebooks do.

    ``work`` takes a callback for its event loop. Ctrl-C in the caller's thread cancels the task there.
    """
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []
    interrupted = False

    def begin() -> None:
        tasks.append((asyncio.get_running_loop(), asyncio.current_task()))

    with ThreadPoolExecutor(1, "edgefl-run") as pool:
        future = pool.submit(work, begin)
        while True:
            try:
                result = future.result()
            except KeyboardInterrupt:
                if future.done():
                    raise
                interrupted = True
                for loop, task in tasks:
                    if task is not None and not loop.is_closed():
                        loop.call_soon_threadsafe(task.cancel)
                continue
            if interrupted:  # too late for the run, which is done
                raise KeyboardInterrupt
            return result


def run(
    file: RunSource | None = None,
    *,
    data: GivenData = None,
    labels: Column | None = None,
    groups: Column | None = None,
    overrides: Overrides = (),
    directory: str | Path = RUNS,
    resume: str = "",
    on_event: Feed | None = None,
    trainers: int = 0,
    in_process: bool = False,
    workers: int = 0,
    joint_steps: bool = False,
    export: bool = True,
    page: bool = True,
) -> Run:
    """Train: a broker, a coordinator and a local fleet from one run file, each a process of its own. Prints nothing.

    ``file``: a run file by path, the name of a shipped one, or its fields as a mapping. ``data``: samples in place of
    its source, with ``labels`` and ``groups`` [N] or their columns; without a file one is drafted, as `edgefl init`
    does (docs/python.md). ``overrides``: fields in the file's place, ``{"training.epochs": 3}`` or as
    ``--set`` has them. ``directory``: where the run's own folder is made.
    ``resume``: the id of a run in it to go on with. ``on_event`` takes every event in order, in another thread than the
    caller's; an error that it raises ends the run. ``trainers``: processes that all devices share, 0: one a device.
    ``in_process``: all of it in this process instead, without a broker: the same result for less (docs/studies.md);
    ``workers``: processes that train its devices then, 0: this one does. The result is the same. ``joint_steps``: the
    devices of a round take their training steps together there, where a trial finds that faster; equal to rounding.
    ``export``, ``page``: write ONNX bundles and report.html at the end.

    Returns when the run has ended. Ctrl-C ends its processes and raises KeyboardInterrupt, whose text says how to go
    on. Raises EdgeFLError, whose ``remedy`` is the way out: ConfigError and DataError before anything starts, RunError
    or the failing program's own error later.
    """
    file, fields = with_data(file, Given(data, labels, groups), Path(directory) / FOLDER)
    overrides = merged(fields, overrides)
    options = LocalOptions(file, overrides, Path(directory), resume=resume, trainers=trainers, in_process=in_process)
    options = options._replace(workers=workers, joint_steps=joint_steps)
    return carried_out(options, on_event or (lambda _: None), Made(export, page))


@explained("run")
def carried_out(options: LocalOptions, on_event: Feed, made: Made) -> Run:
    """The finished run, whose event loop is in a thread of its own."""

    return in_thread(lambda begin: carry_out(options, on_event, made, begin))
