"""Writes a model as ONNX bundles: one for each modality alone, one for the complete input; all of them or none.

Everything is written and checked beside the target and renamed into place at the end.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from edgefl import __version__
from edgefl.disk import explained, write_new
from edgefl.errors import ExportError, MissingDependencyError
from edgefl.export.manifest import (
    INDEX_FILE,
    INDEX_FORMAT,
    MANIFEST_FILE,
    MATCHED,
    MODEL_FILE,
    WEIGHTS,
    Check,
    Index,
    Manifest,
    MaskName,
    bundle_name,
    encode_json,
    input_ports,
    output_ports,
    table_name,
    table_ports,
    valid_name,
)
from edgefl.export.publish import check_target, publish
from edgefl.export.session import open_session
from edgefl.models.spec import ModelSpec
from edgefl.plan.schedule import restrict
from edgefl.plan.values import Stage
from edgefl.prototypes.library import ClassMeans, empty, from_tensors
from edgefl.prototypes.mask import TEMPERATURE, TOP_K
from edgefl.records import Manifest as State
from edgefl.report.rows import BundleRow

Mask = Literal["prototype", "zero", "both"]
#: The masks each choice checks and offers; a plain call uses the first.
MASKS: dict[str, tuple[MaskName, ...]] = {
    "prototype": ("prototype",),
    "zero": ("zero",),
    "both": ("prototype", "zero"),
}
Parts = Mapping[str, Mapping[str, np.ndarray]]
PROTOTYPES = "prototypes"
_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "transformers", "numpy")


@dataclass(frozen=True)
class _Export:
    """What all bundles of one export share."""

    model: ModelSpec
    stage: Stage
    parts: Parts
    tables: Mapping[str, ClassMeans]
    masks: tuple[MaskName, ...]
    tolerance: float
    refs: State


def export_bundles(
    model: ModelSpec,
    stage: Stage,
    parts: Parts,
    directory: Path,
    *,
    capacity: int | None = None,
    mask: Mask = "both",
    tolerance: float = 1e-4,
    refs: State | None = None,
) -> list[BundleRow]:
    """Write ``directory``/<modalities>/{model.onnx, manifest.json} and index.json; replaces an earlier export there.

    ``parts``: part -> tensors, for every part in ``stage.present``, and "prototypes" unless ``mask`` is "zero" (which
    leaves the tables out). ``capacity``: rows of each table, the number of classes by default. ``refs``: the parts'
    objects, for the record. Rows in the order: single modalities, then the complete input.

    Raises ExportError, and publishes nothing, when parts are missing, the export fails, or onnxruntime and torch differ
    by more than ``tolerance``; StoreError when the disk refuses; MissingDependencyError.
    """
    masks = _ready(stage, parts, mask)
    export = _Export(model, stage, parts, _tables(model, parts, masks, capacity), masks, tolerance, refs or {})
    names = tuple(model.encoders)
    wanted = [(m,) for m in names] if len(names) > 1 else []
    place = directory.resolve()
    check_target(place)
    with explained("write bundles to", directory):
        place.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{place.name}.new-", dir=place.parent))
        try:
            manifests = [_write_bundle(building, export, given) for given in [*wanted, names]]
            rows = [_row(manifest) for manifest in manifests]
            write_new(building / INDEX_FILE, encode_json(Index(INDEX_FORMAT, tuple(rows))))
            building.chmod(0o755)  # mkdtemp's 0700 would keep a server of another user out
            publish(building, place)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    return [msgspec.structs.replace(row, path=str(directory / row.path)) for row in rows]


def _ready(stage: Stage, parts: Parts, mask: str) -> tuple[MaskName, ...]:
    """The masks to offer, when packages and parts are there."""
    for package, extra in (("torch", "train"), ("onnx", "export"), ("onnxscript", "export"), ("onnxruntime", "export")):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(package, extra)
    missing = [part for part in stage.present if part not in parts]
    if missing:
        raise ExportError(
            f"the state lacks {len(missing)} parts of stage {stage.index}: {', '.join(missing[:5])}",
            remedy="Export a state that a finished round wrote.",
        )
    if mask not in MASKS:
        raise ExportError(f"unknown mask {mask!r}", remedy=f"Choose one of: {', '.join(MASKS)}.")
    return MASKS[mask]


def _tables(model: ModelSpec, parts: Parts, masks: Sequence[str], capacity: int | None) -> dict[str, ClassMeans]:
    """Every modality's table padded to the capacity (all rows absent where there is none); {} when none is used."""
    if "prototype" not in masks or not model.classes or len(model.encoders) < 2:
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
    tables = {}
    for m in model.encoders:
        table = found.get(m, empty(model.classes, model.head.out))
        if table.means.shape != (model.classes, model.head.out):
            raise ExportError(
                f"the prototypes of '{m}' are {list(table.means.shape)}, the model needs "
                f"{[model.classes, model.head.out]}",
                remedy="Export prototypes and model of the same run.",
            )
        spare = empty(rows - model.classes, model.head.out)
        # A row without samples holds zeros, whatever was sent with it: the file has no use for it.
        means = np.where(table.present[:, None], table.means, np.float32(0))
        tables[m] = ClassMeans(np.concatenate([means, spare.means]), np.concatenate([table.counts, spare.counts]))
    if not any(table.present.any() for table in tables.values()):
        raise ExportError("no class has a prototype", remedy="Export with --mask zero, or train another round.")
    return tables


def _write_bundle(root: Path, export: _Export, given: tuple[str, ...]) -> Manifest:
    """Export, check and write the bundle that takes the modalities ``given``."""
    from edgefl.export.convert import to_onnx
    from edgefl.export.graph import BundleGraph, Matching
    from edgefl.export.parity import Subject, check
    from edgefl.models.build import build
    from edgefl.models.state import load_part

    model, stage = export.model, export.stage
    present = restrict(stage, given).present
    built = build(model, present).eval()
    for part in present:
        load_part(built, part, dict(export.parts[part]))
    absent = tuple(m for m in model.encoders if m not in given) if model.classes else ()
    tables = export.tables if absent else {}
    rows = len(next(iter(tables.values())).counts) if tables else 0
    top_k = min(TOP_K, rows)
    inputs, axes = input_ports(model, given)
    outputs = output_ports(model, given, len(absent), top_k)
    graph = BundleGraph(built, stage.depth, given, Matching(rows, top_k, TEMPERATURE) if tables else None)
    data = to_onnx(graph, inputs, outputs, axes, _defaults(tables))
    subject = Subject(built, stage.depth, given, inputs, axes, tables, export.masks)
    manifest = Manifest(
        **_described(model, given, absent),
        inputs=inputs,
        outputs=outputs,
        axes=axes,
        **_masking(export, absent, rows),
        stage=stage.index,
        depth=stage.depth,
        parts={p: export.refs[p] for p in (*present, *([PROTOTYPES] if tables else [])) if p in export.refs},
        **_checked(check(open_session(data), subject, export.tolerance), export.tolerance),
        **_file(data),
        versions=_software(),
    )
    folder = root / manifest.name
    folder.mkdir()
    write_new(folder / MODEL_FILE, data)
    write_new(folder / MANIFEST_FILE, encode_json(manifest))
    return manifest


def _described(model: ModelSpec, given: tuple[str, ...], absent: tuple[str, ...]) -> dict[str, Any]:
    return {
        "name": bundle_name(given),
        "task": "classify" if model.classes else "embed",
        "modalities": given,
        "absent": absent,
        "encoders": {m: model.encoders[m] for m in given},
        "labels": model.label_names or tuple(str(i) for i in range(model.classes)),
    }


def _masking(export: _Export, absent: tuple[str, ...], rows: int) -> dict[str, Any]:
    """How absent modalities are filled in; ``rows`` 0: without tables."""
    return {
        "tables": table_ports(export.model, rows) if rows else (),
        "mask": export.masks[0] if absent else "none",
        "masks": export.masks if absent else (),
        "top_k": min(TOP_K, rows),
        "temperature": TEMPERATURE if rows else 0.0,
        "capacity": rows,
    }


def _checked(checks: tuple[Check, ...], tolerance: float) -> dict[str, Any]:
    cosines = {MATCHED, WEIGHTS}
    largest = max(value for one in checks for name, value in one.differences.items() if name not in cosines)
    return {"parity": checks, "max_difference": largest, "tolerance": tolerance}


def _file(data: bytes) -> dict[str, Any]:
    import onnx

    proto = onnx.load_model_from_string(data)
    opset = max(entry.version for entry in proto.opset_import if entry.domain in {"", "ai.onnx"})
    return {
        "sha256": hashlib.sha256(data).hexdigest(),
        "size_bytes": len(data),
        "opset": int(opset),
        "ir_version": int(proto.ir_version),
    }


def _defaults(tables: Mapping[str, ClassMeans]) -> dict[str, np.ndarray]:
    """The optional inputs with what is inside the file, in the order the graph takes them."""
    defaults: dict[str, np.ndarray] = {}
    for m, table in tables.items():
        defaults[table_name(m)] = table.means
        defaults[valid_name(m)] = table.present
    return defaults


def _software() -> dict[str, str]:
    found = {"edgefl": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _row(manifest: Manifest) -> BundleRow:
    return BundleRow(
        name=manifest.name,
        path=f"{manifest.name}/{MODEL_FILE}",
        modalities=manifest.modalities,
        size_bytes=manifest.size_bytes,
        max_difference=manifest.max_difference,
        tolerance=manifest.tolerance,
    )
