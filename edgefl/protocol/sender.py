"""The sending side of a transfer: who is sent which chunk, at whose pace, on which topic. See ``transfer``."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from edgefl.errors import ProtocolError
from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES
from edgefl.protocol.instructions import MAX_CREDIT, STEP_BITS, Completed, Failed, Instruction, SendChunk
from edgefl.protocol.layout import Layout, in_at_least, lowest
from edgefl.protocol.messages import Need

#: How long a sender waits for the other receivers before the first chunk. Ends early when all that are expected have
#: asked; a second is ample for an agent to check its store, and is only lost when one of them never asks.
GATHER_S = 1.0
#: How long one receiver may block the others without acknowledging half a window. Half of 16 x 96 KiB in 3 s keeps every
#: link of at least 2.1 Mbit/s in step; slower ones are better served alone.
PACE_STALL_S = 3.0
#: When everything was sent and the receiver says nothing for this long, one chunk is sent again to make it answer (its
#: ``done`` may have been lost), at most MAX_PROBES times in a row: longer than STALL_S, after which it would ask itself.
PROBE_S = 10.0
MAX_PROBES = 5


@dataclass
class _Peer:
    """What a sender knows of one receiver that has asked and does not have everything yet."""

    credit: int
    todo: int  # set of chunks it asked for in this epoch and was not yet sent
    heard: float
    in_step: bool
    sent: int = 0  # in this epoch
    received: int = 0  # acknowledged in this epoch
    blocked_at: float | None = None  # since when it holds up the shared topic
    blocked_received: int = 0
    last: int = 0
    probes: int = 0

    @property
    def has_room(self) -> bool:
        return self.sent - self.received < self.credit

    def take(self, number: int) -> None:
        """Count a chunk as sent to it."""
        self.todo ^= 1 << number
        self.sent += 1
        self.last = number


class _Epochs:
    """Tells a new epoch of a device from the present one and from stale ones, through restarts of the device."""

    def __init__(self) -> None:
        self._now: dict[str, int] = {}
        self._earlier_lives: dict[str, deque[int]] = {}

    def judge(self, device: str, epoch: int) -> Literal["new", "same", "stale"]:
        known = self._now.get(device)
        if known is None:
            return "new"
        if epoch == known:
            return "same"
        life = epoch >> STEP_BITS
        if life in self._earlier_lives[device] or (life == known >> STEP_BITS and epoch < known):
            return "stale"
        return "new"

    def enter(self, device: str, epoch: int) -> None:
        lives = self._earlier_lives.setdefault(device, deque(maxlen=64))  # more restarts than any transfer survives
        known = self._now.get(device)
        if known is not None and known >> STEP_BITS != epoch >> STEP_BITS:
            lives.append(known >> STEP_BITS)
        self._now[device] = epoch


class Sender:
    """Serves the objects ``sizes`` (id -> bytes) to one or many receivers.

    ``expected``: devices that will ask; the first chunk waits for them up to GATHER_S, so that all of them can use what
    is published once. The chunk size is that of the first Need; one with another size is dropped while others are being
    served. ``dropped`` counts by reason what was ignored, ``stalls`` how often a receiver fell out of step,
    ``shared_sent`` and ``own_sent`` chunks by topic; ``completed`` holds the devices that have everything.
    """

    def __init__(self, transfer: str, sizes: Mapping[str, int], expected: Collection[str] = ()) -> None:
        self.transfer = transfer
        self.completed: set[str] = set()
        self.dropped: Counter[str] = Counter()
        self.shared_sent = 0
        self.own_sent = 0
        self.stalls = 0
        self._sizes = dict(sizes)
        self._layout = Layout(sizes, DEFAULT_CHUNK_BYTES)
        self._peers: dict[str, _Peer] = {}
        self._epochs = _Epochs()
        self._awaited = set(expected)
        self._gather_until: float | None = None
        self._shared = 0  # set of chunks still to be published once for all

    @property
    def active(self) -> frozenset[str]:
        """Devices that have asked and do not have everything yet."""
        return frozenset(self._peers)

    @property
    def in_step(self) -> frozenset[str]:
        """Active devices at whose pace the shared topic runs."""
        return frozenset(device for device, peer in self._peers.items() if peer.in_step)

    def on_need(self, device: str, need: Need, now: float) -> list[Instruction]:
        """A Need (or Grant) of ``device`` arrived."""
        reason = self._unfit(device, need)
        if reason:
            self.dropped[reason] += 1
            return []
        if need.done:
            return self._complete(device, need, now)
        peer = self._peers.get(device)
        if peer is not None and self._epochs.judge(device, need.epoch) == "same":
            return self._acknowledge(peer, need, now)
        if not need.missing:
            self.dropped["unknown_epoch"] += 1  # acknowledges what an earlier life of this sender sent
            return []
        try:
            return self._begin(device, need, now)
        except ProtocolError as error:
            self.dropped["unfit_bitmap"] += 1
            lost = next((name for name in need.missing if name not in self._sizes), "")
            return [Failed(device, lost, error.message)] if lost else []

    def on_tick(self, now: float) -> list[Instruction]:
        """Call about twice a second while the transport is connected: ends waiting, drops the stalled from the pace."""
        for peer in self._peers.values():
            if peer.in_step and peer.blocked_at is not None and now - peer.blocked_at >= PACE_STALL_S:
                peer.in_step = False
                peer.blocked_at = None
                self.stalls += 1
                self._plan()
        return [*self._probe(now), *self._pump(now)]

    def drop(self, device: str, now: float) -> list[Instruction]:
        """Forget a device: it went offline, declined, or its round is over. Nobody waits for it any more."""
        self._peers.pop(device, None)
        self._awaited.discard(device)
        self._plan()
        return self._pump(now)

    def _unfit(self, device: str, need: Need) -> str:
        """Why the message must be ignored; "" when it is fit."""
        if need.transfer != self.transfer:
            return "unknown_transfer"
        if need.device != device:
            return "wrong_device"
        if need.credit < 1 or need.received < 0 or need.epoch < 0:
            return "malformed"
        age = self._epochs.judge(device, need.epoch)
        if age == "stale":
            return "stale_epoch"
        if age == "same" and device in self.completed:
            return "completed"
        if not need.done and not self._adopt(device, need.chunk_bytes):
            return "chunk_bytes"
        return ""

    def _adopt(self, device: str, chunk_bytes: int) -> bool:
        if self._layout.chunk_bytes == chunk_bytes:
            return True
        if self._peers.keys() - {device}:
            return False
        try:
            self._layout = Layout(self._sizes, chunk_bytes)
        except ProtocolError:
            return False
        self._peers.pop(device, None)
        self._shared = 0
        return True

    def _complete(self, device: str, need: Need, now: float) -> list[Instruction]:
        self._epochs.enter(device, need.epoch)
        self._peers.pop(device, None)
        self._awaited.discard(device)
        self._plan()
        news: list[Instruction] = [] if device in self.completed else [Completed(device)]
        self.completed.add(device)
        return [*news, *self._pump(now)]

    def _acknowledge(self, peer: _Peer, need: Need, now: float) -> list[Instruction]:
        if need.received <= peer.received:
            self.dropped["stale_progress"] += 1
            return []
        # Chunks of the shared topic that came before this sender knew the epoch can make it more than was sent.
        peer.received = min(need.received, peer.sent)
        peer.heard, peer.probes = now, 0
        if peer.blocked_at is not None and peer.received - peer.blocked_received >= max(1, peer.credit // 2):
            peer.blocked_at = None
        return self._pump(now)

    def _begin(self, device: str, need: Need, now: float) -> list[Instruction]:
        todo = self._layout.pack(need.missing)
        if not todo:
            self.dropped["unfit_bitmap"] += 1
            return []
        before = self._peers.pop(device, None)
        if not any(peer.in_step for peer in self._peers.values()) and self._gather_until is None:
            self._awaited |= self._peers.keys()
            self._gather_until = now + GATHER_S
        # One that asks anew while it holds the others up has lost chunks: from now on it is served alone.
        in_step = before is None or (before.in_step and before.blocked_at is None)
        self._epochs.enter(device, need.epoch)
        self.completed.discard(device)
        self._awaited.discard(device)
        self._peers[device] = _Peer(
            credit=min(need.credit, MAX_CREDIT),
            todo=todo,
            heard=now,
            in_step=in_step or self._gather_until is not None,
        )
        self._plan()
        return self._pump(now)

    def _plan(self) -> None:
        """Choose what is published once: cheaper for the network when more than half of those in step lack it."""
        group = [peer.todo for peer in self._peers.values() if peer.in_step]
        self._shared = in_at_least(max(2, len(group) // 2 + 1), group)

    def _pump(self, now: float) -> list[Instruction]:
        """Everything the windows admit now."""
        gathering = False
        if self._gather_until is not None:
            gathering = bool(self._awaited) and now < self._gather_until
            if not gathering:
                self._gather_until = None
                self._awaited.clear()
        instructions: list[Instruction] = []
        if not gathering:
            instructions += self._publish_shared(now)
        for device, peer in self._peers.items():
            # What will still be published for all is not sent to one alone; those in step wait for it to be over.
            waiting = peer.in_step and (gathering or peer.todo & self._shared)
            while not waiting and peer.has_room and (own := peer.todo & ~self._shared):
                instructions.append(self._send(device, lowest(own), [peer]))
                self.own_sent += 1
        return instructions

    def _publish_shared(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        pacing = [peer for peer in self._peers.values() if peer.in_step]
        while self._shared:
            held_up = 0
            for peer in pacing:
                if not peer.has_room:
                    held_up |= peer.todo
            if not (free := self._shared & ~held_up):
                break
            number = lowest(free)
            self._shared ^= 1 << number
            takers = [peer for peer in self._peers.values() if peer.todo >> number & 1]
            instructions.append(self._send(None, number, takers))
            self.shared_sent += 1
        for peer in pacing:
            if peer.blocked_at is None and not peer.has_room and peer.todo & self._shared:
                peer.blocked_at, peer.blocked_received = now, peer.received
        return instructions

    def _send(self, device: str | None, number: int, takers: Iterable[_Peer]) -> SendChunk:
        for peer in takers:
            peer.take(number)
        return SendChunk(device, *self._layout.locate(number))

    def _probe(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for device, peer in self._peers.items():
            if not peer.todo and now - peer.heard >= PROBE_S and peer.probes < MAX_PROBES:
                peer.heard, peer.probes = now, peer.probes + 1
                instructions.append(self._send(device, peer.last, ()))
        return instructions
