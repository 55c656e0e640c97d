"""Local mode: shares, a broker, a coordinator and one agent a device, as separate processes that end together."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from device_agent.runtime.connect import Options
from edgefl.api.local_processes import end, event_of, last_words, lines_of, start
from edgefl.api.run_inputs import check_data_known, population_of, shared_together, shares_of
from edgefl.api.runs import RUNS, find_run
from edgefl.api.simulation import traces_of
from edgefl.config.profiles import RunSource, budget_overrides, load_device, load_run, source_name
from edgefl.config.settings import FleetDevice, RunConfig, SizedFleet
from edgefl.config.yaml_files import Overrides, yaml_text
from edgefl.data.population import ALL, ROWS, Population
from edgefl.data.sources import check_source
from edgefl.encoder_kinds import given_here
from edgefl.errors import ConfigError, DataError, EdgeFLError, Problem, RunError, StoreError
from edgefl.models.spec import EncoderSpec
from edgefl.plan.preparation import encoders_of
from edgefl.protocol.topics import check_name
from edgefl.run_records import EventRow
from edgefl.sequences import Made
from edgefl.storage.disk import (
    JOINT_STEPS,
    SHARES,
    TEST,
    begin_run,
    gone_if_empty,
    hold_directory,
    store_errors,
    write_new,
)
from edgefl.traces import Traces
from edgefl.transport.broker import start_broker

if TYPE_CHECKING:
    from edgefl.api.in_process import CrowdData
    from edgefl.data.population import Population

#: Agents leave by themselves within a second of SIGTERM; a trainer inside a long step may need a little more.
AGENT_GRACE_S = 5.0
#: The coordinator sends its outstanding messages, and its evaluator may be in the middle of a batch.
COORDINATOR_GRACE_S = 15.0
#: Exit statuses of an agent that was stopped: by us, or by the Ctrl-C that ends this run as well.
_STOPPED = {0, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT}


Feed = Callable[[EventRow], None]


class LocalOptions(NamedTuple):
    """A run in local mode as its owner asks for it.

    ``file``: a run file by path or shipped name, or its fields. ``run``: its id, default name, date and time;
    ``resume``: the id of one to go on with. ``trainers``: processes that all devices share, 0: one a device.
    ``in_process``: the fleet in this process, without a broker; ``workers``: processes that train it then, 0: this one
    does; ``joint_steps``: the devices of a round take their steps together where that pays. ``track``: writers such as
    tensorboard:DIR. ``more``: further options of the coordinator.
    """

    file: RunSource
    overrides: Overrides = ()
    runs: Path = RUNS
    run: str = ""
    resume: str = ""
    trainers: int = 0
    in_process: bool = False
    workers: int = 0
    joint_steps: bool = False
    track: Sequence[str] = ()
    more: Sequence[str] = ()


def check_installed_kinds(config: RunConfig, file: RunSource, why: str, way: str = "") -> None:
    """Raise ConfigError for kinds of encoder that no package brings.

    ``why``: what they cannot be used for, after "alone"; ``way``: another way out than a package.
    """
    if here := [m for m, one in config.model.encoders.items() if given_here(one.kind)]:
        text = f"is a kind of encoder of this process alone, {why}"
        ways = f"Run it with {way}, or bring it" if way else "Bring it"
        raise ConfigError(
            source_name(file),
            [Problem(f"model.encoders.{m}.kind", text) for m in here],
            remedy=f"{ways} by the entry points edgefl.encoders of a package.",
        )


@cache  # a fleet has many devices of few kinds
def _profile(name: str, overrides: tuple[str, ...]) -> Options:
    """An agent's options by its profile alone."""
    profile = load_device(name, overrides)
    return Options(
        profile=profile.name,
        budget=profile.budget.record(),
        speed=profile.speed.record(),
        heartbeat_s=profile.heartbeat_s,
        torch_device=profile.torch_device,
    )


class LocalRun:
    """One run in local mode, from its shares to its last round.

    ``feed`` takes its events, in order. ``finish``: what is made of a finished run, while a page of it may still be
    open. ``check`` takes the encoders, for the shapes of the data, before anything starts, and may raise.
    """

    def __init__(
        self,
        options: LocalOptions,
        feed: Feed,
        finish: Callable[[Path], object] | None = None,
        check: Callable[[Mapping[str, EncoderSpec]], None] = lambda _: None,
    ) -> None:
        self.config, self.recipe = load_run(options.file, options.overrides)
        check_data_known(self.config, source_name(options.file))
        if not self.config.fleet:
            text = "local mode needs at least one device, such as {name: box}"
            raise ConfigError(source_name(options.file), [Problem("fleet", text)])
        if not options.in_process:
            if isinstance(self.config.fleet, SizedFleet) and self.config.fleet.trace is not None:
                problem = Problem("fleet.trace", "is of simulated devices, and those of processes are always there")
                raise ConfigError(source_name(options.file), [problem], remedy="Add --in-process, or take it out.")
            check_installed_kinds(self.config, options.file, "and a fleet's devices are others", "in_process=True")
            if options.workers:
                problem = Problem("--workers", "is of a fleet in one process")
                raise ConfigError(source_name(options.file), [problem], remedy="Add --in-process, or give --trainers.")
            if options.joint_steps:
                problem = Problem("--joint-steps", "is of a fleet in one process")
                raise ConfigError(source_name(options.file), [problem], remedy="Add --in-process, or leave it out.")
        elif options.workers:
            check_installed_kinds(self.config, options.file, "and trainer processes are others", "workers=0")
        self.options, self.feed, self.finish, self._check = options, feed, finish, check
        self.resume = bool(options.resume)
        runs = options.runs
        self.directory = begun(options.resume, runs) if self.resume else runs / (options.run or self.config.name)
        if options.in_process:
            from edgefl.api.in_process import check_in_process  # with it comes the coordinator, which else is a process

            others = ["--trainers"] * bool(options.trainers) + list(options.more)
            if self.resume:  # its devices go on the way they went
                joint = (self.directory / JOINT_STEPS).is_file()
                if options.joint_steps and not joint:
                    self._warn(f"{self.run} goes on as it was started; not used: --joint-steps")
                options = self.options = options._replace(joint_steps=joint)
            file, workers = source_name(options.file), options.workers
            check_in_process(self.config, self._kinds(), file, others, workers, joint=options.joint_steps)
            if not self.resume and isinstance(source := self.config.data.source, str):
                check_source(source)  # errors in its form do not wait for libraries
        self._made: list[Path] = []  # directories made for this run
        if not (options.resume or options.run):  # last: what is refused before leaves no directory behind
            run, self._made = begin_run(runs, self.config.name)
            self.directory = runs / run
        check_name("run", self.run)
        self._population: Population | None = None  # where this process has shared the data out
        self._values: dict[str, object] = {}  # of the run's own file, where this process has written it
        self._ended: list[str] = []  # agents that ended before the run did, and the last lines of their logs

    @property
    def run(self) -> str:
        """The run's id."""
        return self.directory.name

    async def train(self) -> None:
        """The run from first to last round. Raises the failing program's own error."""
        if self.options.in_process:
            loading = asyncio.get_running_loop().run_in_executor(None, _load_libraries)  # while the data are read
            works = [loading]
            try:
                self._prepare()
                await loading
                saving = asyncio.ensure_future(asyncio.to_thread(self._save_shares))  # while the run is planned
                syncing = asyncio.ensure_future(self._sync_shares(saving))  # during the first rounds
                works += [saving, syncing]
                await self._in_process(saving)
            finally:
                await asyncio.gather(*works, return_exceptions=True)
            return
        async with contextlib.AsyncExitStack() as stack:
            run_file = self._prepare()
            url = self.config.broker
            if "://" not in url:
                stack.enter_context(hold_directory(self.directory / "broker"))  # two brokers would share files
                broker = await stack.enter_async_context(start_broker(self.directory / "broker", url))
                url = broker.url
            for name, arguments, log in self._agents():
                await stack.enter_async_context(self._started(name, arguments, url, log))
            await self._coordinate(run_file, url)

    def way_on(self) -> str:
        """Remedy when it was interrupted; "" when there is nothing to go on with."""
        if not (self.directory / "run.yaml").is_file():
            return ""
        where = "" if self.directory.parent == RUNS else f" --runs {self.directory.parent}"
        given, alone = self.options.file, self.options.in_process
        # A simulated fleet is in the run's own file only.
        file = given if isinstance(given, (str, Path)) and not alone else self.directory / "run.yaml"
        where += " --in-process" * alone
        return f"Go on where it stopped with: edgefl run {file} --resume {self.run}{where}"

    def _prepare(self) -> Path:
        """The run's shares and its run file, written unless the run was begun before: then it goes on as it was."""
        folder, path, given = self.directory / SHARES, self.directory / "run.yaml", self.config
        alone = self.options.in_process
        if self.resume and path.is_file():
            self.config = self._as_begun(path)
        wanted, together = self.config.device_names, alone and (folder / ROWS).is_file()
        files = (Path(ALL).stem, TEST) if together else (*wanted, TEST)
        if not path.is_file() or not all((folder / f"{name}.npz").is_file() for name in files):
            with gone_if_empty(self._made):
                if alone:
                    prepared, self._population = shared_together(given, wanted, folder)
                else:
                    prepared = shares_of(given, wanted, folder)
                try:
                    self._check(encoders_of(given, prepared.signature))
                except EdgeFLError:
                    shutil.rmtree(folder)
                    raise
            for text in prepared.warnings:
                self._warn(text)
            values = self.config.model_dump(mode="json", exclude_none=True)
            values["data"]["test"] = str(Path(prepared.test).resolve())
            self._values, text = values, yaml_text(values)
            with store_errors("write", path):
                write_new(path, text.encode())
        return path

    def _as_begun(self, path: Path) -> RunConfig:
        """The run file that the run was begun with; a warning names what differs in the one given now."""
        then, _ = load_run(str(path))
        if then.name != self.config.name:
            problem = Problem("name", f"is {self.config.name!r}, and {self.run} is a run of {then.name!r}")
            raise ConfigError(str(path), [problem], remedy="Give the run file that it was started with.")
        old, new = then.model_dump(mode="json"), self.config.model_dump(mode="json")
        old["data"].pop("test")
        new["data"].pop("test")
        if differing := [field for field in new if old[field] != new[field]]:
            fields = ", ".join(differing)
            self._warn(f"{self.run} goes on as it was started; not used from the run file given: {fields}")
        return then

    def _agents(self) -> Iterator[tuple[str, list[str], Path]]:
        """The agents' processes as (name, arguments, log): one a device, or with shared trainers one for all."""
        logs = self.directory / "logs"
        if not self.options.trainers:
            for device in self.config.fleet:
                data, state = self._places(device.name)
                arguments = ["device_agent.cli", "run", "--device", device.name, "--profile", device.profile]
                arguments += ["--data", data, "--state", state, "--fleet", self.run]
                for override in budget_overrides(device.budget):
                    arguments += ["--set", override]
                yield f"the agent of {device.name}", arguments, logs / f"{device.name}.log"
            return
        file = self.directory / "agents.json"
        with store_errors("write", logs):
            logs.mkdir(parents=True, exist_ok=True)
            write_new(file, msgspec.json.encode(list(self._every())))
        arguments = ["device_agent.many_agents", str(file), str(logs), "--trainers", str(self.options.trainers)]
        yield "the agents' process", arguments, logs / "agents.log"

    def _places(self, device: str) -> tuple[str, str]:
        """A device's share, and its agent's directory."""
        return str(self.directory / SHARES / f"{device}.npz"), str(self.directory / "devices" / device)

    def _every(self) -> Sequence[Options]:
        """The agents' options, but for the broker."""
        return Made(len(self.config.fleet), lambda place: self._options(self.config.fleet[place]))

    def _kinds(self) -> list[Options]:
        """A device of each kind."""
        fleet = self.config.fleet
        if isinstance(fleet, SizedFleet):
            named = (
                FleetDevice(name=f"kind-{n}", profile=k.profile, budget=k.budget) for n, k in enumerate(fleet.kinds)
            )
            return [self._options(device) for device in named]
        return [self._options(device) for device in fleet]

    def _crowd(self) -> CrowdData | None:
        """The fleet's shares and kinds; None where the shares are files, as of a run that was begun by processes."""
        from edgefl.api.in_process import CrowdData

        try:
            population = self._population or population_of(self.config, self.directory / SHARES)
        except DataError as error:
            error.remedy = "The disk may not have had them yet: start the run again, without --resume."
            raise
        if population is None:
            return None
        fleet, known = self.config.fleet, dict[object, int]()
        if isinstance(fleet, SizedFleet):
            return CrowdData(population, fleet.numbers())
        kinds = ((one.profile, tuple(budget_overrides(one.budget))) for one in fleet)
        return CrowdData(population, [known.setdefault(kind, len(known)) for kind in kinds])

    def _traces(self) -> Traces | None:
        fleet = self.config.fleet
        if not isinstance(fleet, SizedFleet) or fleet.trace is None:
            return None
        return traces_of(fleet, fleet.trace, self.config.seed, self._warn)

    def _options(self, device: FleetDevice) -> Options:
        kind = _profile(device.profile, tuple(budget_overrides(device.budget)))
        data, state = self._places(device.name)
        return msgspec.structs.replace(kind, fleet=self.run, device=device.name, data=data, state=state)

    def _save_shares(self) -> None:
        if self._population is not None:
            self._population.save(self.directory / SHARES)

    async def _sync_shares(self, saving: Awaitable[None]) -> None:
        """Sync the saved shares; where the disk refuses, a warning, since only a run that goes on reads them."""
        await saving
        folder = self.directory / SHARES
        if not (folder / ROWS).is_file():
            return
        try:
            await asyncio.to_thread(Population.sync, folder)
        except StoreError as error:
            self._warn(f"the run's data may not outlast a power cut: {error.message}")

    async def _in_process(self, saving: Awaitable[None]) -> None:
        """The same without processes; the first round waits for ``saving``."""
        from coordinator.runtime.start import RunOptions
        from edgefl.api.in_process import execute

        done = False

        def feed(event: EventRow) -> None:
            nonlocal done
            self.feed(event)
            done = done or event.kind == "run_finished"

        run, resume = ("", self.run) if self.resume else (self.run, "")
        runs, file = self.directory.parent, self._values or self.directory / "run.yaml"
        options = RunOptions(file, run, resume, fleet=self.run, directory=runs, track=self.options.track)
        await execute(
            options,
            self._every(),
            feed,
            lambda device, error: self._lost(f"the agent of {device}", error),
            saving,
            await asyncio.to_thread(self._crowd),
            self.options.workers,
            await asyncio.to_thread(self._traces),
            joint=self.options.joint_steps,
        )
        if done and self.finish is not None:
            await asyncio.to_thread(self.finish, self.directory)

    @contextlib.asynccontextmanager
    async def _started(self, name: str, arguments: list[str], url: str, log: Path) -> AsyncIterator[None]:
        process = await start(arguments, url, log, stdout=None)
        watcher = asyncio.create_task(self._watch(name, process, log))
        try:
            yield
        finally:
            watcher.cancel()
            await end(process, AGENT_GRACE_S)

    async def _watch(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        """Warn when an agent ends by itself: the coordinator only sees that it is silent."""
        status = await process.wait()
        if status in _STOPPED:
            return
        self._lost(name, last_words(log) or f"status {status}")

    def _lost(self, name: str, why: object) -> None:
        text = f"{name} has ended: {why}"
        self._ended.append(text)
        self._warn(text)

    def _warn(self, text: str) -> None:
        self.feed(EventRow(time.time(), "warning", data={"text": text}))

    async def _coordinate(self, run_file: Path, url: str) -> None:
        arguments = ["coordinator.cli", "run", str(run_file), "--events", "--fleet", self.run]
        arguments += ["--directory", str(self.directory.parent)]
        arguments += ["--resume" if self.resume else "--run", self.run, *self.options.more]
        arguments += [f"--track={kind}" for kind in self.options.track]
        log = self.directory / "logs" / "coordinator.log"
        process = await start(arguments, url, log, stdout=asyncio.subprocess.PIPE)
        failure = remedy = ""
        done = False
        try:
            async for line in lines_of(process):
                event = event_of(line)
                if event.kind == "run_failed":
                    failure, remedy = str(event.data.get("text", "")), str(event.data.get("remedy", ""))
                self.feed(event)
                if event.kind == "run_finished":
                    if self.finish is not None:
                        await asyncio.to_thread(self.finish, self.directory)
                    done = True
            status = await process.wait()
        except asyncio.CancelledError:  # a page was open still
            if not done:
                raise
            status = 0
        finally:
            await end(process, COORDINATOR_GRACE_S)
        if status != 0:
            text = "\n".join([failure, *self._ended]) if failure else last_words(log)
            if status < 0 and not failure:  # its last words are not the reason
                text, remedy = f"the coordinator was ended by {signal.Signals(-status).name}", self.way_on()
            error = RunError(text or f"the coordinator ended with status {status}", remedy=remedy or f"See {log}.")
            error.exit_code = status if status > 0 else RunError.exit_code
            raise error


def _load_libraries() -> None:
    """Import the largest modules of a run in one process."""
    for name in ("torch", "coordinator.runtime.start"):
        import_module(name)


def begun(text: str, runs: Path) -> Path:
    """The directory of the run to go on with: also one that ended before it was in its ledger.

    Raises RunError naming the runs there are.
    """
    if Path(text).name == text and (runs / text / "run.yaml").is_file():
        return runs / text
    return find_run(text, runs)
