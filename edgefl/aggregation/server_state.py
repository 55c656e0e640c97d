"""The server's state: whose parts it holds, and how a part's new values become what devices hold.

A state is one flat manifest: "head/image" is everyone's, "@left/head/image" that of device left, "#2/head/image" that
of cluster 2, "server/…" is never sent. A device sees everyone's parts, then its cluster's over them, then its own.

A part in the state is what everybody holds, q, so that both sides train and aggregate from the same bits. Kept beside
it, for the server alone: ``server/lost/<key>``, target - q, and ``server/packed/<id>/<base>/<packing>``, the packed
object that leads from the base's object to the object ``id``. A round that is sent whole, as a stage's last one unless
``transfer.closing`` is packed, leaves neither.
"""

from __future__ import annotations

from typing import NamedTuple

from edgefl.aggregation.mean import Tensors
from edgefl.errors import ProtocolError
from edgefl.models.spec import LAYERS
from edgefl.plan.job import Transfer
from edgefl.plan.stages import packing_of
from edgefl.protocol.messages import PackedPart
from edgefl.protocol.packing import add_residual, compress, pays
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Manifest, ObjectRef
from edgefl.storage.objects import ObjectStore

#: The prefix of what is for everyone.
EVERYONE = ""
#: The prefix of what only the server reads: optimiser states, what is remembered of the devices.
SERVER = "server/"


def of_device(device: str) -> str:
    """The prefix of one device's own parts."""
    return f"@{device}/"


def of_cluster(cluster: int) -> str:
    """The prefix of one cluster's parts."""
    return f"#{cluster}/"


def is_shared(part: str) -> bool:
    """Whether a part is for everyone."""
    return not part.startswith(("@", "#", SERVER))


def shared(state: Manifest) -> Manifest:
    """Everyone's parts: the global model."""
    return {part: ref for part, ref in state.items() if is_shared(part)}


def view(state: Manifest, device: str, cluster: int = -1) -> Manifest:
    """The parts as ``device`` is to see them; ``cluster`` -1: it belongs to none."""
    seen = shared(state)
    for prefix in ([of_cluster(cluster)] if cluster >= 0 else []) + [of_device(device)]:
        seen |= {part.removeprefix(prefix): ref for part, ref in state.items() if part.startswith(prefix)}
    return seen


#: The prefixes of what is kept.
RESIDUAL, PACKED = f"{SERVER}lost/", f"{SERVER}packed/"


#: Packed parts an offer names: each is 200 bytes of a message that may have 128 KiB, and the manifest is as long.
MOST_PACKED = 250


class AudiencePart(NamedTuple):
    """A part as one audience has it: its key in the state, its name in the model, the object that devices hold."""

    key: str
    name: str
    base: ObjectRef


class Published(NamedTuple):
    """A part's new object, what is kept beside it, and why it is sent whole although it was to be packed ("": no)."""

    ref: ObjectRef
    kept: Manifest
    whole: str = ""


def publish(
    store: ObjectStore,
    previous: Manifest,
    part: AudiencePart,
    tensors: Tensors,
    transfer: Transfer,
    *,
    feedback: bool = True,
) -> Published:
    """The part of which ``tensors`` are the next state by the recipe.

    ``feedback``: what is not sent is added to the next target. Not where devices go on from something else than this
    state: their next change holds it by itself.
    """
    residual = RESIDUAL + part.key
    known = feedback and residual in previous
    target = add_residual(tensors, decode_part(store.read(previous[residual].id)) if known else {})
    packing = packing_of(transfer.down, part.name)
    if not pays(target, packing, transfer):
        return Published(store.put(encode_part(target)), {})
    try:
        sent = compress(target, decode_part(store.view(part.base.id), copy=False), packing, transfer.top)
    except ProtocolError as error:
        return Published(store.put(encode_part(target)), {}, error.message)
    ref = store.put(encode_part(sent.reconstructed))
    start = part.base.id if packing.startswith("delta+") else ""
    kept = {f"{PACKED}{ref.id}/{start}/{packing}": store.put(sent.data)}
    if feedback and sent.residual:
        kept[residual] = store.put(encode_part(sent.residual))
    return Published(ref, kept)


def fold_residuals(store: ObjectStore, state: Manifest) -> Manifest:
    """The state with everything that was not sent yet in its parts: what a round that is sent whole leaves behind."""
    found = {key: ref for key, ref in state.items() if not key.startswith(RESIDUAL)}
    for key, ref in state.items():
        part = key.removeprefix(RESIDUAL)
        if key.startswith(RESIDUAL) and part in found:
            tensors = decode_part(store.read(found[part].id), copy=False)
            found[part] = store.put(encode_part(add_residual(tensors, decode_part(store.read(ref.id)))))
    return found


def packed_parts(state: Manifest, offered: Manifest) -> dict[str, PackedPart]:
    """part -> the packed object that leads to it, of the parts ``offered``, where the last round has made one."""
    by_id: dict[str, PackedPart] = {}
    for key, ref in state.items():
        if key.startswith(PACKED):
            target, base, packing = key.removeprefix(PACKED).split("/")
            by_id[target] = PackedPart(ref, base, packing)
    found = {part: by_id[ref.id] for part, ref in offered.items() if ref.id in by_id}
    return dict(list(found.items())[:MOST_PACKED])


def without_passing(state: Manifest) -> Manifest:
    """The state as the next one begins with it: without what the last round had packed, and the layers it had lent."""
    return {key: ref for key, ref in state.items() if not key.startswith(PACKED) and not _is_lent(key)}


def _is_lent(key: str) -> bool:
    return key.startswith("@") and key.partition("/")[2] == LAYERS  # no device's name holds a slash
