"""Server history across rounds: reading and writing it, and the server step that uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from edgefl.aggregation.history import NO_CLUSTER, Memory, note_round
from edgefl.aggregation.scope import SERVER, of_device
from edgefl.models.spec import is_matcher, modality_of
from edgefl.records import Manifest
from edgefl.registry import Choice
from edgefl.storage.objects import ObjectStore

#: Where the state keeps the memory.
KEY = f"{SERVER}memory"
#: Metrics of an update: of the model as received and as trained, on the device's own held-out samples.
RECEIVED, TRAINED = "received_score", "trained_score"


class UpdateInfo(msgspec.Struct, frozen=True):
    """One device's finished update, all of whose objects are in the store. ``samples``: part -> samples trained on.

    ``complete``, ``poverty``, ``poverty_change``: as in an update; ``poverty`` counts ``weight_tensors``;
    ``staleness``: how many rounds ago the state was the newest that it was made from, the parts of which are ``base``.
    """

    device: str = ""
    manifest: Manifest = {}
    samples: dict[str, int] = {}
    metrics: dict[str, float] = {}
    complete: bool = True
    poverty: int = -1
    poverty_change: float = 0.0
    staleness: int = 0
    base: Manifest = {}
    factor: float = 1.0  # what its change is damped by

    @property
    def name(self) -> str:
        """Unique name in a round; a stale update carries its staleness: "cam-07~2"."""
        return f"{self.device}~{self.staleness}" if self.staleness else self.device

    @property
    def modalities(self) -> int:
        """How many modalities it trained parts of."""
        return len({owner for part, count in self.samples.items() if count > 0 and (owner := modality_of(part))})


def load(store: ObjectStore, state: Manifest) -> Memory:
    """The memory in a state; a new one when there is none."""
    return msgspec.json.decode(store.read(state[KEY].id), type=Memory) if KEY in state else Memory()


def note(memory: Memory, updates: Sequence[UpdateInfo], clusters: Mapping[str, int]) -> Memory:
    """The memory after a round; of a device that brought two updates, by the newer one."""
    updates = list({u.device: u for u in sorted(updates, key=lambda one: -one.staleness)}.values())
    metrics = {u.device: u.metrics[TRAINED] for u in updates if TRAINED in u.metrics}
    received = {u.device: u.metrics[RECEIVED] for u in updates if RECEIVED in u.metrics}
    weights = {u.device: float(max(u.samples.values(), default=0)) for u in updates}
    return note_round(memory, metrics, received, weights, clusters)


def networks(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The small networks this round has made: "match/<m>" -> {key of the state: weight}."""
    found: dict[str, dict[str, float]] = {}
    for key, told in record["parts"].items():
        if not is_matcher(key):
            continue
        weights = {of_device(device) + key: share for device, share in told["devices"].items()}
        alone = {name: share for name, share in weights.items() if name in record["parts"]}
        found[key] = alone or {key: 1.0}
    return found


def server_step(
    slot: Choice,
    memory: Memory,
    updates: Sequence[UpdateInfo],
    clusters: Mapping[str, int],
    record: dict[str, Any],
) -> Callable[..., Any]:
    """The optimiser's step (state, previous, combined) -> (next, state), with this round's own options."""
    if slot.method.adjust is not None:
        weights = {u.device: float(max(u.samples.values(), default=0)) for u in updates}
        total = sum(weights.values()) or 1.0
        participants = {u.device: NO_CLUSTER for u in updates} | grouped(updates, clusters)
        shares = {device: weight / total for device, weight in weights.items()}
        changed, told = slot.method.adjust(memory, participants, shares, **slot.options)
        record |= told
        slot = slot._replace(options={**slot.options, **changed})
    return slot.bind(slot.method.step)


def grouped(updates: Sequence[UpdateInfo], clusters: Mapping[str, int]) -> dict[str, int]:
    """device -> cluster, without those that belong to none; where the recipe makes no clusters, all are one."""
    if not clusters:
        return {u.device: 0 for u in updates}
    return {u.device: clusters[u.device] for u in updates if u.device in clusters}
