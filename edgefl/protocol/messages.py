"""Messages between devices and the coordinator: tagged MessagePack records, tolerant of other versions.

Every field has a default; unknown fields are ignored; an unknown tag raises UnknownMessageError, which the
receiver counts and drops. All sizes are limited before anything is allocated.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from edgefl import PROTOCOL_VERSION
from edgefl.errors import ProtocolError
from edgefl.plan.job import Job, Preparation
from edgefl.records import Attempt, Budget, Capabilities, Figures, Manifest, Moments, ObjectRef, Refusal

#: Largest control message. An offer for 500 parts is about 60 KB; 120 KiB also fits the 128 KiB limit of AWS IoT Core.
MAX_MESSAGE_BYTES = 120 * 1024


#: Log lines of one answer, and their bytes: enough to see what went wrong, and little on a slow link.
MOST_LOG_LINES = 200
MOST_LOG_BYTES = 32 * 1024

#: Largest signature in a hello, which is sent again at each connect: 1,024 numbers and a header.
MAX_SIGNATURE_BYTES = 8 * 1024


class _Message(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of all messages: a tagged frozen record."""


class Hello(_Message, frozen=True, tag="hello"):
    """Device → coordinator, after each connect: who I am, what I can, what I may spend."""

    device: str = ""
    session: str = ""  # new for each start of the agent process
    agent_version: str = ""
    protocol: int = PROTOCOL_VERSION
    profile: str = ""
    capabilities: Capabilities = Capabilities()
    budget: Budget = Budget()
    modalities: dict[str, tuple[int, ...]] = {}  # modality -> shape of one sample
    samples: dict[str, int] = {}  # modality -> samples that have it; "" -> all samples
    class_counts: tuple[int, ...] = ()
    working_on: Attempt | None = None  # the attempt this device has on disk (accepted or finished but unsent)
    prepared: str = ""  # the id of the ``Preparation`` by which the data was read that the fields above are of
    moments: dict[str, Moments] = {}  # of modalities that this standardises
    addresses: int = 0  # revision of the broker's addresses known to it; see ``Addresses``
    signature: bytes = b""  # a part with what the preparation asks for clusters


class Accept(_Message, frozen=True, tag="accept"):
    """Device → coordinator: I train this attempt. Sent again, it means the same."""

    device: str = ""
    attempt: Attempt = Attempt()


class Decline(_Message, frozen=True, tag="decline"):
    """Device → coordinator: I do not train this attempt, and why, with both numbers."""

    device: str = ""
    attempt: Attempt = Attempt()
    refusal: Refusal = Refusal()
    figures: Figures = {}


class Progress(_Message, frozen=True, tag="progress"):
    """Device → coordinator: how far local training is."""

    device: str = ""
    attempt: Attempt = Attempt()
    epoch: int = 0
    step: int = 0
    steps: int = 0  # of the whole round
    loss: float = 0.0


class Update(_Message, frozen=True, tag="update"):
    """Device → coordinator: training is finished; these objects can be fetched from me."""

    device: str = ""
    attempt: Attempt = Attempt()
    manifest: Manifest = {}  # trained parts that are exchanged, or "layers"; "prototypes", "signature" if there are any
    samples: dict[str, int] = {}  # part -> number of samples it was trained on
    metrics: dict[str, float] = {}
    figures: Figures = {}
    complete: bool = True  # whether it trained with complete data: with repair: poverty, has no poverty layer
    poverty: int = -1  # the poverty layer, as its place among the weight tensors of the manifest's parts; -1: none
    poverty_change: float = 0.0  # how much missing modalities changed it; 0: none, or not told
    layer: str = ""  # of a recipe with periods: the poverty layer that may be exchanged alone, as "part|tensor"
    base: str = ""  # the digest of what the device retains, which its next round of the period goes on from


class Spent(_Message, frozen=True, tag="spent"):
    """Device → coordinator: figures of an attempt that I have dropped, because its round closed or another came."""

    device: str = ""
    attempt: Attempt = Attempt()
    figures: Figures = {}


class Need(_Message, frozen=True, tag="need"):
    """Receiver → sender of objects: what I lack, how many chunks may be in flight, and what arrived so far.

    ``missing`` maps object id -> chunk bitmap (bit i of byte i//8 set: chunk i is missing), for every object not yet
    complete; it is sent in full at the start of an ``epoch`` and left out when only progress is acknowledged.
    ``received`` counts distinct chunks that arrived in this epoch. ``done``: everything is here and verified.
    """

    device: str = ""  # the device's id, in both directions
    transfer: str = ""
    epoch: int = 0
    chunk_bytes: int = 0
    credit: int = 0
    received: int = 0
    missing: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    done: bool = False


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    """Device → coordinator: I am alive. ``sequence`` counts up within a session."""

    device: str = ""
    session: str = ""
    sequence: int = 0
    working_on: Attempt | None = None
    memory_free_bytes: int = 0


class LogLines(_Message, frozen=True, tag="log-lines"):
    """Device → coordinator: the last log lines of its agent, as asked for; or why there are none.

    ``count``: lines its agent has logged since it started, of which these are the newest.
    """

    device: str = ""
    request: int = 0
    count: int = 0
    lines: tuple[str, ...] = ()
    refusal: str = ""


class Renew(_Message, frozen=True, tag="renew"):
    """Device → coordinator: my certificate is half over; sign this request (DER) for a fresh key."""

    device: str = ""
    request: bytes = b""


class Presence(_Message, frozen=True, tag="presence"):
    """Device (or its last will) → coordinator: online or offline."""

    device: str = ""
    session: str = ""
    online: bool = False


class Welcome(_Message, frozen=True, tag="welcome"):
    """Coordinator → device, in answer to hello."""

    coordinator: str = ""
    protocol: int = PROTOCOL_VERSION
    run: str = ""
    made_ms: int = 0  # when that run was made, as in Attempt
    earlier_ms: tuple[int, ...] = ()  # the same before it was restored from a copy: what a device retained of it counts
    heartbeat_s: float = 10.0
    release: str = ""  # of the coordinator's program
    preparation: Preparation = Preparation()  # a hello that was prepared otherwise does not count: read, and say again


class PackedPart(msgspec.Struct, frozen=True):
    """An object that leads from the object ``base`` ("": from nothing) to a part's object, and how it is packed."""

    ref: ObjectRef = ObjectRef()
    base: str = ""
    packing: str = ""


class Offer(_Message, frozen=True, tag="offer"):
    """Coordinator → device: train this. ``manifest`` names every part the job needs, by object.

    ``packed``: part -> a shorter way to its object, for a device that holds what it is based on.
    """

    attempt: Attempt = Attempt()
    deadline_s: float = 0.0  # seconds from now; 0: none
    job: Job = Job()
    manifest: Manifest = {}
    transfer: str = ""  # the transfer that ``need`` messages for this manifest name
    chunk_bytes: int = 0
    credit: int = 0
    packed: dict[str, PackedPart] = {}
    base: str = ""  # of a round that goes on from the device's own parts: their digest, as in its last update
    urls: dict[str, str] = {}  # object id -> where it may be fetched by HTTP instead of in chunks


class Grant(Need, frozen=True, tag="grant"):
    """Coordinator → device: the coordinator's ``need`` for the objects of an update (same fields, same meaning).

    ``urls``: object id -> where what is missing of it may be put by HTTP instead of sent in chunks.
    """

    urls: dict[str, str] = {}


class Ack(_Message, frozen=True, tag="ack"):
    """Coordinator → device: the update of this attempt is complete and on disk, or rejected with a reason."""

    attempt: Attempt = Attempt()
    accepted: bool = True
    refusal: Refusal = Refusal()


class Abort(_Message, frozen=True, tag="abort"):
    """Coordinator → device: drop this attempt (and nothing newer)."""

    attempt: Attempt = Attempt()
    reason: str = ""


class Drain(_Message, frozen=True, tag="drain"):
    """Coordinator → device: there is nothing to do in this run; wait for the next, or to be welcomed to this one again.

    What the device retains between rounds goes once it is ``final``, or when another run begins.
    """

    run: str = ""
    reason: str = ""
    made_ms: int = 0  # as in Attempt
    final: bool = False  # the run is finished and never goes on


class LogRequest(_Message, frozen=True, tag="log-request"):
    """Coordinator → device: send the last ``lines`` of your agent's log that come after line number ``after``."""

    request: int = 0
    lines: int = 0
    after: int = 0


class Renewed(_Message, frozen=True, tag="renewed"):
    """Coordinator → device: the certificate asked for (DER) and when it is valid (epoch seconds), or why there is none.

    ``request``: sha256 (hex) of the request that this answers.
    """

    request: str = ""
    certificate: bytes = b""
    not_before: float = 0.0
    not_after: float = 0.0
    refusal: str = ""


class Addresses(_Message, frozen=True, tag="addresses"):
    """Coordinator → device: the broker's URLs, that of new devices first, and their revision.

    Answered by a hello.
    """

    urls: tuple[str, ...] = ()
    revision: int = 0


UpMessage = Hello | Accept | Decline | Progress | Update | Spent | Need | Heartbeat | Presence | Renew | LogLines
DownMessage = Welcome | Offer | Grant | Ack | Abort | Drain | Renewed | LogRequest | Addresses
M = TypeVar("M", UpMessage, DownMessage)


class UnknownMessageError(ProtocolError):
    """A well-formed message with a tag this version does not know."""


_encoder = msgspec.msgpack.Encoder()
_up: msgspec.msgpack.Decoder[UpMessage] = msgspec.msgpack.Decoder(UpMessage)
_down: msgspec.msgpack.Decoder[DownMessage] = msgspec.msgpack.Decoder(DownMessage)


def encode(message: UpMessage | DownMessage) -> bytes:
    """The message as bytes. Raises ProtocolError when it exceeds MAX_MESSAGE_BYTES."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"{type(message).__name__} of {len(payload)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}"
        )
    return payload


def decode_up(payload: bytes) -> UpMessage:
    """A device's message. Raises UnknownMessageError (other version) or ProtocolError (malformed, oversized)."""
    return _decode(_up, payload)


def decode_down(payload: bytes) -> DownMessage:
    """A coordinator's message. Raises UnknownMessageError (other version) or ProtocolError (malformed, oversized)."""
    return _decode(_down, payload)


def _decode(decoder: msgspec.msgpack.Decoder[M], payload: bytes) -> M:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(payload)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(payload)
    except msgspec.ValidationError as error:
        if "Invalid value" in str(error) and "`$.t`" in str(error):
            raise UnknownMessageError(f"unknown kind of message: {error}") from error
        raise ProtocolError(f"malformed message: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
