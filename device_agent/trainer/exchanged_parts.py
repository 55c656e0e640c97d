"""Exchanged parts at a device: an offer's decompressed before training, an update's compressed after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from device_agent.runtime.memory_store import Objects
from edgefl.errors import DivergedError, ProtocolError, StoreError
from edgefl.models.spec import is_scheduled
from edgefl.plan.job import Job, Stage
from edgefl.plan.stages import RESIDUAL, packing_of
from edgefl.plan.stages import kept as kept_parts
from edgefl.protocol.messages import Offer
from edgefl.protocol.packing import add_residual, compress, decompress, pays
from edgefl.protocol.rotated_parts import Tensors
from edgefl.protocol.tensors import Array, decode_part, encode_part
from edgefl.records import Manifest, Refusal
from edgefl.storage.file_pages import let_go


class StoredParts(Mapping[str, dict[str, Array]]):
    """Parts decoded on access, so that memory never holds two copies of a whole model."""

    def __init__(self, manifest: Manifest, store: Objects) -> None:
        self._manifest = manifest
        self._store = store

    def __getitem__(self, name: str) -> dict[str, Array]:
        # What goes into a model, or onto it, is read where it lies; the rest is copied.
        own = not is_scheduled(name.removeprefix(RESIDUAL))
        return decode_part(self._store.view(self._manifest[name].id), copy=own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest)

    def __len__(self) -> int:
        return len(self._manifest)

    def __contains__(self, name: object) -> bool:
        return name in self._manifest  # the inherited one would read the part


class Sending(NamedTuple):
    """The update's objects, and the residuals to retain for the next round."""

    manifest: Manifest
    residuals: Manifest


def decompress_offer(offer: Offer, store: Objects) -> Refusal | None:
    """Decompress an offer's packed parts, one at a time; refusal at the first fault, else None.

    After a fault the base and the packed object are deleted, so that the next offer brings the part whole.
    """
    for part, packed in offer.packed.items():
        wanted = offer.manifest.get(part)
        if wanted is None or store.has(wanted.id):
            continue
        try:
            base = decode_part(store.view(packed.base), copy=False) if packed.base else None
            made = store.put(encode_part(decompress(store.read(packed.ref.id), base, packed.packing)))
            trouble = "" if made.id == wanted.id else f"it unpacks to {made.id[:12]} here, not to {wanted.id[:12]}"
        except (ProtocolError, StoreError) as error:
            trouble = error.message
        if trouble:
            for name in filter(None, (packed.base, packed.ref.id)):
                store.remove(name)
            return Refusal("packed", detail=f"part '{part}': {trouble}"[:500])
    return None


def compress_update(
    job: Job,
    parts: dict[str, dict[str, Array]],
    offered: Manifest,
    retained: Mapping[str, Tensors],
    store: Objects,
) -> Sending:
    """Store trained ``parts`` for upload, compressed against those ``offered`` if the rules ask for it and it pays.

    ``parts`` is used up, part by part, so that there are not two copies of a model. ``retained`` holds, under
    ``RESIDUAL``, the residuals of earlier rounds; parts that go on from the device's own copy have them in already.
    Raises DivergedError for a part to be compressed whose values are not finite: their residual would stay so.
    """
    transfer, own = job.transfer, set(kept_parts(job))
    manifest: Manifest = {}
    residuals: Manifest = {}
    while parts:
        part = next(iter(parts))
        target = parts.pop(part)
        if part not in own:
            target = add_residual(target, retained.get(RESIDUAL + part, {}), used_up=True)
        packing = packing_of(transfer.up, part) if part in offered and is_scheduled(part) else "f32"
        if not pays(target, packing, transfer):
            manifest[part] = store.put(encode_part(target))
            continue
        if strange := [name for name, one in target.items() if one.dtype.kind == "f" and not np.isfinite(one).all()]:
            text = f"part {part}: {strange[0]!r} has values that are not finite after training"
            raise DivergedError(text, remedy="Lower training.lr, or set training.clip_norm: 1.0.")
        base = decode_part(store.view(offered[part].id), copy=False)
        sent = compress(target, base, packing, transfer.top, reconstruct=False)
        del base  # as large as the part, and so is what comes
        for tensor in target.values():
            let_go(tensor)
        manifest[part] = store.put(sent.data)
        if sent.residual and part not in own:
            residuals[RESIDUAL + part] = store.put(encode_part(sent.residual))
    return Sending(manifest, residuals)


def waiting_residuals(stage: Stage, retained: Manifest, sent: Manifest) -> Manifest:
    """Residuals of parts that were not ``sent`` in this round, and that a later round of the stage may send.

    A part that only an earlier stage trained is sent no more: its residual would lie on the disk until the run ends.
    """
    keys = {RESIDUAL + part for part in (stage.present if stage.draw else stage.trained) if part not in sent}
    return {key: ref for key, ref in retained.items() if key in keys}
