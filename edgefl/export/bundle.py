"""Writes a model as ONNX bundles: one for each modality alone, one for any of them; all of the bundles or none.

Everything is written and checked beside the target and renamed into place at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

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
    ZERO,
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
    from edgefl.training.matching import Networks, WeightedNetworks

Parts = Mapping[str, Mapping[str, np.ndarray]]
_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "transformers", "numpy")


@dataclass(frozen=True)
class TrainedState:
    """The state of a run that is exported.

    ``parts``: part -> tensors, for every part in ``stage.present``, and "prototypes" where a mask uses them. ``refs``:
    the parts' objects, for the record. ``matcher``: how prototypes are found; ``networks``: the small networks a
    trained one asks, all among ``parts``. ``untrained``: parts that no device has trained, for the record.
    """

    model: ModelSpec
    stage: Stage
    parts: Parts
    refs: State = field(default_factory=dict)
    matcher: Matcher = DEFAULT_MATCHER
    networks: Networks = field(default_factory=dict)
    untrained: tuple[str, ...] = ()


def export_bundles(
    state: TrainedState,
    directory: Path,
    *,
    capacity: int | None = None,
    mask: Mask = "both",
    tolerance: float = 1e-4,
    progress: Callable[[str], None] = lambda _: None,
) -> list[BundleRow]:
    """Write ``directory``/<modalities>/{model.onnx, manifest.json} and index.json; replaces an earlier export there.

    ``mask`` "zero" and "reconstruction" leave the prototype tables out. ``capacity``: rows of each table, the number of
    classes by default. ``progress`` is called with a line before each bundle is made. Rows in the order: single
    modalities, then all.

    Raises ExportError, and publishes nothing, when parts are missing, the export fails, or onnxruntime and torch differ
    by more than ``tolerance``; StoreError when the disk refuses; MissingDependencyError.
    """
    masks = _ready(state, mask)
    tables = padded(state.model, state.parts, masks, capacity)
    place = directory.resolve()
    check_target(place)
    wanted = _inputs(state.model)
    with store_errors("write bundles to", directory):
        place.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{place.name}.new-", dir=place.parent))
        try:
            rows: list[BundleRow] = []
            for given in wanted:
                progress(f"bundle {len(rows) + 1} of {len(wanted)}: {bundle_name(given)}")
                rows.append(_write_bundle(building, state, _described(state, given, masks, tables), tables, tolerance))
            write_new(building / INDEX_FILE, encode_json(Index(INDEX_FORMAT, tuple(rows))))
            building.chmod(0o755)  # mkdtemp's 0700 would keep a server of another user out
            publish(building, place)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    return [msgspec.structs.replace(row, path=str(directory / row.path)) for row in rows]


def _inputs(model: ModelSpec) -> list[tuple[str, ...]]:
    """The modalities of each bundle: one each, then all."""
    names = tuple(model.encoders)
    return [*((m,) for m in names if len(names) > 1), names]


def _ready(state: TrainedState, mask: str) -> tuple[MaskName, ...]:
    """The masks to offer, when packages and parts are there."""
    for package, extra in (("torch", "train"), ("onnx", "export"), ("onnxscript", "export"), ("onnxruntime", "export")):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(package, extra)
    missing = [part for part in state.stage.present if part not in state.parts]
    if missing:
        raise ExportError(
            f"the state lacks {len(missing)} parts of stage {state.stage.index}: {', '.join(missing[:5])}",
            remedy="Export a state that a finished round wrote.",
        )
    if mask not in MASKS:
        raise ExportError(f"unknown mask {mask!r}", remedy=f"Choose one of: {', '.join(MASKS)}.")
    makers = [method("missing", one) for one in MASKS[mask]]
    if not all(one.tables or one.offered(state.model, {}) for one in makers):
        raise ExportError(
            "the model has no parts that reconstruct a modality",
            remedy=f"Export with another --mask, or train with missing: {mask}.",
        )
    return MASKS[mask]


def _described(
    state: TrainedState, given: tuple[str, ...], offered: tuple[MaskName, ...], padded: Mapping[str, ClassMeans]
) -> Manifest:
    """The manifest of the bundle that takes the modalities ``given``, but for its file and the comparisons with it."""
    model, stage, matcher = state.model, state.stage, state.matcher
    present = restrict(stage, given).present
    fills = fillable(model, given)
    masks = offered if fills else ()
    tables = tuple(m for m in table_names(model, given, matcher) if m in padded and fills)
    rows = len(padded[tables[0]].counts) if tables else 0
    inputs, axes = input_ports(model, given)
    return Manifest(
        name=bundle_name(given),
        task="classify" if model.classes else "embed",
        modalities=given,
        absent=tuple(m for m in fills if m not in given),
        subsets="any" if len(given) > 1 else "complete",
        encoders={m: model.encoders[m] for m in given},
        labels=model.label_names or tuple(str(i) for i in range(model.classes)),
        inputs=inputs,
        presence=presence_ports(given),
        tables=table_ports(model, tables, rows),
        outputs=output_ports(model, given, min(matcher.k, rows)),
        axes=axes,
        mask=masks[0] if masks else "none",
        masks=masks,
        metric=matcher.metric if rows else "",
        top_k=min(matcher.k, rows),
        temperature=matcher.temperature if rows else 0.0,
        capacity=rows,
        stage=stage.index,
        depth=stage.depth,
        parts={p: state.refs[p] for p in (*present, *([PROTOTYPES] if tables else [])) if p in state.refs},
        untrained=tuple(p for p in state.untrained if p in present),
        versions=_software(),
    )


def _write_bundle(
    root: Path, state: TrainedState, manifest: Manifest, padded: Mapping[str, ClassMeans], tolerance: float
) -> BundleRow:
    """Export, check and write the bundle that ``manifest`` describes."""
    import onnx

    from edgefl.export.graph import BundleGraph, to_onnx
    from edgefl.export.parity import check
    from edgefl.models.parts import loaded

    model, given, matcher = state.model, manifest.modalities, state.matcher
    tables = {m: padded[m] for m in table_names(model, given, matcher) if manifest.capacity}
    networks = {m: _networks(state, m) for m in given if tables and matcher.trained}
    built = loaded(model, restrict(state.stage, given).present, state.parts)
    make = method("missing", manifest.masks[0] if manifest.masks else ZERO).make
    graph = BundleGraph(built, manifest.depth, given, make, matcher, networks)
    defaults: dict[str, np.ndarray] = {}  # in the order the graph takes them
    for m, table in tables.items():
        defaults |= {table_name(m): table.means, valid_name(m): table.present}
    data = to_onnx(graph, manifest.inputs, manifest.presence, manifest.outputs, manifest.axes, defaults)
    checks = check(open_session(data), graph, manifest, tables, tolerance)
    proto = onnx.load_model_from_string(data)
    manifest = msgspec.structs.replace(
        manifest,
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        opset=int(max(entry.version for entry in proto.opset_import if entry.domain in {"", "ai.onnx"})),
        ir_version=int(proto.ir_version),
        networks=tuple(weight for each in networks.values() for weight, _ in each),
        tolerance=tolerance,
        # Of what is answered: the differences of the match are in scores.
        max_difference=max(v for one in checks for k, v in one.differences.items() if k not in {MATCHED, WEIGHTS}),
        parity=checks,
    )
    folder = root / manifest.name
    folder.mkdir()
    write_new(folder / MODEL_FILE, data)
    write_new(folder / MANIFEST_FILE, encode_json(manifest))
    path = f"{manifest.name}/{MODEL_FILE}"
    return BundleRow(manifest.name, path, given, manifest.size_bytes, manifest.max_difference, tolerance)


def _networks(state: TrainedState, modality: str) -> WeightedNetworks:
    """The small networks that match ``modality``. Raises ExportError when there is none."""
    from edgefl.training.matching import matcher_networks

    part = f"match/{modality}"
    weights = state.networks.get(part, {})
    missing = [name for name in weights if name not in state.parts]
    if missing or not weights:
        raise ExportError(
            f"the matcher '{state.matcher.metric}' needs a small network of '{modality}', and the state "
            + (f"lacks {', '.join(missing[:5])}" if missing else "holds none"),
            remedy="Export the state of a run's last round, or with --mask zero.",
        )
    return matcher_networks(state.model, state.parts, part, weights)


def _software() -> dict[str, str]:
    found = {"edgefl": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def padded(model: ModelSpec, parts: Parts, masks: Sequence[str], capacity: int | None) -> dict[str, ClassMeans]:
    """Every modality's table padded to the capacity (all rows absent where there is none); {} when none is used.

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
