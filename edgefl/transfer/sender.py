"""The sending side of a transfer: who is sent which chunk, at whose pace, on which topic. See ``transfer``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from edgefl.errors import ProtocolError
from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES
from edgefl.protocol.messages import Need
from edgefl.transfer.chunk_index import Layout, in_at_least, lowest
from edgefl.transfer.progress import Epochs, Given, Peer
from edgefl.transfer.receiver import SLOW_LINK
from edgefl.transfer.steps import MAX_CREDIT, Completed, Failed, Instruction, SendChunk

#: How long a sender waits for the other receivers before the first chunk. Ends early when all that are expected have
#: asked; a second is ample for an agent to check its store, and is only lost when one of them never asks.
GATHER_S = 1.0
#: How long one receiver may block the others without acknowledging half a window. Half of 16 x 96 KiB in 3 s keeps
#: every link of at least 2.1 Mbit/s in step; slower ones are better served alone.
PACE_STALL_S = 3.0
#: When everything was sent and the receiver says nothing for this long, the smallest chunk is sent again: one that has
#: finished answers (its ``done`` may have been lost). Longer than STALL_S, after which one that lacks something asks by
#: itself; doubles up to MAX_PROBE_S, so that a device that never comes back costs a chunk every few minutes, until its
#: round is closed.
PROBE_S = 10.0
MAX_PROBE_S = 160.0


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
        self._peers: dict[str, Peer] = {}
        self._epochs = Epochs()
        self._given: dict[str, Given] = {}
        self._awaited = set(expected)
        self._gather_until: float | None = None
        self._shared = 0  # set of chunks still to be published once for all

    @property
    def chunk_bytes(self) -> int:
        """The chunk size in force, to read chunks by."""
        return self._layout.chunk_bytes

    @property
    def active(self) -> frozenset[str]:
        """Devices that have asked and do not have everything yet."""
        return frozenset(self._peers)

    @property
    def in_step(self) -> frozenset[str]:
        """Active devices at whose pace the shared topic runs."""
        return frozenset(device for device, peer in self._peers.items() if peer.in_step)

    def resent_bytes(self, device: str) -> int:
        """Bytes of the chunks that a device was sent more than once."""
        return self._given[device].again_bytes if device in self._given else 0

    def on_need(self, device: str, need: Need, now: float) -> list[Instruction]:
        """A Need (or Grant) of ``device`` arrived."""
        reason = self._unfit(device, need)
        if reason:
            self.dropped[reason] += 1
            return []
        if need.done:
            return self._complete(device, need, now)
        peer = self._peers.get(device)
        if peer is not None and self._epochs.judge(device, need.epoch) == "present":
            return self._acknowledge(device, peer, need, now)
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
        instructions = [*self._probe(now), *self._pump(now)]
        self._note_blocked(now)
        return instructions

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
        if age == "stale" or (age == "replaced" and not need.done):
            return "stale_epoch"
        if age == "present" and device in self.completed:
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
        for given in self._given.values():
            given.chunks = 0  # these were numbers of other chunks
        return True

    def _complete(self, device: str, need: Need, now: float) -> list[Instruction]:
        self._epochs.enter(device, need.epoch)
        self._peers.pop(device, None)
        self._awaited.discard(device)
        self._plan()
        news: list[Instruction] = [] if device in self.completed else [Completed(device)]
        self.completed.add(device)
        return [*news, *self._pump(now)]

    def _acknowledge(self, device: str, peer: Peer, need: Need, now: float) -> list[Instruction]:
        if need.received <= peer.received:
            self.dropped["stale_progress"] += 1
            return []
        # Chunks of the shared topic that came before this sender knew the epoch can make it more than was sent.
        peer.received = min(need.received, peer.sent)
        peer.heard, peer.probes = now, 0
        if peer.blocked_at is not None and peer.received - peer.blocked_received >= max(1, peer.credit // 2):
            peer.blocked_at = None
        return self._pump(now, device)

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
        self._peers[device] = Peer(
            credit=min(need.credit, MAX_CREDIT),
            todo=todo,
            heard=now,
            since=now,
            given=self._given.setdefault(device, Given()),
            in_step=in_step or self._gather_until is not None,
        )
        self._plan()
        return self._pump(now)

    def _plan(self) -> None:
        """Choose what is published once: cheaper for the network when more than half of those in step lack it."""
        group = [peer.todo for peer in self._peers.values() if peer.in_step]
        self._shared = in_at_least(max(2, len(group) // 2 + 1), group)

    def _pump(self, now: float, device: str | None = None) -> list[Instruction]:
        """Everything the windows admit now. ``device``: the only one whose window has changed."""
        gathering = False
        if self._gather_until is not None:
            gathering = bool(self._awaited) and now < self._gather_until
            if not gathering:
                self._gather_until = device = None
                self._awaited.clear()
        instructions = [] if gathering else self._publish_shared(now)
        for name in [device] if device is not None and not instructions else self._peers:
            peer = self._peers[name]
            # What will still be published for all is not sent to one alone; those in step wait for it to be over.
            waiting = peer.in_step and (gathering or peer.todo & self._shared)
            while not waiting and peer.has_room and (own := peer.todo & ~self._shared):
                instructions.append(self._send(name, lowest(own), [peer]))
                self.own_sent += 1
        return instructions

    def _publish_shared(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        pacing = [peer for peer in self._peers.values() if peer.in_step]
        while free := self._publishable(pacing):
            number = lowest(free)
            self._shared ^= 1 << number
            takers = [peer for peer in self._peers.values() if peer.todo >> number & 1]
            instructions.append(self._send(None, number, takers))
            self.shared_sent += 1
        if instructions:
            self._note_blocked(now)
        return instructions

    def _publishable(self, pacing: list[Peer]) -> int:
        """Those of the shared chunks that nobody without room lacks."""
        free = self._shared
        for peer in pacing:
            if not free:
                break
            if not peer.has_room:
                free &= ~peer.todo
        return free

    def _note_blocked(self, now: float) -> None:
        for peer in self._peers.values():
            if not peer.in_step or not peer.todo & self._shared:
                peer.blocked_at = None
            elif peer.blocked_at is None and not peer.has_room:
                peer.blocked_at, peer.blocked_received = now, peer.received

    def _send(self, device: str | None, number: int, takers: Iterable[Peer]) -> SendChunk:
        where = self._layout.locate(number)
        size = self._layout.length(*where)
        for peer in takers:
            peer.take(number, size)
        return SendChunk(device, *where)

    def _flight_s(self, peer: Peer) -> float:
        """How long what is on its way to it may take: twice what it has shown to need, or as over a slow link."""
        on_its_way = peer.sent - peer.received
        slow = 1.5 * on_its_way * self._layout.chunk_bytes / SLOW_LINK
        return min(slow, 2 * on_its_way * (peer.heard - peer.since) / peer.received) if peer.received else slow

    def _probe(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for device, peer in self._peers.items():
            patience = min(MAX_PROBE_S, max(PROBE_S, self._flight_s(peer)) * 2 ** min(peer.probes, 16))
            if not peer.todo and now - peer.heard >= patience:
                peer.heard, peer.probes = now, peer.probes + 1
                size, number = peer.least
                instructions.append(self._send(device, number, ()))
                peer.given.count(number, size)
        return instructions
