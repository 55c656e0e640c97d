"""A broker inside the process with faults drawn from a seed, and connections that can be cut.

The same publishes in the same order meet the same faults. Only how long a message that is held back waits for a next
one is the clock's. Lost messages were acknowledged to their sender, as with a real broker whose queue is full.
"""

from __future__ import annotations

import random

from edgefl.transport.memory_broker import MemoryBroker, Message, Session, later

#: A held-back message goes out after the next one to the same client, or after this long when none follows.
HELD_S = 0.05
#: How long a cut client stays away by default: long enough for every client to see it offline.
AWAY_S = 0.02


class FaultyBroker(MemoryBroker):
    """Loses, doubles and holds back deliveries, each independently, with the probabilities given.

    What is held back goes after the next message to that client. ``dropped`` counts what was lost.
    """

    def __init__(
        self, seed: int = 0, loss: float = 0.0, delay_s: float = 0.0, duplicate: float = 0.0, reorder: float = 0.0
    ) -> None:
        super().__init__(delay_s)
        self.loss = loss
        self.duplicate = duplicate
        self.reorder = reorder
        self.dropped = 0
        self._random = random.Random(seed)
        self._held: dict[str, list[Message]] = {}

    def cut(self, client_id: str, seconds: float = AWAY_S) -> None:
        """End a client's connection without DISCONNECT: its will is published. It comes back after ``seconds``."""
        session = self._sessions[client_id]
        transport, session.transport = session.transport, None
        if transport is None:
            return
        transport.lost()
        if transport.will is not None:
            self.publish(transport.will.topic, transport.will.payload, retain=transport.will.retain)
        later(seconds, transport.come_back)

    def _pass_on(self, session: Session, message: Message) -> None:
        # Always three draws, so that changing one probability leaves the other faults where they were.
        lost, twice, held = (self._random.random() < p for p in (self.loss, self.duplicate, self.reorder))
        if lost:
            self.dropped += 1
            return
        copies = [message, message] if twice else [message]
        if held:
            self._held.setdefault(session.client_id, []).extend(copies)
            later(self.delay_s + HELD_S, lambda: self._release(session))
        else:
            self._held[session.client_id] = copies + self._held.get(session.client_id, [])
            self._release(session)

    def _release(self, session: Session) -> None:
        self._send(session, self._held.pop(session.client_id, []))
