"""A run's control socket: requests of a terminal on the same machine, one line of JSON each way.

The socket lies in the run's directory, which is its owner's alone; the directory's lock says whether a coordinator
listens, so that a socket left behind by ``kill -9`` is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgefl.errors import ControlError, EdgeFLError

if TYPE_CHECKING:  # terminals load no coordinator
    from coordinator.runtime.control import Control

_LOG = logging.getLogger(__name__)
SOCKET = "control.sock"
#: Most bytes of sun_path that every system has (108 with the zero on Linux, 104 on macOS).
PATH_BYTES = 103
#: A request names a verb and a device: a fifth of this is more than any has.
MOST_ASKED_BYTES = 4096
#: An answer about a thousand devices, or the longest log that a device sends, has a third of this.
MOST_ANSWERED_BYTES = 2**20
#: Connections at a time: a person's terminals and a script or two.
MOST_AT_ONCE = 16
#: A terminal that has connected says at once what it wants.
LINE_S = 5.0
#: An answer waits for the ledger's transaction; one about a device, for the device.
ANSWER_S = 30.0
#: How it stands it knows by heart.
STATUS_S = 5.0


class Ask(msgspec.Struct, frozen=True):
    """A request. ``verb``: pause, resume, stop, leave_out, take_in, logs or status."""

    verb: str = ""
    by: str = "terminal"
    device: str = ""
    lines: int = 0
    after: int = 0


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a request: its result, or an error and its remedy."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    remedy: str = ""


@contextlib.asynccontextmanager
async def listening(control: Control, directory: Path) -> AsyncIterator[None]:
    """Answer terminals on a socket in the directory; only warn if its file system takes no socket."""
    slots = asyncio.Semaphore(MOST_AT_ONCE)
    open_ones: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            open_ones.add(task)
            task.add_done_callback(open_ones.discard)
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.TimeoutError):
            if slots.locked():
                busy = Answer(error=f"{MOST_AT_ONCE} requests are being answered", remedy="Try again in a moment.")
                writer.write(msgspec.json.encode(busy) + b"\n")
            else:
                async with slots:
                    writer.write(await _answer(control, reader))
                    await asyncio.wait_for(writer.drain(), LINE_S)

    try:
        with _address(directory) as address:
            server = await asyncio.start_unix_server(serve, sock=_bound(address), limit=MOST_ASKED_BYTES)
    except OSError as error:
        _LOG.warning("terminals cannot control this run: no socket in %s (%s)", directory, error.strerror or error)
        yield
        return
    try:
        yield
    finally:
        server.close()
        if open_ones:  # the answer to who has stopped the run
            await asyncio.wait(open_ones, timeout=LINE_S)
        (directory / SOCKET).unlink(missing_ok=True)


def _bound(address: str) -> socket.socket:
    Path(address).unlink(missing_ok=True)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.bind(address)
        Path(address).chmod(0o600)
    except BaseException:
        opened.close()
        raise
    return opened


@contextlib.contextmanager
def _address(directory: Path) -> Iterator[str]:
    """Path of the socket, short enough for sun_path: a long directory by its descriptor in /proc."""
    plain = str(directory / SOCKET)
    if len(os.fsencode(plain)) <= PATH_BYTES:
        yield plain
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


async def _answer(control: Control, reader: asyncio.StreamReader) -> bytes:
    try:
        line = await asyncio.wait_for(reader.readline(), LINE_S)
        ask = msgspec.json.decode(line, type=Ask)
        answer = Answer(msgspec.Raw(msgspec.json.encode(await _perform(control, ask))))
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:  # ValueError: a line beyond the limit
        answer = Answer(error=f"not a request: {error}", remedy="Install the same release for both.")
    except EdgeFLError as error:
        answer = Answer(error=error.message, remedy=error.remedy)
    return msgspec.json.encode(answer) + b"\n"


async def _perform(control: Control, ask: Ask) -> object:
    if ask.verb == "status":
        return control.status()
    if ask.verb == "logs":
        return await control.device_log(ask.device, ask.lines, ask.after)
    if ask.verb in {"pause", "resume", "stop"}:
        return await {"pause": control.pause, "resume": control.resume, "stop": control.stop}[ask.verb](ask.by[:64])
    if ask.verb in {"leave_out", "take_in"}:
        verb = control.leave_out if ask.verb == "leave_out" else control.take_in
        return await verb(ask.device, ask.by[:64])
    raise ControlError(f"this coordinator knows no request {ask.verb[:64]!r}", remedy=ControlError.remedy)


def request(directory: Path, ask: Ask) -> bytes:
    """Send a request to the coordinator of ``directory``; its result as JSON. Raises ControlError."""
    try:
        with _address(directory) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(STATUS_S if ask.verb == "status" else ANSWER_S)
            link.connect(address)
            line = _exchange(link, msgspec.json.encode(ask) + b"\n")
    except TimeoutError as error:
        text = f"the coordinator of {directory.name} runs, and has not answered for {link.gettimeout():g} s"
        raise ControlError(text, remedy="It is very busy, or hangs: see its output, or `edgefl runs`.") from error
    except OSError as error:
        text = f"the coordinator of {directory.name} does not answer: {error.strerror or error}"
        raise ControlError(text, remedy="It may be starting or ending: try again in a moment.") from error
    try:
        answer = msgspec.json.decode(line, type=Answer)
    except msgspec.MsgspecError as error:
        raise ControlError(f"the coordinator of {directory.name} gave no answer") from error
    if answer.error:
        raise ControlError(answer.error, remedy=answer.remedy)
    return bytes(answer.result)


def _exchange(link: socket.socket, sent: bytes) -> bytes:
    """Send a request and read the answer's line, also from a peer that closes before reading all."""
    refused: ConnectionError | None = None
    try:
        link.sendall(sent)
    except ConnectionError as error:
        refused = error
    line = _line(link)
    if refused is not None and not line:
        raise refused
    return line


def _line(link: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n") and len(found) < MOST_ANSWERED_BYTES and (piece := link.recv(2**16)):
        found += piece
    return found
