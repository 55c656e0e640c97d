"""Export of a model as ONNX bundles, one per modality and one for any subset; all or none are written.

Everything is written and checked beside the target and renamed into place at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from edgefl import __version__
from edgefl.data.tokens import FILE_ENDING, tokenizer_file
from edgefl.errors import EdgeFLError, ExportError, MissingDependencyError
from edgefl.export.bundle_format import (
    BOTH,
    INDEX_FILE,
    INDEX_FORMAT,
    MANIFEST_FILE,
    MATCHED,
    MODEL_FILE,
    TABLES_FILE,
    USUAL,
    WEIGHTS,
    ZERO,
    Index,
    Manifest,
    MaskName,
    TokenizerFile,
    bundle_name,
    encode_json,
    fillable,
    input_ports,
    output_ports,
    presence_ports,
    table_name,
    table_names,
    table_ports,
)
from edgefl.export.drafts import Draft, TrainedState, drafted
from edgefl.export.folder import folder_of, replaced
from edgefl.export.form import PLAIN, Form
from edgefl.export.guide import EXAMPLE, README, example, readme
from edgefl.export.measure import Samples
from edgefl.export.precision_record import EXACT, Precision
from edgefl.export.reduced import Exact, reduced
from edgefl.export.session import open_session
from edgefl.export.tables import encode_tables, padded
from edgefl.models.spec import PROTOTYPES, ModelSpec
from edgefl.plan.stages import restrict
from edgefl.prototypes.table import ClassMeans
from edgefl.registry import methods
from edgefl.run_records import BundleRow
from edgefl.storage.checkpoint_paths import is_own
from edgefl.storage.disk import write_new

_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "transformers", "numpy")


def export_bundles(
    state: TrainedState,
    directory: Path,
    *,
    capacity: int | None = None,
    mask: str = BOTH,
    tolerance: float = 1e-4,
    form: Form = PLAIN,
    samples: Samples | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[BundleRow]:
    """Write ``directory``/<modalities>/{model.onnx, manifest.json, …} and index.json; replaces an earlier export there.

    A lower precision goes to ``directory`` with its name at the end; ``samples``: what it is measured with.
    ``mask``: a stand-in, or ``BOTH``; one that is not made of prototype tables leaves these out. ``capacity``: rows of
    each table, the number of classes by default. ``progress`` is called with a line before each bundle is made. Rows by
    precision, in the order: single modalities, then all.

    Raises ExportError, and publishes nothing, when parts are missing, the export fails, onnxruntime and torch differ by
    more than ``tolerance``, or a lower precision costs too much; StoreError when the disk refuses;
    MissingDependencyError.
    """
    masks = _ready(state, mask)
    from edgefl.export import tracing  # needs torch and onnx, which _ready has seen to

    if form.tables != "required" and state.plain == ZERO and ZERO in masks:
        masks = (ZERO,)  # a file that needs no tables beside it is the plain call's
    masks = masks[:1] if form.tables == "fixed" else masks
    tables = padded(state.model, state.parts, masks, capacity)
    wanted = _inputs(state.model)
    places = {kind: folder_of(directory, kind) for kind in form.precisions}
    tokenizers = _tokenizers(state.model, progress)
    rows: dict[Precision, list[BundleRow]] = {kind: [] for kind in places}
    with replaced(list(places.values())) as building:
        drafts = drafted(state, [_described(state, given, masks, tables, form) for given in wanted], tables)
        files = tracing.Trace(drafts, form.opset)
        for i, draft in enumerate(drafts):
            progress(f"bundle {i + 1} of {len(drafts)}: {draft.manifest.name}")
            exact = _exact(draft, tables, tolerance, tracing.to_onnx(draft, form, files))
            for root, (kind, own) in zip(building, rows.items(), strict=True):
                own.append(_write(root, _as(exact, kind, samples, form, progress), tokenizers))
        for root, own in zip(building, rows.values(), strict=True):
            write_new(root / INDEX_FILE, encode_json(Index(INDEX_FORMAT, tuple(own))))
    return [
        msgspec.structs.replace(row, path=str(places[kind] / row.path)) for kind, own in rows.items() for row in own
    ]


def _as(exact: Exact, kind: Precision, samples: Samples | None, form: Form, progress: Callable[[str], None]) -> Exact:
    """The f32 bundle converted to a precision. Raises ExportError."""
    if kind == EXACT:
        return exact
    if samples is None:
        raise ExportError(
            f"there are no samples to measure {kind} with", remedy="Give some of your own, with --calibrate DATA."
        )
    progress(f"  in {kind}")
    return reduced(exact, kind, samples, form.max_loss)


def _inputs(model: ModelSpec) -> list[tuple[str, ...]]:
    """The modalities of each bundle: one each, then all."""
    names = tuple(model.encoders)
    return [*((m,) for m in names if len(names) > 1), names]


def _ready(state: TrainedState, mask: str) -> tuple[MaskName, ...]:
    """The masks to offer. Raises for missing packages or parts, or an impossible mask."""
    for package, extra in (("torch", "train"), ("onnx", "export"), ("onnxscript", "export"), ("onnxruntime", "export")):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(package, extra)
    missing = [part for part in state.stage.present if part not in state.parts]
    if missing:
        raise ExportError(
            f"the state lacks {len(missing)} parts of stage {state.stage.index}: {', '.join(missing[:5])}",
            remedy="Export a state that a finished round wrote.",
        )
    makers, masks = methods("missing"), (USUAL, ZERO) if mask == BOTH else (mask,)
    if not makers.keys() >= {*masks}:
        raise ExportError(f"unknown mask {mask!r}", remedy=f"Choose one of: {', '.join([*makers, BOTH])}.")
    if not all(makers[one].tables or makers[one].offers(state.model, {}) for one in masks):
        raise ExportError(
            f"the model cannot make the stand-ins {mask}",
            remedy=f"Export with another --mask, or train with missing: {mask}.",
        )
    return masks


def _default_mask(wanted: MaskName, masks: tuple[MaskName, ...]) -> MaskName:
    """Default mask of a bundle: the wanted one, or its first."""
    if not masks:
        return "none"
    return wanted if wanted in masks else masks[0]


def _described(
    state: TrainedState,
    given: tuple[str, ...],
    offered: tuple[MaskName, ...],
    padded: Mapping[str, ClassMeans],
    form: Form,
) -> Manifest:
    """Manifest of the bundle for the modalities ``given``, before its file and parity check exist."""
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
        label_column=model.label_column,
        inputs=inputs,
        presence=presence_ports(given),
        tables=() if form.tables == "fixed" else table_ports(model, tables, rows),
        table_file=TABLES_FILE if tables and form.tables == "required" else "",
        outputs=output_ports(model, given, min(matcher.k, rows)),
        axes=axes,
        mask=_default_mask(state.plain, masks),
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


def _exact(draft: Draft, padded: Mapping[str, ClassMeans], tolerance: float, data: bytes) -> Exact:
    """The f32 bundle of a draft and its ONNX bytes, after the parity check."""
    import onnx

    from edgefl.export.parity import check

    graph, manifest = draft.graph, draft.manifest
    tables = {m: table for m, table in padded.items() if table_name(m) in draft.tables}
    checks = check(open_session(data), graph, manifest, tables, tolerance)
    proto = onnx.load_model_from_string(data)
    manifest = msgspec.structs.replace(
        manifest,
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        opset=int(max(entry.version for entry in proto.opset_import if entry.domain in {"", "ai.onnx"})),
        ir_version=int(proto.ir_version),
        tolerance=tolerance,
        # Of what is answered: the differences of the match are in scores.
        max_difference=max(v for one in checks for k, v in one.differences.items() if k not in {MATCHED, WEIGHTS}),
        parity=checks,
    )
    return Exact(manifest, data, draft.tables)


def _tokenizers(model: ModelSpec, progress: Callable[[str], None]) -> dict[str, bytes]:
    """Modality -> tokenizer file of its checkpoint; an unavailable one is reported and left out."""
    found = {}
    for modality, encoder in model.encoders.items():
        if encoder.kind == "text" and encoder.pretrained and not is_own(encoder.pretrained):
            try:
                found[modality] = tokenizer_file(encoder.pretrained, encoder.vocabulary)
            except EdgeFLError as error:
                progress(f"warning: the bundles hold no tokenizer for {modality!r}: {error.message}")
    return found


def _with_tokenizers(folder: Path, manifest: Manifest, tokenizers: Mapping[str, bytes]) -> Manifest:
    """The manifest with the tokenizers of the bundle's texts, written beside it."""
    files = {}
    for modality in (m for m in manifest.modalities if m in tokenizers):
        name = FILE_ENDING if len(tokenizers) == 1 else f"{modality}.{FILE_ENDING}"
        write_new(folder / name, tokenizers[modality])
        files[modality] = TokenizerFile(name, hashlib.sha256(tokenizers[modality]).hexdigest())
    return msgspec.structs.replace(manifest, tokenizers=files)


def _write(root: Path, bundle: Exact, tokenizers: Mapping[str, bytes]) -> BundleRow:
    """Write the bundle's folder into ``root``."""
    manifest = bundle.manifest
    folder = root / manifest.name
    folder.mkdir()
    write_new(folder / MODEL_FILE, bundle.data)
    if manifest.table_file:
        beside = encode_tables(bundle.tables)
        write_new(folder / manifest.table_file, beside)
        manifest = msgspec.structs.replace(manifest, table_sha256=hashlib.sha256(beside).hexdigest())
    manifest = _with_tokenizers(folder, manifest, tokenizers)
    write_new(folder / MANIFEST_FILE, encode_json(manifest))
    write_new(folder / README, readme(manifest).encode())
    write_new(folder / EXAMPLE, example(manifest).encode())
    row = BundleRow(
        manifest.name,
        f"{manifest.name}/{MODEL_FILE}",
        manifest.modalities,
        manifest.size_bytes,
        manifest.max_difference,
        manifest.tolerance,
        manifest.precision,
    )
    if manifest.reduced is None:
        return row
    return msgspec.structs.replace(row, lost_points=manifest.reduced.worst, max_loss=manifest.reduced.max_loss)


def _software() -> dict[str, str]:
    found = {"edgefl": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
