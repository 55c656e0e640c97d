"""A tiny two-sensor model, data with absent modalities, and jobs: what the tests of training share."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from edgefl.data.dataset import Dataset
from edgefl.models.check import encoder_of_size
from edgefl.models.checkpoints import initial_parts
from edgefl.models.spec import HeadSpec, ModelSpec
from edgefl.plan.job import Hyper, Job, Slots, Stage
from edgefl.registry import method
from edgefl.training.batches import Batch

torch.set_num_threads(1)

SHAPE = (8, 2)
CROSS_ENTROPY = {"cross_entropy": {"weight": 1.0}}
CONTRAST = {**CROSS_ENTROPY, "modality_contrast": {"weight": 1.0, "temperature": 0.1}}
CLIP = {"clip": {"weight": 1.0, "temperature": 0.05}}


def model_spec(dropout: float = 0.0, stages: int = 3, classes: int = 3, modalities: str = "ab") -> ModelSpec:
    encoder = encoder_of_size("sensor", "tiny", SHAPE, width=8, depth=stages, patch=4, dropout=dropout)
    names = tuple("xyz"[:classes])
    head = HeadSpec(width=12, out=6, dropout=dropout)
    return ModelSpec(dict.fromkeys(modalities, encoder), stages, head, 10, classes, names)


def stages_of(spec: ModelSpec, schedule: str = "layerwise") -> tuple[Stage, ...]:
    return method("schedule", schedule).stages(spec, [1] * spec.stages, "auto")


def job(spec: ModelSpec | None = None, stage: Stage | None = None, **changes) -> Job:
    spec = spec or model_spec()
    slots = {"objective": CROSS_ENTROPY, "missing": {"zero": {}}, "prototypes": {"none": {}}}
    slots |= {name: changes.pop(name) for name in list(changes) if name in Slots.__struct_fields__}
    hyper = {"batch_size": 6, "lr": {"encoder": 1e-2, "head": 1e-2}, **changes}
    return Job(spec, stage or stages_of(spec)[-1], Hyper(**hyper), Slots(**slots))


def parts_of(made: Job, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    every = dict(initial_parts(made.model, seed))
    return {name: every[name] for name in made.stage.present}


def dataset(samples: int = 12, absent: dict[str, list[int]] | None = None, seed: int = 0, labels=None) -> Dataset:
    """Samples of a and b whose class shows in the mean of either; ``absent``: which lack a modality."""
    rng = np.random.default_rng(seed)
    classes = np.arange(samples) % 3 if labels is None else np.asarray(labels)
    values, present = {}, {}
    for m in "ab":
        values[m] = (rng.normal(size=(samples, *SHAPE)) * 0.3 + classes[:, None, None]).astype(np.float32)
        present[m] = np.ones(samples, bool)
        present[m][(absent or {}).get(m, [])] = False
        values[m][~present[m]] = 0
    ids = [str(i) for i in range(samples)]
    return Dataset(values, present, classes.astype(np.int64), ("x", "y", "z"), ids)


def random_batch(rows: dict[str, list[int]] | None = None, size: int = 6, seed: int = 0) -> Batch:
    """A batch of ``size`` samples; ``rows[m]``: those that have m, when not all do."""
    generator = torch.Generator().manual_seed(seed)
    chosen = {m: None if m not in (rows or {}) else torch.tensor((rows or {})[m]) for m in "ab"}
    counts = {m: size if index is None else len(index) for m, index in chosen.items()}
    inputs = {m: torch.randn((count, *SHAPE), generator=generator) for m, count in counts.items() if count}
    labels = torch.randint(3, (size,), generator=generator)
    complete = set(range(size)).intersection(*(index.tolist() for index in chosen.values() if index is not None))
    return Batch(size, inputs, {m: chosen[m] for m in inputs}, labels, complete=len(complete))


def with_hyper(made: Job, **changes) -> Job:
    return msgspec.structs.replace(made, hyper=msgspec.structs.replace(made.hyper, **changes))
