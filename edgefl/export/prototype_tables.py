"""The prototype tables inside a bundle: padded to its capacity, and as the defaults of its optional inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgefl.errors import ExportError
from edgefl.export.manifest import table_name, valid_name
from edgefl.models.spec import PROTOTYPES, ModelSpec
from edgefl.prototypes.table import ClassMeans, empty, from_tensors
from edgefl.registry import method

Parts = Mapping[str, Mapping[str, np.ndarray]]


def padded(model: ModelSpec, parts: Parts, masks: Sequence[str], capacity: int | None) -> dict[str, ClassMeans]:
    """Every modality's table padded to the capacity (all rows absent where there is none); {} when none is used.

    Raises ExportError when there are no prototypes, they do not fit the model, or the capacity is too small.
    """
    if not any(method("missing", mask).tables for mask in masks) or not model.classes or len(model.encoders) < 2:
        return {}
    if PROTOTYPES not in parts:
        raise ExportError("the state holds no prototypes", remedy="Export with --mask zero, or train with prototypes.")
    found = from_tensors(dict(parts[PROTOTYPES]))
    rows = model.classes if capacity is None else capacity
    if rows < model.classes:
        raise ExportError(
            f"a capacity of {rows} has no room for {model.classes} classes",
            remedy="Give the number of classes or more.",
        )
    tables = {m: _padded(m, found.get(m, empty(model.classes, model.head.out)), model, rows) for m in model.encoders}
    if not any(table.present.any() for table in tables.values()):
        raise ExportError("no class has a prototype", remedy="Export with --mask zero, or train another round.")
    return tables


def _padded(modality: str, table: ClassMeans, model: ModelSpec, rows: int) -> ClassMeans:
    if table.means.shape != (model.classes, model.head.out):
        raise ExportError(
            f"the prototypes of '{modality}' are {list(table.means.shape)}, the model needs "
            f"{[model.classes, model.head.out]}",
            remedy="Export prototypes and model of the same run.",
        )
    spare = empty(rows - model.classes, model.head.out)
    # A row without samples holds zeros, whatever was sent with it: the file has no use for it.
    means = np.where(table.present[:, None], table.means, np.float32(0))
    return ClassMeans(np.concatenate([means, spare.means]), np.concatenate([table.counts, spare.counts]))


def defaults(tables: Mapping[str, ClassMeans]) -> dict[str, np.ndarray]:
    """The optional inputs with what is inside the file, in the order the graph takes them."""
    found: dict[str, np.ndarray] = {}
    for m, table in tables.items():
        found[table_name(m)] = table.means
        found[valid_name(m)] = table.present
    return found
