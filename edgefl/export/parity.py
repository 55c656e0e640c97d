"""Is the ONNX file the model? onnxruntime against torch and the numpy prototype mask that evaluation uses.

Two sizes of each dynamic axis; each mask the bundle offers; and, where there are tables, other tables than those in
the file, which shows that no optimisation folded them into the graph.

The prototype mask is compared link by link: the choice of rows and their weights in cosines, and everything after it
from the file's own stand-ins. A softmax at T = 0.01 turns the rounding of two cosines, were they nearly equal, into a
difference of weights up to 25 times as large, and a tie at the edge of the best k into another choice: both right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgefl.errors import ExportError
from edgefl.export.manifest import BATCH, Axis, Check, Port, table_name, valid_name
from edgefl.export.matches import mixed, shortfall, weight_difference
from edgefl.export.session import run
from edgefl.models.build import StagedModel
from edgefl.prototypes.library import ClassMeans
from edgefl.prototypes.mask import TOP_K

#: Batch sizes compared: one sample, as a device serves it, and several.
BATCHES = (1, 5)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """What is compared: the torch model in evaluation mode, and the ports of the file made of it."""

    model: StagedModel
    depth: int
    modalities: tuple[str, ...]
    inputs: tuple[Port, ...]
    axes: Mapping[str, Axis]
    tables: Mapping[str, ClassMeans]  # padded to the file's capacity; empty: no tables in the graph
    masks: Sequence[str]

    @property
    def absent(self) -> tuple[str, ...]:
        """Modalities the bundle fills in."""
        if not self.model.spec.classes:
            return ()
        return tuple(m for m in self.model.spec.encoders if m not in self.modalities)


def check(session: Any, subject: Subject, tolerance: float, seed: int = 0) -> tuple[Check, ...]:
    """Every comparison. Raises ExportError naming the worst output when one is beyond ``tolerance`` or not a number."""
    rng = np.random.default_rng(seed)
    checks = []
    for sizes in _sizes(subject.axes):
        inputs = {port.name: _random(subject, port, sizes, rng) for port in subject.inputs}
        for mask, tables, feeds in _conditions(subject, rng):
            found = run(session, {**inputs, **feeds})
            checks.append(Check(mask, sizes, differences(subject, inputs, tables, found)))
    worst = [(value, output, one) for one in checks for output, value in one.differences.items()]
    beyond = [entry for entry in worst if not entry[0] <= tolerance]
    if beyond:
        value, output, one = max(beyond, key=lambda entry: np.inf if np.isnan(entry[0]) else entry[0])
        raise ExportError(
            f"{' + '.join(subject.modalities)}: '{output}' differs by {value:.3g} between torch and onnxruntime "
            f"(mask {one.mask}, {', '.join(f'{name} {size}' for name, size in one.sizes.items())}); "
            f"the tolerance is {tolerance:.3g}"
        )
    return tuple(checks)


def differences(subject: Subject, inputs: Arrays, tables: Mapping[str, ClassMeans], found: Arrays) -> dict[str, float]:
    """Largest absolute difference by output between what the file ``found`` and torch."""
    model = subject.model
    with torch.no_grad():
        given = {m: _project(model, m, inputs[m], subject.depth) for m in subject.modalities}
        if not model.spec.classes:
            return {f"embedding.{m}": _largest(found, f"embedding.{m}", _unit(r)) for m, r in given.items()}
        own = given[subject.modalities[0]]
        absent, match = _filled_in(subject, own, tables, found)
        full = {m: torch.from_numpy({**given, **absent}[m]) for m in model.spec.encoders}
        logits = model.classify(model.fuse(full))
    expected = {"logits": logits.numpy(), "probabilities": logits.softmax(dim=1).numpy()}
    return {name: _largest(found, name, value) for name, value in expected.items()} | match


def _filled_in(
    subject: Subject, r: np.ndarray, tables: Mapping[str, ClassMeans], found: Arrays
) -> tuple[Arrays, dict[str, float]]:
    """Stand-ins [B, d] for the absent modalities as the file mixed them, and how far its choice is from ours."""
    absent = subject.absent
    if not tables or not absent:
        return {m: np.zeros_like(r) for m in absent}, {}
    rows, weights = (found.get(name, np.empty(0)) for name in ("matched", "weights"))
    own = tables[subject.modalities[0]]
    shape = (len(r), len(absent), min(TOP_K, len(own.counts)))
    if rows.shape != shape or weights.shape != shape:
        return {m: np.zeros_like(r) for m in absent}, {"matched": float("inf"), "weights": float("inf")}
    cosines = _unit(r) @ _unit(own.means).T
    stand_ins, off = {}, []
    for i, m in enumerate(absent):
        among = own.present & tables[m].present
        off.append((shortfall(cosines, among, rows[:, i]), weight_difference(cosines, rows[:, i], weights[:, i])))
        stand_ins[m] = mixed(rows[:, i], weights[:, i], tables[m])
    return stand_ins, dict(zip(("matched", "weights"), np.max(off, axis=0).tolist(), strict=True))


def _largest(found: Arrays, name: str, expected: np.ndarray) -> float:
    """Infinite for an output that is missing or of another shape."""
    if name not in found or found[name].shape != expected.shape:
        return float("inf")
    return float(np.abs(found[name].astype(np.float64) - expected).max())


def _sizes(axes: Mapping[str, Axis]) -> list[dict[str, int]]:
    """One sample of small sizes (half of an axis' largest, at least its smallest), then several of the largest."""
    small = {name: max(axis.minimum, (axis.maximum or 0) // 2) for name, axis in axes.items()}
    large = {name: axis.maximum or axis.minimum for name, axis in axes.items()}
    return [{**small, BATCH: BATCHES[0]}, {**large, BATCH: BATCHES[1]}]


def _random(subject: Subject, port: Port, sizes: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
    """Input as the encoder takes it: token ids with some padding, pixels in 0..1, anything else normal."""
    shape = [sizes[size] if isinstance(size, str) else size for size in port.shape]
    encoder = subject.model.spec.encoders[port.name]
    if encoder.kind == "text":
        ids = rng.integers(1, encoder.vocabulary, shape, dtype=np.int64)
        ids[:, shape[1] - shape[1] // 4 :] = 0
        return ids
    values = rng.random(shape) if encoder.kind == "vision" else rng.standard_normal(shape)
    return values.astype(np.float32)


def _conditions(subject: Subject, rng: np.random.Generator) -> Iterator[tuple[str, Mapping[str, ClassMeans], Arrays]]:
    """(mask, tables the reference uses, what the call gives besides the inputs)."""
    if not subject.tables:
        yield ("zero" if subject.absent else "none"), {}, {}
        return
    if "prototype" in subject.masks:
        yield "prototype", subject.tables, {}
    if "zero" in subject.masks:
        nothing = {m: ClassMeans(t.means, np.zeros_like(t.counts)) for m, t in subject.tables.items()}
        yield "zero", nothing, {valid_name(m): t.present for m, t in nothing.items()}
    other = {}
    for m, table in subject.tables.items():
        counts = (rng.random(len(table.counts)) < 0.7).astype(np.float32)
        other[m] = ClassMeans(rng.standard_normal(table.means.shape).astype(np.float32), counts)
    feeds = {table_name(m): t.means for m, t in other.items()} | {valid_name(m): t.present for m, t in other.items()}
    yield "override", other, feeds


def _project(model: StagedModel, modality: str, x: np.ndarray, depth: int) -> np.ndarray:
    if model.spec.encoders[modality].kind == "text":  # torch's model takes the full length only
        x = np.pad(x, ((0, 0), (0, model.spec.encoders[modality].input_shape[0] - x.shape[1])))
    return np.asarray(model.project(modality, model.encode(modality, torch.from_numpy(x), depth)).numpy())


def _unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))
