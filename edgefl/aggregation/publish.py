"""A part's new state as the devices will hold it: what is not sent now is kept, and added to the next round's.

The state is what everybody holds, q, so that both sides train and aggregate from the same bits. Kept beside it, for the
server alone: ``server/lost/<key>``, target - q, and ``server/packed/<id>/<base>/<packing>``, the packed object that
leads from the base's object to the object ``id``. A stage's last round is sent whole, and nothing is left.
"""

from __future__ import annotations

from typing import NamedTuple

from edgefl.aggregation.audience import SERVER
from edgefl.aggregation.combine import Tensors
from edgefl.objects import ObjectStore
from edgefl.plan.exchange import packing_of
from edgefl.plan.values import Transfer
from edgefl.protocol.messages import PackedPart
from edgefl.protocol.packing import WORTH, add_lost, lost_of, pack
from edgefl.protocol.parts import decode_part, encode_part
from edgefl.records import Manifest, ObjectRef

#: The prefixes of what is kept.
LOST, PACKED = f"{SERVER}lost/", f"{SERVER}packed/"


class Published(NamedTuple):
    """A part's new object, and what is kept beside it."""

    ref: ObjectRef
    kept: Manifest


def publish(
    store: ObjectStore, previous: Manifest, key: str, part: str, base: ObjectRef, tensors: Tensors, transfer: Transfer
) -> Published:
    """``tensors`` are the part's next state by the recipe; ``base``: the object that devices hold."""
    target = add_lost(tensors, decode_part(store.read(previous[LOST + key].id)) if LOST + key in previous else {})
    packing = packing_of(transfer.down, part)
    whole = encode_part(target)
    if packing == "f32" or transfer.whole:
        return Published(store.put(whole), {})
    sent = pack(target, decode_part(store.read(base.id), copy=False), packing, transfer.top)
    if len(sent.data) > WORTH * len(whole):
        return Published(store.put(whole), {})
    ref = store.put(encode_part(sent.held))
    start = base.id if packing.startswith("delta+") else ""
    kept = {f"{PACKED}{ref.id}/{start}/{packing}": store.put(sent.data)}
    return Published(ref, kept | {LOST + key: store.put(encode_part(lost_of(target, sent.held)))})


def packed_parts(state: Manifest, offered: Manifest) -> dict[str, PackedPart]:
    """part -> the packed object that leads to it, of the parts ``offered``, where the last round has made one."""
    by_id: dict[str, PackedPart] = {}
    for key, ref in state.items():
        if key.startswith(PACKED):
            target, base, packing = key.removeprefix(PACKED).split("/", 2)
            by_id[target] = PackedPart(ref, base, packing)
    return {part: by_id[ref.id] for part, ref in offered.items() if ref.id in by_id}


def without_packed(state: Manifest) -> Manifest:
    """The state as a new round begins with it: what the last one had packed leads nowhere any more."""
    return {key: ref for key, ref in state.items() if not key.startswith(PACKED)}
