"""Is the ONNX file the model? onnxruntime against torch, and against numpy for the prototype mask.

Two sizes of each dynamic axis; each mask the bundle offers; and, where there are tables, other tables than those in
the file, which shows that no optimisation folded them into the graph. The mask is compared link by link: which rows and
weights the file found (``edgefl.export.matches``), and everything after them from the file's own stand-ins; what is
reconstructed, with what the evaluation makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgefl.errors import ExportError
from edgefl.export.manifest import BATCH, MATCHED, WEIGHTS, Axis, Check, Port, table_name, valid_name
from edgefl.export.matches import SCORE_TOLERANCE, heard, mixed, scored, shortfall, weight_difference
from edgefl.export.session import run
from edgefl.models.build import StagedModel
from edgefl.models.encoder import TokenState
from edgefl.prototypes.library import ClassMeans
from edgefl.prototypes.mask import DEFAULT_MATCHER, Matcher
from edgefl.training.evaluate import reconstructed
from edgefl.training.judging import answers

#: Batch sizes compared: one sample, as a device serves it, and several.
BATCHES = (1, 5)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """What is compared: the torch model in evaluation mode, and the ports of the file made of it.

    ``tables``: padded to the file's capacity; empty: no tables in the graph. ``speakers``: as in the graph's matching.
    """

    model: StagedModel
    depth: int
    modalities: tuple[str, ...]
    inputs: tuple[Port, ...]
    axes: Mapping[str, Axis]
    tables: Mapping[str, ClassMeans]
    masks: Sequence[str]
    matcher: Matcher = DEFAULT_MATCHER
    speakers: Sequence[tuple[float, StagedModel]] = ()

    @property
    def absent(self) -> tuple[str, ...]:
        """Modalities the bundle fills in."""
        if not self.model.spec.classes:
            return ()
        return tuple(m for m in self.model.spec.encoders if m not in self.modalities)


def check(session: Any, subject: Subject, tolerance: float, seed: int = 0) -> tuple[Check, ...]:
    """Every comparison. Raises ExportError naming the worst output that is beyond its tolerance or not a number."""
    rng = np.random.default_rng(seed)
    checks = []
    for sizes in _sizes(subject.axes):
        inputs = {port.name: _random(subject, port, sizes, rng) for port in subject.inputs}
        for mask, tables, feeds in _conditions(subject, rng):
            found = run(session, {**inputs, **feeds})
            checks.append(Check(mask, sizes, differences(subject, inputs, tables, found)))
    _refuse_beyond(subject, checks, tolerance)
    return tuple(checks)


def _refuse_beyond(subject: Subject, checks: Sequence[Check], tolerance: float) -> None:
    """Raise for what is too far off: a wrong match first, since it comes before what follows from it."""
    for keys, limit in (((MATCHED, WEIGHTS), SCORE_TOLERANCE), (None, tolerance)):
        found = [(v, name, c) for c in checks for name, v in c.differences.items() if keys is None or name in keys]
        beyond = [entry for entry in found if not entry[0] <= limit]  # not a number is beyond
        if beyond:
            value, name, one = max(beyond, key=lambda entry: np.inf if np.isnan(entry[0]) else entry[0])
            sizes = ", ".join(f"{axis} {size}" for axis, size in one.sizes.items())
            raise ExportError(
                f"{' + '.join(subject.modalities)}: '{name}' differs by {value:.3g} between torch and onnxruntime "
                f"(mask {one.mask}, {sizes}); the tolerance is {limit:.3g}"
            )


def differences(subject: Subject, inputs: Arrays, tables: Mapping[str, ClassMeans], found: Arrays) -> dict[str, float]:
    """How far what the file ``found`` is off, by output; the match in scores, under ``MATCHED`` and ``WEIGHTS``."""
    model = subject.model
    with torch.no_grad():
        states = _encoded(model, inputs, subject)
        given = {m: _projected(model, m, state) for m, state in states.items()}
        if not model.spec.classes:
            return {f"embedding.{m}": _largest(found, f"embedding.{m}", _unit(r)) for m, r in given.items()}
        stand_ins, match = _stand_ins(subject, given, tables, found)
        filled = given | stand_ins
        full = {m: torch.from_numpy(filled[m]) for m in model.spec.encoders}
        size = len(given[subject.modalities[0]])
        shown = {m: m in given or bool(np.any(filled[m])) for m in full}  # zeros say that nothing is there
        at_hand = {m: torch.full((size,), there) for m, there in shown.items()}
        logits = model.classify(model.fuse(full, at_hand, states))
    expected = {"logits": logits.numpy(), "probabilities": logits.softmax(dim=1).numpy()}
    return match | {name: _largest(found, name, value) for name, value in expected.items()}


def _stand_ins(
    subject: Subject, given: Arrays, tables: Mapping[str, ClassMeans], found: Arrays
) -> tuple[Arrays, dict[str, float]]:
    """Stand-ins [B, d] for the absent modalities: ours, or as the file mixed them and how far its choice is from ours.

    ``given[m]`` [B, d]: projections, of which the first are matched. A choice without sense is infinitely far off.
    """
    absent, speaker, matcher = subject.absent, subject.modalities[0], subject.matcher
    source = given[speaker]
    if "reconstruction" in subject.masks:
        return reconstructed(subject.model, given), {}
    nothing = {m: np.zeros_like(source) for m in absent}
    if not tables or not absent:
        return nothing, {}
    capacity = len(tables[absent[0]].counts)
    rows, weights = (found.get(name, np.empty(0)) for name in ("matched", "weights"))
    shape = (len(source), len(absent), min(matcher.k, capacity))
    if rows.shape != shape or rows.min() < -1 or rows.max() >= capacity:
        return nothing, {MATCHED: float("inf")}
    if weights.shape != shape:
        return nothing, {WEIGHTS: float("inf")}
    stand_ins, off = {}, []
    for i, m in enumerate(absent):
        if matcher.trained:
            ours = heard(source, tables[m], matcher, answers(subject.speakers, speaker, m))
        else:
            ours = scored(source, tables[speaker], tables[m], matcher)
        missed = shortfall(ours, rows[:, i], matcher.k)
        off.append((missed, weight_difference(ours, rows[:, i], weights[:, i], matcher.temperature)))
        stand_ins[m] = mixed(rows[:, i], weights[:, i], tables[m])
    return stand_ins, dict(zip((MATCHED, WEIGHTS), np.max(off, axis=0).tolist(), strict=True))


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
        made = "reconstruction" if "reconstruction" in subject.masks else "zero"
        yield (made if subject.absent else "none"), {}, {}
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


def _encoded(model: StagedModel, inputs: Arrays, subject: Subject) -> dict[str, TokenState]:
    values = {}
    for m in subject.modalities:
        x = inputs[m]
        if model.spec.encoders[m].kind == "text":  # torch's model takes the full length only
            x = np.pad(x, ((0, 0), (0, model.spec.encoders[m].input_shape[0] - x.shape[1])))
        values[m] = torch.from_numpy(x)
    size = len(next(iter(values.values())))
    return model.encode_batch_tokens(values, dict.fromkeys(values), size, subject.depth)


def _projected(model: StagedModel, modality: str, state: TokenState) -> np.ndarray:
    return np.asarray(model.project(modality, model.pool_tokens(modality, state)).numpy())


def _unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))
