"""Own checkpoints: the encoders of a model in one safetensors file, cut by block, whatever stages it had.

A tensor is called ``<piece>|<name>``; pieces are ``embed``, ``block/<i>`` (i counted from 0 through all stages) and
``norm``. In a file of several encoders ``<modality>/`` stands before them, and with multiway encoders
``shared/block/<i>`` is the attention of layer i. A file of one encoder fits any modality of its kind and shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edgefl.errors import ModelError
from edgefl.models.low_rank import merged
from edgefl.models.parts import Tensors, check_shapes, named_tensors, part_tensors
from edgefl.models.spec import EncoderSpec, ModelSpec, is_encoder, part_names
from edgefl.models.staged import StagedModel, build
from edgefl.storage.checkpoint_paths import located
from edgefl.storage.disk import store_errors, write_new

SHARED = "shared"
#: What the names of the one encoder of a file begin with.
_PIECES = ("embed|", "block/", "norm|")
_FORMAT = "edgefl-encoders/1"


class _Wanted(NamedTuple):
    part: str
    tensor: str
    shape: tuple[int, ...]


def save_encoders(path: Path, model: StagedModel) -> None:
    """Write all encoders of ``model``, its shared attention included, to ``path``: whole or not at all.

    Low-rank terms are in the weights. Raises StoreError when the disk refuses.
    """
    spec = model.spec
    parts = merged({part: part_tensors(model, part) for part in filter(is_encoder, part_names(spec))}, spec.lora)
    alone = len(spec.encoders) == 1
    tensors: Tensors = {}
    for part, named in parts.items():
        owner = part.partition("/")[0]
        prefix = "" if alone and owner != SHARED else f"{owner}/"
        tensors |= {_name(spec, part, prefix, name): value for name, value in named.items()}
    encoders = {"" if alone else modality: encoder for modality, encoder in spec.encoders.items()}
    about = {
        "format": _FORMAT,
        "sharing": spec.encoder_sharing,
        "encoders": msgspec.json.encode(encoders).decode(),
    }
    data = save(tensors, metadata=about)
    with store_errors("write", path, len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new(path, data)


def own_parts(spec: ModelSpec, owner: str) -> Iterator[tuple[str, Tensors]]:
    """The parts of one encoder, or of the shared attention (``owner`` "shared"), one at a time out of its file.

    Raises ModelError when the file can't be read or does not fit.
    """
    file = _File(spec, owner)
    wanted = file.check()
    with file.open() as opened:
        for part in _parts(spec, owner):
            yield part, {w.tensor: opened.get_tensor(name) for name, w in wanted.items() if w.part == part}


def check_own(spec: ModelSpec, owner: str) -> None:
    """As :func:`own_parts`, without reading a tensor."""
    _File(spec, owner).check()


class _File:
    """The file that holds an owner's parts, and what is wrong with it."""

    def __init__(self, spec: ModelSpec, owner: str) -> None:
        self.spec, self.owner = spec, owner
        first = next(iter(spec.encoders.values()))
        self.encoder = first if owner == SHARED else spec.encoders[owner]
        whose = "the shared attention" if owner == SHARED else f"modality '{owner}'"
        self.label = f"checkpoint '{self.encoder.pretrained}' for {whose}"

    def open(self) -> safe_open:
        path = Path(located(self.encoder.pretrained))
        if not path.is_file():
            raise ModelError(
                f"the {self.label} cannot be read: there is no such file",
                remedy="Check the path; python -m benchmarks.accuracy.pretrain writes such files.",
            )
        try:
            return safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the {self.label} cannot be read: {error}", remedy="Write the file anew.") from error

    def check(self) -> dict[str, _Wanted]:
        """{name in the file: what the model wants of it}. Raises ModelError naming the first difference."""
        with self.open() as file:
            theirs, prefix = self._encoder(file.metadata() or {})
            parts = _parts(self.spec, self.owner)
            model = build(self.spec, parts, device="meta")
            wanted = {
                _name(self.spec, part, prefix, name): _Wanted(part, name, tuple(tensor.shape))
                for part in parts
                for name, tensor in named_tensors(model.part(part)).items()
            }
            own = [n for n in file.keys() if n.startswith(prefix or _PIECES)]  # noqa: SIM118 - not a dictionary
            slices = {name: file.get_slice(name) for name in own}
            shapes = {name: tuple(piece.get_shape()) for name, piece in slices.items()}
            try:
                check_shapes(self.owner, {name: w.shape for name, w in wanted.items()}, shapes)
            except ModelError as error:
                raise self._misfit(error.message) from error
            other = next((name for name, piece in slices.items() if piece.get_dtype() != "F32"), "")
            if other:
                raise self._misfit(f"the tensor '{other}' is {slices[other].get_dtype()}, not F32")
        self._compare(theirs)
        return wanted

    def _encoder(self, metadata: dict[str, str]) -> tuple[EncoderSpec, str]:
        """The encoder that the file holds for this owner, and what its tensors' names begin with."""
        try:
            if metadata.get("format") != _FORMAT:
                raise ValueError(metadata.get("format"))
            encoders = msgspec.json.decode(metadata.get("encoders", ""), type=dict[str, EncoderSpec])
            if not encoders:
                raise ValueError("no encoders")
        except (ValueError, msgspec.DecodeError) as error:
            raise ModelError(
                f"the {self.label} cannot be used: it does not say that it is of the form {_FORMAT}",
                remedy="Own files are written by edgefl.models.own_checkpoint.save_encoders; else name a folder.",
            ) from error
        if metadata.get("sharing") != self.spec.encoder_sharing:
            raise self._misfit(f"its blocks are {metadata.get('sharing')}, the model's {self.spec.encoder_sharing}")
        name = "" if "" in encoders else self.owner
        if self.owner == SHARED:
            return next(iter(encoders.values())), f"{SHARED}/"
        if name not in encoders:
            raise self._misfit(f"it holds the modalities {', '.join(encoders)}")
        if encoders[name].kind != self.encoder.kind:
            raise self._misfit(f"it is a {encoders[name].kind} encoder, but the model's is {self.encoder.kind}")
        return encoders[name], f"{name}/" if name else ""

    def _compare(self, theirs: EncoderSpec) -> None:
        """Raise for what decides how an encoder computes and does not show in the shapes of its tensors."""
        mine = self.encoder
        unseen: dict[str, tuple[object, object]] = {
            "heads": (theirs.heads, mine.heads),
            "pool": (theirs.pool, mine.pool),
        }
        if self.owner != SHARED and mine.kind != "text":
            unseen["input_shape"] = list(theirs.input_shape), list(mine.input_shape)
            unseen["patch"] = theirs.patch, mine.patch
            unseen["stride"] = theirs.stride or theirs.patch, mine.stride or mine.patch
        for field, (other, own) in unseen.items():
            if other != own:
                raise self._misfit(f"its {field} = {other}, but the model has {own}")

    def _misfit(self, message: str) -> ModelError:
        return ModelError(f"the {self.label} does not fit the model: {message}")


def _parts(spec: ModelSpec, owner: str) -> list[str]:
    return [part for part in part_names(spec) if is_encoder(part) and part.partition("/")[0] == owner]


def _name(spec: ModelSpec, part: str, prefix: str, tensor: str) -> str:
    """``<m>/stage<k>`` with ``blocks.<j>.<rest>`` or ``layers.<j>.<rest>`` is ``block/<i>|<rest>``."""
    piece = part.partition("/")[2]
    if not piece.startswith("stage"):
        return f"{prefix}{piece}|{tensor}"
    encoder = spec.encoders.get(part.partition("/")[0]) or next(iter(spec.encoders.values()))
    per_stage = encoder.depth // spec.stages
    _, j, rest = tensor.split(".", 2)
    return f"{prefix}block/{(int(piece.removeprefix('stage')) - 1) * per_stage + int(j)}|{rest}"
