"""From the command line's words to a run: file, test set, directory, broker."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coordinator.ledger.ledger import Ledger
from coordinator.runtime.runner import run as run_plan
from edgefl.config.profiles import load_run
from edgefl.config.settings import RunConfig
from edgefl.data.dataset import Dataset
from edgefl.data.prepare import hold_out
from edgefl.data.sources import load, load_pair
from edgefl.errors import ConfigError, IdentityError, Problem, StoreError
from edgefl.plan.compile import closed, compile_run, read_as, untaken, with_statistics
from edgefl.plan.job import RunPlan
from edgefl.protocol.topics import check_name
from edgefl.resources.process_memory import keep_for_parts
from edgefl.run_records import EventRow, RunReport
from edgefl.storage.disk import (
    hold_directory,
    ledger_file,
    ledger_of,
    make_private,
    new_run_id,
    note_ledger,
    store_errors,
    write_new,
)
from edgefl.transport.address import check_protected
from edgefl.transport.broker import start_broker
from edgefl.transport.mqtt import MqttTransport

if TYPE_CHECKING:
    from coordinator.runtime.fleet_auth import Guard

#: How long a thread that computes (an aggregation) may keep the loop and the network from going on: a tenth of
#: Python's own 5 ms, which are felt in rounds of a tenth of a second.
_SWITCH_S = 0.0005


def execute(
    file: str,
    *,
    run: str = "",
    broker: str = "",
    fleet: str = "",
    directory: Path = Path("runs"),
    resume: str = "",
    overrides: Sequence[str] = (),
    ledger: str = "",
    identity: Path | None = None,
    insecure: bool = False,
    emit: Callable[[EventRow], None],
    say: Callable[[str], None],
) -> RunReport:
    """Run ``file`` (or go on with ``resume``) to its end. Raises EdgeFLError; KeyboardInterrupt when told to stop.

    ``run``: its id, default name, date and time. ``broker``: a URL, or auto, mosquitto, amqtt to start one; default:
    what the run file says. ``ledger``: URL of a database, default the one the run was started with, else a file in
    its directory. ``say`` is told what a person must know to connect agents. ``identity``: directory of the fleet's
    identity (its name is then the fleet); ``insecure``: a broker on another machine may be without TLS.
    """
    if "://" in broker:
        check_protected(broker, insecure=insecure)
    guard = _guard(identity, fleet)
    fleet = guard.fleet.record.fleet if guard is not None else check_name("fleet", fleet or "default")
    if resume:
        check_name("run", resume)
    # A run that was killed before it had begun is not in the ledger: it starts anew, if there is a file to start from.
    known = resume and (not file or _holds(ledger or ledger_of(directory / resume), resume))
    if known:
        plan, wanted = _resumed(ledger or ledger_of(directory / resume), resume)
    else:
        if resume and not (directory / resume).is_dir():
            there = ", ".join(sorted(path.name for path in directory.glob("*") if ledger_file(path))) or "none"
            raise StoreError(f"there is no run {resume!r} in {directory}", remedy=f"Runs there are: {there}.")
        if run:  # before anything is written into its directory
            check_name("run", run)
            _check_new(ledger or ledger_of(directory / run), run)
        plan, wanted = _compiled(file, resume or run, directory, overrides, say)
    place = directory / plan.run
    make_private(place)
    write_run_file(plan, place / "run.yaml")
    if ledger:
        note_ledger(place, ledger)
    elsewhere = ledger or str(ledger_of(place))
    try:
        if not broker and "://" in wanted:
            check_protected(wanted, insecure=insecure)
        return asyncio.run(_run(plan, place, broker or wanted, fleet, bool(resume), elsewhere, guard, emit, say))
    except (KeyboardInterrupt, asyncio.CancelledError) as error:  # Ctrl-C, SIGTERM
        way_on = f"Go on where it stopped with the same options and --resume {plan.run}."
        raise KeyboardInterrupt(way_on) from error


async def _run(
    plan: RunPlan,
    place: Path,
    broker: str,
    fleet: str,
    resume: bool,
    ledger: str,
    guard: Guard | None,
    emit: Callable[[EventRow], None],
    say: Callable[[str], None],
) -> RunReport:
    _heed_signals()
    sys.setswitchinterval(_SWITCH_S)
    keep_for_parts()
    if guard is not None:
        from coordinator.runtime.fleet_auth import fleets_broker

        opened = fleets_broker(guard.fleet, broker, say)
    else:
        opened = _broker(broker, place / "broker", fleet, say)
    async with opened as url:
        own = None if guard is None else guard.fleet.transport(url=url)
        transport = own or MqttTransport(url, f"edgefl-coordinator-{fleet}"[:64])
        return await run_plan(
            plan,
            directory=place,
            transport=transport,
            fleet=fleet,
            emit=emit,
            resume=resume,
            ledger_url=ledger,
            broker=url,
            guard=guard,
        )


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


def _resumed(ledger: str | Path, run: str) -> tuple[RunPlan, str]:
    """The plan as the run was started with: a run file changed since then can not tear it apart.

    One of before there was a closing round gets it, unless the run is done.
    """
    with Ledger(ledger, create=False) as opened:
        plan = with_statistics(opened.plan(run))
        done = any(one.run == run and one.status == "done" for one in opened.runs())
        if not done and (later := closed(plan)) != plan:
            plan = later
            opened.replan(plan)
    config = plan.config.get("run")
    broker = config.get("broker", "auto") if isinstance(config, dict) else "auto"
    return plan, str(broker)


def _compiled(
    file: str, run: str, directory: Path, overrides: Sequence[str], say: Callable[[str], None]
) -> tuple[RunPlan, str]:
    if not file:
        raise ConfigError("RUN.yaml", [Problem("RUN.yaml", "name a run file, or a run to go on with by --resume")])
    config, recipe = load_run(file, overrides)
    run = check_name("run", run or new_run_id(directory, config.name))
    place = directory / run
    test, path = _test_set(config, file, place, say)
    plan = compile_run(config, recipe, run=run, shapes=test.signature(), label_names=test.label_names, test=path)
    if problem := untaken(plan, test.samples()):
        raise ConfigError(file, [problem])
    say(f"waiting for {plan.policy.devices} device{'' if plan.policy.devices == 1 else 's'} (round.devices)")
    return plan, config.broker


def _holds(ledger: str | Path, run: str) -> bool:
    """Whether the run is in the ledger, if there is one."""
    if isinstance(ledger, Path) and not ledger.is_file():
        return False
    with Ledger(ledger) as opened:
        return any(known.run == run for known in opened.runs())


def _check_new(ledger: str | Path, run: str) -> None:
    if _holds(ledger, run):
        remedy = f"Go on with it by --resume {run}, or give another --run."
        raise StoreError(f"there is a run {run!r} already", remedy=remedy)


def _test_set(config: RunConfig, file: str, place: Path, say: Callable[[str], None]) -> tuple[Dataset, str]:
    """The test set, which also tells the shapes and labels of the data; and its path as .npz."""
    data = config.data
    if data.test:
        encoders = read_as(config, folder=Path(data.test).is_dir())
        test = load(data.test, bad_samples=data.bad_samples, modalities=encoders)
        if Path(data.test).suffix == ".npz":
            return test, str(Path(data.test).resolve())
    elif data.source is not None:
        test = _held_out(config, say)
    else:
        text = "is needed, or data.source: the coordinator learns the shapes and labels of the data from it"
        raise ConfigError(file, [Problem("data.test", f"{text} (`edgefl data` writes one)")])
    path = place / "shares" / "test.npz"
    with store_errors("create", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with store_errors("write", path):
        test.save_npz(path)
    return test, str(path.resolve())


def _held_out(config: RunConfig, say: Callable[[str], None]) -> Dataset:
    """The test set of the run file's own source, the one that `edgefl run` and `edgefl data` take too."""
    data, source = config.data, config.data.source
    if source is None:
        raise ValueError("a run file without a source")
    encoders = read_as(config, folder=isinstance(source, str) and Path(source).is_dir())
    every, official = load_pair(source, bad_samples=data.bad_samples, modalities=encoders)
    if official is not None:
        return official
    _, test, _ = hold_out(every, data, config.round.devices or max(1, len(config.fleet)), config.seed)
    where = source if isinstance(source, str) else ", ".join(source)
    say(f"data.test is not given: the test set is {len(test)} of {len(every)} samples of {where}, as for `edgefl run`")
    return test


def write_run_file(plan: RunPlan, path: Path) -> None:
    """The run file as resolved, beside the ledger, unless it is there."""
    if not path.exists():
        with store_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_new(path, msgspec.yaml.encode(plan.config.get("run", {})))
