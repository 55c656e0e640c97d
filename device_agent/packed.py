"""The trainer's side of packed parts: what was offered unpacked before training, what was trained packed after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from edgefl.errors import ProtocolError
from edgefl.models.spec import is_scheduled
from edgefl.objects import ObjectStore
from edgefl.plan.exchange import LOST, packing_of
from edgefl.plan.values import Transfer
from edgefl.protocol.messages import Offer
from edgefl.protocol.packing import WORTH, add_lost, lost_of, pack, unpack
from edgefl.protocol.parts import decode_part, encode_part
from edgefl.records import Manifest


class Sending(NamedTuple):
    """The update's objects; and what they leave out, to be kept for the next round."""

    manifest: Manifest
    lost: Manifest


def unpack_offer(offer: Offer, store: ObjectStore) -> None:
    """Make the offer's parts that came packed, one at a time. Raises ProtocolError when one is not what was named."""
    for part, packed in offer.packed.items():
        wanted = offer.manifest.get(part)
        if wanted is None or store.has(wanted.id):
            continue
        base = decode_part(store.read(packed.base), copy=False) if packed.base else None
        made = store.put(encode_part(unpack(store.read(packed.ref.id), base, packed.packing)))
        if made.id != wanted.id:
            raise ProtocolError(f"part '{part}' unpacks to {made.id[:12]} on this device, not to {wanted.id[:12]}")


def pack_update(
    parts: Mapping[str, Mapping[str, Any]],
    offered: Manifest,
    kept: Mapping[str, Mapping[str, Any]],
    transfer: Transfer,
    store: ObjectStore,
) -> Sending:
    """``parts`` as they are sent: packed, where the rules say so and it pays, against what was ``offered``.

    ``kept``: holds under ``LOST`` what earlier rounds have left out.
    """
    manifest: Manifest = {}
    lost: Manifest = {}
    for part, tensors in parts.items():
        target = add_lost(tensors, kept.get(LOST + part, {}))
        packing = packing_of(transfer.up, part) if part in offered and is_scheduled(part) else "f32"
        if packing != "f32" and not transfer.whole:
            base = decode_part(store.read(offered[part].id), copy=False)
            sent = pack(target, base, packing, transfer.top)
            if len(sent.data) <= WORTH * offered[part].size:
                manifest[part] = store.put(sent.data)
                lost[LOST + part] = store.put(encode_part(lost_of(target, sent.held)))
                continue
        manifest[part] = store.put(encode_part(target))
    return Sending(manifest, lost)
