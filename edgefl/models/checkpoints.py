"""The tensors a run begins with: random parts, or an encoder's parts from a checkpoint.

A checkpoint is an own file (``edgefl.models.own_checkpoint``) or one of `transformers`: a hub name, a local folder or a
folder inside a Python package (``package:NAME/PATH``), with its weights in safetensors. Nothing of it may be missing,
and what the specification cannot express (another activation, another norm) is refused instead of approximated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from torch import nn

from edgefl.encoder_families import taken
from edgefl.errors import MissingDependencyError, ModelError
from edgefl.models.check import CHOICES, check_spec, token_count
from edgefl.models.checkpoint_shapes import place_of, stored_shapes
from edgefl.models.declared import declared_tensors
from edgefl.models.own_checkpoint import SHARED, check_own, own_parts
from edgefl.models.parts import Tensors, check_tensors, module_tensors, named_tensors, part_tensors
from edgefl.models.spec import (
    EncoderSpec,
    ModelSpec,
    encoder_parts,
    is_encoder,
    is_lora,
    part_names,
    shares_attention,
)
from edgefl.models.staged import build, check_lora
from edgefl.storage.checkpoint_paths import is_own, located


class Architecture(NamedTuple):
    """A public checkpoint's architecture: its name (``model_type`` in config.json) and its model class's.

    ``fixed``: settings that EncoderSpec has no field for, and the only value our encoders compute with.
    """

    model_type: str
    model: str
    options: Mapping[str, bool]
    fixed: Mapping[str, object]


_VIT = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "qkv_bias": True}
_BERT = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "is_decoder": False,
    "position_embedding_type": "absolute",
}
#: By kind, for text by its ``arch``.
ARCHITECTURES = {
    "vision": Architecture("vit", "ViTModel", {"add_pooling_layer": False}, _VIT),
    "distilbert": Architecture("distilbert", "DistilBertModel", {}, {"activation": "gelu", "pad_token_id": 0}),
    "bert": Architecture("bert", "BertModel", {"add_pooling_layer": False}, _BERT),
    "audio": Architecture("audio-spectrogram-transformer", "ASTModel", {}, _VIT),
}
#: Settings that newer versions of `transformers` do not know any more unless a checkpoint differs from this.
ASSUMED = {"position_embedding_type": "absolute"}
T = TypeVar("T")


def initial_parts(spec: ModelSpec, seed: int = 0) -> Iterator[tuple[str, Tensors]]:
    """Every part of the model with its first tensors, in order, at most one encoder's checkpoint in memory.

    Parts of an encoder whose ``pretrained`` names a checkpoint come from there, and with multiway encoders the shared
    attention too; all others are random, as ``build`` makes them.
    Raises ModelError when a checkpoint can't be read or does not fit.
    """
    if spec.declared is not msgspec.UNSET:
        yield from declared_tensors(spec.declared)
        return
    check_spec(spec)
    check_lora(spec)
    loaded: tuple[str, dict[str, Tensors]] = ("", {})
    for part in part_names(spec):
        owner = part.partition("/")[0]
        if is_encoder(part) and not is_lora(part) and _checkpoint(spec, owner):
            if loaded[0] != owner:
                loaded = (owner, dict(pretrained_parts(spec, owner)))
            yield part, loaded[1].pop(part)
        else:
            yield part, part_tensors(build(spec, [part], seed=seed), part)


def _checkpoint(spec: ModelSpec, owner: str) -> str:
    """Checkpoint that an encoder starts from; the shared attention starts from the file that all encoders name."""
    encoder = next(iter(spec.encoders.values())) if owner == SHARED else spec.encoders[owner]
    return encoder.pretrained


def pretrained_parts(spec: ModelSpec, modality: str) -> Iterator[tuple[str, Tensors]]:
    """The parts of one encoder (embed, stages, norm) from its checkpoint, the blocks split evenly into the stages.

    With multiway encoders also those of the shared attention, ``modality`` "shared".
    """
    if is_own(_checkpoint(spec, modality)):
        yield from own_parts(spec, modality)
        return
    encoder = spec.encoders[modality]
    source = Source(modality, encoder)
    checkpoint = source.load()
    if encoder.config:
        yield from _library_parts(spec, modality, source, checkpoint)
        return
    for part, modules in split_modules(spec, modality, checkpoint).items():
        tensors = {f"{prefix}{name}": t for prefix, m in modules.items() for name, t in module_tensors(m).items()}
        if part.endswith("/embed"):
            tensors = source.adapt_embedding(tensors)
        wanted = named_tensors(build(spec, [part], device="meta").part(part))
        shapes = {name: tuple(t.shape) for name, t in wanted.items()}
        try:
            check_tensors(part, shapes, tensors)
        except ModelError as error:
            raise source.misfit(error.message) from error
        yield part, tensors


def _library_parts(
    spec: ModelSpec, modality: str, source: Source, checkpoint: nn.Module
) -> Iterator[tuple[str, Tensors]]:
    """As ``pretrained_parts``, of an encoder that runs the library's own modules."""
    from edgefl.models.adapter import LibraryEmbed, blocks_of, cut_of, norm_of

    encoder = spec.encoders[modality]
    cut = cut_of(encoder)
    blocks, norm, per_stage = blocks_of(checkpoint, cut), norm_of(checkpoint, cut), encoder.depth // spec.stages
    modules: dict[str, nn.Module] = {f"{modality}/embed": LibraryEmbed(checkpoint, encoder, cut)}
    for k in range(spec.stages):
        stage = nn.Module()
        stage.blocks = nn.ModuleList(blocks[k * per_stage : (k + 1) * per_stage])
        modules[f"{modality}/stage{k + 1}"] = stage
    modules[f"{modality}/norm"] = norm
    for part, module in modules.items():
        yield part, module_tensors(module)


def check_pretrained(spec: ModelSpec) -> None:
    """Raises ModelError when a checkpoint that the model names is not there or is described as something else."""
    for modality, encoder in spec.encoders.items():
        if is_own(encoder.pretrained):
            check_own(spec, modality)
        elif encoder.pretrained:
            source = Source(modality, encoder)
            source.check_library() if encoder.config else source.check()
            source.check_shapes(spec)
    if shares_attention(spec) and is_own(_checkpoint(spec, SHARED)):
        check_own(spec, SHARED)


class Source:
    """One encoder's checkpoint: reading it, and saying what is wrong with it."""

    def __init__(self, modality: str, encoder: EncoderSpec) -> None:
        self.modality, self.encoder = modality, encoder
        self.name = located(encoder.pretrained)
        self.architecture = ARCHITECTURES.get(encoder.arch if encoder.kind == "text" else encoder.kind)
        self.whole: Any = None  # what holds the encoder, once loaded
        #: A folder on this machine is never looked for on a hub.
        self.local = {"local_files_only": True} if Path(self.name).is_dir() else {}
        self.label = f"checkpoint '{encoder.pretrained}' for modality '{modality}'"

    def misfit(self, message: str) -> ModelError:
        return ModelError(f"the {self.label} does not fit the model: {message}")

    def check_library(self) -> None:
        """Raises ModelError when the library's own modules cannot be cut, or give other tokens than are planned for."""
        from edgefl.models.adapter import cut_of

        counted, planned = prod(cut_of(self.encoder).inner), token_count(self.encoder)
        if counted != planned:
            raise self.misfit(f"it makes {counted} tokens of a sample, and {planned} are planned for")

    def check(self) -> Architecture:
        """Raises ModelError when the checkpoint's own description does not fit; its weights are not read."""
        encoder, architecture = self.encoder, self.architecture
        if architecture is None:
            raise ModelError(
                f"the {self.label} cannot be used: our own {encoder.kind} encoder has no public checkpoints",
                remedy="Name a checkpoint's folder with its config.json, or an own file (.safetensors).",
            )
        if find_spec("transformers") is None:
            raise MissingDependencyError("transformers", "train")
        import transformers

        config = self._read(partial(transformers.AutoConfig.from_pretrained, **self.local))
        if config.model_type != architecture.model_type:
            mended = encoder.kind == "text" and config.model_type in CHOICES["arch"]
            other = f"; set its arch to {config.model_type}" if mended else f"; taken: {', '.join(taken(encoder.kind))}"
            raise self.misfit(
                f"it is of type '{config.model_type}', and the {encoder.kind} encoder of type "
                f"'{architecture.model_type}'{other}"
            )
        if config.num_hidden_layers != encoder.depth:
            last = min(config.num_hidden_layers, encoder.depth)
            raise self.misfit(
                f"it has {config.num_hidden_layers} transformer blocks, but the model needs depth {encoder.depth}"
                f" (first difference: the tensors of block {last}, counted from 0)"
            )
        if config.num_attention_heads != encoder.heads:
            raise self.misfit(f"it has {config.num_attention_heads} attention heads, the model {encoder.heads}")
        for field, value in {**architecture.fixed, **self._grid()}.items():
            own = getattr(config, field, ASSUMED.get(field))
            if isinstance(value, list) and isinstance(own, int):  # of a square
                own = [own] * len(value)
            if own != value:
                raise self.misfit(f"its {field} is {own!r}, but the model computes with {value!r}")
        return architecture

    def load(self) -> nn.Module:
        """The checkpoint as `transformers` builds it, with every tensor read from the file."""
        if self.encoder.config:
            return self._load_library()
        architecture = self.check()
        import transformers

        # safetensors only: the older files are pickles, which can run code
        reader = partial(
            getattr(transformers, architecture.model).from_pretrained,
            use_safetensors=True,
            output_loading_info=True,
            **architecture.options,
            **self.local,
        )
        module: nn.Module
        module, report = self._read(reader)
        self._complain(report, report["missing_keys"])
        self.whole = module
        return module

    def _load_library(self) -> nn.Module:
        import transformers

        from edgefl.models.adapter import cut_of, encoder_of, library_config, runs

        self.check_library()
        reader = partial(
            transformers.AutoModel.from_pretrained,
            config=library_config(self.encoder),
            use_safetensors=True,
            output_loading_info=True,
            dtype="float32",
            **self.local,
        )
        whole, report = self._read(reader)
        module: nn.Module = encoder_of(whole)
        self.whole = whole
        prefix = "" if module is whole else "encoder."
        cut = cut_of(self.encoder)
        inside = (key.removeprefix(prefix) for key in map(str, report["missing_keys"]) if key.startswith(prefix))
        self._complain(report, [key for key in inside if runs(cut, key)])
        return module

    def _complain(self, report: Mapping[str, Any], missing: Iterable[object]) -> None:
        """Raises ModelError where the file lacks a tensor, or has one of another shape than its configuration says."""
        # The final norm and every block count; a classifier or pooler the file has besides does not matter.
        if lacking := sorted(map(str, missing)):
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise self.misfit(f"it lacks the tensor '{lacking[0]}'{more}")
        if misshapen := report.get("mismatched_keys"):
            raise self.misfit(f"tensors differ from its own configuration: {min(map(str, misshapen))}")

    def check_shapes(self, spec: ModelSpec) -> None:
        """Raises ModelError where a tensor in the folder's files has another shape than the model; headers alone."""
        stored = stored_shapes(self.name)
        per_stage = self.encoder.depth // spec.stages
        for part in encoder_parts(spec, self.modality)[:-1]:  # without the head
            stage = re.fullmatch(r".*/stage(\d+)", part)
            first = (int(stage[1]) - 1) * per_stage if stage else 0
            for name, tensor in named_tensors(build(spec, [part], device="meta").part(part)).items():
                shape = tuple(tensor.shape)
                place, inner = place_of(name, first)
                for found, theirs in stored.get(inner, ()):
                    if found == place and theirs != shape and not self._is_cut(name, theirs, shape):
                        raise self.misfit(
                            f"its tensor '{name}' of {part} is {list(theirs)}, and the model's {list(shape)}"
                        )

    def _is_cut(self, name: str, theirs: tuple[int, ...], ours: tuple[int, ...]) -> bool:
        """Whether a table of positions is taken in part."""
        return "position_embeddings" in name and self.encoder.kind == "text" and theirs[0] >= ours[0]

    def _read(self, reader: Callable[[str], T]) -> T:
        from safetensors import SafetensorError

        try:
            return reader(self.name)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(
                f"the {self.label} cannot be read: {reason}",
                remedy="Give a hub name or, without network, a local folder with config.json and model.safetensors.",
            ) from error

    def _grid(self) -> dict[str, object]:
        """The field of a checkpoint's configuration that says where its positions are in a picture."""
        size, stride = self.encoder.input_shape, self.encoder.stride or self.encoder.patch
        if self.encoder.kind == "vision":
            return {"image_size": list(size[:2])}
        if self.encoder.kind == "audio":
            sides = {"max_length": size[0], "num_mel_bins": size[1]}
            return {**sides, "frequency_stride": stride, "time_stride": stride}
        return {}

    def adapt_embedding(self, tensors: Tensors) -> Tensors:
        """The checkpoint's embedding as our parts use it: fewer text positions, our pixel scale."""
        if self.encoder.kind == "text":
            rows = self.encoder.positions or self.encoder.input_shape[0]
            table = "embeddings.position_embeddings.weight"
            # Positions beyond the text's length are never read; more than the checkpoint has would be.
            return {**tensors, table: np.ascontiguousarray(tensors[table][:rows])}
        return self._rescaled(tensors, self._read(_preprocessing)) if self.encoder.kind == "vision" else tensors

    def _rescaled(self, tensors: Tensors, settings: Mapping[str, Any]) -> Tensors:
        """Another pixel scale folded into the patch projection: our -1..1 pixels give what the checkpoint expects.

        With y = (x - .5) / .5 and z = (x - m) / s: z = a y + c with a = .5 / s, c = (.5 - m) / s;
        so W z + b = (a W) y + (b + W c). Where the checkpoint tells no scale it is ViT's own, 0.5 and 0.5.
        """
        from edgefl.models.published import PIXEL_DEVIATION, PIXEL_MEAN

        # Ours are 0..1 whatever the file's were.
        if not settings.get("do_rescale", True) or abs(255 * settings.get("rescale_factor", 1 / 255) - 1) > 1e-3:
            raise self.misfit("preprocessor_config.json: it was made for pixels other than value / 255")
        mean, deviation = settings.get("image_mean", PIXEL_MEAN), settings.get("image_std", PIXEL_DEVIATION)
        if not settings.get("do_normalize", True):
            mean, deviation = 0.0, 1.0
        weight_name, bias_name = (f"embeddings.patch_embeddings.projection.{kind}" for kind in ("weight", "bias"))
        weight = tensors[weight_name].astype(np.float64)  # [D, C, patch, patch]
        m, s = np.atleast_1d(np.asarray(mean, np.float64)), np.atleast_1d(np.asarray(deviation, np.float64))
        if m.size not in (1, weight.shape[1]) or s.size not in (1, weight.shape[1]) or not np.all(s > 0):
            raise self.misfit(f"preprocessor_config.json: image_mean {mean} and image_std {deviation} are unusable")
        a = np.broadcast_to(PIXEL_DEVIATION / s, weight.shape[1])[None, :, None, None]
        c = np.broadcast_to((PIXEL_MEAN - m) / s, weight.shape[1])[None, :, None, None]
        bias = tensors[bias_name] + (weight * c).sum(axis=(1, 2, 3))
        return {**tensors, weight_name: (weight * a).astype(np.float32), bias_name: bias.astype(np.float32)}


def split_modules(spec: ModelSpec, modality: str, checkpoint: Any) -> dict[str, dict[str, nn.Module]]:
    """{part: {prefix of its tensor names: module of the checkpoint}}."""
    encoder = spec.encoders[modality]
    owner = checkpoint
    # Where the blocks hang: DistilBERT; BERT, and before transformers 5 the others too.
    for attribute in ("transformer", "encoder"):
        owner = getattr(owner, attribute, owner)
    blocks = owner.layers if hasattr(owner, "layers") else owner.layer
    per_stage = encoder.depth // spec.stages
    parts: dict[str, dict[str, nn.Module]] = {f"{modality}/embed": {"embeddings.": checkpoint.embeddings}}
    for k in range(spec.stages):
        mine = range(k * per_stage, (k + 1) * per_stage)
        parts[f"{modality}/stage{k + 1}"] = {f"blocks.{i}.": blocks[b] for i, b in enumerate(mine)}
    parts[f"{modality}/norm"] = {} if encoder.kind == "text" else {"": checkpoint.layernorm}
    return parts


def _preprocessing(name: str) -> dict[str, Any]:
    """Preprocessing of pictures as the checkpoint states it; {}: not stated."""
    from transformers.utils.hub import cached_file

    if Path(name).is_dir():  # never looked for on a hub
        path = file if (file := Path(name) / "preprocessor_config.json").is_file() else None
    else:
        path = cached_file(name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
    settings: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    return settings
