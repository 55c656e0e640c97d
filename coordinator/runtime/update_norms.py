"""How far an update has moved each part, measured on arrival: what ``coordinator.core.plausibility`` compares."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import numpy as np

from coordinator.core.state import Change, Changes
from edgefl.aggregation.mean import BLOCK, BUFFERS, MisfitError, Tensor, Tensors, check_finite
from edgefl.aggregation.server_state import shared
from edgefl.models.spec import PROTOTYPES
from edgefl.protocol.tensors import decode_part
from edgefl.prototypes.table import from_tensors
from edgefl.records import Manifest, ObjectRef
from edgefl.storage.objects import ObjectStore

#: Before the name of a part, in the entry of its buffers.
BUFFERS_OF = "buffers of "


def changes_of(store: ObjectStore, manifest: Manifest, previous: Manifest) -> Changes:
    """L2 norms of the changes of an update that was checked, against ``previous``, the parts the device was offered.

    A part's weights and its buffers are measured apart: they have other scales. Of prototypes: the longest mean.
    """
    found: Changes = {}
    for part, ref in sorted(manifest.items()):
        if part == PROTOTYPES:
            tables = from_tensors(_tensors(store, ref))
            if longest := max((_longest(table.means) for table in tables.values()), default=0.0):
                found[part] = Change(longest)  # without a row, as of too few samples, it says nothing of the others'
        elif part in previous:
            before = _tensors(store, previous[part])
            after = before if ref == previous[part] else _tensors(store, ref)
            floating = [name for name, tensor in before.items() if tensor.dtype.kind == "f"]
            buffers = [name for name in floating if name.endswith(BUFFERS)]
            weights = [name for name in floating if name not in buffers]
            for key, names in ((part, weights), (BUFFERS_OF + part, buffers)):
                if names:
                    found[key] = _change(before, after, names)
    return found


def ruined(store: ObjectStore, manifest: Manifest) -> str:
    """The first part of a model state that nothing can be calculated with, and why; "" for a sound one."""
    for part, ref in sorted(shared(manifest).items()):
        try:
            check_finite(_tensors(store, ref))
        except MisfitError as error:
            return f"part {part}: {error.message}"
    return ""


def _tensors(store: ObjectStore, ref: ObjectRef) -> Tensors:
    return decode_part(store.view(ref.id), copy=False)


def _change(before: Tensors, after: Tensors, names: Iterable[str]) -> Change:
    change = base = 0.0
    for name in names:
        flat, moved = before[name].reshape(-1), after[name].reshape(-1)
        for start in range(0, flat.size, BLOCK):
            span = slice(start, start + BLOCK)
            block = flat[span].astype(np.float64)
            base += float(np.dot(block, block))
            block -= moved[span]
            change += float(np.dot(block, block))
    return Change(sqrt(change), sqrt(base))


def _longest(means: Tensor) -> float:
    return float(np.linalg.norm(means.astype(np.float64), axis=1).max(initial=0.0))
