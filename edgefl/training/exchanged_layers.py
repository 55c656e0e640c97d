"""Layers that travel alone, named "part|tensor": those lent to a device, and those it is asked for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgefl.models.parts import part_tensors
from edgefl.models.spec import LAYERS
from edgefl.models.staged import StagedModel
from edgefl.plan.job import WHOLE_ROUND, Job
from edgefl.plan.periods import in_parts, split

Tensors = dict[str, np.ndarray]


def between(job: Job) -> bool:
    """Whether the round uploads layers alone: it is inside a period."""
    return not (job.period or WHOLE_ROUND).whole


def by_part(layers: Mapping[str, np.ndarray]) -> dict[str, Tensors]:
    """Part -> its tensors by name, of layers named "part|tensor"."""
    found: dict[str, Tensors] = {}
    for layer, value in layers.items():
        part, name = split(layer)
        found.setdefault(part, {})[name] = value
    return found


def asked_layers(job: Job, model: StagedModel, samples: Mapping[str, int]) -> dict[str, Tensors]:
    """The layers that the round asks for, as one part; without those of parts that no sample trained."""
    asked = in_parts((job.period or WHOLE_ROUND).layers, samples)
    parts = {part: part_tensors(model, part, copy=False) for part in {split(layer)[0] for layer in asked}}
    found = {layer: parts[part][name] for layer in asked for part, name in [split(layer)]}
    return {LAYERS: found} if found else {}
