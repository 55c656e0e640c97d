"""Latency and memory of a bundle, in a process of its own. No torch.

`python -m edgefl.export.benchmark` is that process: a worker (``edgefl.process.worker``) of one bundle.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from edgefl.data.arrays import read_npz
from edgefl.data.dataset import Dataset
from edgefl.export.bundle_format import (
    MANIFEST_FILE,
    Manifest,
    encode_json,
    read_manifest,
    read_model,
    table_name,
    valid_name,
)
from edgefl.export.folder import folder_of
from edgefl.export.form import PRECISIONS
from edgefl.export.measure import Samples, in_turn
from edgefl.export.precision_record import Precision
from edgefl.export.reduced import Exact, reduced
from edgefl.export.runtime import find_bundles, load_bundle
from edgefl.export.session import Device, runs_on
from edgefl.export.tables import read_tables
from edgefl.process.worker import Note, serve
from edgefl.resources.process_memory import idle_rss_bytes, peak_bytes


class Task(msgspec.Struct, frozen=True):
    """A bundle's folder, the file of its inputs (.npz: an array a modality, of the largest batch), and batch sizes."""

    bundle: str
    inputs: str
    batches: tuple[int, ...]
    device: Device = "auto"
    threads: int = 0


class Speed(msgspec.Struct, frozen=True):
    """Median milliseconds of a call with ``batch`` samples, and the process's peak so far (None: unknown)."""

    batch: int
    call_ms: float
    calls: int
    peak_bytes: int | None


class Measured(msgspec.Struct, frozen=True):
    """Result of a task. ``idle_bytes``: memory of the process with onnxruntime, before loading a bundle."""

    runs_on: str
    idle_bytes: int
    speeds: tuple[Speed, ...]


def measured(task: Task) -> Measured:
    """Speeds and peaks of the task's bundle, smaller batches first: a process's peak only rises."""
    arrays = read_npz(Path(task.inputs))
    import onnxruntime  # noqa: F401 - part of the idle process

    idle = idle_rss_bytes()
    bundle = load_bundle(task.bundle, device=task.device, threads=task.threads)
    speeds = []
    for batch in sorted(task.batches):
        inputs = {m: array[:batch] for m, array in arrays.items()}
        (median,), calls = in_turn([partial(bundle.predict, inputs)])
        speeds.append(Speed(batch, median, calls, peak_bytes()))
    return Measured(runs_on(bundle.session), idle, tuple(speeds))


def exported_precisions(path: Path) -> dict[Precision, Path]:
    """Precision -> path of the same bundle in that precision, of those exported.

    ``path``: a bundle's folder or file, or the folder of all bundles. Raises ExportError where there is none.
    """
    bundles = find_bundles(path)
    first, manifest = next(iter(bundles.items()))
    folder = (path.parent if path.is_file() else path).absolute()
    inside = folder.name if folder == first.absolute() else ""
    root = folder.parent if inside else folder
    plain = root.with_name(root.name.removesuffix(f"-{manifest.precision}"))
    places = {kind: folder_of(plain, kind) / inside for kind in PRECISIONS} | {manifest.precision: folder}
    pattern = MANIFEST_FILE if inside else f"*/{MANIFEST_FILE}"
    return {kind: place for kind, place in places.items() if any(place.glob(pattern))}


def convert(folder: Path, target: Path, kind: Precision, samples: Samples, max_loss: float) -> None:
    """Write the f32 bundle in ``folder`` to ``target`` in a lower precision. Raises ExportError as ``reduced``."""
    manifest = read_manifest(folder)
    tables = read_tables(folder, manifest)
    inside = [name for m in (*manifest.modalities, *manifest.absent) for name in (table_name(m), valid_name(m))]
    tables = tables or dict.fromkeys(inside, np.empty(0))  # those in the model are left as they are, by their names
    made = reduced(Exact(manifest, read_model(folder, manifest), tables), kind, samples, max_loss)
    shutil.copytree(folder, target)
    (target / manifest.file).write_bytes(made.data)
    changed = {"sha256": hashlib.sha256(made.data).hexdigest(), "size_bytes": len(made.data), "precision": kind}
    (target / MANIFEST_FILE).write_bytes(encode_json(msgspec.structs.replace(manifest, **changed)))


def inputs_of(manifest: Manifest, given: Sequence[str], data: Dataset | None, batch: int) -> Mapping[str, np.ndarray]:
    """Inputs [batch, *shape] of each modality: the samples, repeated as needed; zeros where there are none."""
    found = {}
    for port in manifest.inputs:
        if port.name in given and data is not None and len(data):
            found[port.name] = np.resize(data.modalities[port.name], (batch, *data.modalities[port.name].shape[1:]))
        elif port.name in given:
            axes = (manifest.axes[size].maximum or 1 if isinstance(size, str) else size for size in port.shape[1:])
            found[port.name] = np.zeros((batch, *axes), port.dtype)
    return found


def _answer(body: object, _: Note) -> Measured:
    return measured(msgspec.convert(body, Task))


if __name__ == "__main__":
    serve({"measure": _answer})
