"""The slot cluster: which devices belong together, by the signature that each of them sent once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgefl.aggregation.history import Memory, UpdateInfo
from edgefl.aggregation.server_state import SERVER
from edgefl.errors import ProtocolError
from edgefl.models.spec import SIGNATURE
from edgefl.protocol.tensors import decode_part
from edgefl.records import Manifest
from edgefl.registry import Choice, Recipe, choose
from edgefl.storage.objects import ObjectStore

#: The prefix under which the state keeps the devices' signatures.
SIGNATURES = f"{SERVER}{SIGNATURE}/"
#: Largest signature: a sketch is below 1 MB, the bases of 100 classes at rank 3 and width 256 are 0.3 MB.
LIMIT_BYTES = 4 * 2**20


def wanted(recipe: Recipe) -> str:
    """Kind of signature that devices send once for the recipe's clusters: sketch, bases, or nothing."""
    asked = choose("cluster", recipe).method.signature
    return asked.name if asked else ""


def signed(state: Manifest) -> list[str]:
    """The devices whose signature is known, sorted."""
    return sorted(key.removeprefix(SIGNATURES) for key in state if key.startswith(SIGNATURES))


def sign(
    slot: Choice, updates: Sequence[UpdateInfo], store: ObjectStore
) -> tuple[Manifest, dict[str, tuple[str, str]]]:
    """The signatures among the updates as keys of the state; and device -> (reason, detail) of those that are none."""
    found: Manifest = {}
    refused: dict[str, tuple[str, str]] = {}
    for update in updates:
        if SIGNATURE not in update.manifest:
            continue
        ref = update.manifest[SIGNATURE]
        try:
            tensors = decode_part(store.read(ref.id), LIMIT_BYTES, finite=True)
            if slot.method.signature is None:
                raise ProtocolError("a signature that no device was asked for")
            slot.method.signature.check(tensors)
            found[SIGNATURES + update.device] = ref
        except ProtocolError as error:
            refused[update.device] = ("malformed", error.message)
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
