"""Is the ONNX file the model? onnxruntime against torch, and against numpy for the prototype mask.

Two sizes of each dynamic axis; every subset of the modalities (of many, a part of the subsets); each mask the bundle
offers; and, where there are tables, other tables than those in the file, which shows that no optimisation folded them
into the graph. The mask is compared link by link: which rows and weights the file found
(``edgefl.export.match_parity``), and everything after them from the file's own stand-ins; what is reconstructed, with
what the evaluation makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import torch

from edgefl.errors import ExportError
from edgefl.export.manifest import (
    BATCH,
    MATCHED,
    WEIGHTS,
    Axis,
    Check,
    Port,
    fillable,
    present_name,
    table_name,
    valid_name,
)
from edgefl.export.match_parity import SCORE_TOLERANCE, mixed, shortfall, weight_difference
from edgefl.export.session import run
from edgefl.models.encoders.base import TokenState
from edgefl.models.staged import StagedModel
from edgefl.prototypes.mask import combined, heard, scored
from edgefl.prototypes.matcher import DEFAULT_MATCHER, Matcher
from edgefl.prototypes.matching import Scored
from edgefl.prototypes.table import ClassMeans
from edgefl.training.evaluate import reconstructed
from edgefl.training.scoring import answers

#: Batch sizes compared: one sample, as a device serves it, and several.
BATCHES = (1, 5)
Arrays = dict[str, np.ndarray]


#: All subsets are checked up to this many modalities, 15 of them; beyond, the whole, each alone and as many drawn.
ALL_SUBSETS, DRAWN = 4, 8


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
    speakers: Mapping[str, Sequence[tuple[float, StagedModel]]] = field(default_factory=dict)

    @property
    def fills(self) -> tuple[str, ...]:
        """Modalities the bundle may fill in."""
        return fillable(self.model.spec, self.modalities)


def check(session: Any, subject: Subject, tolerance: float, seed: int = 0) -> tuple[Check, ...]:
    """Every comparison. Raises ExportError naming the worst output that is beyond its tolerance or not a number."""
    rng = np.random.default_rng(seed)
    checks = []
    for sizes in _sizes(subject.axes):
        for given in _batches(subset_list(subject.modalities, rng), sizes[BATCH]):
            inputs = {port.name: _random(subject, port, sizes, rng) for port in subject.inputs}
            shown = _presence(subject, given)
            for mask, tables, feeds in _conditions(subject, rng):
                found = run(session, {**inputs, **shown, **feeds})
                off = differences(subject, given, inputs, tables, found)
                checks.append(Check(mask, tuple(dict.fromkeys(map("+".join, given))), sizes, off))
    _refuse_beyond(subject, checks, tolerance)
    return tuple(checks)


def subset_list(modalities: tuple[str, ...], rng: np.random.Generator) -> list[tuple[str, ...]]:
    """The subsets that are checked, the complete one first."""
    several = [some for n in range(len(modalities), 1, -1) for some in combinations(modalities, n)]
    if len(modalities) > ALL_SUBSETS:
        drawn = rng.choice(len(several) - 1, DRAWN, replace=False) + 1
        several = [several[0], *(several[i] for i in sorted(drawn.tolist()))]
    return [*several, *((m,) for m in modalities if len(modalities) > 1)] or [modalities]


def _batches(subsets: list[tuple[str, ...]], size: int) -> list[list[tuple[str, ...]]]:
    """Modalities of each of ``size`` samples, batch by batch: all subsets in turn, from the first again at the end."""
    count = -(-len(subsets) // size)
    return [[subsets[(i * size + row) % len(subsets)] for row in range(size)] for i in range(count)]


def _presence(subject: Subject, given: Sequence[tuple[str, ...]]) -> Arrays:
    several = subject.modalities if len(subject.modalities) > 1 else ()
    return {present_name(m): np.array([m in one for one in given], np.float32) for m in several}


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
                f"(mask {one.mask}, {sizes}, given {', '.join(one.given)}); the tolerance is {limit:.3g}"
            )


def differences(
    subject: Subject,
    given: Sequence[tuple[str, ...]],
    inputs: Arrays,
    tables: Mapping[str, ClassMeans],
    found: Arrays,
) -> dict[str, float]:
    """How far what the file ``found`` is off, by output; the match in scores, under ``MATCHED`` and ``WEIGHTS``.

    ``given``: what each sample has; the reference sees nothing else of it.
    """
    worst: dict[str, float] = {}
    whole = {name: array for name, array in found.items() if len(array) == len(given)}
    for subset in dict.fromkeys(given):
        rows = [i for i, one in enumerate(given) if one == subset]
        own = {m: inputs[m][rows] for m in subset}
        off = _differences(subject, own, tables, {name: array[rows] for name, array in whole.items()})
        worst |= {name: float(np.maximum(value, worst.get(name, 0.0))) for name, value in off.items()}
    return worst


def _differences(subject: Subject, inputs: Arrays, tables: Mapping[str, ClassMeans], found: Arrays) -> dict[str, float]:
    """As :func:`differences`, of samples that all have exactly the modalities of ``inputs``."""
    model = subject.model
    with torch.no_grad():
        states = _encoded(model, inputs, subject.depth)
        given = {m: _projected(model, m, state) for m, state in states.items()}
        size = len(next(iter(given.values())))
        if not model.spec.classes:
            nothing = np.zeros((size, model.spec.head.out), np.float32)
            units = {m: _unit(given[m]) if m in given else nothing for m in subject.modalities}
            return {f"embedding.{m}": _largest(found, f"embedding.{m}", r) for m, r in units.items()}
        stand_ins, match = _stand_ins(subject, given, tables, found)
        filled = given | stand_ins
        full = {m: torch.from_numpy(filled[m]) for m in model.spec.encoders}
        shown = {m: m in given or bool(np.any(filled[m])) for m in full}  # zeros say that nothing is there
        at_hand = {m: torch.full((size,), there) for m, there in shown.items()}
        logits = model.classify(model.fuse(full, at_hand, states))
    expected = {"logits": logits.numpy(), "probabilities": logits.softmax(dim=1).numpy()}
    return match | {name: _largest(found, name, value) for name, value in expected.items()}


def _stand_ins(
    subject: Subject, given: Arrays, tables: Mapping[str, ClassMeans], found: Arrays
) -> tuple[Arrays, dict[str, float]]:
    """Stand-ins [B, d] for the absent modalities: ours, or as the file mixed them and how far its choice is from ours.

    ``given[m]`` [B, d]: projections, all of which are matched. A choice without sense is infinitely far off.
    """
    like, matcher = next(iter(given.values())), subject.matcher
    if "reconstruction" in subject.masks:
        return reconstructed(subject.model, given), {}
    stand_ins = {m: np.zeros_like(like) for m in subject.fills if m not in given}
    if not tables:
        return stand_ins, {}
    capacity = len(next(iter(tables.values())).counts)
    rows, weights = (found.get(name, np.empty(0)) for name in ("matched", "weights"))
    shape = (len(like), len(subject.fills), min(matcher.k, capacity))
    if rows.shape != shape or rows.min() < -1 or rows.max() >= capacity:
        return stand_ins, {MATCHED: float("inf")}
    if weights.shape != shape:
        return stand_ins, {WEIGHTS: float("inf")}
    off = [(0.0, 0.0)]
    for i, m in enumerate(subject.fills):
        if m in given:  # nothing stands in for it
            off.append((float("inf") if (rows[:, i] >= 0).any() else 0.0, float(np.abs(weights[:, i]).max())))
            continue
        ours = combined([_said(subject, s, r, tables, m) for s, r in given.items()], matcher)
        missed = shortfall(ours, rows[:, i], matcher.k)
        off.append((missed, weight_difference(ours, rows[:, i], weights[:, i], matcher.temperature)))
        stand_ins[m] = mixed(rows[:, i], weights[:, i], tables[m])
    return stand_ins, dict(zip((MATCHED, WEIGHTS), np.max(off, axis=0).tolist(), strict=True))


def _said(subject: Subject, modality: str, r: np.ndarray, tables: Mapping[str, ClassMeans], absent: str) -> Scored:
    """Scores of the absent modality's prototypes by the projections ``r`` [B, d] of one modality at hand."""
    if subject.matcher.trained:
        small = answers(subject.speakers[modality], modality, absent)
        return heard(r, tables[absent], subject.matcher, small)
    return scored(r, tables[modality], tables[absent], subject.matcher)


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
        yield (made if subject.fills else "none"), {}, {}
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


def _encoded(model: StagedModel, inputs: Arrays, depth: int) -> dict[str, TokenState]:
    values = {}
    for m, x in inputs.items():  # torch's model takes texts of the full length only
        short = model.spec.encoders[m].input_shape[0] - x.shape[1] if model.spec.encoders[m].kind == "text" else 0
        values[m] = torch.from_numpy(np.pad(x, ((0, 0), (0, short))) if short else x)
    size = len(next(iter(values.values())))
    return model.encode_batch_tokens(values, dict.fromkeys(values), size, depth)


def _projected(model: StagedModel, modality: str, state: TokenState) -> np.ndarray:
    return np.asarray(model.project(modality, model.pool_tokens(modality, state)).numpy())


def _unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))
