"""A worker: a child process that answers requests over its pipes, so that heavy libraries live (and die) apart.

Used for the agent's trainer and the coordinator's evaluator. Frames are a 4-byte length and MessagePack. The child's
own prints go to stderr, which is appended to a log file. The parent learns of replies, of notes sent while a request
is being worked on, and of the child's end, in that order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Literal, TextIO, TypeVar

import msgspec

from edgefl import errors
from edgefl.errors import EdgeFLError, WorkerError, missing_dependency

#: Largest frame. Frames carry paths and numbers, never tensors; a plan for 500 parts is under 1 MiB.
MAX_FRAME_BYTES = 16 * 2**20

T = TypeVar("T")
Note = Callable[[object], None]
Handler = Callable[[object, Note], object]


class Request(msgspec.Struct, frozen=True):
    """From the parent: which of the handlers, and what it is given."""

    method: str = ""
    body: object = None


class Answer(msgspec.Struct, frozen=True):
    """From the child: a note while it works, then what came out, or the error that it ended with."""

    kind: Literal["note", "reply", "error"]
    body: object = None
    error: str = ""  # name of the error's class
    message: str = ""
    remedy: str = ""


#: Turns that OpenMP's threads spin between a model's layers before they sleep. By libgomp's default two trainers on two
#: busy processors took 4.3 s a step, so 0.04; alone 0.02 either way, and 0.033 without any spinning.
_SPINS = {"GOMP_SPINCOUNT": "1000"}


class WorkerProcess:
    """Parent side. ``start`` it, ``call`` it any number of times (one at a time), ``stop`` or ``kill`` it."""

    def __init__(self, module: str, arguments: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.module = module
        self.arguments = arguments
        self.log = log
        self.env = env or {}
        self.process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._killed = False

    @property
    def pid(self) -> int | None:
        """Process id while the child runs, else None."""
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    async def start(self) -> None:
        """Start the child unless it runs already."""
        if self.process is not None and self._killed:
            await self.process.wait()
        if self.pid is not None:
            return
        self._killed = False
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as stderr:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self.module,
                *self.arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**_SPINS, **os.environ, **self.env},
            )

    async def call(self, method: str, body: object, on_note: Note | None = None) -> object:
        """The child's answer. Raises WorkerFailedError when the child raised or ended (``status`` < 0: it was killed).

        A call that is cancelled, or answered with nonsense, ends the child: its next words would belong to no request.
        """
        async with self._lock:
            await self.start()
            process = self.process
            if process is None or process.stdin is None or process.stdout is None:
                raise WorkerFailedError(f"{self.module} did not start", log=self.log)
            request = _frame(Request(method, body))
            try:
                process.stdin.write(request)
                await process.stdin.drain()
                frame = await read_answer(process.stdout, on_note)
            except (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError) as error:
                status = await process.wait()
                how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
                raise WorkerFailedError(
                    f"{self.module} {how} while it did '{method}'", log=self.log, status=status
                ) from error
            except WorkerError as error:
                self.kill()
                raise WorkerFailedError(f"{self.module}: {error.message}", log=self.log) from error
            except BaseException:
                self.kill()
                raise
            return reply_of(frame, self.log)

    def interrupt(self) -> None:
        """Ask the request under way to end early, by SIGUSR1, for which the child has a handler."""
        if (pid := self.pid) is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End the child at once."""
        self._killed = True
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    async def stop(self, grace_s: float = 3.0) -> None:
        """Close the child's input, which ends it; kill it after ``grace_s`` seconds."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except asyncio.TimeoutError:
            self.kill()
            await process.wait()


class WorkerFailedError(WorkerError):
    """``status``: how the child ended (< 0: by that signal; None: it lives). ``kind``: the child's own error class."""

    def __init__(
        self, message: str, *, log: Path | str = "its log", status: int | None = None, kind: str = "", remedy: str = ""
    ) -> None:
        super().__init__(message, remedy=remedy or f"See {log}.")
        self.status = status
        self.kind = kind
        own = getattr(errors, kind, None)  # what the child raised on purpose ends this program as it would have there
        self.on_purpose = False
        if isinstance(own, type) and issubclass(own, EdgeFLError):
            self.on_purpose = True
            self.exit_code = own.exit_code


def serve(handlers: dict[str, Handler]) -> None:
    """Child side: answer requests until the parent closes the pipe. Each handler takes (body, note)."""
    frames_in, frames_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to the log, never into the frames
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # and a library that asks a question is told at once that nobody answers
    os.close(nothing)

    def send(frame: Answer) -> None:
        frames_out.write(_frame(frame))
        frames_out.flush()

    def note(body: object) -> None:
        send(Answer("note", msgspec.to_builtins(body)))

    while (request := read_request(frames_in)) is not None:
        try:
            send(answered(handlers, request, note, sys.stderr))
        except WorkerError as error:  # a reply that no frame can hold
            send(Answer("error", error=type(error).__name__, message=error.message, remedy=error.remedy))


def answered(
    handlers: Mapping[str, Handler], request: Request, note: Note, log: TextIO, *, as_it_is: bool = False
) -> Answer:
    """The reply of a request's handler, or the error it raised; ``log`` takes the traceback of an unexpected one.

    ``as_it_is``: the reply crosses no pipe, and need not be made of plain values.
    """
    try:
        reply = handlers[request.method](request.body, note)
        return Answer("reply", reply if as_it_is else msgspec.to_builtins(reply))
    except (EdgeFLError, ModuleNotFoundError) as error:
        named = error if isinstance(error, EdgeFLError) else missing_dependency(error)
        named = named or WorkerError(f"ModuleNotFoundError: {error}")
        return Answer("error", error=type(named).__name__, message=named.message, remedy=named.remedy)
    except Exception as error:  # the caller must hear of every failure
        traceback.print_exception(error, file=log)
        return Answer("error", error=type(error).__name__, message=f"{type(error).__name__}: {error}")


async def read_answer(stream: asyncio.StreamReader, on_note: Note | None) -> Answer:
    """The reply or error that ends a request, after its notes.

    Raises IncompleteReadError when the child ended, WorkerError for what is no answer.
    """
    while True:
        length = _checked(int.from_bytes(await stream.readexactly(4), "big"))
        frame = _decoded(await stream.readexactly(length), Answer)
        if frame.kind != "note":
            return frame
        if on_note is not None:
            on_note(frame.body)


def read_request(stream: BinaryIO) -> Request | None:
    """The next request; None when the parent has closed the pipe. Raises WorkerError for what is no request."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    return _decoded(stream.read(_checked(int.from_bytes(header, "big"))), Request)


def reply_of(frame: Answer, log: Path) -> object:
    """The body of a reply. Raises WorkerFailedError for an error, which ``log`` may tell more of."""
    if frame.kind == "error":
        raise WorkerFailedError(frame.message, log=log, kind=frame.error, remedy=frame.remedy)
    return frame.body


def understood(body: object, kind: type[T]) -> T:
    """A worker's reply, as ``kind``. Raises WorkerFailedError when it is something else."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise WorkerFailedError(f"a worker answered with something else than {kind}: {error}") from error


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:  # TypeError: a list as a key
        raise WorkerError(f"a worker's frame of {len(data)} bytes makes no sense: {error}") from error


def _frame(value: object) -> bytes:
    payload = msgspec.msgpack.encode(value)
    return struct.pack(">I", _checked(len(payload))) + payload


def _checked(length: int) -> int:
    if length > MAX_FRAME_BYTES:
        raise WorkerError(f"a worker's frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return length
