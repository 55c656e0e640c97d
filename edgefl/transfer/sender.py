"""Sender of a transfer: choice of chunks, pace and topic for each receiver. See ``edgefl.transfer``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from edgefl.errors import ProtocolError
from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES
from edgefl.protocol.messages import Need
from edgefl.transfer.receiver import (
    MAX_CREDIT,
    SLOW_LINK,
    STEP_BITS,
    ChunkIndex,
    Completed,
    Failed,
    Instruction,
    SendChunk,
)

#: How long a sender waits for the other receivers before the first chunk. Ends early when all that are expected have
#: asked; a second is ample for an agent to check its store, and is only lost when one of them never asks.
GATHER_S = 1.0
#: How long one receiver may block the others without acknowledging half a window. Half of 16 x 96 KiB in 3 s keeps
#: every link of at least 2.1 Mbit/s in step; slower ones are better served alone.
PACE_STALL_S = 3.0
#: Bytes a second that a broker is expected to hand out at least, to all receivers together. What it may still hold is
#: neither sent again nor held against a receiver: 2,000 windows of 1.5 MB are 3 GB on their way.
BROKER_RATE = 16_000_000
#: Seconds of it that a broker may be behind before receivers' requests are taken to cross with what they ask for.
LAG_S = 1.0
#: Receivers that are sent chunks of their own at a time, as many as there are uploads: what is sent to one alone is in
#: the memory of coordinator and broker, 1.5 MB for each window.
MOST_ALONE = 32
#: When everything was sent and the receiver says nothing for this long, the smallest chunk is sent again: one that has
#: finished answers (its ``done`` may have been lost). Longer than STALL_S, after which one that lacks something asks by
#: itself; doubles up to MAX_PROBE_S, so that a device that never comes back costs a chunk every few minutes, until its
#: round is closed.
PROBE_S = 10.0
MAX_PROBE_S = 160.0
#: Earlier incarnations of a device that are remembered: no device restarts more often within one transfer.
MAX_INCARNATIONS = 64


class Sent(NamedTuple):
    """Bytes of chunks sent to a device: the first time, and repeated."""

    first: int = 0
    again: int = 0


class Sender:
    """Serves the objects ``sizes`` (id -> bytes) to one or many receivers.

    ``expected``: devices that will ask; the first chunk waits for them up to GATHER_S, so that all of them can use what
    is published once. The chunk size is that of the first Need; one with another size is dropped while others are being
    served; ``chunk_bytes`` holds until then. ``dropped`` counts by reason what was ignored; ``completed`` holds the
    devices that have everything.
    """

    def __init__(
        self,
        transfer: str,
        sizes: Mapping[str, int],
        expected: Collection[str] = (),
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        self.transfer = transfer
        self.completed: set[str] = set()
        self.dropped: Counter[str] = Counter()
        self._sizes = dict(sizes)
        self._index = ChunkIndex(sizes, chunk_bytes)
        self._receivers: dict[str, ReceiverState] = {}
        self._unserved: dict[str, ReceiverState] = {}  # those of them with chunks that they were not sent
        self._in_step = 0  # how many of them are in step
        self._epochs = Epochs()
        self._sent: dict[str, int] = {}  # device -> set of chunks that it was sent in all epochs
        self._untold: dict[str, Sent] = {}
        self._awaited = set(expected)
        self._gather_until: float | None = None
        self._shared = 0  # set of chunks still to be published once for all
        self._planned = True  # it is chosen for the receivers there are
        self._alone: dict[str, None] = {}  # devices that are sent chunks of their own
        self._flying = 0  # chunks of all receivers that are sent and not acknowledged
        self._delivered_at = 0.0  # when the broker should have handed out everything

    @property
    def chunk_bytes(self) -> int:
        """The chunk size in force, to read chunks by."""
        return self._index.chunk_bytes

    def sent_bytes(self, device: str) -> int:
        """Bytes of chunks sent to a device, each once; an object's last one counts as whole."""
        return self._sent.get(device, 0).bit_count() * self.chunk_bytes

    def on_passed(self, device: str, object_id: str, begin: int, end: int) -> None:
        """Bytes of an object, from and to, went to the device another way; each chunk counts with its last."""
        last = end == self._sizes[object_id]
        for index in range(begin // self.chunk_bytes, end // self.chunk_bytes + last):
            if (number := self._index.number(object_id, index)) is not None:
                self._count(device, number, self._index.length(object_id, index))

    def waits(self, device: str) -> bool:
        """True if slower receivers hold the device back: chunks left, and room in its window."""
        receiver = self._receivers.get(device)
        return receiver is not None and receiver.todo != 0 and receiver.has_room

    def take_sent(self) -> dict[str, Sent]:
        """Device -> bytes of chunks sent since the last call."""
        taken, self._untold = self._untold, {}
        return taken

    def on_need(self, device: str, need: Need, now: float) -> list[Instruction]:
        """A Need (or Grant) of ``device`` arrived."""
        reason = self._unfit(device, need)
        if reason:
            self.dropped[reason] += 1
            return []
        receiver = self._receivers.get(device)
        if need.done:
            self._epochs.enter(device, need.epoch)
            news: list[Instruction] = [] if device in self.completed else [Completed(device)]
            self.completed.add(device)
            return [*news, *self.drop(device, now)]
        if receiver is not None and self._epochs.age(device, need.epoch) == "present":
            if need.received > receiver.received:
                before = receiver.received
                receiver.acknowledge(need.received, now)
                self._flying -= receiver.received - before
                if not receiver.todo and receiver.received >= receiver.sent:
                    self._alone.pop(device, None)
                return self._pump(now, device)
            self.dropped["stale_progress"] += 1
            return []
        if not need.missing:
            self.dropped["unknown_epoch"] += 1  # acknowledges what an earlier incarnation of this sender sent
            return []
        try:
            return self._begin(device, need, now)
        except ProtocolError as error:
            self.dropped["unfit_bitmap"] += 1
            lost = next((name for name in need.missing if name not in self._sizes), "")
            return [Failed(device, lost, error.message)] if lost else []

    def on_tick(self, now: float) -> list[Instruction]:
        """Call about twice a second while the transport is connected: ends waiting, drops the stalled from the pace."""
        blocking = [
            (one, one.blocked_at) for one in self._unserved.values() if one.in_step and one.blocked_at is not None
        ]
        if not self._behind_s(now) or 2 * len(blocking) <= self._in_step:  # else the broker is slow, not they
            for receiver, since in blocking:
                if now - since >= PACE_STALL_S:
                    receiver.in_step, receiver.blocked_at = False, None
                    self._in_step -= 1
                    self._plan()
        self._alone = {name: None for name in self._alone if now - self._receivers[name].heard < PROBE_S}
        instructions = [*self._probe(now), *self._pump(now)]
        self._note_blocked(now)
        return instructions

    def drop(self, device: str, now: float) -> list[Instruction]:
        """Drop a device (offline, declined, round over), so that others no longer wait for it."""
        self._leave(device)
        self._awaited.discard(device)
        self._alone.pop(device, None)
        self._plan()
        return self._pump(now)

    def _leave(self, device: str) -> ReceiverState | None:
        receiver = self._receivers.pop(device, None)
        self._unserved.pop(device, None)
        if receiver is not None:
            self._in_step -= receiver.in_step
            self._flying -= receiver.sent - receiver.received
        return receiver

    def _unfit(self, device: str, need: Need) -> str:
        """Reason to ignore the message; "" for none."""
        if need.transfer != self.transfer:
            return "unknown_transfer"
        if need.device != device:
            return "wrong_device"
        if need.credit < 1 or need.received < 0 or need.epoch < 0:
            return "malformed"
        age = self._epochs.age(device, need.epoch)
        if age == "stale" or (age == "replaced" and not need.done):
            return "stale_epoch"
        if age == "present" and device in self.completed:
            return "completed"
        if not need.done and not self._adopt(device, need.chunk_bytes):
            return "chunk_bytes"
        return ""

    def _adopt(self, device: str, chunk_bytes: int) -> bool:
        if self._index.chunk_bytes == chunk_bytes:
            return True
        if self._receivers.keys() - {device}:
            return False
        try:
            self._index = ChunkIndex(self._sizes, chunk_bytes)
        except ProtocolError:
            return False
        self._leave(device)
        self._shared = 0
        self._alone.clear()
        self._sent.clear()  # these were numbers of other chunks
        return True

    def _begin(self, device: str, need: Need, now: float) -> list[Instruction]:
        todo = self._index.pack(need.missing)
        if not todo:
            self.dropped["unfit_bitmap"] += 1
            return []
        behind_s, before = self._behind_s(now), self._leave(device)
        if not self._in_step and self._gather_until is None:
            self._awaited |= self._receivers.keys()
            self._gather_until = now + GATHER_S
        coming = 0  # what it was sent and the broker may still hold
        if before is not None and behind_s >= LAG_S and before.due_at > now and self._goes_on(device, need.epoch):
            coming = todo & self._sent.get(device, 0)
        # One that opens an epoch while it blocks the others has lost chunks: from now on it is served alone.
        in_step = before is None or (before.in_step and (before.blocked_at is None or coming != 0))
        self._epochs.enter(device, need.epoch)
        self.completed.discard(device)
        self._awaited.discard(device)
        self._receivers[device] = receiver = ReceiverState(
            credit=min(need.credit, MAX_CREDIT),
            todo=todo & ~coming,
            sent=coming.bit_count(),
            least=min(((self._index.length(*self._index.locate(n)), n) for n in members(coming)), default=(0, 0)),
            heard=now,
            since=now,
            in_step=in_step or self._gather_until is not None,
            due_at=before.due_at if before is not None and coming else 0.0,
        )
        self._in_step += receiver.in_step
        self._flying += receiver.sent
        if receiver.todo:
            self._unserved[device] = receiver
        self._plan()
        return self._pump(now)

    def _goes_on(self, device: str, epoch: int) -> bool:
        """True if the receiver was not restarted since its last epoch."""
        return self._epochs.incarnation(device) == epoch >> STEP_BITS

    def _behind_s(self, now: float) -> float:
        """Seconds of the broker's backlog, by the time since sending and by acknowledgements."""
        return max(0.0, min(self._delivered_at - now, self._flying * self._index.chunk_bytes / BROKER_RATE))

    def _plan(self) -> None:
        """Choose chunks for the shared topic, before the next are sent: what is in step has changed."""
        self._planned = False

    def _choose(self) -> None:
        """Choose those that more than half of the receivers in step lack."""
        self._planned = True
        least = max(2, self._in_step // 2 + 1)
        if len(self._unserved) < least:  # as after each of the many that ask once the others have been served
            self._shared = 0
            return
        lacking = [receiver.todo for receiver in self._unserved.values() if receiver.in_step]
        self._shared = in_at_least(least, lacking) if len(lacking) >= least else 0

    def _pump(self, now: float, device: str | None = None) -> list[Instruction]:
        """Send all chunks admitted by the windows. ``device``: the only one with a changed window."""
        gathering = False
        if self._gather_until is not None:
            gathering = bool(self._awaited) and now < self._gather_until
            if not gathering:
                self._gather_until = device = None
                self._awaited.clear()
        if not gathering and not self._planned:
            self._choose()
        instructions = [] if gathering else self._publish_shared(now)
        for name in [device] if device is not None and not instructions else self._servable():
            receiver = self._receivers[name]
            # What will still be published for all is not sent to one alone; those in step wait for it to be over.
            waiting = receiver.in_step and (gathering or receiver.todo & self._shared)
            while not waiting and receiver.has_room and (own := receiver.todo & ~self._shared):
                if name not in self._alone:
                    if len(self._alone) >= MOST_ALONE:
                        break
                    self._alone[name], receiver.heard = None, now
                instructions.append(self._send(name, lowest(own), [name], now))
        return instructions

    def _servable(self) -> list[str]:
        """Unserved receivers that may be sent chunks of their own."""
        if len(self._alone) < MOST_ALONE:
            return list(self._unserved)
        return [name for name in self._alone if name in self._unserved]

    def _publish_shared(self, now: float) -> list[Instruction]:
        """Publish shared chunks, but for those lacked by a receiver in step with a full window."""
        instructions: list[Instruction] = []
        if not self._shared:
            return instructions
        pacing = [receiver for receiver in self._unserved.values() if receiver.in_step]
        while True:
            free = self._shared
            for receiver in pacing:
                if free and not receiver.has_room:
                    free &= ~receiver.todo
            if not free:
                break
            number = lowest(free)
            self._shared ^= 1 << number
            takers = [name for name, receiver in self._unserved.items() if receiver.todo >> number & 1]
            instructions.append(self._send(None, number, takers, now))
        if instructions:
            self._note_blocked(now)
        return instructions

    def _note_blocked(self, now: float) -> None:
        if not self._planned:
            self._choose()
        for receiver in self._unserved.values():
            if not receiver.in_step or not receiver.todo & self._shared:
                receiver.blocked_at = None
            elif receiver.blocked_at is None and not receiver.has_room:
                receiver.blocked_at, receiver.blocked_received = now, receiver.received

    def _send(self, device: str | None, number: int, takers: Collection[str], now: float) -> SendChunk:
        where = self._index.locate(number)
        size = self._index.length(*where)
        self._delivered_at = now + self._behind_s(now) + size * len(takers) / BROKER_RATE
        self._flying += len(takers)
        for name in takers:
            self._count(name, number, size)
            receiver = self._receivers[name]
            receiver.take(number, size, self._delivered_at)
            if not receiver.todo:
                receiver.blocked_at = None
                self._unserved.pop(name, None)
        return SendChunk(device, *where)

    def _count(self, device: str, number: int, size: int) -> None:
        before = self._sent.get(device, 0)
        again = size if before >> number & 1 else 0
        first, repeated = self._untold.get(device, Sent())
        self._untold[device] = Sent(first + size - again, repeated + again)
        self._sent[device] = before | 1 << number

    def _probe(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for device, receiver in self._receivers.items():
            if receiver.todo:
                continue
            # Chunks in flight may take twice as long as at the receiver's pace so far, or as over a slow link.
            in_flight = receiver.sent - receiver.received
            flight_s = 1.5 * in_flight * self._index.chunk_bytes / SLOW_LINK
            if receiver.received:
                flight_s = min(flight_s, 2 * in_flight * (receiver.heard - receiver.since) / receiver.received)
            patience = min(MAX_PROBE_S, max(PROBE_S, flight_s) * 2 ** min(receiver.probes, 16))
            if now - receiver.heard >= patience:
                receiver.heard, receiver.probes = now, receiver.probes + 1
                size, number = receiver.least
                instructions.append(self._send(device, number, (), now))
                self._count(device, number, size)
        return instructions


@dataclass
class ReceiverState:
    """Progress of one receiver, as its sender knows it: its window, and the chunks it still lacks."""

    credit: int
    todo: int  # set of chunks it asked for in this epoch and was not yet sent
    heard: float
    since: float  # when it asked
    in_step: bool
    sent: int = 0  # in this epoch
    received: int = 0  # acknowledged in this epoch
    blocked_at: float | None = None  # since when it holds up the shared topic
    blocked_received: int = 0
    least: tuple[int, int] = (0, 0)  # (bytes, number) of the smallest chunk it was sent in this epoch
    probes: int = 0
    due_at: float = 0.0  # when the broker should have handed out the last chunk it was sent

    @property
    def has_room(self) -> bool:
        """True if its window admits another chunk."""
        return self.sent - self.received < self.credit

    def acknowledge(self, received: int, now: float) -> None:
        """Note the number of chunks that the receiver has of this epoch.

        It may exceed the number sent: chunks on the shared topic may arrive before the epoch is known.
        """
        self.received = min(received, self.sent)
        self.heard, self.probes = now, 0
        if self.blocked_at is not None and self.received - self.blocked_received >= max(1, self.credit // 2):
            self.blocked_at = None

    def take(self, number: int, size: int, due_at: float) -> None:
        """Note a chunk of ``size`` bytes as sent to it."""
        self.todo ^= 1 << number
        self.due_at = due_at
        self.least = min(self.least, (size, number)) if self.sent else (size, number)
        self.sent += 1


class Epochs:
    """Epochs of devices: new, present or stale, also after restarts of a device.

    Incarnations are random, so nothing says which of two is the later one; a living receiver opens ever new epochs,
    which is what counts. A message that was overtaken by one of a later incarnation costs one stall, no more.
    """

    def __init__(self) -> None:
        self._present: dict[str, int] = {}
        self._last_steps: dict[str, dict[int, int]] = {}  # device -> incarnation -> last step

    def age(self, device: str, epoch: int) -> Literal["new", "present", "replaced", "stale"]:
        """Age of an epoch; ``replaced``: the last of an incarnation superseded by another."""
        incarnation, step = divmod(epoch, 1 << STEP_BITS)
        last = self._last_steps.get(device, {}).get(incarnation, -1)
        if step != last:
            return "new" if step > last else "stale"
        return "present" if self._present.get(device) == epoch else "replaced"

    def incarnation(self, device: str) -> int | None:
        """Incarnation of the device's present epoch; None before its first."""
        return None if (epoch := self._present.get(device)) is None else epoch >> STEP_BITS

    def enter(self, device: str, epoch: int) -> None:
        """Make this the device's present epoch."""
        incarnation, step = divmod(epoch, 1 << STEP_BITS)
        steps = self._last_steps.setdefault(device, {})
        steps[incarnation] = step
        if len(steps) > MAX_INCARNATIONS:
            del steps[next(iter(steps))]
        self._present[device] = epoch


def members(chunks: int) -> Iterator[int]:
    """Numbers in a bit set."""
    while chunks:
        yield lowest(chunks)
        chunks &= chunks - 1


def lowest(chunks: int) -> int:
    """Smallest number in a non-empty bit set."""
    return (chunks & -chunks).bit_length() - 1


def in_at_least(least: int, sets: Iterable[int]) -> int:
    """The chunks in at least ``least`` (>= 1) of the sets.

    Counts all chunks at once: ``planes[i]`` holds bit i of every chunk's count, as in a row of binary adders.
    """
    planes: list[int] = []
    for carry in sets:
        for place, plane in enumerate(planes):
            planes[place], carry = plane ^ carry, plane & carry
        if carry:
            planes.append(carry)
    if least >> len(planes):
        return 0
    more, equal = 0, -1
    for place in reversed(range(len(planes))):
        if least >> place & 1:
            equal &= planes[place]
        else:
            more |= equal & planes[place]
            equal &= ~planes[place]
    return more | equal
