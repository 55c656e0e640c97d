"""Parity check of an ONNX file: onnxruntime against the evaluation's torch code.

Two sizes of each dynamic axis; every subset of the modalities (of many, a part of the subsets); each mask the bundle
offers; and, where there are tables, other tables than those in the file, which shows that no optimisation folded them
into the graph.

A softmax at T = 0.01 turns the rounding of two nearly equal cosines into weights up to 25 times as far apart, and a tie
at the edge of the best k into another choice: both right. So the prototypes the file chose are judged by the scores
they were chosen by (cosines, or distances and logarithms of probabilities as shares of the largest, since their
rounding grows with them), and what follows is computed from the file's own choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from edgefl.errors import ExportError
from edgefl.export.bundle_format import (
    BATCH,
    MATCHED,
    WEIGHTS,
    ZERO,
    Check,
    Manifest,
    Port,
    fillable,
    present_name,
)
from edgefl.export.graph import BundleGraph, probabilities
from edgefl.export.session import Session, run
from edgefl.export.subsets import subset_list
from edgefl.export.tables import table_feeds
from edgefl.models.spec import EncoderSpec
from edgefl.models.vectors import unit
from edgefl.prototypes.mask import Scores, in_torch, mix, scores_of
from edgefl.prototypes.table import ClassMeans
from edgefl.training.evaluate import logits_of
from edgefl.training.fill import AtHand, Made

#: Batch sizes compared: one sample, as a device serves it, and several.
BATCHES = (1, 5)
#: Largest difference in scores. Rounding of cosines came to 1.4e-6 at most (two trained models, two sensors, 60 random
#: inputs each, every mask); 2e-5 is 0.2 % of a weight at T = 0.01, and of a plain softmax 0.002 %;
#: of a classifier's weights 0.002 % times the largest -ln p at hand, 87 at most.
SCORE_TOLERANCE = 2e-5
#: A weight below this counts as this in logarithms: at most 1e-6 of a row enters the mix.
_SMALLEST_WEIGHT = 1e-6
Arrays = dict[str, np.ndarray]


def check(
    session: Session, graph: BundleGraph, manifest: Manifest, tables: Mapping[str, ClassMeans], tolerance: float
) -> tuple[Check, ...]:
    """Compare the file with ``graph``, its torch module in evaluation mode, under every condition.

    ``manifest`` describes the file's ports; ``tables``: padded to its capacity, {}: none in the graph. Raises
    ExportError naming the worst output that is beyond its tolerance or not a number.
    """
    rng = np.random.default_rng(0)
    checks, modalities, axes = [], graph.given, manifest.axes
    # One sample of small sizes (half of an axis' largest, at least its smallest), then several of the largest.
    small = {name: max(axis.minimum, (axis.maximum or 0) // 2) for name, axis in axes.items()}
    large = {name: axis.maximum or axis.minimum for name, axis in axes.items()}
    for sizes in ({**small, BATCH: BATCHES[0]}, {**large, BATCH: BATCHES[1]}):
        for given in _batches(subset_list(modalities, rng), sizes[BATCH]):
            encoders = graph.model.spec.encoders
            inputs = {port.name: _random(encoders[port.name], port, sizes, rng) for port in manifest.inputs}
            several = modalities if len(modalities) > 1 else ()
            shown = {present_name(m): np.array([m in one for one in given], np.float32) for m in several}
            for mask, used, feeds in _conditions(manifest, tables, rng):
                found = run(session, {**inputs, **shown, **feeds})
                off = differences(graph, given, inputs, used, found)
                checks.append(Check(mask, tuple(dict.fromkeys(map("+".join, given))), sizes, off))
    _refuse_beyond(modalities, checks, tolerance)
    return tuple(checks)


def _batches(subsets: list[tuple[str, ...]], size: int) -> list[list[tuple[str, ...]]]:
    """Modalities of each of ``size`` samples, batch by batch: all subsets in turn, from the first again at the end."""
    count = -(-len(subsets) // size)
    return [[subsets[(i * size + row) % len(subsets)] for row in range(size)] for i in range(count)]


def _refuse_beyond(modalities: tuple[str, ...], checks: Sequence[Check], tolerance: float) -> None:
    """Raise ExportError for a difference beyond its tolerance, matches first, since outputs follow from them."""
    for keys, limit in (((MATCHED, WEIGHTS), SCORE_TOLERANCE), (None, tolerance)):
        found = [(v, name, c) for c in checks for name, v in c.differences.items() if keys is None or name in keys]
        beyond = [entry for entry in found if not entry[0] <= limit]  # not a number is beyond
        if beyond:
            value, name, one = max(beyond, key=lambda entry: np.inf if np.isnan(entry[0]) else entry[0])
            sizes = ", ".join(f"{axis} {size}" for axis, size in one.sizes.items())
            raise ExportError(
                f"{' + '.join(modalities)}: '{name}' differs by {value:.3g} between torch and onnxruntime "
                f"(mask {one.mask}, {sizes}, given {', '.join(one.given)}); the tolerance is {limit:.3g}"
            )


def differences(
    graph: BundleGraph,
    given: Sequence[tuple[str, ...]],
    inputs: Arrays,
    tables: Mapping[str, ClassMeans],
    found: Arrays,
) -> dict[str, float]:
    """Output -> difference of the file's ``found`` from torch; matches in scores (``MATCHED``, ``WEIGHTS``).

    ``given``: what each sample has; the reference sees nothing else of it.
    """
    worst: dict[str, float] = {}
    whole = {name: torch.from_numpy(array) for name, array in found.items() if len(array) == len(given)}
    for subset in dict.fromkeys(given):
        rows = [i for i, one in enumerate(given) if one == subset]
        own = {m: inputs[m][rows] for m in subset}
        with torch.no_grad():
            off = _differences(graph, own, tables, {name: array[rows] for name, array in whole.items()})
        worst |= {name: float(np.maximum(value, worst.get(name, 0.0))) for name, value in off.items()}
    return worst


def _differences(
    graph: BundleGraph, inputs: Arrays, tables: Mapping[str, ClassMeans], found: Mapping[str, Tensor]
) -> dict[str, float]:
    """:func:`differences` for samples with exactly the modalities of ``inputs``."""
    model, values = graph.model, {}
    for m, x in inputs.items():  # torch's model takes texts of the full length only
        encoder = model.spec.encoders[m]
        short = encoder.input_shape[0] - x.shape[1] if encoder.kind == "text" else 0
        values[m] = torch.from_numpy(np.pad(x, ((0, 0), (0, short))) if short else x)
    size = len(next(iter(values.values())))
    states = model.encode_batch_tokens(values, dict.fromkeys(values), size, graph.depth)
    r = {m: model.project(m, model.pool_tokens(m, state)) for m, state in states.items()}
    given = graph.at_hand(r, {}, in_torch(tables))
    if not graph.model.spec.classes:
        expected = {f"embedding.{m}": unit(r[m]) if m in r else given.zeros() for m in graph.given}
        return {name: _largest(found, name, value) for name, value in expected.items()}
    off: dict[str, float] = {}
    make = graph.make
    if tables:
        wrong = _misshapen(graph, tables, size, found)
        if wrong:
            return {wrong: float("inf")}
        fills = fillable(graph.model.spec, graph.given)
        chosen = {m: (found["matched"][:, i], found["weights"][:, i]) for i, m in enumerate(fills)}
        needless = [chosen[m] for m in fills if m in r]  # nothing stands in for what is given
        off[MATCHED] = float("inf") if any(bool((rows >= 0).any()) for rows, _ in needless) else 0.0
        off[WEIGHTS] = max((float(weights.abs().max()) for _, weights in needless), default=0.0)
        make = partial(_as_chosen, chosen, off)
    logits = logits_of(given, make, states)
    expected = {"logits": logits, "probabilities": probabilities(logits, graph.model.spec.label_names)}
    return off | {name: _largest(found, name, value) for name, value in expected.items()}


def _misshapen(graph: BundleGraph, tables: Mapping[str, ClassMeans], size: int, found: Mapping[str, Tensor]) -> str:
    """Name of a match output with a wrong shape or nonexistent rows; "" for neither."""
    capacity = len(next(iter(tables.values())).counts)
    shape = (size, len(fillable(graph.model.spec, graph.given)), min(graph.matcher.k, capacity))
    rows, weights = (found.get(name, torch.empty(0)) for name in ("matched", "weights"))
    if rows.shape != shape or rows.min() < -1 or rows.max() >= capacity:
        return MATCHED
    return WEIGHTS if weights.shape != shape else ""


def _as_chosen(
    chosen: Mapping[str, tuple[Tensor, Tensor]], off: dict[str, float], modality: str, given: AtHand
) -> Made:
    """Stand-ins mixed by the file's rows and weights; raises the differences in ``off`` by their errors."""
    rows, weights = chosen[modality]
    scores = scores_of(modality, given.full, given.has, given.tables, given.matcher, given.networks)
    for name, value in (
        (MATCHED, shortfall(scores, rows)),
        (WEIGHTS, weight_difference(scores, rows, weights, given.matcher.temperature)),
    ):
        off[name] = float(np.maximum(off[name], value))  # np.maximum keeps what is not a number
    return Made(mix(rows, weights, given.tables[modality]), weights.sum(dim=1) > 0)


def shortfall(scores: Scores, rows: Tensor) -> float:
    """Relative top-k error of an exported model's prototype choice.

    Largest excess, over samples, of the best unchosen score over the smallest chosen one, divided by the largest
    absolute score (at least 1); 0 if the choice is right. ``rows`` [B, k] as the file chose them, -1 where it chose
    none. Infinite: too few or too many rows, one twice, or one that must not match.
    """
    values, among = scores.values, scores.among.expand_as(scores.values)
    times = torch.zeros_like(values, dtype=torch.int64).scatter_add(1, rows.clamp(min=0), (rows >= 0).long())  # [B, P]
    wanted = among.sum(dim=1).clamp(max=rows.shape[1])
    if not bool((times <= among).all() and ((rows >= 0).sum(dim=1) == wanted).all()):
        return float("inf")
    best_left = torch.where(among & (times == 0), values, -torch.inf).amax(dim=1)
    least_chosen = torch.where(times > 0, values, torch.inf).amin(dim=1)
    return float(((best_left - least_chosen) / _scale(scores)).clamp(min=0).max())


def weight_difference(scores: Scores, rows: Tensor, weights: Tensor, temperature: float) -> float:
    """Largest difference of log(weight) times the temperature: the error of a score behind that weight.

    Against the softmax over the rows the file chose. What no rounding of scores gives counts with its full size: a
    weight without a row, a negative one, and a sum that is not 1 (0 without any row).
    """
    matched = rows >= 0
    picked = scores.values.double().gather(1, rows.clamp(min=0)) / temperature
    expected = torch.where(matched, picked, -torch.inf).softmax(dim=1)
    logs = [shares.double().clamp(min=_SMALLEST_WEIGHT).log() for shares in (weights, expected)]
    off = temperature * (logs[0] - logs[1]).abs() / _scale(scores)
    links = torch.where(matched, off, weights.abs()).max()
    sums = (weights.sum(dim=1) - matched.any(dim=1).float()).abs().max()
    return float(torch.stack([links, sums.double(), -weights.min().double()]).max())


def _scale(scores: Scores) -> Tensor:
    """Scale of the scores in use: their largest, at least 1."""
    return torch.where(scores.among, scores.values.abs(), 0.0).max().clamp(min=1.0)


def _largest(found: Mapping[str, Tensor], name: str, expected: Tensor) -> float:
    """Largest absolute difference of an output; infinite if missing or of another shape."""
    if name not in found or found[name].shape != expected.shape:
        return float("inf")
    return float((found[name].double() - expected).abs().max())


def _random(encoder: EncoderSpec, port: Port, sizes: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
    """Random input of an encoder: token ids with some padding, pixels in 0..1, cells, else normal values."""
    shape = [sizes[size] if isinstance(size, str) else size for size in port.shape]
    if encoder.kind == "text":
        ids = rng.integers(1, encoder.vocabulary, shape, dtype=np.int64)
        ids[:, shape[1] - shape[1] // 4 :] = 0
        return ids
    if encoder.kind == "table":
        return _random_cells(encoder, shape, rng)
    values = rng.random(shape) if encoder.kind == "vision" else rng.standard_normal(shape)
    return values.astype(np.float32)


def _random_cells(encoder: EncoderSpec, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Random cells [N, C, 2], one in ten absent: numbers in the fleet's scale, category codes and one beyond."""
    values = rng.standard_normal(shape[:2])
    values = values * np.array(encoder.std or 1.0) + np.array(encoder.mean or 0.0)
    for c, column in enumerate(encoder.columns):
        if column.values:
            values[:, c] = rng.integers(0, len(column.values) + 1, shape[0])
    there = rng.random(shape[:2]) < 0.9
    return np.stack((np.where(there, values, 0.0), there), axis=2).astype(np.float32)


def _conditions(
    manifest: Manifest, tables: Mapping[str, ClassMeans], rng: np.random.Generator
) -> Iterator[tuple[str, Mapping[str, ClassMeans], Arrays]]:
    """(mask, the reference's tables, extra inputs of the call) for each condition to compare."""
    masks = manifest.masks
    if not tables:
        yield (masks[0] if masks else "none"), {}, {}
        return
    for mask in masks:
        if mask == ZERO:
            nothing = {m: ClassMeans(t.means, np.zeros_like(t.counts)) for m, t in tables.items()}
            yield mask, nothing, table_feeds(manifest, nothing)
        else:
            yield mask, tables, table_feeds(manifest, tables) if manifest.table_file else {}
    if not manifest.tables:
        return  # fixed
    other = {}
    for m, table in tables.items():
        counts = (rng.random(len(table.counts)) < 0.7).astype(np.float32)
        other[m] = ClassMeans(rng.standard_normal(table.means.shape).astype(np.float32), counts)
    yield "override", other, table_feeds(manifest, other)
