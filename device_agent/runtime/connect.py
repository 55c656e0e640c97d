"""The agent's process: from resolved options to a running agent, and the lines that it logs.

``edgefl-agent run`` checks the command line and the profile, then *becomes* this program (exec): a supervisor without
typer and pydantic is 13 MB smaller for as long as it lives, and the broker's password leaves the list of processes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.util
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import msgspec

import edgefl
from device_agent.core.state import HEARTBEAT_S, State
from device_agent.runtime.agent import Agent, last_will
from device_agent.runtime.by_url import Trust
from device_agent.runtime.memory_store import MemoryStore, Pool
from device_agent.runtime.recent_lines import RecentLines
from device_agent.runtime.service_status import reporting
from device_agent.runtime.store import AgentStore, Owner, fingerprint
from device_agent.runtime.trainer_process import Trainer, TrainerProcess, TrainerSettings
from edgefl.console import guarded
from edgefl.errors import EdgeFLError, IdentityError, MissingDependencyError
from edgefl.log_lines import Emit, LineHandler, line_writer
from edgefl.process.notify import Notify
from edgefl.protocol.topics import check_name
from edgefl.records import Budget, Capabilities, Speed
from edgefl.resources.hardware import capabilities
from edgefl.resources.process_memory import keep_for_chunks
from edgefl.transport.address import check_protected, parse_url
from edgefl.transport.interface import Transport, Will
from edgefl.transport.link import TlsFiles
from edgefl.transport.mqtt import MqttTransport

if TYPE_CHECKING:
    from edgefl.identity.device import Credentials

MakeTrainer = Callable[[TrainerSettings, int], Trainer]
#: Makes a transport that is not connected yet, of its last will.
MakeLink = Callable[[Will], Transport]


class Simulated(NamedTuple):
    """Starting point of an agent that is simulated in one process with its whole fleet.

    ``transport``: connected, with all subscriptions; ``state``: after it has met the coordinator.
    """

    transport: Transport
    state: State
    pool: Pool


#: Timers of an agent whose messages do not get lost: they only repeat what was lost. A thousand agents that look twice
#: a second, as real ones do, take a quarter of a processor.
SIMULATED_TICK_S = 5.0
#: Carries the options over the exec, and is taken out at once so that no child inherits the password.
_VARIABLE = "EDGEFL_AGENT_OPTIONS"


class Options(msgspec.Struct, frozen=True):
    """Options of ``edgefl-agent run``, with the profile resolved."""

    broker: str = ""
    fleet: str = "default"
    device: str = ""
    data: str = ""
    state: str = ""
    profile: str = ""
    budget: Budget = Budget()
    speed: Speed = Speed()
    heartbeat_s: float = HEARTBEAT_S
    torch_device: str = "auto"
    bad_samples: str = "error"
    trainer: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    form: str = "text"
    debug: bool = False
    insecure: bool = False
    no_logs: bool = False
    no_moments: bool = False


def check_fit(data: str, trainer: str = "") -> None:
    """Check training's requirements without loading: torch is installed, local data exists.

    What own training code (``trainer``) reads, only it knows.

    Called before the agent connects, since a coordinator would count on the device. Raises
    MissingDependencyError, DataError.
    """
    from edgefl.data.sources import check_source

    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("torch", "train")
    if not trainer:
        check_source(data)


def become(options: Options) -> NoReturn:
    """Replace this process by the agent."""
    check_name("fleet", options.fleet)
    check_name("device", options.device)
    check_fit(options.data, options.trainer)
    environment = {name: value for name, value in os.environ.items() if name != "EDGEFL_BROKER"}
    environment[_VARIABLE] = msgspec.json.encode(options).decode()
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [sys.executable, "-m", "device_agent.runtime.connect", options.fleet, options.device]
    os.execve(sys.executable, arguments, environment)  # noqa: S606 - becoming the agent is the purpose; there is no shell


def take_options(environment: MutableMapping[str, str]) -> Options:
    """The options left by ``become``. Raises EdgeFLError when there are none."""
    text = environment.pop(_VARIABLE, "")
    if not text:
        raise EdgeFLError(
            "device_agent.runtime.connect is not meant to be started by hand", remedy="Use `edgefl-agent run`."
        )
    return msgspec.json.decode(text, type=Options)


def make_agent(
    options: Options,
    emit: Emit,
    trainer: MakeTrainer = TrainerProcess,
    recent: RecentLines | None = None,
    link: MakeLink | None = None,
) -> Agent:
    """The agent, not yet running; it holds the lock of its state directory. Raises EdgeFLError.

    ``trainer``: makes its trainer of the settings and the machine's memory in bytes. ``recent``: what ``emit`` keeps.
    ``link``: makes its transport, in place of MQTT.
    """
    settings, place = settings_of(options), Path(options.state)
    if link is None:
        check_protected(options.broker, insecure=options.insecure)
    credentials = _credentials(place, options)
    data = fingerprint(options.data, options.bad_samples, options.torch_device, options.trainer)
    store = AgentStore(place, Owner(options.device, options.fleet), options.budget.disk_bytes, fingerprint=data)
    try:
        blank = blank_state(options, capabilities(place), strict=credentials is not None)
        dial = partial(link or _mqtt(options, credentials), last_will(blank))
        broker = str(parse_url(options.broker)) if link is None else "in this process"
        emit("starting", device=options.device, profile=options.profile, broker=broker)
        own = trainer(settings, blank.capabilities.memory_total_bytes)
        trust = _trust(options, credentials) if link is None else None
        agent = Agent(blank, dial, own, store, emit, credentials, trust)
        agent.recent = recent or agent.recent
        return agent
    except BaseException:
        store.close()
        raise


def simulated_agent(
    options: Options, emit: Emit, trainer: MakeTrainer, recent: RecentLines, simulated: Simulated
) -> Agent:
    """The agent of a simulated device, not yet running. Raises EdgeFLError."""
    emit("starting", device=options.device, profile=options.profile, broker="in this process")
    transport, state, pool = simulated
    store = MemoryStore(Path(options.state), options.device, options.budget.disk_bytes, pool)
    own = trainer(settings_of(options), state.capabilities.memory_total_bytes)
    agent = Agent(state, lambda: transport, own, store, emit)
    agent.tick_s, agent.recent = SIMULATED_TICK_S, recent
    return agent


def blank_state(options: Options, machine: Capabilities, *, strict: bool = False) -> State:
    """An agent's state at its start, on this machine; ``strict``: it has an identity."""
    return State(
        fleet=options.fleet,
        device=options.device,
        session=secrets.token_hex(8),
        agent_version=edgefl.__version__,
        profile=options.profile,
        budget=options.budget,
        capabilities=msgspec.structs.replace(machine, speed=options.speed),
        heartbeat_s=options.heartbeat_s,
        strict=strict,
        no_moments=options.no_moments,
    )


def settings_of(options: Options) -> TrainerSettings:
    """Settings of an agent's trainer."""
    place = Path(options.state)
    return TrainerSettings(
        device=options.device,
        data=options.data,
        store=str(place / "objects"),
        log=str(place / "trainer.log"),
        budget=options.budget,
        bad_samples=options.bad_samples,
        torch_device=options.torch_device,
        code=options.trainer,
    )


def _files(options: Options, credentials: Credentials | None) -> TlsFiles:
    """TLS files of the identity, else those of the options."""
    ca, cert = options.ca, options.cert
    if credentials is not None:
        ca, cert = str(credentials.authority), str(credentials.certificate)
    return TlsFiles(ca or None, cert or None, options.key or None)


def _trust(options: Options, credentials: Credentials | None) -> Trust:
    """Hosts of objects past the broker: the fleet's by their certificates, else the broker's host alone."""
    files, broker = _files(options, credentials), parse_url(options.broker)
    return Trust(files, broker.tls or any(files), "" if credentials is not None else broker.host)


def _mqtt(options: Options, credentials: Credentials | None) -> MakeLink:
    """Factory of MQTT transports with the identity's certificates and client name."""
    client, files = f"{options.fleet}.{options.device}", _files(options, credentials)
    others: tuple[str, ...] = ()
    if credentials is not None:
        client = credentials.record.client_id
        others = credentials.record.others if options.broker == credentials.record.broker else ()
    return lambda will: MqttTransport(options.broker, client, will, tls=files, others=others, in_loop=True)


def _credentials(state: Path, options: Options) -> Credentials | None:
    """The identity in the state directory, if any. Raises IdentityError for another device's or an unusable one."""
    if not (state / "credentials" / "device.json").is_file():
        if options.key:
            from edgefl.identity.keys import check_private  # with it comes what checks signatures: a megabyte

            check_private(Path(options.key))
        return None
    from edgefl.identity.device import Credentials

    if options.cert or options.key:
        raise IdentityError(
            f"{state} holds an identity of its own", remedy="Leave --cert and --key away, or name another --state."
        )
    found = Credentials(state)
    if (found.record.fleet, found.record.device) != (options.fleet, options.device):
        raise IdentityError(
            f"the identity in {state} is of {found.record.device!r} in fleet {found.record.fleet!r}, not of "
            f"{options.device!r} in {options.fleet!r}",
            remedy="Leave --device and --fleet away, or name another --state.",
        )
    return found


async def run_agent(options: Options, emit: Emit, manager: Notify, recent: RecentLines | None = None) -> None:
    """Run an agent until SIGTERM or SIGINT, with its status to systemd. Raises the EdgeFLError that ended it."""
    keep_for_chunks()
    agent = make_agent(options, emit, recent=recent)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    async with reporting(agent, manager, str(parse_url(options.broker)), options.data):
        await agent.run()


def main() -> None:
    """Entry of ``python -m device_agent.runtime.connect``, with the options in the environment."""
    faulthandler.enable()  # a watchdog's SIGABRT leaves in the log where the program hung
    with guarded():
        options, manager = take_options(os.environ), Notify(os.environ)
    recent = RecentLines(sys.stderr, shared=not options.no_logs)
    always = {"program": "agent", "fleet": options.fleet, "device": options.device}
    emit = line_writer(options.form, recent, whole=options.debug, **always)
    logging.basicConfig(handlers=[LineHandler(emit)], level=logging.WARNING, force=True)
    with guarded(options.debug, tell=emit if options.form == "json" else None):
        asyncio.run(run_agent(options, emit, manager, recent))


if __name__ == "__main__":
    main()
