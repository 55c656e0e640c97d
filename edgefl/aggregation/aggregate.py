"""A whole round on the server: from the devices' updates to the next state, part by part, and the record of it.

Each part is the mean over the devices that trained it, so devices with other depths, modalities or shares can be in one
round. One device's part is in memory at a time. Devices are taken in sorted order: the result does not depend, not even
in its last bit, on who arrived first. Whatever is left out is in the record with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from edgefl.aggregation.combine import MisfitError, Outcome, Tensors, layout_of
from edgefl.aggregation.prototypes import merge_prototypes
from edgefl.aggregation.slots import Choice, Recipe, choose
from edgefl.errors import ProtocolError
from edgefl.objects import ObjectStore
from edgefl.protocol.parts import decode_part, encode_part
from edgefl.prototypes.library import Weighting
from edgefl.records import Manifest, ObjectRef

#: The part that is merged by its own counts.
PROTOTYPES = "prototypes"
#: The slots that act on updates, in this order. Clusters and selection come before a round.
_ROLES = ("repair", "weight", "combine", "optimise")
#: Largest "prototypes" part: 310 classes of 3 tables at width 768 are 2.9 MB.
_PROTOTYPES_LIMIT_BYTES = 64 * 2**20

Load = Callable[[], Tensors]


class UpdateInfo(msgspec.Struct, frozen=True):
    """One device's finished update, all of whose objects are in the store. ``samples``: part -> samples trained on."""

    device: str = ""
    manifest: Manifest = {}
    samples: dict[str, int] = {}


def aggregate_round(
    updates: Sequence[UpdateInfo],
    store: ObjectStore,
    previous: Manifest,
    recipe: Recipe | None = None,
    *,
    prototype_weighting: Weighting = "modality",
) -> tuple[Manifest, dict[str, Any]]:
    """The next state, whose new objects are in ``store``, and the record of the round as plain values.

    ``previous`` holds every part of the model; parts nobody trained keep their object. In the record: per slot, role ->
    {choice, options}; ``parts`` {part: {devices: {name: weight}}}, weights as they took effect, sum 1; ``refused``
    [{device, part, reason, detail}], reason names, shape, dtype, not_finite, malformed or unknown_part; ``ignored``
    {part: [devices without samples of it]}; ``kept`` {part: why it stays as it was although it was sent}.
    Raises StoreError when the store fails (no fault of a device), ConfigError for a recipe with unknown methods,
    ValueError when a device is named twice.
    """
    slots = {role: choose(role, recipe or {}) for role in _ROLES}
    if len({update.device for update in updates}) != len(updates):
        raise ValueError("a device appears twice among the updates of one round")
    samples = {update.device: update.samples for update in updates}
    manifests: dict[str, Manifest] = slots["repair"].method({u.device: u.manifest for u in updates})
    record: dict[str, Any] = {role: {"choice": slot.name, **slot.options} for role, slot in slots.items()}
    record |= {"parts": {}, "refused": [], "ignored": {}, "kept": {}}
    state = dict(previous)
    for part in sorted({part for manifest in manifests.values() for part in manifest}):
        objects = {device: manifests[device][part] for device in sorted(manifests) if part in manifests[device]}
        if part == PROTOTYPES:
            outcome = _prototypes(store, objects, previous.get(part), prototype_weighting)
        elif part not in previous:
            outcome = _unknown(objects)
        else:
            counts = {device: samples[device].get(part, 0) for device in objects}
            outcome = _part(store, objects, previous[part], counts, slots)
        if outcome.tensors is not None:
            state[part] = store.put(encode_part(outcome.tensors))
        _note(record, part, outcome)
    return state, record


def _unknown(objects: Mapping[str, ObjectRef]) -> Outcome:
    detail = "the model has no such part"
    return Outcome(None, {"devices": {}}, dict.fromkeys(objects, ("unknown_part", detail)), detail)


def _part(
    store: ObjectStore,
    objects: Mapping[str, ObjectRef],
    previous: ObjectRef,
    counts: Mapping[str, int],
    slots: Mapping[str, Choice],
) -> Outcome:
    weights: dict[str, float] = slots["weight"].method(counts)
    ignored = tuple(device for device, count in counts.items() if count <= 0)
    if not weights:
        return Outcome(None, {"devices": {}}, {}, "no device trained it on any sample", ignored)
    load_previous = _loader(store, previous, 2 * previous.size)
    mean = slots["combine"].method(layout_of(load_previous()))
    refused: dict[str, tuple[str, str]] = {}
    for device, weight in weights.items():
        try:
            # The same tensors in another encoding differ by a factor of two at most, headers by less than 1 MiB.
            mean.add(weight, _loader(store, objects[device], 2 * previous.size + 2**20)())
        except MisfitError as error:
            refused[device] = (error.reason, error.message)
        except ProtocolError as error:
            refused[device] = ("malformed", error.message)
    taken = {device: weight for device, weight in weights.items() if device not in refused}
    if not taken:
        return Outcome(None, {"devices": {}}, refused, "every device that trained it was refused", ignored)
    total = sum(taken.values())
    shares = {device: weight / total for device, weight in taken.items()}
    tensors = slots["optimise"].method(load_previous, mean.result())
    return Outcome(tensors, {"devices": shares}, refused, "", ignored)


def _prototypes(
    store: ObjectStore, objects: Mapping[str, ObjectRef], previous: ObjectRef | None, weighting: Weighting
) -> Outcome:
    loaders = {device: _loader(store, ref, _PROTOTYPES_LIMIT_BYTES) for device, ref in objects.items()}
    load_previous = _loader(store, previous, _PROTOTYPES_LIMIT_BYTES) if previous is not None else None
    return merge_prototypes(loaders, load_previous, weighting)


def _loader(store: ObjectStore, ref: ObjectRef, limit: int) -> Load:
    def load() -> Tensors:
        size = store.size(ref.id)
        if size > limit:
            raise ProtocolError(f"its object has {size} bytes, at most {limit} can be right")
        return decode_part(store.read(ref.id), limit, copy=False)

    return load


def _note(record: dict[str, Any], part: str, outcome: Outcome) -> None:
    if outcome.tensors is None:
        record["kept"][part] = outcome.kept
    else:
        record["parts"][part] = outcome.weights
    if outcome.ignored:
        record["ignored"][part] = list(outcome.ignored)
    for device, (reason, detail) in sorted(outcome.refused.items()):
        record["refused"].append({"device": device, "part": part, "reason": reason, "detail": detail})
