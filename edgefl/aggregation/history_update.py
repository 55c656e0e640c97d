"""What a round leaves behind for the next, into and out of the server's memory: returns, clusters, poverty."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from edgefl.aggregation.history import NO_CLUSTER, Memory, note_round
from edgefl.aggregation.mean import Tensors
from edgefl.aggregation.scope import SERVER, of_device
from edgefl.aggregation.slots import Choice
from edgefl.methods.optimise.portfolio import portfolio_beta
from edgefl.methods.repair.poverty_substitution import Substitution, plan_substitution, substitute
from edgefl.models.spec import is_matcher, is_scheduled, modality_of
from edgefl.protocol.tensors import decode_part
from edgefl.records import Manifest
from edgefl.storage.objects import ObjectStore

#: Where the state keeps the memory.
KEY = f"{SERVER}memory"
#: The part with the one layer that a device's personal model is sent.
POVERTY = "poverty"
#: Metrics of an update: of the model as received and as trained, on the device's own held-out samples.
RECEIVED, TRAINED = "received_score", "trained_score"
Mended = dict[tuple[str, str], dict[str, np.ndarray]]


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
        """What it is called among the updates of a round, of which a device may have two: "cam-07~2"."""
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
    """The optimiser's step (state, previous, combined) -> (next, state), with this round's momentum."""
    if slot.name != "fedadagrad_mpo":
        step: Callable[..., Any] = slot.method
        return step
    weights = {u.device: float(max(u.samples.values(), default=0)) for u in updates}
    total = sum(weights.values()) or 1.0
    participants = {u.device: NO_CLUSTER for u in updates} | _grouped(updates, clusters)
    options = {name: slot.options[name] for name in ("beta", "risk", "temperature") if name in slot.options}
    shares = {device: weight / total for device, weight in weights.items()}
    beta, told = portfolio_beta(memory, participants, shares, **options)
    record["momentum"] = {"beta": beta, **told}
    return lambda state, previous, combined: slot.method(state, previous, combined, beta=beta)


def weight_tensors(parts: Mapping[str, Tensors]) -> list[tuple[str, str]]:
    """(part, tensor) of every weight tensor (two dimensions or more), sorted: what a poverty layer's number counts."""
    return sorted((part, name) for part, tensors in parts.items() for name, value in tensors.items() if value.ndim >= 2)


def repair(
    slot: Choice,
    updates: Sequence[UpdateInfo],
    model: Manifest,
    store: ObjectStore,
    clusters: Mapping[str, int],
    record: dict[str, Any],
) -> Mended:
    """(device, part) -> tensors to put in place of the device's own: its poverty layer, from its cluster's donors."""
    if slot.name != "poverty":
        return {}
    grouped = _grouped(updates, clusters)
    by_device = {u.device: u for u in updates}

    def tensors(device: str, part: str) -> Tensors:
        return decode_part(store.read(by_device[device].manifest[part].id), copy=False)

    poorest, plan = _poorest(updates, model, store)
    complete = {u.device for u in updates if u.complete}
    holders: dict[str, set[str]] = {}
    for update in updates:
        for part in update.manifest:
            if update.samples.get(part, 0) > 0:
                holders.setdefault(part, set()).add(update.device)
    changes = {u.device: u.poverty_change for u in updates if u.poverty >= 0}
    less = changes if slot.options.get("donors") == "less_affected" else None
    plan |= plan_substitution(poorest, complete, grouped, holders, less)
    weights = {u.device: float(max(u.samples.values(), default=0)) for u in updates}
    found = substitute(tensors, plan, weights)
    record["repaired"] = {
        device: {"part": one.part, "tensor": one.tensor, "donors": list(one.donors)}
        if not isinstance(one, str)
        else {"kept": one}
        for device, one in sorted(plan.items())
    }
    return {(device, part): {tensor: value} for device, (part, tensor, value) in found.items()}


def _poorest(
    updates: Sequence[UpdateInfo], model: Manifest, store: ObjectStore
) -> tuple[dict[str, tuple[str, str]], dict[str, Substitution | str]]:
    """device -> (part, tensor) of its poverty layer; and why the other devices without complete data have none."""
    poorest: dict[str, tuple[str, str]] = {}
    none: dict[str, Substitution | str] = {}
    for update in (u for u in updates if not u.complete):
        trained = [part for part in update.manifest if part in model and is_scheduled(part)]
        layers = weight_tensors({part: decode_part(store.read(model[part].id), copy=False) for part in trained})
        if 0 <= update.poverty < len(layers):
            poorest[update.device] = layers[update.poverty]
        elif update.poverty < 0:
            none[update.device] = "no batch that lacks modalities came after a complete one"
        else:
            none[update.device] = "it names a layer that it did not train"
    return poorest, none


def _grouped(updates: Sequence[UpdateInfo], clusters: Mapping[str, int]) -> dict[str, int]:
    """device -> cluster, without those that belong to none; where the recipe makes no clusters, all are one."""
    if not clusters:
        return {u.device: 0 for u in updates}
    return {u.device: clusters[u.device] for u in updates if u.device in clusters}


def repaired_layers(mended: Mended) -> dict[str, Tensors]:
    """What each mended device is sent for its personal model: one layer, named part|tensor."""
    return {
        of_device(device) + POVERTY: {f"{part}|{name}": value for name, value in tensors.items()}
        for (device, part), tensors in mended.items()
    }
