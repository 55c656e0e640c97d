"""The tensors a run begins with: random parts, or an encoder's parts from a checkpoint.

A checkpoint is an own file (``edgefl.models.own_checkpoint``) or one of `transformers`: a hub name, a local folder or a
folder inside a Python package (``package:NAME/PATH``), with its weights in safetensors. Nothing of it may be missing,
and what the specification cannot express (another activation, another norm) is refused instead of approximated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import nn

from edgefl.errors import MissingDependencyError, ModelError
from edgefl.models.check import CHOICES, check_spec
from edgefl.models.own_checkpoint import SHARED, check_own, own_parts
from edgefl.models.parts import Tensors, check_tensors, module_tensors, named_tensors, part_tensors
from edgefl.models.spec import EncoderSpec, ModelSpec, is_encoder, part_names, shares_attention
from edgefl.models.staged import build
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
    check_spec(spec)
    loaded: tuple[str, dict[str, Tensors]] = ("", {})
    for part in part_names(spec):
        owner = part.partition("/")[0]
        if is_encoder(part) and _checkpoint(spec, owner):
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
    source = _Source(modality, encoder)
    checkpoint = source.load()
    for part, modules in _split(spec, modality, checkpoint).items():
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


def check_pretrained(spec: ModelSpec) -> None:
    """Raises ModelError when a checkpoint that the model names is not there or is described as something else."""
    for modality, encoder in spec.encoders.items():
        if is_own(encoder.pretrained):
            check_own(spec, modality)
        elif encoder.pretrained:
            _Source(modality, encoder).check()
    if shares_attention(spec) and is_own(_checkpoint(spec, SHARED)):
        check_own(spec, SHARED)


class _Source:
    """One encoder's checkpoint: reading it, and saying what is wrong with it."""

    def __init__(self, modality: str, encoder: EncoderSpec) -> None:
        self.encoder = encoder
        self.name = located(encoder.pretrained)
        self.architecture = ARCHITECTURES.get(encoder.arch if encoder.kind == "text" else encoder.kind)
        self.label = f"checkpoint '{encoder.pretrained}' for modality '{modality}'"

    def misfit(self, message: str) -> ModelError:
        return ModelError(f"the {self.label} does not fit the model: {message}")

    def check(self) -> Architecture:
        """Raises ModelError when the checkpoint's own description does not fit; its weights are not read."""
        encoder, architecture = self.encoder, self.architecture
        if architecture is None:
            raise ModelError(
                f"the {self.label} cannot be used: a {encoder.kind} encoder has no public checkpoints",
                remedy="Leave `pretrained` empty for this modality, or name an own file (.safetensors).",
            )
        if find_spec("transformers") is None:
            raise MissingDependencyError("transformers", "train")
        import transformers

        config = self._read(transformers.AutoConfig.from_pretrained)
        if config.model_type != architecture.model_type:
            mended = encoder.kind == "text" and config.model_type in CHOICES["arch"]
            other = f"; set its arch to {config.model_type}" if mended else ""
            raise self.misfit(
                f"it is a '{config.model_type}', but a {encoder.kind} encoder takes '{architecture.model_type}'{other}"
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
        architecture = self.check()
        import transformers

        # safetensors only: the older files are pickles, which can run code
        reader = partial(
            getattr(transformers, architecture.model).from_pretrained,
            use_safetensors=True,
            output_loading_info=True,
            **architecture.options,
        )
        module: nn.Module
        module, report = self._read(reader)
        # The final norm and every block count; a classifier or pooler the file has besides does not matter.
        if missing := sorted(str(key) for key in report["missing_keys"]):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise self.misfit(f"it lacks the tensor '{missing[0]}'{more}")
        if misshapen := report.get("mismatched_keys"):
            raise self.misfit(f"tensors differ from its own configuration: {min(map(str, misshapen))}")
        return module

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


def _split(spec: ModelSpec, modality: str, checkpoint: Any) -> dict[str, dict[str, nn.Module]]:
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

    path = cached_file(name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
    settings: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    return settings
