"""Format of a bundle: a folder with ``model.onnx`` and this manifest. Neither torch nor onnx here.

A model of several modalities gives one bundle for each alone and one of all. The latter answers samples that lack some
of them (docs/decisions/0034): beside each modality it takes ``<m>.present`` [batch], 1 where a sample has it and 0
where not; whatever finite numbers stand in the input there do not count. Labelled bundles take the prototype tables as
inputs: ``prototypes.<m>`` [capacity, d] and ``prototypes.<m>.valid`` [capacity], 1 or 0 for each row. What an export
found is in ``TABLES_FILE`` beside the model, or inside it as the inputs' defaults; without tables among its inputs
the model has them for good (docs/decisions/0051). A call whose ``valid`` is all 0 gets the zero mask, so one file
serves both. A model that makes stand-ins of its own weights holds these, and has that mask alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from edgefl.data.labels import MAX_CLASSES
from edgefl.errors import ExportError
from edgefl.export.precision_record import EXACT, Precision, Reduced
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.prototypes.mask import Matcher
from edgefl.records import CellName, ObjectRef
from edgefl.run_records import BundleRow
from edgefl.storage.disk import read_at_most

#: Grow when a field changes its meaning or goes away; new fields leave them as they are.
FORMAT = "edgefl.bundle/1"
INDEX_FORMAT = "edgefl.bundles/1"
MODEL_FILE = "model.onnx"
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "index.json"
TABLES_FILE = "tables.json"
BATCH = "batch"
#: Texts are exported for this length and more: `torch.export` cannot treat one and two tokens like the rest, because
#: tensors of one element broadcast. Serving pads shorter texts with 0, which changes nothing.
MIN_LENGTH = 3
#: Rounding of float32 in another order of operations gives 1e-6; a wrong graph gives 1e-2 and more.
TOLERANCE = 1e-4
#: A manifest has a few kilobytes; with 100,000 label names some megabytes. Read whole, so bounded.
MAX_MANIFEST_BYTES = 64 * 2**20
#: A server makes arrays of these sizes when it starts. 256 MiB in f32: an hour of sound, a picture of 22 megapixels.
MAX_SAMPLE_VALUES = 2**26

#: A mask: the method that fills in the modalities that a sample lacks.
MaskName = CellName
#: Those that a command line names; another package's is the recipe's, and taken by itself.
OwnMask = Literal["prototype", "zero", "reconstruction"]
#: What an export may be asked for in place of one mask: prototypes, and zeros for a call that brings none.
BOTH = "both"
#: Mask -> what it fills in with, in words; "none": nothing; another package's method: its name.
STAND_INS: dict[str, str] = {"prototype": "prototypes", "zero": "zeros", "none": ""}
#: The mask for which every row of the tables counts as absent.
ZERO: MaskName = "zero"
#: The mask of a call that names none, where the recipe does not train with zeros and the bundle has tables.
USUAL: MaskName = "prototype"
DAMAGED = "Export it again with `edgefl export RUN`, or copy the bundle's folder anew."


class Axis(msgspec.Struct, frozen=True):
    """Allowed sizes of a dynamic axis; ``maximum`` None: any."""

    minimum: int = 1
    maximum: int | None = None


class Port(msgspec.Struct, frozen=True):
    """One input or output of the graph. A name among the sizes is a dynamic axis, described in ``Manifest.axes``."""

    name: str = ""
    dtype: Literal["float32", "int64", "bool"] = "float32"
    shape: tuple[int | str, ...] = ()


#: How the match is compared (``edgefl.export.parity``).
MATCHED, WEIGHTS = "matched.score", "weights.score"


class Check(msgspec.Struct, frozen=True):
    """One comparison of onnxruntime with torch: difference of each output.

    logits, probabilities, embeddings: the largest absolute difference. ``MATCHED`` and ``WEIGHTS`` are in scores
    (cosines, probabilities, or distances as shares of the largest): how much larger one left out is than one chosen,
    and how far off one would have to be to give the weight. ``mask`` "override": with other tables than those in the
    file. ``given``: what the samples had, such as "acc" and "acc+gyro", each sample another.
    """

    mask: str = "none"
    given: tuple[str, ...] = ()
    sizes: dict[str, int] = {}
    differences: dict[str, float] = {}


class TokenizerFile(msgspec.Struct, frozen=True):
    """A text's tokenizer beside the model."""

    file: str = ""
    sha256: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """A bundle's description. ``masks``: the masks it was checked with; ``absent``: the modalities no sample has.

    ``subsets``: "complete", a sample has all ``modalities``; "any", at least one of them, as ``presence`` says of each.
    ``metric``, ``top_k``, ``temperature``: how prototypes are found; ``networks``: the weights of the small networks
    that do it, where the metric is a trained one, of one modality after the other. ``untrained``: parts that the recipe
    trains, and of which no device sent an update: they hold what the run began with.
    """

    format: str = FORMAT
    name: str = ""
    file: str = MODEL_FILE
    sha256: str = ""
    size_bytes: int = 0
    opset: int = 0
    ir_version: int = 0
    task: Literal["classify", "embed"] = "classify"
    modalities: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    subsets: Literal["complete", "any"] = "complete"
    encoders: dict[str, EncoderSpec] = {}  # of the modalities it takes
    labels: tuple[str, ...] = ()
    label_column: CellName = ""  # of the user's table, where labels came from one
    inputs: tuple[Port, ...] = ()
    presence: tuple[Port, ...] = ()
    tables: tuple[Port, ...] = ()
    table_file: str = ""  # "": each is optional, its default is in the model
    table_sha256: str = ""
    outputs: tuple[Port, ...] = ()
    axes: dict[str, Axis] = {}
    mask: MaskName = "none"  # what a plain call does
    masks: tuple[MaskName, ...] = ()
    metric: str = "cosine"
    top_k: int = 0
    temperature: float = 0.0
    networks: tuple[float, ...] = ()
    capacity: int = 0
    tolerance: float = 0.0
    max_difference: float = 0.0
    parity: tuple[Check, ...] = ()
    stage: int = 0
    depth: int = 0
    parts: dict[str, ObjectRef] = {}
    untrained: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    tokenizers: dict[str, TokenizerFile] = {}  # of texts whose checkpoint has one
    precision: Precision = EXACT
    reduced: Reduced | None = None  # None: it is f32

    @property
    def fills(self) -> tuple[str, ...]:
        """Modalities possibly filled in by a mask, in the order of the output ``matched``."""
        return self.absent or (self.modalities if self.subsets == "any" and self.task == "classify" else ())

    def serves(self, given: Collection[str]) -> bool:
        """True if the bundle answers samples with exactly the modalities ``given``."""
        known = set(self.modalities)
        return set(given) == known or (self.subsets == "any" and bool(given) and set(given) <= known)


class Index(msgspec.Struct, frozen=True):
    """The bundles of one folder; their paths are relative to it."""

    format: str = INDEX_FORMAT
    bundles: tuple[BundleRow, ...] = ()


def bundle_name(modalities: tuple[str, ...]) -> str:
    """Name of a bundle: ``acc``, or ``acc+gyro`` (a modality's name has no +)."""
    return "+".join(modalities)


def input_ports(model: ModelSpec, modalities: tuple[str, ...]) -> tuple[tuple[Port, ...], dict[str, Axis]]:
    """Input ports, one per modality, and the dynamic axes."""
    axes = {BATCH: Axis()}
    ports = []
    for m in modalities:
        encoder = model.encoders[m]
        shape: tuple[int | str, ...] = tuple(encoder.input_shape)
        if encoder.kind == "text" and encoder.input_shape[0] > MIN_LENGTH:
            axes[f"{m}.length"] = Axis(MIN_LENGTH, encoder.input_shape[0])
            shape = (f"{m}.length",)
        ports.append(Port(m, "int64" if encoder.kind == "text" else "float32", (BATCH, *shape)))
    return tuple(ports), axes


def presence_ports(modalities: tuple[str, ...]) -> tuple[Port, ...]:
    """Ports of presence flags [batch] for each of several modalities; none for a single one."""
    return tuple(Port(present_name(m), "float32", (BATCH,)) for m in modalities if len(modalities) > 1)


def fillable(model: ModelSpec, given: tuple[str, ...]) -> tuple[str, ...]:
    """Modalities possibly absent from samples of a bundle for those ``given``; () without labels."""
    return tuple(m for m in model.encoders if len(given) > 1 or m not in given) if model.classes else ()


def table_names(model: ModelSpec, given: tuple[str, ...], matcher: Matcher) -> tuple[str, ...]:
    """Modalities with prototype inputs, in the graph's order: all, or with matcher networks the fillable ones."""
    return tuple(m for m in model.encoders if not matcher.trained or m in fillable(model, given))


def table_ports(model: ModelSpec, names: tuple[str, ...], capacity: int) -> tuple[Port, ...]:
    """Ports of prototype rows and valid flags for the modalities ``names``."""
    ports = []
    for m in names:
        # Flags as numbers: several runtimes do not take inputs of type bool.
        width = model.head.out
        ports += [Port(table_name(m), "float32", (capacity, width)), Port(valid_name(m), "float32", (capacity,))]
    return tuple(ports)


def output_ports(model: ModelSpec, modalities: tuple[str, ...], top_k: int) -> tuple[Port, ...]:
    """Output ports: logits and probabilities, with ``top_k`` also matches of fillable modalities; or embeddings."""
    if not model.classes:
        return tuple(Port(f"embedding.{m}", "float32", (BATCH, model.head.out)) for m in modalities)
    ports = tuple(Port(name, "float32", (BATCH, model.classes)) for name in ("logits", "probabilities"))
    if not top_k:
        return ports
    matches = (BATCH, len(fillable(model, modalities)), top_k)
    return (*ports, Port("matched", "int64", matches), Port("weights", "float32", matches))


def present_name(modality: str) -> str:
    """Name of the presence input of a modality."""
    return f"{modality}.present"


def table_name(modality: str) -> str:
    """Name of the prototype input of a modality."""
    return f"prototypes.{modality}"


def valid_name(modality: str) -> str:
    """Name of the input of valid flags for a modality's prototypes."""
    return f"prototypes.{modality}.valid"


def encode_json(value: msgspec.Struct) -> bytes:
    """A manifest or index as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the bundle in ``directory``. Raises ExportError (missing, damaged, of another version)."""
    path = directory / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(read_at_most(path, MAX_MANIFEST_BYTES), type=Manifest)
    except OSError as error:
        raise ExportError(
            f"{directory} holds no bundle: {MANIFEST_FILE} cannot be read ({error.strerror or error})",
            remedy="Give the folder of a bundle, or the folder `edgefl export` wrote.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path} is damaged: {error}", remedy=DAMAGED) from error
    if manifest.format != FORMAT:
        raise ExportError(
            f"{path} has the format {manifest.format[:80]!r}, and this version reads {FORMAT!r}",
            remedy="Export the run again with this version of EdgeFL.",
        )
    count = len(manifest.labels)
    if count > MAX_CLASSES:
        raise ExportError(f"{path} names {count} labels, more than {MAX_CLASSES}", remedy=DAMAGED)
    if odd := [port.shape for port in manifest.outputs if port.name == "logits" and port.shape[-1:] != (count,)]:
        raise ExportError(f"{path} names {count} labels, and its logits are {odd[0]!r:.60}", remedy=DAMAGED)
    if odd_inputs := [port for port in manifest.inputs if not _has_samples(port, manifest.axes)]:
        raise ExportError(f"{path}: '{odd_inputs[0].name}' has sizes that no sample has", remedy=DAMAGED)
    return _with_tokenizers(directory, manifest) if manifest.tokenizers else manifest


def _has_samples(port: Port, axes: Mapping[str, Axis]) -> bool:
    """Whether an input has a batch axis, and axes of a sample within MAX_SAMPLE_VALUES."""
    sizes = [axes.get(size, Axis()) if isinstance(size, str) else Axis(size, size) for size in port.shape[1:]]
    valid = all(1 <= axis.minimum <= (axis.maximum or 0) for axis in sizes)
    return port.shape[:1] == (BATCH,) and valid and math.prod(axis.maximum or 0 for axis in sizes) <= MAX_SAMPLE_VALUES


def _with_tokenizers(directory: Path, manifest: Manifest) -> Manifest:
    """The manifest, its texts' checkpoints replaced by the tokenizers in the bundle. Raises ExportError."""
    encoders = dict(manifest.encoders)
    for modality, tokenizer in manifest.tokenizers.items():
        path = directory / Path(tokenizer.file).name  # a manifest cannot point out of its folder
        try:
            data = read_at_most(path, MAX_MANIFEST_BYTES)
        except (OSError, ValueError) as error:
            raise ExportError(f"{path}: the tokenizer cannot be read: {error}", remedy=DAMAGED) from error
        if hashlib.sha256(data).hexdigest() != tokenizer.sha256 or modality not in encoders:
            raise ExportError(f"{path} is not the tokenizer that the manifest names", remedy=DAMAGED)
        encoders[modality] = msgspec.structs.replace(encoders[modality], pretrained=str(path))
    return msgspec.structs.replace(manifest, encoders=encoders)


def read_model(directory: Path, manifest: Manifest) -> bytes:
    """The model file's bytes, with size and hash verified by the manifest. Raises ExportError."""
    path = directory / Path(manifest.file).name  # a manifest cannot point out of its folder
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size == manifest.size_bytes else b""
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise ExportError(
            f"{directory}: the model file {manifest.file!r:.80} cannot be read: {reason}", remedy=DAMAGED
        ) from error
    if size != manifest.size_bytes:
        raise ExportError(f"{path} has {size} bytes, its manifest says {manifest.size_bytes}", remedy=DAMAGED)
    found = hashlib.sha256(data).hexdigest()
    if found != manifest.sha256:
        raise ExportError(
            f"{path} is damaged: sha256 {found[:16]}…, its manifest says {manifest.sha256[:16]}…", remedy=DAMAGED
        )
    return data
