"""Bytes that a round moves between the coordinator and one device, kind of round by kind.

A part that the device holds already does not travel again. Down: parts that the rounds since its last one have
changed; in its first round of a stage, also parts that are new or frozen since; in its first round of the run, every
part that is present. Up: trained parts. Beside them, but not in the closing round, travel prototype tables (down from
the run's second round on) and the signature that clusters are made of (once).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from edgefl.models.spec import PROTOTYPES, reconstruct_parts
from edgefl.plan.exchange import packed_bytes, packing_of, sent
from edgefl.plan.job import Candidate, Job, Stage
from edgefl.plan.schedule import is_closing
from edgefl.registry import chosen

#: Bytes of a value by safetensors' name of its type.
_WIDTH = {"F32": 4, "I64": 8, "I16": 2}
#: Tensor name -> (safetensors' name of the type, shape).
Layout = Mapping[str, tuple[str, tuple[int, ...]]]


class Moved(msgspec.Struct, frozen=True):
    """Bytes of one device's round. ``down``, ``up``: of a usual one, prototypes in it; ``whole_up``: of a last one.

    Down in other rounds: ``joining`` of the device's first round in the run, ``entering`` of its first in a stage when
    it took part in the stage before. ``prototypes_down`` is not part of what the run's first round moves.
    """

    down: int = 0
    up: int = 0
    whole_up: int = 0
    joining: int = 0
    entering: int = 0
    prototypes_down: int = 0
    prototypes_up: int = 0
    signature: int = 0


class StageTraffic(NamedTuple):
    """A stage as all devices train it, and the sizes of its parts: with a device's job, they give a round's bytes.

    ``part_bytes``: part -> bytes of its object in f32; ``before``: the stage whose rounds came before; ``signature``:
    what clusters are made of, which a device sends once, "" for none.
    """

    stage: Stage
    part_bytes: Mapping[str, int]
    before: Stage | None = None
    signature: str = ""


def moved(job: Job, candidate: Candidate, traffic: StageTraffic) -> Moved:
    """Bytes that rounds of ``job``, a device's part of the stage, move."""
    stage, part_bytes, before, signature = traffic
    exchange, transfer, here = job.slots.exchange, job.transfer, set(job.stage.present)
    changed = [part for part in sent(stage, exchange) if part in here]
    trained = [part for part in sent(job.stage, exchange) if part not in _untouched(job, candidate)]
    tables_down, tables_up = prototype_bytes(job, candidate, part_bytes)
    known = set(before.present) - set(sent(before, exchange)) if before is not None else set()
    # Parts come packed only where the device holds what they are a change of: of a first round they come whole.
    first = [part for part in job.stage.present if part not in known]
    return Moved(
        down=packed_of(changed, part_bytes, transfer.down, transfer.top) + tables_down,
        up=packed_of(trained, part_bytes, transfer.up, transfer.top) + tables_up,
        whole_up=bytes_of(trained, part_bytes) + tables_up,
        joining=bytes_of(job.stage.present, part_bytes) + tables_down,
        entering=bytes_of(first, part_bytes) + tables_down,
        prototypes_down=tables_down,
        prototypes_up=tables_up,
        signature=signature_bytes(signature, candidate.class_counts) if signature and not is_closing(job.stage) else 0,
    )


def _untouched(job: Job, candidate: Candidate) -> set[str]:
    """Trained parts that a device's samples say nothing of: they stay the object that the coordinator has."""
    lone = sum(candidate.samples.get(m, 0) > 0 for m in job.model.encoders) < 2
    return set(reconstruct_parts(job.model)) if lone else set()


def signature_bytes(kind: str, class_counts: Sequence[int]) -> int:
    """Bytes of what clusters are made of: a sketch, or the bases of the classes that a device has."""
    from edgefl.methods.cluster.signature import signature_layout  # numpy waits until there are clusters

    return object_bytes(signature_layout(kind, class_counts))


def prototype_bytes(job: Job, candidate: Candidate, part_bytes: Mapping[str, int]) -> tuple[int, int]:
    """(down, up) of the prototype tables; (0, 0) without them. Global ones in ``part_bytes`` are that large."""
    if is_closing(job.stage):
        return 0, 0
    slot = chosen("prototypes", job.slots.prototypes)[0]
    if slot.method.local is None:
        return 0, 0
    own = [m for m in job.model.encoders if f"head/{m}" in job.stage.present and candidate.samples.get(m, 0) > 0]
    every = _layout(slot.bind(slot.method.rows)(job.model))
    mine = _layout(slot.bind(slot.method.local_rows)(job, candidate, own))
    return part_bytes.get(PROTOTYPES, object_bytes(every)), object_bytes(mine) if mine else 0


def _layout(tables: Mapping[str, tuple[int, int]]) -> Layout:
    """Tensors of tables: their means, and how many samples each row is of."""
    from edgefl.prototypes.table import COUNT

    return {
        name: layout
        for table, (rows, width) in tables.items()
        for name, layout in ((table, ("F32", (rows, width))), (table + COUNT, ("F32", (rows,))))
    }


def object_bytes(layout: Layout) -> int:
    """Bytes of the object that ``protocol.tensors.encode_part`` makes of f32 tensors of this layout, and header."""
    header: dict[str, object] = {"__metadata__": {"encoding": "f32"}}
    end = 0
    for name, (kind, shape) in sorted(layout.items(), key=lambda item: (-_WIDTH[item[1][0]], item[0])):
        start, size = end, _WIDTH[kind]
        for axis in shape:
            size *= axis
        end = start + size
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = len(json.dumps(header, separators=(",", ":")).encode())
    return 8 + -(-text // 8) * 8 + end


def bytes_of(parts: Sequence[str], part_bytes: Mapping[str, int]) -> int:
    """Bytes of these parts in f32; what is not known counts 0."""
    return sum(part_bytes.get(part, 0) for part in parts)


def packed_of(parts: Sequence[str], part_bytes: Mapping[str, int], rules: Sequence[tuple[str, str]], top: float) -> int:
    """Bytes of these parts as the rules pack them."""
    return sum(packed_bytes(part_bytes.get(part, 0), packing_of(rules, part), top) for part in parts)
