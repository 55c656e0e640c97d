"""Identity of an agent for one start of its process, and the state it starts with."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import msgspec

import edgefl
from device_agent.core import state as v
from device_agent.core.agent_timeouts import HEARTBEAT_S
from device_agent.runtime.store import AgentStore
from edgefl.protocol import topics
from edgefl.protocol.messages import Presence, encode
from edgefl.records import Budget, Capabilities
from edgefl.transport.interface import Will


class Identity(NamedTuple):
    """Identity of this agent. ``session`` is new for each start of the process: ``started()`` sets it."""

    fleet: str
    device: str
    profile: str = ""
    budget: Budget = Budget()
    capabilities: Capabilities = Capabilities()
    heartbeat_s: float = HEARTBEAT_S
    fingerprint: str = ""  # of the data
    session: str = ""
    strict: bool = False  # it has credentials: see ``device_agent.core.freshness``

    def started(self) -> Identity:
        """This identity with a new session."""
        return self._replace(session=secrets.token_hex(8))

    def will(self) -> Will:
        """MQTT will: published by the broker when the connection ends without goodbye."""
        offline = encode(Presence(self.device, self.session, online=False))
        return Will(topics.build("presence", self.fleet, self.device), offline, retain=False)

    def blank_state(self) -> v.State:
        """The machine's state without any work."""
        return v.State(
            device=self.device,
            session=self.session,
            agent_version=edgefl.__version__,
            profile=self.profile,
            budget=self.budget,
            capabilities=self.capabilities,
            heartbeat_s=self.heartbeat_s,
            strict=self.strict,
        )


def complete(store: AgentStore) -> v.Saved:
    """Saved state of an earlier process; an update whose objects are gone cannot be delivered and is trained again.

    Retained parts that are gone, after a loss of power, count as never retained.
    """
    saved = store.load()
    here = [{part: ref for part, ref in one.manifest.items() if store.objects.has(ref.id)} for one in saved.retained]
    kept = tuple(msgspec.structs.replace(one, manifest=found) for one, found in zip(saved.retained, here, strict=True))
    saved = msgspec.structs.replace(saved, retained=kept)
    update = saved.update
    if update is not None and not all(store.objects.has(ref.id) for ref in update.manifest.values()):
        return msgspec.structs.replace(saved, update=None)
    return saved
