"""Conversion of a bundle to a lower precision within a limit on each subset's loss of accuracy.

The noisiest nodes stay in f32, as few as needed; the manifest lists them, with losses and gains.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edgefl.errors import ExportError
from edgefl.export import precision
from edgefl.export.bundle_format import Manifest
from edgefl.export.measure import Samples, answers, feeds, in_memory, losses, machine, processor, timings, usable
from edgefl.export.precision_record import Precision, Reduced, SubsetLoss
from edgefl.export.subsets import subset_list

if TYPE_CHECKING:
    from edgefl.export.runtime import Bundle, Prediction


@dataclass(frozen=True)
class Exact:
    """A bundle in f32: its manifest, its model file's bytes and its prototype tables by name."""

    manifest: Manifest
    data: bytes
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def given(self) -> Mapping[str, np.ndarray]:
        """Tables stored beside the model, inputs of every call; {} otherwise."""
        return self.tables if self.manifest.table_file else {}


@dataclass(frozen=True)
class _Compared:
    """The f32 bundle with its answers on the samples, as a reference."""

    exact: Exact
    samples: Samples
    bundle: Bundle
    answers: Mapping[tuple[str, ...], Prediction]

    def losses(self, data: bytes) -> tuple[SubsetLoss, ...]:
        """Losses by subset of another model file against the reference."""
        other = in_memory(self.exact.manifest, data, self.exact.given)
        return losses(self.answers, answers(other, list(self.answers), self.samples.data), self.samples.data)


def reduced(exact: Exact, kind: Precision, samples: Samples, max_loss: float) -> Exact:
    """The bundle in precision ``kind``. Raises ExportError when a subset would lose more than ``max_loss`` points, or
    the samples are not those of the bundle.
    """
    manifest = exact.manifest
    values = feeds(manifest, samples.data, exact.given)
    bundle = in_memory(manifest, exact.data, exact.given)
    every = subset_list(manifest.modalities, np.random.default_rng(0)) if manifest.subsets == "any" else []
    before = _Compared(exact, samples, bundle, answers(bundle, every or [manifest.modalities], samples.data))
    data, record = (_int8 if kind == "int8" else _f16)(before, values, max_loss)
    after = in_memory(manifest, data, exact.given)
    record = msgspec.structs.replace(
        record,
        before_bytes=len(exact.data),
        measure=_measure(manifest, samples),
        data=samples.source,
        max_loss=max_loss,
        timings=tuple(timings(bundle.session, after.session, values, list(exact.tables))),
        machine=machine(),
        provider=after.session.get_providers()[0],
        threads=usable(),
    )
    changed = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data), "precision": kind}
    # What f32 was checked for to the last bits does not hold here.
    free = {"tolerance": 0.0, "max_difference": 0.0, "parity": ()}
    return Exact(msgspec.structs.replace(manifest, reduced=record, **changed, **free), data, exact.tables)


def _measure(manifest: Manifest, samples: Samples) -> str:
    if manifest.task == "embed":
        return "cosine"
    labels = samples.data.labels
    return "accuracy" if labels is not None and (labels >= 0).any() else "agreement"


def _f16(before: _Compared, values: precision.Feeds, max_loss: float) -> tuple[bytes, Reduced]:
    data, count = precision.to_f16(before.exact.data, list(before.exact.tables))
    lost = before.losses(data)
    record = Reduced(losses=lost, converted=count)
    if not record.worst <= max_loss:  # NaN: answers that are not finite
        raise _too_much(before, "f16", record, max_loss)
    return data, record


def _int8(before: _Compared, values: precision.Feeds, max_loss: float) -> tuple[bytes, Reduced]:
    proto = precision.loaded(before.exact.data)
    weights = precision.weight_of(proto, before.exact.tables)
    if not weights:
        raise ExportError(
            f"{before.exact.manifest.name}: no weight has {precision.SMALLEST} numbers or more",
            remedy="Export this model in f32: 8 bits would save nothing.",
        )
    narrow = precision.needs_reduced_range(processor())
    tables = list(before.exact.given)
    convert = partial(precision.to_int8, proto, calibration=values, reduce_range=narrow, tables=tables)
    ranked: list[str] = []  # only where all at once lose too much
    tried: dict[int, tuple[bytes, tuple[SubsetLoss, ...]]] = {}

    def enough(count: int) -> bool:
        if count and not ranked:
            few = {k: v if k in before.exact.given else v[: precision.PROBE] for k, v in values.items()}
            ranked.extend(precision.by_noise(proto, weights, few))
        data = convert([name for name in weights if name not in ranked[:count]])
        tried[count] = data, before.losses(data)
        return Reduced(losses=tried[count][1]).worst <= max_loss

    count = precision.fewest(enough, len(weights) - 1)
    if count is None:
        raise _too_much(before, "int8", Reduced(losses=tried[len(weights) - 1][1]), max_loss)
    data, lost = tried[count]
    left = tuple(ranked[:count])
    fixed = {node.name for node in proto.graph.node if node.op_type == "Conv"} & (weights.keys() - set(left))
    record = Reduced(losses=lost, converted=len(weights) - count, calibrated=len(fixed), left=left, reduce_range=narrow)
    return data, record


def _too_much(before: _Compared, kind: str, record: Reduced, max_loss: float) -> ExportError:
    name = f"{before.exact.manifest.name} in {kind}"
    for one in record.losses:
        if not math.isfinite(one.points):
            text = f"{name} gives answers that are not finite (NaN or infinite) given {' + '.join(one.given)}"
            return ExportError(text, remedy="Export in f32, or look for samples of far larger values than others.")
    worst = max(record.losses, key=lambda one: one.points)
    return ExportError(
        f"{name} loses {worst.points:.1f} points given {' + '.join(worst.given)} "
        f"({worst.before:.1f} to {worst.after:.1f} % of {worst.samples} samples); {max_loss:g} are allowed",
        remedy="Allow more with --max-loss, or export in f32.",
    )
