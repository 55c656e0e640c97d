"""Validation of an update: its sizes before it is fetched, its tensors before they are aggregated; how far it moved."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite, prod, sqrt
from typing import NamedTuple

import numpy as np

from coordinator.core.state import BUFFERS_OF, Change, Changes, Claim
from edgefl.aggregation.mean import (
    BLOCK,
    BUFFERS,
    Layout,
    MisfitError,
    Tensor,
    Tensors,
    check,
    check_finite,
    stored_layout,
)
from edgefl.aggregation.weights import LIMIT_BYTES
from edgefl.errors import ProtocolError
from edgefl.models.spec import LAYERS, PROTOTYPES, SIGNATURE, is_scheduled
from edgefl.plan.job import Transfer
from edgefl.plan.periods import HEADER_BYTES as LAYER_HEADER_BYTES
from edgefl.plan.periods import VALUE_BYTES, split
from edgefl.plan.stages import packing_of
from edgefl.protocol.packing import decompress
from edgefl.protocol.tensors import decode_part, encode_part, float_runs, is_alike, is_packed
from edgefl.prototypes.table import ClassMeans, from_tensors
from edgefl.records import Manifest, ObjectRef, Refusal
from edgefl.registry import signature
from edgefl.storage.objects import ObjectStore

#: The same tensors in another encoding differ by a factor of two at most, and a header is less than 1 MiB.
SIZE_FACTOR = 2
HEADER_BYTES = 2**20
#: 310 classes of 3 tables at width 768 are 2.9 MB.
PROTOTYPES_BYTES = 64 * 2**20
#: Parts of an update that have no version in the state that they are to be like.
_UNLIKE = frozenset({PROTOTYPES, SIGNATURE, LAYERS})
#: A packed tensor has longer names, and one or two entries more; it is sent packed where that saves a tenth.
PACKED_HEADER_BYTES = 4096


def asked_layout(store: ObjectStore, layers: Iterable[str], previous: Manifest) -> Layout:
    """Layout of these layers ("part|tensor") as one part, from the state ``previous``. Raises ProtocolError."""
    found: Layout = {}
    for layer in layers:
        part, name = split(layer)
        if part in previous and name in (layout := stored_layout(store, previous[part])):
            found[layer] = layout[name]
    return found


def layers_limit(layout: Layout) -> int:
    """Largest object in bytes of a part with this layout."""
    return sum(VALUE_BYTES * prod(shape) + LAYER_HEADER_BYTES for shape, _ in layout.values())


def size_limit(part: str, previous: Manifest, asked: Layout | None = None) -> int:
    """Largest object in bytes of a new version of this part. Raises ProtocolError for an unknown part."""
    if part == LAYERS and asked:
        return layers_limit(asked)
    if part == PROTOTYPES:
        return PROTOTYPES_BYTES
    if part == SIGNATURE:
        return LIMIT_BYTES
    if part not in previous:
        raise ProtocolError(f"the model has no part {part[:80]!r}")
    return SIZE_FACTOR * previous[part].size + HEADER_BYTES


def check_sizes(
    manifest: Manifest, previous: Manifest, transfer: Transfer, asked: Layout | None = None
) -> Refusal | None:
    """Refusal of an update by the sizes of its objects alone, at the first wrong part.

    The same tensors have the same size, to the byte; packed ones (``transfer``) have fewer bytes. ``asked``: layers
    that may come alone. Raises ProtocolError for an unknown part.
    """
    for part, ref in sorted(manifest.items()):
        least, limit = 1, size_limit(part, previous, asked)
        if part not in _UNLIKE:
            if ref.size == previous[part].size:
                continue
            packed = packing_of(transfer.up, part) != "f32"
            limit = previous[part].size + (PACKED_HEADER_BYTES if packed else 0)
            least = 1 if packed else limit
        if not least <= ref.size <= limit:
            can = f"exactly {limit}" if least == limit else f"at most {limit}"
            text = f"part {part[:80]}: {ref.size} bytes announced, {can} can be right"
            return Refusal("size", float(ref.size), float(limit), "B", text)
    return None


class Own(NamedTuple):
    """Bounds on the sample counts of a device's prototypes.

    ``claim``: samples, in all and by class, from the device's first hello (upper bound); ``min_count``: fewest samples
    behind one prototype. ``by_class``: one prototype a class; else clusters, each bounded by all samples.
    """

    claim: Claim
    min_count: float = 1
    by_class: bool = True

    def check(self, tables: Mapping[str, ClassMeans]) -> None:
        """Raises MisfitError, naming table and class, for a row of more samples than the device has, or of too few."""
        total = self.claim.samples.get("", 0)
        for name, table in tables.items():
            held = np.full(len(table.counts), float(total))
            if self.by_class:  # its hello numbers classes in its own order, the model in another: by size they compare
                known = sorted(self.claim.class_counts, reverse=True)[: len(held)]
                held[:] = np.pad(known, (0, len(held) - len(known)))
            order = np.argsort(-table.counts, kind="stable")
            if (more := np.flatnonzero(table.counts[order] > held)).size:
                row, most = int(order[more[0]]), held[more[0]]
                text = f"table '{name}', class {row}: {table.counts[row]:g} samples claimed, the device has {most:g}"
                raise MisfitError("samples", text)
            if float(table.counts.sum(dtype=np.float64)) > total:
                text = f"table '{name}': {table.counts.sum():g} samples claimed in all, the device has {total}"
                raise MisfitError("samples", text)
            if (few := np.flatnonzero(table.present & (table.counts < self.min_count))).size:
                row = int(few[0])
                text = f"table '{name}', class {row}: a mean of {table.counts[row]:g} samples"
                raise MisfitError("few", f"{text}, at least {self.min_count:g} are asked for (prototypes: min_count)")


class Rules(NamedTuple):
    """Rules for the updates of a run.

    ``signature``: what the run's clusters are made of (``weights.wanted``), "" for nothing; ``transfer``: how parts
    may be packed.
    """

    signature: str = ""
    transfer: Transfer = Transfer()


def check_update(
    store: ObjectStore,
    manifest: Manifest,
    previous: Manifest,
    rules: Rules,
    own: Own | None = None,
    asked: Layout | None = None,
) -> Refusal | Manifest:
    """The update's parts, packed ones by their decompressed objects, when every one has the tensors of the state
    before, all finite; else the first fault.

    ``previous``: the parts as the device was offered them; ``own``: what bounds its prototypes; ``asked``: layout
    of the single layers asked for; the device sends those that it trained. One part of each is in memory at a time.
    Raises StoreError when the disk fails.
    """
    found = dict(manifest)
    for part, ref in sorted(manifest.items()):
        try:
            data, limit = store.view(ref.id), size_limit(part, previous, asked)
            if part not in _UNLIKE and part in previous and _is_plain(data, store.view(previous[part].id, again=True)):
                continue
            if part in previous and is_packed(data):
                base = decode_part(store.view(previous[part].id), copy=False)
                tensors = decompress(data, base, packing_of(rules.transfer.up, part), limit, rules.transfer.top)
                found[part] = store.append(encode_part(tensors))
            else:
                tensors = decode_part(data, limit, copy=False)
            if part == PROTOTYPES:
                check_finite(tensors)
                tables = from_tensors(tensors)
                if own is not None:
                    own.check(tables)
            elif part == SIGNATURE:
                signature(rules.signature).check(tensors)
            elif part == LAYERS:
                check(tensors, {layer: one for layer, one in (asked or {}).items() if layer in tensors})
            else:
                check(tensors, stored_layout(store, previous[part]))
        except (ProtocolError, MisfitError) as error:
            reason = error.reason if isinstance(error, MisfitError) else "malformed"
            return Refusal(reason=reason, detail=f"part {part}: {error.message}"[:500])
    return found


def _is_plain(data: memoryview, base: memoryview) -> bool:
    """True for a part with the header of the state's own, and numbers that are fit to calculate with."""
    if not is_alike(data, base) or (runs := float_runs(data)) is None:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        return all(isfinite(np.dot(run, run)) for run in runs[0])  # else the checks one by one find the tensor


def changes_of(store: ObjectStore, manifest: Manifest, previous: Manifest) -> Changes:
    """L2 norms of a checked update's changes, by part.

    ``previous``: the parts that the device was offered. Weights and buffers of a part are measured apart, since their
    scales differ; layers that were uploaded alone, each by itself. Prototypes: the norm is that of the longest mean,
    and the base that of the longest mean offered, at least sqrt(width) (a vector of ones).
    """
    found: Changes = {}
    for part, ref in sorted(manifest.items()):
        if part == PROTOTYPES:
            longest, width = _longest_mean(store, ref)
            if longest:  # without a row, as of too few samples, it says nothing of the others'
                offered = _longest_mean(store, previous[part])[0] if part in previous else 0.0
                found[part] = Change(longest, max(offered, sqrt(width)))
        elif part == LAYERS:
            for layer, values in _tensors(store, ref).items():
                whole, name = split(layer)
                base = _tensors(store, previous[whole])[name]
                found[layer] = _change([base.reshape(-1)], [values.reshape(-1)])
        elif part in previous:
            for key, before, after in zip((part, BUFFERS_OF + part), *_floats(store, previous[part], ref), strict=True):
                if before:
                    found[key] = _change(before, after)
    return found


def _floats(store: ObjectStore, base: ObjectRef, ref: ObjectRef) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Flat values of both versions of a part: of its weights, and of its buffers."""
    before, after = store.view(base.id, again=True), store.view(ref.id)
    if is_alike(before, after) and (runs := float_runs(before, BUFFERS)) and (others := float_runs(after, BUFFERS)):
        yield from (runs, others)
        return
    names = [name for name, tensor in decode_part(before, copy=False).items() if tensor.dtype.kind == "f"]
    for tensors in (decode_part(before, copy=False), decode_part(after, copy=False)):
        flat = {name: tensors[name].reshape(-1) for name in names}
        buffers = [flat.pop(name) for name in names if name.endswith(BUFFERS)]
        yield list(flat.values()), buffers


def _longest_mean(store: ObjectStore, ref: ObjectRef) -> tuple[float, int]:
    """Largest L2 norm of a prototype in an object, and the prototypes' width."""
    means = [table.means.astype(np.float64) for table in from_tensors(_tensors(store, ref)).values()]
    norms = [float(np.linalg.norm(one, axis=1).max(initial=0.0)) for one in means]
    return max(norms, default=0.0), max((one.shape[1] for one in means), default=0)


def clipped_change(
    store: ObjectStore, manifest: Manifest, previous: Manifest, factors: Mapping[str, float]
) -> Manifest:
    """An update with its changes against ``previous`` scaled by ``factors``, by part and buffers."""
    found, parts = dict(manifest), {entry.removeprefix(BUFFERS_OF) for entry in factors}
    for part in sorted(parts & manifest.keys()):
        before = _tensors(store, previous[part])
        by_name = {name: BUFFERS_OF + part if name.endswith(BUFFERS) else part for name in before}
        found[part] = _scaled(store, manifest[part], before, {n: factors.get(key, 1.0) for n, key in by_name.items()})
    if alone := parts - manifest.keys():  # layers that came by themselves
        before = {layer: _tensors(store, previous[split(layer)[0]])[split(layer)[1]] for layer in alone}
        found[LAYERS] = _scaled(store, manifest[LAYERS], before, factors)
    return found


def is_whole(factors: Mapping[str, float]) -> bool:
    """True if a clip scales weights, not only batch norm's statistics."""
    return any(is_scheduled(part) and not part.startswith(BUFFERS_OF) for part in factors)


def nothing_of(manifest: Manifest) -> dict[str, float]:
    """Factors of 0 for every part and buffer of an update."""
    parts = [part for part in manifest if is_scheduled(part)]
    return dict.fromkeys([*parts, *(BUFFERS_OF + part for part in parts)], 0.0)


def opposed(store: ObjectStore, updates: Sequence[tuple[Manifest, Manifest]], clipped: Collection[int]) -> set[int]:
    """Indices in ``clipped`` of updates whose change has a negative product with the unclipped updates' sum.

    ``updates``: (manifest, the parts as offered) of each update of the round. One part of one update is in memory
    beside the sum of that part.
    """
    products = dict.fromkeys(clipped, 0.0)
    for part in sorted({part for i in products for part in updates[i][0] if is_scheduled(part)}):
        held = {i: _steps(store, sent[part], base[part]) for i, (sent, base) in enumerate(updates) if part in sent}
        total: dict[str, Tensor] = {}
        for i in held.keys() - products.keys():
            for name, change in held[i]:
                total[name] = total[name] + change if name in total else change
        for i in held.keys() & products.keys():
            products[i] += sum(float(np.vdot(change, total[name])) for name, change in held[i] if name in total)
    return {i for i, product in products.items() if product < 0}


def _steps(store: ObjectStore, ref: ObjectRef, base: ObjectRef) -> Iterator[tuple[str, Tensor]]:
    """Name and change of each weight of a part."""
    after, before = _tensors(store, ref), _tensors(store, base)
    for name, tensor in after.items():
        if tensor.dtype.kind == "f" and not name.endswith(BUFFERS):
            yield name, np.subtract(tensor, before[name], dtype=np.float32)


def _scaled(store: ObjectStore, ref: ObjectRef, before: Tensors, factors: Mapping[str, float]) -> ObjectRef:
    tensors = dict(_tensors(store, ref))
    for name, factor in factors.items():
        if factor < 1 and name in tensors and tensors[name].dtype.kind == "f":
            change = np.subtract(tensors[name], before[name], dtype=np.float32)
            tensors[name] = before[name] + np.float32(factor) * change
    return store.put(encode_part(tensors))


def _tensors(store: ObjectStore, ref: ObjectRef) -> Tensors:
    return decode_part(store.view(ref.id), copy=False)


def _change(before: Sequence[Tensor], after: Sequence[Tensor]) -> Change:
    """L2 norms of the differences of flat values, and of the first ones."""
    change = base = 0.0
    for flat, moved in zip(before, after, strict=True):
        for start in range(0, flat.size, BLOCK):
            span = slice(start, start + BLOCK)
            block = flat[span].astype(np.float64)
            base += float(np.dot(block, block))
            block -= moved[span]
            change += float(np.dot(block, block))
    return Change(sqrt(change), sqrt(base))
