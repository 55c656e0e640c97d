"""Prototype tables of a bundle: the model's input arrays, and their JSON file. No torch.

The file is JSON, which programs in every language read: {"prototypes.acc": {"dtype": "float32", "shape": [4, 128],
"data": [row after row]}, …}.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from edgefl.errors import ExportError
from edgefl.export.bundle_format import DAMAGED, TABLES_FILE, Manifest, table_name, valid_name
from edgefl.models.spec import PROTOTYPES, ModelSpec
from edgefl.prototypes.table import ClassMeans, empty, from_tensors
from edgefl.registry import method
from edgefl.storage.disk import read_at_most

#: Numbers in the tables of a bundle: 10,000 classes of 128 in three modalities, 80 MB as text. Read whole, so bounded.
MOST_NUMBERS = 2**22
#: A number takes 24 characters at most (a sign, 17 digits, a point, an exponent, a comma).
MOST_BYTES = 24 * MOST_NUMBERS + 2**20


class _Table(msgspec.Struct, frozen=True):
    dtype: Literal["float32"]
    shape: tuple[int, ...]
    data: list[float]


def padded(
    model: ModelSpec, parts: Mapping[str, Mapping[str, np.ndarray]], masks: Sequence[str], capacity: int | None
) -> dict[str, ClassMeans]:
    """Modality -> table padded to the capacity, all rows absent without prototypes; {} if no mask uses tables.

    Raises ExportError when there are no prototypes, they do not fit the model, or the capacity is too small.
    """
    if not any(method("missing", mask).tables for mask in masks) or not model.classes or len(model.encoders) < 2:
        return {}
    if PROTOTYPES not in parts:
        raise ExportError("the state holds no prototypes", remedy="Export with --mask zero, or train with prototypes.")
    shape = (model.classes, model.head.out)
    rows = model.classes if capacity is None else capacity
    if rows < model.classes:
        raise ExportError(
            f"a capacity of {rows} has no room for {model.classes} classes",
            remedy="Give the number of classes or more.",
        )
    found, spare = from_tensors(dict(parts[PROTOTYPES])), empty(rows - model.classes, model.head.out)
    tables = {}
    for m in model.encoders:
        table = found.get(m, empty(*shape))
        if table.means.shape != shape:
            raise ExportError(
                f"the prototypes of '{m}' are {list(table.means.shape)}, the model needs {list(shape)}",
                remedy="Export prototypes and model of the same run.",
            )
        # A row without samples holds zeros, whatever was sent with it: the file has no use for it.
        means = np.where(table.present[:, None], table.means, np.float32(0))
        tables[m] = ClassMeans(np.concatenate([means, spare.means]), np.concatenate([table.counts, spare.counts]))
    if not any(table.present.any() for table in tables.values()):
        raise ExportError("no class has a prototype", remedy="Export with --mask zero, or train another round.")
    return tables


def table_arrays(tables: Mapping[str, ClassMeans]) -> dict[str, np.ndarray]:
    """Input name -> rows or valid flags of each modality in turn."""
    found: dict[str, np.ndarray] = {}
    for m, table in tables.items():
        found |= {table_name(m): table.means.astype(np.float32), valid_name(m): table.present.astype(np.float32)}
    return found


def unmarked(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tables with every valid flag 0: inputs of the zero mask."""
    return {name: np.zeros_like(array) if array.ndim == 1 else array for name, array in arrays.items()}


def marked(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tables with valid flags restored after ``unmarked``: 0 for rows of zeros (``padded``)."""
    found = dict(arrays)
    for name, array in arrays.items():
        if array.ndim == 2:
            flags = valid_name(name.removeprefix(table_name("")))
            found[flags] = (array != 0).any(axis=1).astype(arrays[flags].dtype)
    return found


def table_feeds(manifest: Manifest, tables: Mapping[str, ClassMeans]) -> dict[str, np.ndarray]:
    """The tables in the types of the bundle's inputs, without tables of other inputs."""
    arrays = table_arrays(tables)
    return {port.name: arrays[port.name].astype(port.dtype) for port in manifest.tables if port.name in arrays}


def encode_tables(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The JSON file's bytes. Raises ExportError when the tables are too large for text."""
    count = sum(array.size for array in arrays.values())
    if count > MOST_NUMBERS:
        raise ExportError(
            f"the prototype tables hold {count} numbers; beside the model there is room for {MOST_NUMBERS}",
            remedy="Export with --tables optional or fixed, or a smaller --capacity.",
        )
    return msgspec.json.encode({k: _Table("float32", a.shape, a.ravel().tolist()) for k, a in arrays.items()})


def read_tables(directory: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """The tables beside the model, {} where there are none. Raises ExportError where the manifest names others."""
    if not manifest.table_file:
        return {}
    path = directory / TABLES_FILE
    try:
        data = read_at_most(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ExportError(f"{path}: the prototype tables cannot be read: {reason}", remedy=DAMAGED) from error
    found = hashlib.sha256(data).hexdigest()
    if found != manifest.table_sha256:
        raise ExportError(
            f"{path} is damaged: sha256 {found[:16]}…, its manifest says {manifest.table_sha256[:16]}…", remedy=DAMAGED
        )
    try:
        tables = msgspec.json.decode(data, type=dict[str, _Table])
        arrays = {name: np.array(one.data, np.float32).reshape(one.shape) for name, one in tables.items()}
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path} is damaged: {error}", remedy=DAMAGED) from error
    shapes = {name: array.shape for name, array in arrays.items()}
    if shapes != {port.name: port.shape for port in manifest.tables}:
        raise ExportError(f"{path} does not hold the tables that the model takes", remedy=DAMAGED)
    return {port.name: arrays[port.name].astype(port.dtype) for port in manifest.tables}
