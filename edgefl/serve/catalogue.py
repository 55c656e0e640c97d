"""Models of a server: all bundles as one model with optional inputs, and each bundle by itself."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgefl.data.label_sets import plain_names
from edgefl.data.readers import Target, target
from edgefl.errors import ExportError
from edgefl.export.bundle_format import MANIFEST_FILE, Manifest, Port
from edgefl.export.micro_batch import tuned
from edgefl.export.runtime import ROWS, Bundle, choose, encoders, find_bundles, load_bundle
from edgefl.export.session import Device, runs_on
from edgefl.models.spec import EncoderSpec

#: A model's name is a part of URLs and topics.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Seconds at the start for the micro-batch sizes of all bundles together: a start without takes 0.6.
TUNING_S = 3.0
_DATATYPES = {"float32": "FP32", "int64": "INT64"}


@dataclass(frozen=True)
class Model:
    """A model for clients. ``complete``: requests must give all of its inputs."""

    name: str
    bundles: Mapping[Path, Bundle]
    complete: bool

    @property
    def manifests(self) -> dict[Path, Manifest]:
        """Folder -> manifest of its bundles."""
        return {path: bundle.manifest for path, bundle in self.bundles.items()}

    @property
    def encoders(self) -> dict[str, EncoderSpec]:
        """Modality -> encoder specification of the model's inputs."""
        return encoders(self.manifests)

    @property
    def inputs(self) -> dict[str, Port]:
        """Name -> port of the model's inputs."""
        return {port.name: port for one in self.manifests.values() for port in one.inputs}

    @property
    def first(self) -> Bundle:
        """The first of its bundles, all of the same model."""
        return next(iter(self.bundles.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """Class names; () for a model of embeddings."""
        return self.first.manifest.labels

    @property
    def runs_on(self) -> str:
        """Execution provider of the onnxruntime session."""
        return runs_on(self.first.session)

    @property
    def untrained(self) -> tuple[str, ...]:
        """Parts never trained by a device, with unreliable answers."""
        return tuple(sorted({part for one in self.manifests.values() for part in one.untrained}))

    def pick(self, given: Collection[str]) -> Bundle | None:
        """The bundle for samples with exactly these modalities; None without one."""
        if self.complete and set(given) != set(self.inputs):
            return None
        path = choose(self.manifests, frozenset(given))
        return None if path is None else self.bundles[path]

    def describe(self) -> dict[str, object]:
        """The model's metadata in the protocol's form; a size of -1: any."""
        manifest = self.first.manifest
        floats = [("logits", len(self.names)), ("probabilities", len(self.names))]
        outputs = [{"name": name, "datatype": "FP32", "shape": [-1, size]} for name, size in floats]
        outputs.append({"name": "label", "datatype": "BYTES", "shape": [-1]})
        if manifest.task == "embed":
            widths = {port.name: port.shape[1] for one in self.manifests.values() for port in one.outputs}
            outputs = [{"name": name, "datatype": "FP32", "shape": [-1, size]} for name, size in widths.items()]
        return {
            "name": self.name,
            "versions": ["1"],
            "platform": "onnxruntime_onnx",
            "inputs": [_described(port) for port in self.inputs.values()],
            "outputs": outputs,
            "parameters": {
                "inputs_needed": "all" if self.complete else "any",
                "providers": ",".join(self.first.session.get_providers()),
                "runs_on": self.runs_on,
                "micro_batches": ",".join(f"{one.manifest.name}={one.rows}" for one in self.bundles.values()),
                "masks": ",".join(dict.fromkeys(mask for one in self.manifests.values() for mask in one.masks)),
                "labels": "\n".join(plain_names(self.names)),
                "untrained": ",".join(self.untrained),
            },
        }


def _described(port: Port) -> dict[str, object]:
    shape = [-1 if isinstance(size, str) else size for size in port.shape]
    return {"name": port.name, "datatype": _DATATYPES[port.dtype], "shape": shape}


@dataclass(frozen=True)
class Catalogue:
    """The models by name; ``main`` takes raw samples."""

    models: Mapping[str, Model]
    main: Model
    targets: Mapping[str, Target]  # how texts and files of each modality are read


def load_catalogue(
    path: Path, *, name: str = "", device: Device = "auto", threads: int = 0, micro_batch: int = ROWS
) -> Catalogue:
    """Every bundle at ``path``, loaded and tried with one sample. ``name`` "": that of the run, or of the folder.

    ``micro_batch``: samples of one call of onnxruntime; 0: the fastest of each bundle here, by measurement.

    Raises ExportError, MissingDependencyError.
    """
    manifests = find_bundles(path)
    name = name or _name_of(path, manifests)
    if not _NAME.fullmatch(name):
        raise ExportError(
            f"{name!r:.150} cannot name a model",
            remedy="Give --name NAME: letters, digits and . _ -, beginning with a letter or digit, at most 64.",
        )
    bundles = {one: load_bundle(one, device=device, threads=threads) for one in manifests}
    for one, bundle in bundles.items():
        _try(bundle)
        fixed = replace(bundle, rows=micro_batch)
        bundles[one] = fixed if micro_batch else tuned(bundle, TUNING_S / len(bundles))
    main = Model(name, bundles, complete=False)
    models = {name: main}
    if len(bundles) > 1 or (path / MANIFEST_FILE).is_file() is False:
        models |= {
            f"{name}-{bundle.manifest.name}": Model(f"{name}-{bundle.manifest.name}", {one: bundle}, complete=True)
            for one, bundle in bundles.items()
        }
    targets = {m: target(encoder) for m, encoder in main.encoders.items()}
    return Catalogue(models, main, targets)


def _name_of(path: Path, manifests: Mapping[Path, Manifest]) -> str:
    folder = (path.parent if path.is_file() else path).resolve()
    if folder.name == "bundles" and folder not in {one.resolve() for one in manifests}:
        return folder.parent.name
    return folder.name


def _try(bundle: Bundle) -> None:
    """Warm up a bundle with one sample of zeros, so that a failing one fails at the start."""
    axes = bundle.manifest.axes
    shapes = {
        port.name: [1, *(axes[size].minimum if isinstance(size, str) else size for size in port.shape[1:])]
        for port in bundle.manifest.inputs
    }
    bundle.predict({port.name: np.zeros(shapes[port.name], port.dtype) for port in bundle.manifest.inputs})
