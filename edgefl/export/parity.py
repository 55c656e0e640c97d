"""Is the ONNX file the model? onnxruntime against torch and the numpy prototype mask that evaluation uses.

Two sizes of each dynamic axis; each mask the bundle offers; and, where there are tables, other tables than those in
the file, which shows that no optimisation folded them into the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgefl.errors import ExportError
from edgefl.export.manifest import BATCH, Axis, Check, Port, table_name, valid_name
from edgefl.export.session import run
from edgefl.models.build import StagedModel
from edgefl.prototypes.library import ClassMeans
from edgefl.prototypes.mask import TEMPERATURE, TOP_K, masked
from edgefl.prototypes.matching import match

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
            expected = reference(subject, inputs, tables, mask)
            found = dense(run(session, {**inputs, **feeds}), len(next(iter(tables.values())).counts) if tables else 0)
            checks.append(Check(mask, sizes, compare(expected, found)))
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


def reference(subject: Subject, inputs: Arrays, tables: Mapping[str, ClassMeans], mask: str) -> Arrays:
    """What evaluation computes: torch for the model, numpy for the mask. "weights": [B, absent, rows]."""
    model = subject.model
    with torch.no_grad():
        projections = {m: _project(model, m, inputs[m], subject.depth) for m in subject.modalities}
        if not model.spec.classes:
            return {f"embedding.{m}": _unit(r) for m, r in projections.items()}
        kind = "zero" if mask == "zero" else "prototype"
        filled = masked(projections, list(model.spec.encoders), tables, kind, model.spec.head.out)
        logits = model.classify(model.fuse({m: torch.from_numpy(r) for m, r in filled.items()}))
    outputs = {"logits": logits.numpy(), "probabilities": logits.softmax(dim=1).numpy()}
    if tables:
        source = subject.modalities[0]
        weights = [_weights(projections[source], tables[source], tables[m]) for m in subject.absent]
        outputs["weights"] = np.stack(weights, axis=1)
    return outputs


def dense(outputs: Arrays, rows: int) -> Arrays:
    """The matches as one weight for each table row [B, absent, rows], which does not depend on the order of equals."""
    if "matched" not in outputs:
        return outputs
    matched, weights = outputs["matched"], outputs["weights"]
    out = np.zeros((*matched.shape[:2], rows + 1), np.float32)
    np.put_along_axis(out, np.where(matched < 0, rows, matched), weights, axis=2)
    kept = {name: value for name, value in outputs.items() if name != "matched"}
    return {**kept, "weights": out[:, :, :rows]}


def compare(expected: Arrays, found: Arrays) -> dict[str, float]:
    """Largest absolute difference by output; infinite for one that is missing or of another shape."""
    differences = {}
    for name, value in expected.items():
        same = name in found and found[name].shape == value.shape
        differences[name] = float(np.abs(found[name].astype(np.float64) - value).max()) if same else float("inf")
    return differences


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


def _weights(r: np.ndarray, own: ClassMeans, other: ClassMeans) -> np.ndarray:
    out = np.zeros((len(r), len(own.counts)), np.float32)
    among = own.present & other.present
    if among.any():
        index, weights = match(r, own, "cosine", TOP_K, TEMPERATURE, among)
        np.put_along_axis(out, index, weights, axis=1)
    return out


def _unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))
