"""The FLOP meter of a round, and a cache of counts by shape: counting a small step costs several times the step itself.

``with metered(counts) as bill`` opens the meter; inside, ``counted(kind, shape, work)`` runs the work and adds its
FLOPs to the bill. So no function that computes takes or returns counts. A context variable holds the open bills: each
thread has its own.

The operations of a step are a sum over its rows: FLOPs = c + sum_m c_m n_m for n_m rows of modality m (encoders, heads
work row by row; fusion and losses have the batch's fixed size). So once the counted shapes span a new one, its count
follows exactly. Where rows attend over what else they have, c belongs to a pattern (both, the one, the other), which
the shape tells of two modalities; of three it does not, and there every shape is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec
import numpy as np

from edgefl.label_spaces import space_of
from edgefl.models.spec import ModelSpec, encodes_together
from edgefl.plan.job import Job
from edgefl.resources.tensor_counters import FlopCounter
from edgefl.training.batches import ShapeKey

R = TypeVar("R")
#: What FLOPs are a sum over.
Linear = Literal["rows", "patterns", "nothing"]


class FlopCounts:
    """FLOPs already counted, by kind of step and shape of batch. Kept between rounds, so that none is counted twice."""

    def __init__(self) -> None:
        self._known: dict[bytes, dict[ShapeKey, float]] = {}

    def get(self, kind: bytes, shape: ShapeKey, *, linear: Linear) -> float | None:
        """FLOPs of a step of this kind on a batch of this shape; None: it has to be counted."""
        known = self._known.get(kind, {})
        if shape in known or linear == "nothing":
            return known.get(shape)
        names = [name for name, _ in shape]
        family = [s for s in tuple(known) if [name for name, _ in s] == names]  # another thread may add to them
        if not family:
            return None
        rows = np.array([_row(s, linear) for s in family])
        wanted = _row(shape, linear)
        weights, *_ = np.linalg.lstsq(rows.T, wanted, rcond=None)
        if not np.allclose(weights @ rows, wanted, atol=1e-6):
            return None
        return float(round(float(weights @ np.array([known[s] for s in family]))))

    def put(self, kind: bytes, shape: ShapeKey, flops: float) -> None:
        """Note a count."""
        self._known.setdefault(kind, {})[shape] = flops


@dataclass
class Bill:
    """FLOPs of what ``counted`` has run in a block; ``counts``: what was known before, and what was counted in it."""

    counts: FlopCounts
    flops: float = 0.0


#: The bills of the blocks that are open, the innermost last.
_BILLS: ContextVar[tuple[Bill, ...]] = ContextVar("_BILLS", default=())


@contextmanager
def metered(counts: FlopCounts | None = None) -> Iterator[Bill]:
    """A block whose FLOPs are added up. A block within a block adds to both bills, and uses the outer one's counts."""
    outer = _BILLS.get()
    if counts is None:
        counts = outer[-1].counts if outer else FlopCounts()
    bill = Bill(counts)
    token = _BILLS.set((*outer, bill))
    try:
        yield bill
    finally:
        _BILLS.reset(token)


def counted(kind: bytes, shape: ShapeKey, work: Callable[[], R], *, linear: Linear) -> R:
    """The result of ``work``; its FLOPs, as known or else counted while it runs, go to the open bills.

    ``kind``, ``shape``, ``linear``: see ``FlopCounts.get``. Without an open bill nothing is counted.
    """
    bills = _BILLS.get()
    if not bills:
        return work()
    flops = bills[-1].counts.get(kind, shape, linear=linear)
    if flops is not None:
        result = work()
    else:
        with FlopCounter() as counter:
            result = work()
        flops = float(counter.flops)
        bills[-1].counts.put(kind, shape, flops)
    add_flops(flops)
    return result


def add_flops(flops: float) -> None:
    """FLOPs of work that was done elsewhere, for the open bills."""
    for bill in _BILLS.get():
        bill.flops += flops


def kind_of_step(job: Job, *, with_tables: bool) -> bytes:
    """Key of a step's FLOPs besides the batch's shape; ``with_tables``: there are global prototypes."""
    hyper = job.hyper
    sizes = (hyper.batch_size, hyper.micro_batch, hyper.checkpoint)
    stage = (job.stage.depth, job.stage.present, job.stage.trained)
    decisive = (shapes_of(job.model), stage, sizes, hyper.cache, job.slots)
    return msgspec.msgpack.encode((decisive, with_tables))


def shapes_of(model: ModelSpec) -> ModelSpec:
    """The model without names of classes and values of statistics: equal for models whose steps cost the same."""
    encoders = {
        m: msgspec.structs.replace(encoder, mean=(0.0,) * len(encoder.mean), std=(1.0,) * len(encoder.std))
        for m, encoder in model.encoders.items()
    }
    spaces = tuple(filter(None, map(space_of, model.label_names)))
    return msgspec.structs.replace(model, encoders=encoders, label_names=spaces)


def linear_in(job: Job) -> Linear:
    """The terms that a step's FLOPs are a sum over: rows of each modality, or with two of them rows of each pattern."""
    if not encodes_together(job.model):
        return "rows"
    return "patterns" if len(job.model.encoders) <= 2 else "nothing"  # of three, the shape does not tell the patterns


def _row(shape: ShapeKey, linear: Linear) -> np.ndarray:
    """How many are complete does not matter where each modality costs by its own rows."""
    return np.array([1.0, *(count for name, count in shape if name != "&" or linear == "patterns")])
