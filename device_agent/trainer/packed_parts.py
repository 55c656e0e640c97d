"""The trainer's side of packed parts: what was offered unpacked before training, what was trained packed after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from edgefl.errors import ProtocolError, StoreError
from edgefl.models.spec import is_scheduled
from edgefl.plan.exchange import LOST, packing_of
from edgefl.plan.exchange import kept as kept_parts
from edgefl.plan.job import Job
from edgefl.protocol.compression import add_lost, pack, pays, unpack
from edgefl.protocol.messages import Offer
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Manifest, Refusal
from edgefl.storage.objects import ObjectStore


class Sending(NamedTuple):
    """The update's objects; and what they leave out, to be kept for the next round."""

    manifest: Manifest
    lost: Manifest


def unpack_offer(offer: Offer, store: ObjectStore) -> Refusal | None:
    """Make the offer's parts that came packed, one at a time; what is wrong where one can not be made.

    Its base and the packed object are deleted then, so that the same offer, sent again, brings the part whole.
    """
    for part, packed in offer.packed.items():
        wanted = offer.manifest.get(part)
        if wanted is None or store.has(wanted.id):
            continue
        try:
            base = decode_part(store.read(packed.base), copy=False) if packed.base else None
            made = store.put(encode_part(unpack(store.read(packed.ref.id), base, packed.packing)))
            trouble = "" if made.id == wanted.id else f"it unpacks to {made.id[:12]} here, not to {wanted.id[:12]}"
        except (ProtocolError, StoreError) as error:
            trouble = error.message
        if trouble:
            for name in filter(None, (packed.base, packed.ref.id)):
                store.path(name).unlink(missing_ok=True)
            return Refusal("packed", detail=f"part '{part}': {trouble}"[:500])
    return None


def pack_update(
    job: Job,
    parts: dict[str, dict[str, Any]],
    offered: Manifest,
    kept: Mapping[str, Mapping[str, Any]],
    store: ObjectStore,
) -> Sending:
    """``parts`` as they are sent: packed, where the rules say so and it pays, against what was ``offered``.

    ``parts`` is used up, part by part, so that there are not two copies of a model. ``kept``: holds under ``LOST`` what
    earlier rounds have left out; parts that go on from the device's own copy have it in them already.
    """
    transfer, own = job.transfer, set(kept_parts(job))
    manifest: Manifest = {}
    lost: Manifest = {}
    while parts:
        part = next(iter(parts))
        target = parts.pop(part)
        if part not in own:
            target = add_lost(target, kept.get(LOST + part, {}), used_up=True)
        packing = packing_of(transfer.up, part) if part in offered and is_scheduled(part) else "f32"
        if packing == "f32" or transfer.whole or not pays(target, packing, transfer.top):
            manifest[part] = store.put(encode_part(target))
            continue
        base = decode_part(store.read(offered[part].id), copy=False)
        sent = pack(target, base, packing, transfer.top, holding=False)
        del base  # as large as the part, and so is what comes
        manifest[part] = store.put(sent.data)
        if sent.lost and part not in own:
            lost[LOST + part] = store.put(encode_part(sent.lost))
    return Sending(manifest, lost)
