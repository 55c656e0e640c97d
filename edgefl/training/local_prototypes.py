"""Prototypes of one device, after local training, as its update holds them."""

from __future__ import annotations

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Job
from edgefl.prototypes.table import of_several, to_tensors
from edgefl.registry import chosen
from edgefl.training.forward import Auxiliary


def local_tables(
    job: Job, model: StagedModel, auxiliary: Auxiliary, dataset: Dataset, rng: np.random.Generator
) -> dict[str, np.ndarray] | None:
    """The tensors of the part "prototypes" by the recipe's slot; None without one. A table without rows is left out."""
    slot = chosen("prototypes", job.slots.prototypes)[0]
    if slot.method.local is None:
        return None
    found = slot.bind(slot.method.local)(job, model, auxiliary, dataset, rng)
    enough = {m: of_several(table, float(slot.options["min_count"])) for m, table in found.items()}
    tables = {m: table for m, table in enough.items() if table.present.any()}
    return to_tensors(tables) if tables else None
