"""Clusters of devices, and the aggregation weights of one part per scope (global, cluster, device).

The slot cluster says which devices belong together, by the signature that each of them sent once.

Where devices of a round train different depths (schedule mixed, budgets), the mean over those that trained a part would
let a single one replace everybody's, below what the others trained upon the old one. With combine: {mean: {absent:
keep}} the others keep it: theta' = sum over trained w_k theta_k + sum over absent w_k theta, w over both sums to 1.
An audience is the prefix of a state's part (``edgefl.aggregation.server_state``): everyone, a cluster, a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from edgefl.aggregation.history import Memory, UpdateInfo
from edgefl.aggregation.mean import MisfitError, capped, proportional
from edgefl.aggregation.server_state import EVERYONE, SERVER, of_cluster, of_device
from edgefl.errors import ProtocolError
from edgefl.models.spec import SIGNATURE, is_matcher, modality_of, rank_start
from edgefl.plan.stages import encoder_stage
from edgefl.protocol.tensors import decode_part
from edgefl.records import Manifest
from edgefl.registry import Choice, Recipe, choose
from edgefl.storage.objects import ObjectStore

Load = Callable[[str], Mapping[str, np.ndarray]]
#: audience -> device -> weight, sum 1.
Shares = dict[str, dict[str, float]]
#: The prefix under which the state keeps the devices' signatures.
SIGNATURES = f"{SERVER}{SIGNATURE}/"
#: Largest signature: a sketch is below 1 MB, the bases of 100 classes at rank 3 and width 256 are 0.3 MB.
LIMIT_BYTES = 4 * 2**20


def wanted(recipe: Recipe) -> str:
    """Kind of signature that devices send with their first update for the recipe's clusters; "": none."""
    asked = choose("cluster", recipe).method.signature
    return asked.name if asked and not asked.joining else ""


def signed(state: Manifest) -> list[str]:
    """The devices whose signature is known, sorted."""
    return sorted(key.removeprefix(SIGNATURES) for key in state if key.startswith(SIGNATURES))


def sign(
    slot: Choice,
    updates: Sequence[UpdateInfo],
    store: ObjectStore,
    joined: Mapping[str, bytes] | None = None,
    known: Manifest | None = None,
) -> tuple[Manifest, dict[str, tuple[str, str]]]:
    """New signatures as keys of the state; and device -> (reason, detail) of those that are none.

    They are among the updates, or in the hellos of devices (``joined``) that the state ``known`` has none of.
    """
    found: Manifest = {}
    refused: dict[str, tuple[str, str]] = {}
    brought = {u.device: store.read(u.manifest[SIGNATURE].id) for u in updates if SIGNATURE in u.manifest}
    if slot.method.signature is not None and slot.method.signature.joining:
        brought = {name: one for name, one in (joined or {}).items() if SIGNATURES + name not in (known or {})}
    for device, data in brought.items():
        try:
            tensors = decode_part(data, LIMIT_BYTES, finite=True)
            if slot.method.signature is None:
                raise ProtocolError("a signature that no device was asked for")
            slot.method.signature.check(tensors)
            found[SIGNATURES + device] = store.put(data)
        except ProtocolError as error:
            refused[device] = ("malformed", error.message)
    return found, refused


def assign(slot: Choice, state: Manifest, store: ObjectStore, memory: Memory, seed: int) -> dict[str, int]:
    """device -> cluster, of every device with a signature; as before unless a signature is new. Empty: no clusters."""
    devices = signed(state)
    if slot.method.group is None or not devices:
        return {}
    known = {d: memory.devices[d].cluster for d in devices if d in memory.devices and memory.devices[d].cluster >= 0}
    if known.keys() == set(devices):
        return known
    signatures: Mapping[str, Mapping[str, np.ndarray]] = {
        device: decode_part(store.read(state[SIGNATURES + device].id), LIMIT_BYTES) for device in devices
    }
    found: dict[str, int] = slot.bind(slot.method.group)(signatures, np.random.default_rng(seed))
    return found


class RoundContext(NamedTuple):
    """Facts about the devices of a round that their weights depend on.

    ``modalities``: how many each has; ``clusters``: the cluster of each, empty: there are none; ``similarity``: the
    weights by the models' outputs; ``own_models``: clusters have their own; ``small``: how small networks combine;
    ``most``: the largest share that a device may have of a part.
    """

    modalities: Mapping[str, int]
    clusters: Mapping[str, int]
    similarity: Mapping[str, float]
    own_models: bool
    small: str
    most: float


def absent_from(part: str, trained: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """device -> samples, of the devices that hold samples of the part's modality and trained without it.

    ``trained``: device -> part -> samples. Encoder stages alone can be left out for a stage or a budget. A device that
    lacks the modality is not absent: of its encoder it knows nothing. Nor is one whose rank ends before the slice.
    """
    if encoder_stage(part) is None:
        return {}
    owner, start = modality_of(part), rank_start(part)
    held = {
        device: max(
            (n for p, n in samples.items() if rank_start(p) == start and owner in {None, modality_of(p)}), default=0
        )
        for device, samples in trained.items()
        if part not in samples
    }
    return {device: count for device, count in held.items() if count > 0}


def shares_of(
    part: str,
    counts: Mapping[str, int],
    slot: Choice,
    context: RoundContext,
    load: Load,
    absent: Mapping[str, int],
) -> Shares:
    """The shares of ``part`` for each audience; empty when no device has samples of it.

    ``counts``: device -> samples; ``load``: a device's tensors of this part; it raises MisfitError or ProtocolError for
    tensors that do not fit it, whose devices have no row and no column in the relationship graph. ``absent``: device ->
    samples, of those that keep the part; they have a share where a device that trained it has one.
    """
    if not any(count > 0 for count in counts.values()):
        return {}
    counts = {**counts, **absent}
    if is_matcher(part):
        shares = _small_networks(capped(proportional(counts), context.most), context.small)
    else:
        shares = {EVERYONE: _weigh(counts, slot, context)}
        if slot.method.personal is not None and part.startswith("head/") and modality_of(part) is not None:
            fitting = {d: partial(load, d) for d in shares[EVERYONE] if _fits(d, load)}
            shares |= {of_device(device): row for device, row in slot.bind(slot.method.personal)(fitting).items()}
        elif context.own_models:
            for cluster in sorted(set(context.clusters.values())):
                within = {d: counts[d] for d in shares[EVERYONE] if context.clusters.get(d) == cluster}
                if mine := _weigh(within, slot, context):
                    shares[of_cluster(cluster)] = mine
    return {audience: weights for audience, weights in shares.items() if weights.keys() - absent.keys()}


def _fits(device: str, load: Load) -> bool:
    """Whether a device's tensors match the layout; the global mean records the reason where not."""
    try:
        load(device)
    except (MisfitError, ProtocolError):
        return False
    return True


def _small_networks(weights: Mapping[str, float], how: str) -> Shares:
    """Matcher networks: averaged, the largest device's only, or the average plus one per device."""
    if how == "largest":
        return {EVERYONE: {max(sorted(weights), key=lambda device: weights[device]): 1.0}}
    alone = {of_device(device): {device: 1.0} for device in weights} if how == "ensemble" else {}
    return {EVERYONE: dict(weights), **alone}


def _weigh(counts: Mapping[str, int], slot: Choice, context: RoundContext) -> dict[str, float]:
    if slot.method.similarity is None:
        weights = slot.bind(slot.method.weigh)(counts, context.modalities)
    else:
        known = {d: context.similarity[d] for d, count in sorted(counts.items()) if count > 0}
        total = sum(known.values())
        weights = {device: weight / total for device, weight in known.items()}
    return capped(weights, context.most)
