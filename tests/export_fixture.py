"""A tiny model of two sensors with random weights and prototypes, exported once for all tests of a process."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from edgefl.export.bundle import export_bundles
from edgefl.export.drafts import TrainedState
from edgefl.models.parts import part_tensors
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec, part_names
from edgefl.models.staged import StagedModel, build
from edgefl.plan.job import Stage
from edgefl.prototypes.table import ClassMeans, to_tensors
from edgefl.run_records import BundleRow

torch.set_num_threads(1)

LABELS = ("rest", "run", "swim", "walk")
Parts = dict[str, dict[str, np.ndarray]]


def sensor(**changes: object) -> EncoderSpec:
    fields = {"kind": "sensor", "input_shape": (12, 3), "width": 16, "depth": 2, "heads": 2, "patch": 4}
    return EncoderSpec(**{**fields, **changes})


def two_sensors(**changes: object) -> ModelSpec:
    fields = {
        "encoders": {"acc": sensor(), "gyro": sensor(input_shape=(10, 2))},
        "stages": 2,
        "head": HeadSpec(width=16, out=8),
        "fusion_width": 12,
        "classes": 4,
        "label_names": LABELS,
    }
    return ModelSpec(**{**fields, **changes})


def stage_of(spec: ModelSpec, depth: int = 2) -> Stage:
    present = tuple(part_names(spec, through=depth))
    return Stage(index=depth, depth=depth, rounds=1, present=present, trained=present)


def some_tables(spec: ModelSpec, seed: int = 5) -> dict[str, ClassMeans]:
    """Random prototypes; the first modality lacks the last class, the second one the first."""
    rng = np.random.default_rng(seed)
    tables = {}
    for i, m in enumerate(spec.encoders):
        counts = np.full(spec.classes, 3, np.float32)
        counts[-1 if i == 0 else 0] = 0
        means = rng.standard_normal((spec.classes, spec.head.out)).astype(np.float32) * (counts > 0)[:, None]
        tables[m] = ClassMeans(means, counts)
    return tables


def some_state(spec: ModelSpec, *, prototypes: bool = True) -> tuple[StagedModel, Parts]:
    """A model in evaluation mode whose batch norms and biases are not those of an untrained one, and its parts."""
    model = build(spec, seed=3).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0, generator=generator)
        elif name.endswith("running_mean"):
            buffer.normal_(generator=generator)
    parts = {part: part_tensors(model, part) for part in model.parts_present}
    if prototypes and spec.classes:
        parts["prototypes"] = to_tensors(some_tables(spec))
    return model.eval(), parts


@dataclass(frozen=True)
class Exported:
    spec: ModelSpec
    model: StagedModel
    parts: Parts
    directory: Path
    rows: list[BundleRow]


_KEPT: list[tempfile.TemporaryDirectory] = []


@functools.cache
def exported() -> Exported:
    """Bundles acc, gyro and acc+gyro with both masks and room for six prototypes. Do not change the folder."""
    spec = two_sensors()
    model, parts = some_state(spec)
    _KEPT.append(tempfile.TemporaryDirectory(prefix="edgefl-bundles-"))
    directory = Path(_KEPT[0].name) / "bundles"
    rows = export_bundles(TrainedState(spec, stage_of(spec), parts), directory, capacity=6)
    return Exported(spec, model, parts, directory, rows)


def windows(spec: ModelSpec, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {m: rng.standard_normal((count, *e.input_shape)).astype(np.float32) for m, e in spec.encoders.items()}
