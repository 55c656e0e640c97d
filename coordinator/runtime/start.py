"""Start of a run from the command line's options: run file, test set, directory, broker."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from coordinator.ledger.ledger import Ledger
from coordinator.runtime.environment import Environment, Watch
from coordinator.runtime.observers import logged, tracked
from coordinator.runtime.runner import run as run_plan
from edgefl.config.profiles import RunSource, load_run, source_name
from edgefl.config.settings import RunConfig
from edgefl.data.dataset import Dataset
from edgefl.data.hold_out import hold_out, split_warnings
from edgefl.data.sources import Source, as_test, has_manifest, load, load_pair
from edgefl.errors import ConfigError, ControlError, IdentityError, Problem, StoreError
from edgefl.log_lines import Emit as WriteLine
from edgefl.plan.compile import compile_run, ungrouped, untaken
from edgefl.plan.job import RunPlan
from edgefl.plan.preparation import read_as
from edgefl.protocol.topics import check_name
from edgefl.resources.process_memory import keep_for_parts
from edgefl.run_records import EventRow, RunReport
from edgefl.storage.disk import (
    begin_run,
    gone_if_empty,
    hold_directory,
    ledger_file,
    ledger_of,
    make_private,
    note_ledger,
    store_errors,
    write_new,
)
from edgefl.transport.address import check_protected
from edgefl.transport.broker import start_broker
from edgefl.transport.mqtt import MqttTransport

if TYPE_CHECKING:
    from coordinator.runtime.fleet_auth import Guard
    from coordinator.runtime.object_endpoint import ObjectEndpoint
    from coordinator.web.server import Door

#: How long a thread that computes (an aggregation) may keep the loop and the network from going on: a tenth of
#: Python's own 5 ms, which are felt in rounds of a tenth of a second.
_SWITCH_S = 0.0005
#: New objects after which cyclic garbage is looked for. With Python's 700, a sixth of the processor's time that a fleet
#: of 10,000 took went into that, and the state of a run has no cycles.
_COLLECT_AFTER = 10_000
#: The live page of a finished run is up for so long at most; without a browser, as long as one takes to load it again.
STAY_S = 600.0
RELOAD_S = 3.0
#: The run file as resolved, in the run's directory.
RUN_FILE = "run.yaml"
#: File in the run's directory with the one-time link to its live page, where lines of a log must not have it.
LINK = "web-link"


class Shared(NamedTuple):
    """A queue's broker URL, open page and waiting runs, shared by its runs."""

    url: str
    door: Door | None
    waiting: Callable[[], tuple[str, ...]]


class RunOptions(NamedTuple):
    """A run as its owner asks for it.

    ``file``: a run file by path or shipped name, or its fields. ``run``: its id, default name, date and time;
    ``resume``: the id of one to go on with. ``broker``: a URL, or auto, mosquitto, amqtt to start one; default: what
    the run file says. ``ledger``: URL of a database, default the one the run was started with, else a file in its
    directory. ``identity``: directory of the fleet's identity (its name is then the fleet); ``insecure``: a broker on
    another machine may be without TLS. ``web``: where the live page is, "" for its usual place; ``web_control``: it may
    act on the run. ``log``: a writer of log lines. ``track``: writers such as tensorboard:DIR. ``unless_stopped``: a
    run that its operator has stopped stays so. ``queue``: what a queue keeps open for its runs; None: the run has a
    broker and a page to itself. ``objects_at``: HOST:PORT where devices fetch and put large objects, "": all go through
    the broker.
    """

    file: RunSource = ""
    run: str = ""
    resume: str = ""
    broker: str = ""
    fleet: str = ""
    directory: Path = Path("runs")
    overrides: Sequence[str] = ()
    ledger: str = ""
    identity: Path | None = None
    insecure: bool = False
    web: str | None = None
    web_control: bool = False
    log: WriteLine | None = None
    track: Sequence[str] = ()
    unless_stopped: bool = False
    queue: Shared | None = None
    objects_at: str = ""

    def ledger_of(self, run: str) -> str | Path:
        """The ledger, existing or planned, of this run."""
        return self.ledger or ledger_of(self.directory / run)


def execute(options: RunOptions, emit: Callable[[EventRow], None], say: Callable[[str], None]) -> RunReport:
    """Run a plan to its end. Raises EdgeFLError; KeyboardInterrupt on SIGINT and SIGTERM.

    ``say`` takes what a person must know to connect agents.
    """
    if "://" in options.broker:
        check_protected(options.broker, insecure=options.insecure)
    if options.web is not None:  # before there is a directory: what failed then would leave one behind
        from coordinator.web.access import check_settings

        check_settings(options.web)
    guard = _guard(options.identity, options.fleet)
    fleet = guard.fleet.record.fleet if guard is not None else check_name("fleet", options.fleet or "default")
    with _only_run(guard, options.directory):  # looked at first: to read the data and plan takes seconds
        pass
    plan, broker = planned(options, say)
    plan = _reached(plan, options, guard, broker)
    directory = options.directory / plan.run
    make_private(directory)
    write_run_file(plan, directory / RUN_FILE)
    if options.ledger:
        note_ledger(directory, options.ledger)
    options = options._replace(fleet=fleet, broker=options.broker or broker)
    if "://" in options.broker:
        check_protected(options.broker, insecure=options.insecure)
    shown = emit if options.log is None else logged(emit, options.log, run=plan.run, fleet=fleet)
    try:
        with (
            _only_run(guard, directory),
            tracked(shown, options.track, plan, directory) as shown,
            _endpoint(options, guard, say) as endpoint,
        ):
            return asyncio.run(_run(plan, options, guard, shown, say, endpoint))
    except (KeyboardInterrupt, asyncio.CancelledError) as error:  # Ctrl-C, SIGTERM
        way_on = f"Go on where it stopped with the same options and --resume {plan.run}."
        raise KeyboardInterrupt(way_on) from error


def planned(options: RunOptions, say: Callable[[str], None]) -> tuple[RunPlan, str]:
    """The plan, and the broker of its run file.

    A run that was killed before it had begun is not in the ledger: it starts again, from the file that is given, else
    from its own.
    """
    run, resume, directory = options.run, options.resume, options.directory
    if resume:
        check_name("run", resume)
        own = directory / resume / RUN_FILE
        if _holds(options.ledger_of(resume), resume) or not (options.file or own.is_file()):
            return _resumed(options, resume)
        options = options._replace(file=options.file or str(own))
        if not (directory / resume).is_dir():
            there = ", ".join(sorted(path.name for path in directory.glob("*") if ledger_file(path))) or "none"
            raise StoreError(f"there is no run {resume!r} in {directory}", remedy=f"Runs there are: {there}.")
    if run and _holds(options.ledger_of(check_name("run", run)), run):  # before anything is written into its directory
        remedy = f"Go on with it by --resume {run}, or give another --run."
        raise StoreError(f"there is a run {run!r} already", remedy=remedy)
    return _compiled(options, resume or run, say)


def _reached(plan: RunPlan, options: RunOptions, guard: Guard | None, broker: str) -> RunPlan:
    """The plan with its fleet and broker. Raises if a resumed run would use another.

    ``broker``: the run file's.
    """
    own = guard.fleet.record.fleet if guard is not None else ""
    if plan.fleet not in {"", own}:
        text = f"run {plan.run!r} is of the fleet {plan.fleet!r}, whose devices take nothing without its identity"
        remedy = "Name its directory, which `edgefl-coordinator init` has made: --identity DIRECTORY (EDGEFL_IDENTITY)."
        raise IdentityError(text, remedy=remedy)
    wanted = options.broker or broker
    if plan.broker_given and not own and not options.broker and "://" not in wanted:
        text = "name the URL that the run was started with, where its devices are (EDGEFL_BROKER); auto starts one here"
        raise ConfigError(
            f"run {plan.run}", [Problem("--broker", text)], remedy="Resume with the options of the start."
        )
    given = plan.broker_given or "://" in options.broker
    return msgspec.structs.replace(plan, fleet=own, broker_given=given)


async def _run(
    plan: RunPlan,
    options: RunOptions,
    guard: Guard | None,
    emit: Callable[[EventRow], None],
    say: Callable[[str], None],
    endpoint: ObjectEndpoint | None,
) -> RunReport:
    _heed_signals()
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(_COLLECT_AFTER)
    keep_for_parts()
    directory, fleet = options.directory / plan.run, options.fleet
    kept = contextlib.nullcontext(options.queue.url) if options.queue else None
    opened = kept or _opened(options.broker, directory / "broker", fleet, guard, say)
    with _shown(options, plan.run, emit) as (show, watch):
        async with opened as url:
            own = None if guard is None else guard.fleet.transport(url=url)
            transport = own or MqttTransport(url, f"edgefl-coordinator-{fleet}"[:64])
            ledger = str(options.ledger_of(plan.run))
            environment = Environment(directory, transport, fleet, show, ledger, url, guard=guard, watch=watch)
            environment = environment._replace(endpoint=endpoint)
            report = await run_plan(plan, environment, resume=bool(options.resume))
        if watch is not None and report.status == "done" and not options.queue:  # the next run waits for no page
            await _stay(watch)
        return report


async def _stay(watch: Watch) -> None:
    """Keep the live page up after the run while browsers follow it, for downloads; a signal ends it."""
    clock = asyncio.get_running_loop().time
    until, looked = clock() + STAY_S, clock() if watch.followers() else -RELOAD_S
    with contextlib.suppress(asyncio.CancelledError):
        while clock() < min(until, looked + RELOAD_S):
            await asyncio.sleep(0.2)
            looked = clock() if watch.followers() else looked


Emit = Callable[[EventRow], None]


@contextlib.contextmanager
def page_kept(options: RunOptions) -> Iterator[Door | None]:
    """The live page's address, open until the block ends; None where no page is asked for."""
    if options.web is None:
        yield None
        return
    from coordinator.web.server import opened

    with opened(options.web, control=options.web_control) as door:
        yield door


@contextlib.contextmanager
def _shown(options: RunOptions, run: str, emit: Emit) -> Iterator[tuple[Emit, Watch | None]]:
    """Serve the live page, if asked for: ``emit`` extended to the page, and the page's ``Watch``."""
    if options.web is None:
        yield emit, None
        return
    from coordinator.web.server import Served, serving

    loop, watch = asyncio.get_running_loop(), Watch()

    def announce(url: str) -> None:  # not to the page: the address may hold a link that lets in whoever has it
        place, data = url.partition("/open/")[0], {"url": url}
        if options.log is not None and place != url:  # nor to a log, which others read as well
            file = options.directory / run / LINK
            with store_errors("write", file):
                write_new(file, f"{url}\n".encode(), mode=0o600)
            data = {"url": place, "link": str(file)}
        loop.call_soon_threadsafe(emit, EventRow(time.time(), "page", data=data))

    async def act(action: str, *device: str) -> None:  # in the page's loop
        if watch.control is None:
            raise ControlError("the run has not begun yet", remedy="Try again in a moment.")
        asked = getattr(watch.control, action)(*device, "web")
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, loop))

    def phase() -> str:  # the run sets it when it begins
        return watch.phase()

    served = Served(run, options.directory / run, watch.signs, act if options.web_control else None, phase)
    door = None
    if options.queue is not None:
        door, served = options.queue.door, served._replace(waiting=options.queue.waiting)
    with serving(door or options.web, served, announce) as feed:
        watch.followers = lambda: feed.followers

        def both(event: EventRow) -> None:
            feed.put(event)
            emit(event)

        yield both, watch


@contextlib.contextmanager
def _endpoint(options: RunOptions, guard: Guard | None, say: Callable[[str], None]) -> Iterator[ObjectEndpoint | None]:
    """The endpoint of large objects until the block ends; None where none is asked for."""
    if not options.objects_at:
        yield None
        return
    from coordinator.runtime.object_endpoint import opened

    with opened(options.objects_at, guard.fleet if guard is not None else None, insecure=options.insecure) as endpoint:
        say(f"large parts go by {endpoint.base} past the broker; devices that cannot reach it go on with the broker")
        yield endpoint


def _guard(identity: Path | None, fleet: str) -> Guard | None:
    """The fleet's identity. Raises IdentityError when there is none, or when it is another fleet's."""
    if identity is None:
        return None
    from coordinator.runtime.fleet_auth import Guard
    from edgefl.identity.fleet import Fleet

    opened = Fleet(identity)
    if fleet not in {"", opened.record.fleet}:
        text = f"{identity} is the identity of fleet {opened.record.fleet!r}, not of {fleet!r}"
        raise IdentityError(text, remedy="Leave --fleet away, or name the other fleet's --identity.")
    return Guard(opened)


@contextlib.contextmanager
def _only_run(guard: Guard | None, directory: Path) -> Iterator[None]:
    """Hold the fleet's identity: of two coordinators with it, each would throw the other off their broker."""
    if guard is None:
        yield
        return
    place = guard.fleet.directory / "run"
    remedy = "A fleet has one run at a time: end that one first (`edgefl runs stop`), or wait for its end."
    with hold_directory(place, by=str(directory.resolve()), remedy=remedy):
        yield


def _heed_signals() -> None:
    """Ctrl-C and SIGTERM cancel this task; only the first: local mode sends both, and what ends must end in order."""
    task, told = asyncio.current_task(), False

    def stop() -> None:
        nonlocal told
        if task is not None and not told:
            told = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)


@contextlib.contextmanager
def broker_kept(options: RunOptions, place: Path, say: Callable[[str], None]) -> Iterator[str]:
    """The URL of a broker that stays open over several runs; started in ``place`` unless it is elsewhere."""
    if "://" in options.broker:
        check_protected(options.broker, insecure=options.insecure)
    guard = _guard(options.identity, options.fleet)
    opened = _opened(options.broker, place, options.fleet or "default", guard, say)
    loop = asyncio.new_event_loop()  # a run has its own; a broker is bound to none
    with contextlib.closing(loop), contextlib.ExitStack() as stack:
        url = loop.run_until_complete(opened.__aenter__())
        stack.callback(lambda: loop.run_until_complete(opened.__aexit__(None, None, None)))
        yield url


def _opened(
    wanted: str, place: Path, fleet: str, guard: Guard | None, say: Callable[[str], None]
) -> contextlib.AbstractAsyncContextManager[str]:
    """The URL of the fleet's broker, started if it is ours and does not run."""
    if guard is None:
        return _broker(wanted, place, fleet, say)
    from coordinator.runtime.fleet_auth import fleets_broker

    return fleets_broker(guard.fleet, wanted, say)


@contextlib.asynccontextmanager
async def _broker(wanted: str, place: Path, fleet: str, say: Callable[[str], None]) -> AsyncIterator[str]:
    """The URL of a broker, started here unless ``wanted`` is a URL."""
    if "://" in wanted:
        yield wanted
        return
    with hold_directory(place):  # two brokers would overwrite each other's files
        async with start_broker(place, wanted) as started:
            address = place / "url"
            with store_errors("write", address):
                address.touch(mode=0o600)
                address.write_text(started.url + "\n", encoding="utf-8")
            command = f'edgefl-agent run --broker "$(cat {address})" --fleet {fleet} --device NAME --data PATH'
            say(f"{started.kind} listens on {started.address}; agents on this machine connect with:\n  {command}")
            yield started.url


def _resumed(options: RunOptions, run: str) -> tuple[RunPlan, str]:
    """Plan and broker of a run in the ledger; later changes of the run file do not count."""
    with Ledger(options.ledger_of(run), create=False) as opened:
        plan = opened.plan(run)
        status = next(one.status for one in opened.runs() if one.run == run)
        if status == "stopped" and options.unless_stopped:
            remedy = f"`edgefl runs resume {run}` lets it go on; then start it again."
            raise ControlError(f"run {run} stays stopped, as its operator has it", remedy=remedy)
    config = plan.config.get("run")
    broker = config.get("broker", "auto") if isinstance(config, dict) else "auto"
    return plan, str(broker)


def _compiled(options: RunOptions, run: str, say: Callable[[str], None]) -> tuple[RunPlan, str]:
    file = options.file
    if not file:
        raise ConfigError("RUN.yaml", [Problem("RUN.yaml", "name a run file, or a run to go on with by --resume")])
    config, recipe = load_run(file, options.overrides)
    made: list[Path] = []
    if not run:
        run, made = begin_run(options.directory, config.name)
    with gone_if_empty(made):
        check_name("run", run)
        samples: Mapping[str, int] | None = None
        if config.model.own:  # its data, and what is in them, only the devices know
            plan = compile_run(config, recipe, run=run, shapes={})
        else:
            test, path = _test_set(config, file, options.directory / run, say)
            shapes, labels, samples = test.signature(), test.label_names, test.samples()
            plan = compile_run(config, recipe, run=run, shapes=shapes, label_names=labels, test=path)
        if options.identity is not None:
            from edgefl.identity.fleet import Fleet

            fleet = Fleet(options.identity)
            names = {name: shown for name, shown in fleet.shown().items() if shown != name}
            plan = msgspec.structs.replace(plan, groups=fleet.groups(), names=names)
        taken = None if samples is None else untaken(plan, samples)
        if problems := [*filter(None, [taken]), *ungrouped(plan)]:
            raise ConfigError(source_name(file), problems)
    say(f"waiting for {plan.policy.devices} device{'' if plan.policy.devices == 1 else 's'} (round.devices)")
    return plan, config.broker


def _holds(ledger: str | Path, run: str) -> bool:
    """True if the run is in an existing ledger."""
    if isinstance(ledger, Path) and not ledger.is_file():
        return False
    with Ledger(ledger) as opened:
        return any(known.run == run for known in opened.runs())


def _test_set(config: RunConfig, file: RunSource, place: Path, say: Callable[[str], None]) -> tuple[Dataset, str]:
    """The test set, source of the data's shapes and labels, and its path as .npz."""
    data = config.data
    if data.test:
        encoders = read_as(config, folder=has_manifest(data.test))
        test = load(as_test(data.test), bad_samples=data.bad_samples, modalities=encoders)
        if isinstance(data.test, str) and Path(data.test).suffix == ".npz":
            return test, str(Path(data.test).resolve())
    elif data.source is not None:
        test = _held_out(config, data.source, say)
    else:
        text = "is needed, or data.source: the coordinator learns the shapes and labels of the data from it"
        raise ConfigError(source_name(file), [Problem("data.test", f"{text} (`edgefl data` writes one)")])
    path = place / "shares" / "test.npz"
    with store_errors("create", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with store_errors("write", path):
        test.save_npz(path)
    return test, str(path.resolve())


def _held_out(config: RunConfig, source: Source, say: Callable[[str], None]) -> Dataset:
    """The hold-out or official test set of the run file's source, the same as in `edgefl run` and `edgefl data`."""
    data = config.data
    encoders = read_as(config, folder=has_manifest(source))
    every, official = load_pair(source, bad_samples=data.bad_samples, modalities=encoders)
    if official is not None:
        return official
    train, test, origin = hold_out(every, data, config.round.devices or max(1, len(config.fleet)), config.seed)
    where = ", ".join(source) if isinstance(source, Mapping) else source
    say(f"data.test is not given: the test set is {len(test)} of {len(every)} samples of {where}, as for `edgefl run`")
    for text in split_warnings(train, test, origin):
        say(f"warning: {text}")
    return test


def write_run_file(plan: RunPlan, path: Path) -> None:
    """The run file as resolved, beside the ledger, unless it is there."""
    if not path.exists():
        with store_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_new(path, msgspec.yaml.encode(plan.config.get("run", {})))
