"""The streaming weighted mean of tensors: theta = sum_k w_k theta_k / sum_k w_k, one device in memory at a time.

FedAvg (McMahan et al. 2017, arXiv 1602.05629). Floating tensors are accumulated in f32; integer and boolean buffers are
copied from the first device (D-L2). The same devices in the same order give the same bits.

Updates made from an earlier state join it as FedBuff's (Nguyen et al., AISTATS 2022, arXiv 2106.06639):
x_next = x + sum_k p_k s_k (y_k - x_b(k)),  s_k = (1 + tau_k)^-alpha, where x_b is the state that device k started from
and tau_k the number of rounds closed since. p_k is the recipe's weight (the paper: 1/K), and sums to 1; s_k damps the
change and is not made up for by the others: the update counts as y'_k = x + s_k (y_k - x_b), for tau 0 y_k itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.errors import ModelError, ProtocolError
from edgefl.protocol.tensors import Views, read_layout
from edgefl.prototypes.table import COUNT
from edgefl.records import ObjectRef
from edgefl.storage.disk import store_errors
from edgefl.storage.objects import ObjectStore

Tensor = npt.NDArray[Any]
Tensors = Mapping[str, Tensor]
#: Reads a device's part.
Load = Callable[[], Tensors]
#: Values added at a time: 1 MiB, which stays in the processor's cache.
BLOCK = 2**18
#: Of so many devices or more, one's weight is bounded and its change compared with the others'.
OF = 3
#: What the tensors of a part look like: name -> (shape, whether it is floating).
Layout = dict[str, tuple[tuple[int, ...], bool]]

#: Endings of the buffers of batch norm, as torch names them: averages, which no server step changes.
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Outcome(NamedTuple):
    """The outcome of one part. ``tensors`` None: it stays as it was, because of ``kept``."""

    tensors: Tensors | None = None
    weights: Mapping[
        str, Any
    ] = {}  # "devices": {name: weight}; "kept": weight of the part before; of prototypes "tables"
    refused: Mapping[str, tuple[str, str]] = {}  # device -> (machine-readable reason, detail)
    kept: str = ""
    ignored: tuple[str, ...] = ()  # devices that have no samples of it


class MisfitError(ModelError):
    """A device's tensors do not fit the part. ``reason``: names, shape, dtype, not_finite or range."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message, remedy="The device and the coordinator must build the same model.")
        self.reason = reason


class WeightedMean:
    """Takes one device's tensors at a time. ``layout``: what to expect; default: what the first device brings."""

    def __init__(self, layout: Layout | None = None) -> None:
        self._layout = layout
        self._sums: dict[str, Tensor] = {}
        self._flat: tuple[object, list[Tensor]] | None = None  # header of all parts so far, and their sums in one piece
        self._weight = 0.0

    def add(self, weight: float, tensors: Tensors) -> None:
        """Take one device. Raises MisfitError, changing nothing, when its tensors do not fit or are not finite."""
        layout = self._layout = layout_of(tensors) if self._layout is None else self._layout
        first, views = not self._sums, tensors if isinstance(tensors, Views) and tensors.runs is not None else None
        if self._flat and views is not None and views.header is self._flat[0] and _all_calculable(views.runs or ()):
            for total, more in zip(self._flat[1], views.runs or (), strict=True):
                _add(total, more, np.float32(weight))
            self._weight += weight
            return
        check(tensors, layout)
        if first and views is not None:
            self._begin(weight, views)
            return
        for name, (_, floating) in layout.items():
            if not floating:
                if first:
                    self._sums[name] = np.array(tensors[name])
                continue
            if first:
                self._sums[name] = np.multiply(tensors[name], np.float32(weight), dtype=np.float32, order="C")
            else:
                _add(self._sums[name], tensors[name], np.float32(weight))
        self._weight += weight

    def _begin(self, weight: float, tensors: Views) -> None:
        """Take the first device, in pieces in which most others can be added."""
        totals = [np.multiply(run, np.float32(weight), dtype=np.float32) for run in tensors.runs or ()]
        self._sums = tensors.over(totals)
        self._flat, self._weight = (tensors.header, totals), self._weight + weight

    def result(self) -> dict[str, Tensor]:
        """The mean, renormalised over what was taken. Raises ModelError when that weighs nothing."""
        if not self._weight > 0:
            raise ModelError("a weighted mean of nothing", remedy="Leave a part that nobody trained as it is.")
        if abs(self._weight - 1) > 1e-9:  # somebody was refused; else the weights sum to 1 but for rounding
            for tensor in self._sums.values():
                if tensor.dtype == np.float32:
                    tensor /= np.float32(self._weight)
        return self._sums


def _add(total: Tensor, tensor: Tensor, weight: np.float32) -> None:
    """total += weight * tensor, block by block: a product as large as the tensor is never there."""
    flat, more = total.reshape(-1), np.ascontiguousarray(tensor).reshape(-1)
    for start in range(0, flat.size, BLOCK):
        span = slice(start, start + BLOCK)
        flat[span] += np.multiply(more[span], weight, dtype=np.float32)


def layout_of(tensors: Tensors) -> Layout:
    """The layout of a part, sorted by name."""
    return {name: (tensor.shape, _floating(tensor)) for name, tensor in sorted(tensors.items())}


def stored_layout(store: ObjectStore, ref: ObjectRef) -> Layout:
    """The same of a part in the store, whose values are not read. Raises StoreError, ProtocolError."""
    with store.file_of(ref.id) as file, store_errors("read", store.path(ref.id)):
        return read_layout(file)


def check(tensors: Tensors, layout: Layout) -> None:
    """Raises MisfitError, naming the tensor, when ``tensors`` do not have this layout, or as ``check_finite`` does."""
    for verb, names in (("lacks", layout.keys() - tensors.keys()), ("has unknown", tensors.keys() - layout.keys())):
        if names:
            raise MisfitError(
                "names", f"it {verb} tensor '{min(names)}'" + f" and {len(names) - 1} more" * (len(names) > 1)
            )
    for name, (shape, floating) in layout.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise MisfitError("shape", f"tensor '{name}' is {list(tensor.shape)}, expected {list(shape)}")
        if _floating(tensor) != floating:
            raise MisfitError(
                "dtype", f"tensor '{name}' is {tensor.dtype}, expected {'float' if floating else 'integer'}"
            )
    check_finite({name: tensors[name] for name, (_, floating) in layout.items() if floating})


def check_finite(tensors: Tensors) -> None:
    """Raises MisfitError, naming the tensor and where, for the first one that would break f32 arithmetic.

    That is one with a value that is NaN or infinite, or with finite values whose sum of squares overflows (from 1.8e19
    on): the first product with such a tensor is infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        broken = next((name for name, one in tensors.items() if _floating(one) and not _calculable(one)), None)
    if broken is None:
        return
    tensor = tensors[broken]
    bad = np.flatnonzero(~np.isfinite(tensor))
    at = bad[0] if len(bad) else np.abs(tensor).argmax()
    value, where = tensor.reshape(-1)[at], [int(i) for i in np.unravel_index(at, tensor.shape)]
    if len(bad):
        text = f"tensor '{broken}' holds NaN or infinity: {value} at {where}, and {len(bad) - 1} more"
        raise MisfitError("not_finite", text)
    raise MisfitError("range", f"tensor '{broken}' holds {value:g} at {where}: its sum of squares overflows f32")


def _all_calculable(tensors: Iterable[Tensor]) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        return all(map(_calculable, tensors))


def _calculable(tensor: Tensor) -> bool:
    flat = tensor.reshape(-1)
    return math.isfinite(np.dot(flat, flat))


def _floating(tensor: Tensor) -> bool:
    return tensor.dtype.kind == "f"


def refusal(load: Load, take: Callable[[Tensors], None]) -> tuple[str, str] | None:
    """Reason and detail of a part that ``take`` rejects; None: it took it."""
    try:
        take(load())
    except MisfitError as error:
        return error.reason, error.message
    except ProtocolError as error:
        return "malformed", error.message
    return None


def factor(staleness: int, alpha: float) -> float:
    """s, for an update made from the state ``staleness`` rounds ago."""
    return float((1 + staleness) ** -alpha)


def moved(load: Load, base: Load, now: Load, weight: float, layout: Layout) -> Load:
    """Gives a device's part as if it had been trained from the present state, its change damped by ``weight``.

    ``load``: as trained, ``base``: as the device received it, ``now``: the present state. Buffers, which are averages
    already, go towards the device's own; integers are the device's. What does not fit raises MisfitError.
    """

    def moving() -> Tensors:
        trained = load()
        check(trained, layout)
        start, present = base(), now()
        return {name: _moved(name, value, start[name], present[name], weight) for name, value in trained.items()}

    return moving


def _moved(name: str, trained: Tensor, start: Tensor, present: Tensor, weight: float) -> Tensor:
    if not np.issubdtype(trained.dtype, np.floating):
        return trained
    origin = present if name.endswith(BUFFERS) else start  # a variance must not become negative
    change = np.subtract(trained, origin, dtype=np.float32)
    change *= np.float32(weight)
    change += present
    return change


def faded(load: Load, weight: float) -> Load:
    """Gives a device's prototype tables with counts that weigh ``weight`` of what they did."""
    return lambda: {
        name: value * np.float32(weight) if name.endswith(COUNT) else value for name, value in load().items()
    }


def proportional(amounts: Mapping[str, float]) -> dict[str, float]:
    """Weights, sum 1, of the devices whose amount is above 0, in order of name; empty when there is none."""
    present = {device: amount for device, amount in sorted(amounts.items()) if amount > 0}
    total = sum(present.values())
    return {device: amount / total for device, amount in present.items()}


def capped(shares: Mapping[str, float], most: float) -> dict[str, float]:
    """Weights (sum 1) of which none exceeds ``most``: what is above it goes to the others, in proportion to theirs.

    Where ``most`` is less than one over their number, all weigh the same. Of one or two devices none is bounded.
    """
    if most >= 1 or len(shares) < OF:
        return dict(shares)
    high: set[str] = set()
    while over := {d for d, w in _rest(shares, high, most).items() if w > most * (1 + 1e-12)} - high:
        high |= over
    if len(high) == len(shares):
        return dict.fromkeys(shares, 1 / len(shares))
    return _rest(shares, high, most)


def _rest(shares: Mapping[str, float], high: set[str], most: float) -> dict[str, float]:
    """The devices in ``high`` weigh ``most``; the others share what is left."""
    left = sum(weight for device, weight in shares.items() if device not in high)
    scale = (1 - most * len(high)) / left if left else 0.0
    return {device: most if device in high else weight * scale for device, weight in shares.items()}
