"""Limits of a server on outside input, each with its reason, and memory shared by requests."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from edgefl.errors import EdgeFLError
from edgefl.process.listening import Listener

#: Where a server listens unless asked otherwise.
DEFAULT = ("127.0.0.1", 8481)
LISTENER = Listener("edgefl serve", "--host")
#: Environment variable with the token that clients need; without it none is.
TOKEN = "EDGEFL_SERVE_TOKEN"  # noqa: S105 - the variable's name
#: Bytes of the JSON in a request: three pictures of 224 x 224 as text. Numbers in JSON take some sixteen times their
#: text as objects; larger tensors travel as binary data, which needs no more than its bytes.
MAX_JSON_BYTES = 8 * 2**20
#: Bytes of a table: a cell of two takes some 70 in memory, and one table is read at a time.
MAX_CSV_BYTES = 2**20
#: Bytes of one of its lines: pandas took 14 s and 500 MB for one of 500,000 cells.
MAX_CSV_LINE = 2**15
#: Tensors a request may name: models here have at most a dozen inputs and outputs.
MAX_TENSORS = 64
#: Axes of a tensor; encoders take three beside the batch. Values along one: no body may have more bytes.
MAX_AXES, MAX_AXIS = 8, 2**30
#: Characters of a request's id and of names, which come back in answers and messages.
MAX_NAME = 256
#: JSON of the parameters of a request or a tensor: the protocol's have one or two of 30. 560,000 took 0.27 s to read.
MAX_PARAMETERS_BYTES = 2**14
#: Parts of a form: one a modality.
MAX_PARTS = 32
#: Samples a request may have in all: 64 are computed at a time, and others wait for them.
MAX_ROWS = 256
#: Windows of a recording: each has an entry of some 300 bytes in the answer, and 64 of them are computed at a time.
MAX_WINDOWS = 4096
#: Seconds for a request's body, and between two of its pieces: one that stops holds room that others wait for.
BODY_S, STALL_S = 30.0, 5.0


@dataclass(frozen=True)
class Limits:
    """An operator's limits. ``body_bytes``: of one request; ``room_bytes``: of all requests in memory; ``batch_rows``:
    samples in a batch; ``delay_s``: longest wait for a full batch; ``waiting``: most requests in the queue;
    ``answer_s``: for one answer.
    """

    body_bytes: int = 32 * 2**20
    room_bytes: int = 128 * 2**20
    batch_rows: int = 64
    delay_s: float = 0.005
    waiting: int = 256
    answer_s: float = 30.0


class Refused(EdgeFLError):  # noqa: N818 - an answer to a client, not a fault of this program
    """Refusal of a request, with an HTTP status."""

    remedy = "See docs/serving.md."

    def __init__(self, status: int, message: str, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.status = status

    @property
    def told(self) -> str:
        """Message and remedy as one text, for an answer."""
        return f"{self.message}. {self.remedy}"


def busy(what: str) -> Refused:
    """Refusal for overload: a client tries again later."""
    return Refused(503, what, "Try again later.")


class Room:
    """Shared limit on bytes of request bodies in memory."""

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0

    def lease(self) -> Lease:
        """A lease of the room for one request."""
        return Lease(self)


class Lease:
    """Share of the room held by one request until the end of a ``with`` block."""

    def __init__(self, room: Room) -> None:
        self._room, self.held = room, 0

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._room.used -= self.held
        self.held = 0

    def take(self, count: int) -> None:
        """Hold ``count`` bytes at least. Raises Refused when others hold them."""
        more = max(0, count - self.held)
        if self._room.used + more > self._room.size:
            raise busy(f"requests in progress take {self._room.used} bytes, and {self._room.size} is the most")
        self._room.used += more
        self.held += more
