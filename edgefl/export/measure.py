"""Accuracy and latency of a bundle beside the f32 one of the same export, on the user's own samples. No torch."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.data.label_sets import THRESHOLD
from edgefl.errors import ExportError
from edgefl.export.bundle_format import Manifest, present_name
from edgefl.export.precision_record import SubsetLoss, Timing
from edgefl.export.runtime import Bundle, Prediction
from edgefl.export.session import Session, open_session, run

#: Samples answered for each subset at most: of a thousand, one point of accuracy is ten samples, and an encoder of
#: the paper's size answers them in minutes.
MOST = 1000
#: Samples that calibrate fixed ranges, and with which nodes are ranked.
CALIBRATION = 64
#: A device serves one sample, a server several.
BATCHES = (1, 32)
#: Calls that are timed: until this many, or this many seconds when there are three at least.
CALLS, CALL_SECONDS = 31, 3.0


@dataclass(frozen=True)
class Samples:
    """Samples for measuring and calibrating a bundle, and their source."""

    data: Dataset
    source: str


def feeds(manifest: Manifest, data: Dataset, tables: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs of the bundle for those samples with any of its modalities; ``tables`` are passed through.

    Raises ExportError when no sample has any.
    """
    lacking = np.zeros(len(data), np.bool_)
    has = {m: data.present.get(m, lacking) for m in manifest.modalities}
    rows = _spread(np.flatnonzero(np.logical_or.reduce(list(has.values()))), CALIBRATION)
    found = dict(tables)
    for port in manifest.inputs:
        if port.name not in data.modalities or not len(rows):
            raise ExportError(
                f"no sample has '{port.name}', which the bundle '{manifest.name}' is measured with",
                remedy="Give samples of every modality, with --calibrate DATA.",
            )
        found[port.name] = np.ascontiguousarray(data.modalities[port.name][rows], port.dtype)
    found |= {present_name(m): has[m][rows].astype(np.float32) for m in manifest.modalities if manifest.presence}
    return found


def chosen(data: Dataset, given: Sequence[str]) -> np.ndarray:
    """Rows [n] with the modalities ``given``, at most ``MOST``, evenly spread."""
    lacking = np.zeros(len(data), np.bool_)
    return _spread(np.flatnonzero(np.logical_and.reduce([data.present.get(m, lacking) for m in given])), MOST)


def _spread(rows: np.ndarray, most: int) -> np.ndarray:
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


def answers(bundle: Bundle, subsets: Sequence[tuple[str, ...]], data: Dataset) -> dict[tuple[str, ...], Prediction]:
    """Subset of modalities -> predictions from that subset alone; without subsets in no sample."""
    found = {}
    for given in subsets:
        rows = chosen(data, given)
        if len(rows):
            found[given] = bundle.predict({m: data.modalities[m][rows] for m in given})
    return found


def right(before: Prediction, one: Prediction, labels: np.ndarray | None) -> tuple[int, float]:
    """(Samples, percent right): by ``labels`` [n] or [n, C] where there are any (-1: none), else by ``before``.

    (0, NaN) where an answer is not finite: the class of such an answer says nothing.
    """
    if not all(np.isfinite(values).all() for values in (one.logits, one.probabilities, *one.embeddings.values())):
        return 0, math.nan
    if not len(one.classes):
        pairs = [(one.embeddings[m], before.embeddings[m]) for m in one.embeddings]
        cosines = np.concatenate([(a * b).sum(axis=1)[np.abs(b).sum(axis=1) > 0] for a, b in pairs])
        return len(cosines), 100 * float(cosines.mean())
    if labels is not None and labels.ndim == 2:  # of several labels: each class that is told right
        known = (labels >= 0).all(axis=1)
        told = (one.probabilities >= THRESHOLD) == (labels == 1)
        return int(known.sum()), 100 * float(told[known].mean())
    truth = before.classes if labels is None else labels
    known = truth >= 0
    return int(known.sum()), 100 * float((one.classes[known] == truth[known]).mean())


def losses(
    before: Mapping[tuple[str, ...], Prediction], after: Mapping[tuple[str, ...], Prediction], data: Dataset
) -> tuple[SubsetLoss, ...]:
    """Loss of accuracy of each subset of the modalities."""
    rows = []
    for given, one in after.items():
        labels = None
        if data.labels is not None and (data.labels[chosen(data, given)] >= 0).any():
            rows_given = chosen(data, given)
            labels = data.labels[rows_given]
            if data.sets is not None:
                labels = np.where((labels >= 0)[:, None], data.sets[rows_given], -1)
        samples, now = right(before[given], one, labels)
        rows.append(SubsetLoss(given, samples, right(before[given], before[given], labels)[1], now))
    return tuple(rows)


def in_memory(manifest: Manifest, data: bytes, tables: Mapping[str, np.ndarray]) -> Bundle:
    """A bundle from bytes not yet written. ``tables``: inputs of every call."""
    return Bundle(Path(), manifest, open_session(data, threads=usable()), tables)


def timings(before: Session, after: Session, values: Mapping[str, np.ndarray], tables: Sequence[str]) -> list[Timing]:
    """Median latencies of both sessions by batch size, called in turn so that other load meets both."""
    found = []
    for batch in BATCHES:
        one = {k: v if k in tables else np.resize(v, (batch, *v.shape[1:])) for k, v in values.items()}
        medians, count = in_turn([partial(run, session, one) for session in (before, after)])
        found.append(Timing(batch, medians[0], medians[1], count))
    return found


def in_turn(calls: Sequence[Callable[[], object]]) -> tuple[list[float], int]:
    """(median milliseconds of each call, number of runs), made in turn after a warm-up."""
    seconds: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    start = time.monotonic()
    while len(seconds[0]) < 3 or (len(seconds[0]) < CALLS and time.monotonic() - start < CALL_SECONDS):
        for call, taken in zip(calls, seconds, strict=True):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    return [1000 * median(taken) for taken in seconds], len(seconds[0])


def usable() -> int:
    """Number of processors usable by this process, the threads of a measured session."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The kernel's description of the processor; "" where there is none."""
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def machine() -> str:
    """The processor's name, or the architecture where the kernel does not name it."""
    name = next(
        (line.partition(":")[2].strip() for line in processor().splitlines() if line.startswith("model name")), ""
    )
    return name or platform.machine()
