"""A round inside a period: devices are lent layers, and the model stays as it is (``edgefl.plan.periods``).

Only the last round of a period makes a new model. Here the state gains, for each device that is lent something, a part
of its own that its next offer brings; what the devices go on from, and their poverty layers, are remembered with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from edgefl.aggregation import history
from edgefl.aggregation.history import NO_CLUSTER, RECEIVED, Memory, PeriodMember, Record, Track, UpdateInfo
from edgefl.aggregation.mean import stored_layout
from edgefl.aggregation.server_state import of_device, without_passing
from edgefl.aggregation.weights import assign, sign
from edgefl.models.spec import LAYERS, SIGNATURE
from edgefl.plan.periods import exchangeable, in_parts
from edgefl.protocol.tensors import encode_part
from edgefl.records import Manifest
from edgefl.registry import Recipe, choose
from edgefl.storage.objects import ObjectStore


def exchange_layers(
    updates: Sequence[UpdateInfo],
    store: ObjectStore,
    previous: Manifest,
    recipe: Recipe,
    seed: int = 0,
    joined: Mapping[str, bytes] | None = None,
) -> tuple[Manifest, Record]:
    """The next state, whose new objects are in ``store``, and the record of the round as plain values.

    ``joined``: signatures of devices' hellos. In the record: the choices in the slots cluster and repair; ``clusters``
    and ``refused`` as of other rounds; ``repaired`` {device: {part, tensor, donors, lent, sent} or {kept: why}}, where
    ``lent`` is the id of what the device receives and ``sent`` that of what it had sent.
    """
    with store.write_batch() as made:
        slots = {role: choose(role, recipe) for role in ("cluster", "repair")}
        record: Record = {role: {"choice": slot.name, **slot.options} for role, slot in slots.items()}
        updates = sorted(updates, key=lambda update: update.device)
        signatures, strange = sign(slots["cluster"], updates, made, joined, previous)
        record["refused"] = [
            {"device": device, "part": SIGNATURE, "reason": reason, "detail": detail}
            for device, (reason, detail) in sorted(strange.items())
        ]
        state, memory = without_passing(previous) | signatures, history.load(made, previous)
        groups = assign(slots["cluster"], state, made, memory, seed)
        if groups:
            record["clusters"] = groups
        known = {u.device: memory.devices.get(u.device, Track()).layer for u in updates}
        # Of an earlier stage, whose parts it trains no more, it says nothing.
        needs = {u.device: layer for u in updates for layer in in_parts([known[u.device]], u.samples)}
        repair = slots["repair"]
        values, told = repair.bind(repair.method.lend)(updates, needs, made, groups)
        lent = {device: made.put(encode_part(tensors)) for device, tensors in values.items()}
        sent = {u.device: u.manifest[LAYERS].id for u in updates if LAYERS in u.manifest}
        record["repaired"] = {
            device: {**one, **({"lent": lent[device].id, "sent": sent.get(device, "")} if device in lent else {})}
            for device, one in told.items()
        }
        memory = _remembered(memory, updates, groups, lent)
        state |= {of_device(device) + LAYERS: ref for device, ref in lent.items()}
        return state | {history.KEY: made.put(msgspec.json.encode(memory))}, record


def _remembered(memory: Memory, updates: Sequence[UpdateInfo], groups: Mapping[str, int], lent: Manifest) -> Memory:
    """The memory after the round: returns and core members stay, which whole rounds make."""
    before = memory.period
    members = {
        u.device: PeriodMember(
            base=u.retained,
            lent=lent[u.device].id if u.device in lent else "",
            received=before[u.device].received if u.device in before else u.metrics.get(RECEIVED),
        )
        for u in updates
        if u.retained
    }
    memory = history.note_layers(memory, updates)
    devices = memory.devices
    if groups:
        devices = {d: msgspec.structs.replace(track, cluster=groups.get(d, NO_CLUSTER)) for d, track in devices.items()}
    return msgspec.structs.replace(memory, devices=devices, period=members)


def exchangeable_layers(store: ObjectStore, state: Manifest, trained: Sequence[str]) -> dict[str, int]:
    """The layers of a stage's trained parts that may be exchanged alone -> their bytes at most."""
    parts = [part for part in trained if part in state]
    layouts = {part: stored_layout(store, state[part]) for part in parts}
    shapes = {part: {name: shape for name, (shape, _) in layout.items()} for part, layout in layouts.items()}
    return exchangeable(shapes, sum(state[part].size for part in parts))
