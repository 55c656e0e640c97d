"""Merging the "prototypes" part of a round's updates: tables of class means, weighted by their own counts.

Unlike other parts its tensors may differ between devices: one that lacks a modality sends no table for it, and a table
may appear in a later round. So shapes are settled first (the previous state's, else what most devices sent), then the
fitting tables are merged one device at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from edgefl.aggregation.mean import Load, Outcome
from edgefl.errors import ModelError, ProtocolError
from edgefl.prototypes.pairs import pair_count
from edgefl.prototypes.table import ClassMeans, Merger, Weighting, from_tensors, to_tensors
from edgefl.registry import Choice

Shape = tuple[int, ...]


def merge_prototypes(
    loaders: Mapping[str, Load], previous: Load | None, slot: Choice, rng: np.random.Generator
) -> Outcome:
    """The next "prototypes" tensors from the devices' (device -> loader, in the order to take them), by the slot."""
    if slot.method.merge is None:
        return averaged(loaders, previous)
    merge: Callable[..., Outcome] = slot.method.merge
    return slot.bind(merge)(loaders, previous, rng)


def averaged(loaders: Mapping[str, Load], previous: Load | None, weighting: Weighting = "modality") -> Outcome:
    """Tables averaged class by class. Weights: a device's share of all samples in the tables, and of each table."""
    before = from_tensors(previous()) if previous is not None else {}
    shapes: dict[str, dict[str, Shape]] = {}
    refused: dict[str, tuple[str, str]] = {}
    for device, load in loaders.items():
        try:
            shapes[device] = {name: table.means.shape for name, table in from_tensors(load()).items()}
        except ProtocolError as error:
            refused[device] = ("malformed", error.message)
    expected = _expected(shapes, before)
    mergers: dict[str, Merger] = {}
    counts: dict[str, dict[str, float]] = {}  # table -> device -> samples
    for device, tables in shapes.items():
        misfit = next((name for name, shape in tables.items() if shape != expected[name]), None)
        if misfit is not None:
            text = f"table '{misfit}' is {list(tables[misfit])}, expected {list(expected[misfit])}"
            refused[device] = ("shape", text)
            continue
        for name, table in from_tensors(loaders[device]()).items():
            mergers.setdefault(name, Merger(weighting)).add(table)
            counts.setdefault(name, {})[device] = float(table.counts.sum())
    if not mergers:
        return Outcome(refused=refused, kept="no device sent usable prototypes")
    merged = {name: merger.result(before.get(name)) for name, merger in mergers.items()}
    devices = sorted({device for table in counts.values() for device in table})
    totals = {device: sum(table.get(device, 0.0) for table in counts.values()) for device in devices}
    weights = {"devices": _shares(totals), "tables": {name: _shares(counts[name]) for name in sorted(counts)}}
    return Outcome(to_tensors({**before, **merged}), weights, refused)


def of_pairs(
    loaders: Mapping[str, Load],
    made: Callable[[Mapping[str, Mapping[str, ClassMeans]]], tuple[dict[str, ClassMeans], dict[str, object]]],
) -> Outcome:
    """Global pairs of the devices' pairs, as ``made`` of the fitting ones; in the weights its record too."""
    tables: dict[str, dict[str, ClassMeans]] = {}
    width = 0  # of all tables alike: the first fitting device's
    refused: dict[str, tuple[str, str]] = {}
    for device, load in loaders.items():
        try:
            own = from_tensors(load())
            pair_count(own)
        except (ProtocolError, ModelError) as error:
            refused[device] = ("malformed", error.message)
            continue
        sizes = {m: table.means.shape[1] for m, table in own.items()}
        wanted = width or next(iter(sizes.values()), 0)
        odd = next((m for m, size in sizes.items() if size != wanted), None)
        if odd is None:
            tables[device], width = own, wanted
        else:
            refused[device] = ("shape", f"table '{odd}' is {sizes[odd]} wide, others are {wanted}")
    found, record = made(tables)
    if not record["pairs"]:
        return Outcome(refused=refused, kept="no device sent usable prototypes")
    counts = {d: float(sum(table.counts.sum() for table in own.values())) for d, own in tables.items()}
    return Outcome(to_tensors(found), {"devices": _shares(counts), "tables": {}, "pairs": record}, refused)


def _expected(shapes: Mapping[str, Mapping[str, Shape]], before: Mapping[str, ClassMeans]) -> dict[str, Shape]:
    votes: dict[str, Counter[Shape]] = {}
    for tables in shapes.values():
        for name, shape in tables.items():
            votes.setdefault(name, Counter())[shape] += 1
    most = {name: counter.most_common(1)[0][0] for name, counter in votes.items()}  # ties: the first device's
    return {**most, **{name: table.means.shape for name, table in before.items()}}


def _shares(counts: Mapping[str, float]) -> dict[str, float]:
    total = sum(counts.values())
    return {device: count / total if total else 0.0 for device, count in counts.items()}
