"""A broker of our own, for one machine that has none: mosquitto if it is installed, else amqtt, as a child process.

It listens on loopback unless asked otherwise, admits one user with a generated secret, ends with its parent, and can be
stopped, killed and started again under the same URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import msgspec

from edgefl.errors import BrokerError, MissingDependencyError, StoreError
from edgefl.process.parent_death import leashed
from edgefl.storage.disk import read_at_most, way_out, write_new
from edgefl.transport.address import Address
from edgefl.transport.mosquitto import write_configuration
from edgefl.transport.mqtt import MqttTransport

BrokerKind = Literal["mosquitto", "amqtt"]

#: mosquitto answers within 0.1 s; amqtt's imports take 0.5 s on a PC and several seconds on a small board.
START_TIMEOUT_S = 30.0
#: mosquitto writes its sessions before it ends; a large queue takes a second or two.
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.01
_USER = "edgefl"
#: Largest size of the file with port, user and password; and the characters of the latter two.
_IDENTITY_BYTES = 4096
_WORD = re.compile(r"[A-Za-z0-9_-]{1,200}")


class Program(NamedTuple):
    """A configured broker program: how it is started and reached.

    ``host``: the address it listens on; ``address``: as this machine dials it; ``log``: file of its output; ``client``:
    makes a client that this broker admits and no other.
    """

    kind: BrokerKind
    command: list[str]
    host: str
    address: Address
    log: Path
    client: Callable[[], MqttTransport]


class Broker:
    """One broker program as a child process. Use it as ``async with``, or call ``start`` and ``stop``.

    ``url`` holds the password: hand it on in files and environments of the same user, never print it
    (``str(broker.address)`` can be printed). Not bound to an event loop. ``beside``: another broker that starts and
    ends with it.
    """

    def __init__(self, program: Program, beside: Broker | None = None) -> None:
        self.kind, self.address, self.log = program.kind, program.address, program.log
        self.directory = program.log.parent
        self.beside = beside
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        """The URL with which ``MqttTransport`` connects, password included."""
        return self.address.secret_url()

    @property
    def pid(self) -> int | None:
        """Process id of the broker program while it runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    async def start(self) -> None:
        """Return once it answers; at once if it runs. Raises BrokerError with the last line of its log."""
        if self.pid is not None:
            return
        if (fault := _port_fault(self._program.host, self.address.port)) is not None:
            raise fault
        try:
            self._log_start = self.log.stat().st_size if self.log.exists() else 0
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    leashed(self._program.command, descriptors=True),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C in the terminal is the parent's to answer, which then stops it
                )
        except OSError as error:
            raise _refusing_disk(error, self.directory) or BrokerError(
                f"cannot start {self.kind}: {error.strerror}: {error.filename}"
            ) from error
        try:
            await asyncio.wait_for(self._until_it_answers(), START_TIMEOUT_S)
        except BaseException as error:
            code = self._process.poll()
            await self.kill()
            if isinstance(error, asyncio.TimeoutError):
                raise self._start_error(f"did not answer within {START_TIMEOUT_S:.0f} s") from None
            if isinstance(error, BrokerError) and code is not None:
                raise self._start_error(f"ended at once with exit code {code}") from error
            raise
        if self.beside is not None:
            try:
                await self.beside.start()
            except BaseException:
                await self.stop()
                raise

    async def stop(self) -> None:
        """End it in an orderly way (mosquitto saves its sessions); kills it when that takes too long."""
        if self.beside is not None:
            await self.beside.stop()
        if self._process is not None and self.pid is not None:
            self._process.terminate()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended(), STOP_TIMEOUT_S)
        await self.kill()

    async def kill(self) -> None:
        """End it by SIGKILL. mosquitto keeps what it saved ``mosquitto.AUTOSAVE_S`` ago or before; amqtt nothing."""
        if self.beside is not None:
            await self.beside.kill()
        if self._process is None:
            return
        self._process.kill()  # does nothing to one that has ended
        await self._ended()
        self._process = None

    async def __aenter__(self) -> Broker:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _ended(self) -> None:
        while self.pid is not None:
            await asyncio.sleep(_POLL_S)

    async def _until_it_answers(self) -> None:
        while True:
            if self.pid is None:
                raise self._start_error("ended at once")
            try:
                _, writer = await asyncio.open_connection(self.address.host, self.address.port)
            except OSError:
                await asyncio.sleep(_POLL_S)
                continue
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            break
        client = self._program.client()  # another program may listen there, which does not admit it
        await client.connect()
        await client.close()

    def _start_error(self, what: str) -> BrokerError:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read()[-64 * 1024 :].decode(errors="replace").strip().splitlines()
        last = lines[-1].strip() if lines else "its log is empty"
        return BrokerError(
            f"{self.kind} on {self.address} {what}: {last}",
            remedy=f"Its whole log is in {self.log}; or give the URL of a broker that runs already.",
        )


class _Identity(msgspec.Struct):
    """Settings that stay the same when a broker is started again in its directory, by this or a later process."""

    port: int
    username: str
    password: str


def start_broker(directory: Path, kind: str = "auto", host: str = "127.0.0.1", port: int = 0) -> Broker:
    """A broker that keeps its files in ``directory``, ready for ``await broker.start()`` or ``async with``.

    kind: mosquitto, amqtt, or auto (mosquitto if there is one). port 0: the one used last in this directory if it is
    free, else any. Raises BrokerError for an unknown kind, a missing program or an unusable directory.
    """
    chosen = resolve_kind(kind)
    program, directory = program_of(chosen), directory.absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        who = _load_identity(directory, host, port)
        if chosen == "mosquitto":
            files = write_configuration(directory, host, who.port, who.username, who.password)
            command = [program, "-c", str(files)]
        else:
            files = directory / "amqtt.json"
            write_new(files, msgspec.json.encode({"host": host, **msgspec.structs.asdict(who)}), mode=0o600)
            command = [program, "-m", "edgefl.transport.amqtt_process", str(files)]
    except OSError as error:
        raise _refusing_disk(error, directory) or BrokerError(
            f"cannot use {directory} for the broker: {error.strerror}",
            remedy="Choose a directory that can be written.",
        ) from error
    address = Address(dialled(host), who.port, False, who.username, who.password, legacy=chosen == "amqtt")

    def client() -> MqttTransport:
        return MqttTransport(address.secret_url(), f"{_USER}-probe-{os.getpid()}", clean_session=True)

    return Broker(Program(chosen, command, host, address, directory / f"{chosen}.log", client))


def dialled(host: str) -> str:
    """Address by which this machine reaches a server that listens on ``host``, "" for all addresses."""
    every = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - bound only when the user asks for it
    return every.get(host, host)


def program_of(kind: BrokerKind) -> str:
    """Path of the program that runs this kind of broker. Raises BrokerError or MissingDependencyError without one."""
    if (program := broker_program(kind)) is not None:
        return program
    if kind == "amqtt":
        raise MissingDependencyError("amqtt", "coordinator")
    raise BrokerError(
        "mosquitto is not on the PATH (Debian keeps it in /usr/sbin)",
        remedy="Install it (apt install mosquitto), choose broker: amqtt, or give the URL of a running broker.",
    )


def resolve_kind(kind: str) -> BrokerKind:
    """The kind of broker that ``auto`` means here. Raises BrokerError for an unknown kind."""
    if kind == "auto":
        return "mosquitto" if broker_program("mosquitto") else "amqtt"
    if kind == "mosquitto":
        return "mosquitto"
    if kind == "amqtt":
        return "amqtt"
    raise BrokerError(f"unknown kind of broker {kind!r}", remedy="Choose auto, mosquitto or amqtt.")


def broker_program(kind: BrokerKind) -> str | None:
    """Path of the program that would run this kind of broker, None if it is not installed. Starts nothing.

    For mosquitto the environment variable EDGEFL_MOSQUITTO overrides the search: a path, or ``off`` to do without.
    """
    if kind == "amqtt":
        return sys.executable if importlib.util.find_spec("amqtt") is not None else None
    chosen = os.environ.get("EDGEFL_MOSQUITTO")
    if chosen:
        return None if chosen == "off" else shutil.which(chosen)
    return shutil.which("mosquitto")


def read_identity(path: Path) -> _Identity | None:
    """Port, user and password of an earlier start; None when unusable: devices then need the new URL."""
    try:
        identity = msgspec.json.decode(read_at_most(path, _IDENTITY_BYTES), type=_Identity)
    except (FileNotFoundError, ValueError):
        return None
    sound = 0 <= identity.port < 2**16 and _WORD.fullmatch(identity.username) and _WORD.fullmatch(identity.password)
    return identity if sound else None


def _load_identity(directory: Path, host: str, port: int) -> _Identity:
    """The broker's port and secret; another port where any will do and the last one is taken."""
    path = directory / "identity.json"
    identity = read_identity(path) or _Identity(0, _USER, secrets.token_urlsafe(24))
    identity.port = port or identity.port
    if not identity.port or (not port and _port_fault(host, identity.port)):
        identity.port = free_port(host)
    write_new(path, msgspec.json.encode(identity), mode=0o600)
    return identity


def _refusing_disk(error: OSError, directory: Path) -> StoreError | None:
    """StoreError for a full or read-only disk, None for any other error."""
    if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}:
        return None
    text = f"cannot write the broker's files in {directory}: {error.strerror}"
    return StoreError(text, remedy=way_out(directory, error))


def _port_fault(host: str, port: int) -> BrokerError | None:
    """Why nothing can listen there, None if it can."""
    try:
        _bound(host, port)
    except OSError as error:
        where = f"port {port} on {host}"
        if error.errno == errno.EADDRINUSE:
            return BrokerError(
                f"{where} is already in use",
                remedy="Stop the program that uses it, or choose another port (of a fleet with an identity: "
                "`edgefl-coordinator init --port … --enroll-port … --directory …`), or give its URL if it is a broker.",
            )
        return BrokerError(f"cannot listen on {where}: {error.strerror}", remedy="Choose another host or port.")
    return None


def free_port(host: str) -> int:
    """A port where nothing listens now."""
    try:
        return _bound(host, 0)
    except OSError as error:
        raise BrokerError(f"cannot listen on {host}: {error.strerror}", remedy="Choose another host.") from error


def _bound(host: str, port: int) -> int:
    """The port that a listener gets there, 0 for any. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])
