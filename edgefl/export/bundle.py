"""Writes a model as ONNX bundles: one for each modality alone, one for any of them; all of the bundles or none.

Everything is written and checked beside the target and renamed into place at the end.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from edgefl import __version__
from edgefl.errors import ExportError, MissingDependencyError
from edgefl.export.bundle_format import (
    INDEX_FILE,
    INDEX_FORMAT,
    MANIFEST_FILE,
    MASKS,
    MATCHED,
    MAX_MANIFEST_BYTES,
    MODEL_FILE,
    WEIGHTS,
    Check,
    Index,
    Manifest,
    Mask,
    MaskName,
    bundle_name,
    encode_json,
    fillable,
    input_ports,
    output_ports,
    presence_ports,
    table_name,
    table_names,
    table_ports,
    valid_name,
)
from edgefl.export.session import open_session
from edgefl.models.spec import PROTOTYPES, ModelSpec
from edgefl.plan.job import Stage
from edgefl.plan.stages import restrict
from edgefl.prototypes.mask import DEFAULT_MATCHER, Matcher
from edgefl.prototypes.table import ClassMeans, empty, from_tensors
from edgefl.records import Manifest as State
from edgefl.registry import method
from edgefl.run_records import BundleRow
from edgefl.storage.disk import read_at_most, store_errors, sync_directory, write_new

if TYPE_CHECKING:
    from edgefl.models.staged import StagedModel
    from edgefl.training.matching import Networks, WeightedNetworks

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
    matcher: Matcher
    networks: Networks
    untrained: tuple[str, ...]


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
    matcher: Matcher = DEFAULT_MATCHER,
    networks: Networks | None = None,
    untrained: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[BundleRow]:
    """Write ``directory``/<modalities>/{model.onnx, manifest.json} and index.json; replaces an earlier export there.

    ``parts``: part -> tensors, for every part in ``stage.present``, and "prototypes" unless ``mask`` is "zero" or
    "reconstruction" (which leave the tables out). ``capacity``: rows of each table, the number of classes by default.
    ``refs``: the parts' objects, for the record. ``matcher``: how prototypes are found; ``networks``: the small
    networks a trained one asks, all among ``parts``. ``untrained``: parts that no device has trained, for the record.
    ``progress`` is called with a line before each bundle is made. Rows in the order: single modalities, then all.

    Raises ExportError, and publishes nothing, when parts are missing, the export fails, or onnxruntime and torch differ
    by more than ``tolerance``; StoreError when the disk refuses; MissingDependencyError.
    """
    masks = _ready(model, stage, parts, mask)
    tables = padded(model, parts, masks, capacity)
    export = _Export(
        model, stage, parts, tables, masks, tolerance, refs or {}, matcher, networks or {}, tuple(untrained)
    )
    place = directory.resolve()
    check_target(place)
    with store_errors("write bundles to", directory):
        place.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{place.name}.new-", dir=place.parent))
        try:
            rows: list[BundleRow] = []
            for given in (wanted := _inputs(model)):
                progress(f"bundle {len(rows) + 1} of {len(wanted)}: {bundle_name(given)}")
                rows.append(_row(_write_bundle(building, export, given)))
            write_new(building / INDEX_FILE, encode_json(Index(INDEX_FORMAT, tuple(rows))))
            building.chmod(0o755)  # mkdtemp's 0700 would keep a server of another user out
            publish(building, place)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    return [msgspec.structs.replace(row, path=str(directory / row.path)) for row in rows]


def _inputs(model: ModelSpec) -> list[tuple[str, ...]]:
    """What each bundle takes: one modality each, then all."""
    names = tuple(model.encoders)
    return [*((m,) for m in names if len(names) > 1), names]


def _ready(model: ModelSpec, stage: Stage, parts: Parts, mask: str) -> tuple[MaskName, ...]:
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
    makers = [method("missing", one) for one in MASKS[mask]]
    if not all(one.tables or one.offered(model, {}) for one in makers):
        raise ExportError(
            "the model has no parts that reconstruct a modality",
            remedy=f"Export with another --mask, or train with missing: {mask}.",
        )
    return MASKS[mask]


def _write_bundle(root: Path, export: _Export, given: tuple[str, ...]) -> Manifest:
    """Export, check and write the bundle that takes the modalities ``given``."""
    from edgefl.export.graph import BundleGraph, to_onnx
    from edgefl.export.parity import Subject, check

    model, stage, matcher = export.model, export.stage, export.matcher
    present = restrict(stage, given).present
    fills = fillable(model, given)
    masks = export.masks if fills else ()
    tables = {m: export.tables[m] for m in table_names(model, given, matcher) if m in export.tables and fills}
    rows = len(next(iter(tables.values())).counts) if tables else 0
    networks = {m: _networks(export, m) for m in given if tables and matcher.trained}
    inputs, axes = input_ports(model, given)
    presence, outputs = presence_ports(given), output_ports(model, given, min(matcher.k, rows))
    make = method("missing", export.masks[0]).make
    graph = BundleGraph(_built(export, present), stage.depth, given, make, matcher, networks)
    data = to_onnx(graph, inputs, presence, outputs, axes, defaults(tables))
    checks = check(open_session(data), Subject(graph, inputs, axes, tables, masks), export.tolerance)
    manifest = Manifest(
        name=bundle_name(given),
        task="classify" if model.classes else "embed",
        modalities=given,
        absent=tuple(m for m in fills if m not in given),
        subsets="any" if len(given) > 1 else "complete",
        encoders={m: model.encoders[m] for m in given},
        labels=model.label_names or tuple(str(i) for i in range(model.classes)),
        inputs=inputs,
        presence=presence,
        tables=table_ports(model, tuple(tables), rows),
        outputs=outputs,
        axes=axes,
        mask=masks[0] if masks else "none",
        masks=masks,
        metric=matcher.metric if rows else "",
        top_k=min(matcher.k, rows),
        temperature=matcher.temperature if rows else 0.0,
        networks=tuple(weight for each in networks.values() for weight, _ in each),
        capacity=rows,
        tolerance=export.tolerance,
        max_difference=_largest(checks),
        parity=checks,
        stage=stage.index,
        depth=stage.depth,
        parts={p: export.refs[p] for p in (*present, *([PROTOTYPES] if tables else [])) if p in export.refs},
        untrained=tuple(p for p in export.untrained if p in present),
        versions=_software(),
        **_file(data),
    )
    folder = root / manifest.name
    folder.mkdir()
    write_new(folder / MODEL_FILE, data)
    write_new(folder / MANIFEST_FILE, encode_json(manifest))
    return manifest


def _built(export: _Export, present: Sequence[str]) -> StagedModel:
    from edgefl.models.parts import load_part
    from edgefl.models.staged import build

    built = build(export.model, present)
    for part in present:
        load_part(built, part, dict(export.parts[part]))
    return built.eval()


def _networks(export: _Export, modality: str) -> WeightedNetworks:
    """The small networks that match ``modality``. Raises ExportError when there is none."""
    from edgefl.training.matching import matcher_networks

    part = f"match/{modality}"
    weights = export.networks.get(part, {})
    missing = [name for name in weights if name not in export.parts]
    if missing or not weights:
        raise ExportError(
            f"the matcher '{export.matcher.metric}' needs a small network of '{modality}', and the state "
            + (f"lacks {', '.join(missing[:5])}" if missing else "holds none"),
            remedy="Export the state of a run's last round, or with --mask zero.",
        )
    return matcher_networks(export.model, export.parts, part, weights)


def _largest(checks: Sequence[Check]) -> float:
    """The largest difference of what is answered; those of the match are in scores."""
    return max(value for one in checks for name, value in one.differences.items() if name not in {MATCHED, WEIGHTS})


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


def check_target(directory: Path) -> None:
    """An existing target may only hold an earlier export: it will be replaced as a whole."""
    if not directory.exists():
        return
    other = f"{directory} exists and is not an earlier export"
    remedy = "Name a new or empty directory with -o DIR."
    if not directory.is_dir():
        raise ExportError(other, remedy=remedy)
    names = {path.name for path in directory.iterdir()}
    if not names:
        return
    try:
        index = msgspec.json.decode(read_at_most(directory / INDEX_FILE, MAX_MANIFEST_BYTES), type=Index)
    except (OSError, ValueError):
        raise ExportError(other, remedy=remedy) from None
    known = {INDEX_FILE, *(row.name for row in index.bundles)}
    if index.format != INDEX_FORMAT or names - known:
        raise ExportError(f"{other}: it holds {', '.join(sorted(names - known))[:200]}", remedy=remedy)


def publish(building: Path, directory: Path) -> None:
    """Put the new folder in the place of the old one, which is there until the new one is."""
    old = building.with_name(f"{building.name}.old")
    replaced = directory.exists()
    if replaced:
        directory.rename(old)
    try:
        building.rename(directory)
    except BaseException:
        if replaced:
            old.rename(directory)
        raise
    sync_directory(directory.parent)
    if replaced:
        shutil.rmtree(old, ignore_errors=True)
