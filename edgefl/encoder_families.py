"""Families of `transformers` that encoders are taken from: what their config.json says, in our fields. No torch here.

Four families have blocks of our own (``edgefl.models.published``); the others run the library's own modules
(``edgefl.models.adapter``), which are built from the text of ``EncoderSpec.config``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Config = Mapping[str, Any]
Shape = tuple[int, ...]
#: The four with blocks of our own: ``model_type`` -> (kind, ``arch`` of a text).
OWN_BLOCKS = {
    "vit": ("vision", ""),
    "distilbert": ("text", "distilbert"),
    "bert": ("text", "bert"),
    "audio-spectrogram-transformer": ("audio", ""),
}
#: Bytes of a library's configuration that travel; XLM-R's has 0.7 kB without its labels.
MAX_CONFIG_BYTES = 16 * 2**10
#: Our fields -> what configurations call them.
_NAMES = {
    "width": ("hidden_size", "dim", "d_model", "n_embd"),
    "depth": ("num_hidden_layers", "n_layers", "encoder_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_heads", "encoder_attention_heads", "n_head"),
    "hidden": ("intermediate_size", "hidden_dim", "encoder_ffn_dim", "ffn_dim"),
}
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5,), (0.5,))
#: Fields of a configuration that say nothing of the encoder, or that could make a device load code or other weights.
_LEFT_OUT = {"id2label", "label2id", "architectures", "auto_map", "dtype", "torch_dtype", "task_specific_params"}
_LEFT_OUT |= {"transformers_version", "quantization_config", "attn_implementation", "custom_pipelines"}
_LEFT_OUT |= {"output_hidden_states", "output_attentions", "return_dict", "use_cache"}


class Family(NamedTuple):
    """A family whose blocks are the library's own.

    ``tokens``: of one sample; ``pool``: its features without a word in the run file; ``assumed``: what its
    configurations leave out; ``tower``: key of the encoder's own configuration in one of several; ``pixels``: mean
    and deviation of 0..1 pixels where no preprocessor_config.json says them.
    """

    kind: str
    tokens: Callable[[Config, Shape], int]
    pool: Literal["token", "mean"] = "token"
    assumed: Config = MappingProxyType({})
    tower: str = ""
    pixels: tuple[tuple[float, ...], tuple[float, ...]] = _HALF
    note: str = ""


def _length(config: Config, shape: Shape) -> int:
    return shape[0]


def _patches(leading: int) -> Callable[[Config, Shape], int]:
    def count(config: Config, shape: Shape) -> int:
        patch = int(config.get("patch_size", 16))
        return leading + int(config.get("num_register_tokens", 0)) + (shape[0] // patch) * (shape[1] // patch)

    return count


def _half_frames(config: Config, shape: Shape) -> int:
    return (shape[0] + 1) // 2  # the second convolution has stride 2


def _convolved(config: Config, shape: Shape) -> int:
    steps = shape[0]
    kernels, strides = config.get("conv_kernel", _CONV_KERNEL), config.get("conv_stride", _CONV_STRIDE)
    for kernel, stride in zip(kernels, strides, strict=True):
        steps = (steps - kernel) // stride + 1
    return max(0, steps)


def _series(config: Config, shape: Shape) -> int:
    length, stride = int(config.get("patch_length", 1)), int(config.get("patch_stride", 1))
    leading = 1 if config.get("use_cls_token") else 0
    return shape[1] * (leading + max(0, shape[0] - length) // stride + 1)


_CONV_KERNEL, _CONV_STRIDE = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_VISION = {**_BASE, "image_size": 224, "patch_size": 16, "num_channels": 3}
_CLIP_VISION = Family("vision", _patches(1), assumed={**_VISION, "patch_size": 32}, pixels=_CLIP)
_SIGLIP_VISION = Family("vision", _patches(0), "mean", _VISION, note="no class token; its attention pooling is left")
_WAVE = Family("audio", _convolved, "mean", _BASE, note="raw samples as arrays [samples, 1]")
#: ``model_type`` -> family, in the order of the documentation's table.
FAMILIES = {
    "roberta": Family("text", _length),
    "xlm-roberta": Family("text", _length),
    "camembert": Family("text", _length),
    "mpnet": Family("text", _length),
    "electra": Family("text", _length),
    "albert": Family("text", _length, note="its blocks share their weights: model.stages has to be 1"),
    "modernbert": Family("text", _length),
    "deit": Family("vision", _patches(2), assumed=_VISION, pixels=_IMAGENET),
    "dinov2": Family("vision", _patches(1), assumed={**_VISION, "mlp_ratio": 4}, pixels=_IMAGENET),
    "dinov2_with_registers": Family("vision", _patches(1), assumed={**_VISION, "mlp_ratio": 4}, pixels=_IMAGENET),
    "clip": _CLIP_VISION._replace(tower="vision_config", note="the vision tower"),
    "clip_vision_model": _CLIP_VISION,
    "siglip": _SIGLIP_VISION._replace(tower="vision_config", note="the vision tower; its attention pooling is left"),
    "siglip_vision_model": _SIGLIP_VISION,
    "beit": Family("vision", _patches(1), assumed=_VISION),
    "whisper": Family(
        "audio", _half_frames, "mean", {"num_mel_bins": 80, "max_source_positions": 1500}, note="the encoder"
    ),
    "wav2vec2": _WAVE,
    "hubert": _WAVE,
    "patchtst": Family("sensor", _series, "mean", {"num_input_channels": 1, "context_length": 32}),
}
#: What cannot be cut into stages of equal blocks, and why.
REFUSED = {
    **dict.fromkeys(("swin", "swinv2", "convnext", "resnet"), "its stages change the number and the width of tokens"),
    **dict.fromkeys(
        ("gpt2", "llama", "mistral", "opt"), "its attention looks back only, so no token stands for a text"
    ),
}


def taken(kind: str = "") -> list[str]:
    """The ``model_type`` of every family that is taken, or of those of one kind."""
    own = [name for name, (of, _) in OWN_BLOCKS.items() if kind in {"", of}]
    return own + [name for name, family in FAMILIES.items() if kind in {"", family.kind}]


def family_of(model_type: str, kind: str) -> Family:
    """The family of a ``model_type``; one that the table does not name is cut as the kind's usual one."""
    usual = {"vision": Family("vision", _patches(1)), "audio": _WAVE, "sensor": FAMILIES["patchtst"]}
    return FAMILIES.get(model_type) or usual.get(kind, Family("text", _length))


def tower_of(config: Config, kind: str) -> dict[str, Any]:
    """The configuration of the encoder itself, with what its family's configurations leave out."""
    family = family_of(str(config.get("model_type")), kind)
    inner = dict(config[family.tower]) if isinstance(config.get(family.tower), dict) else dict(config)
    if family.tower:
        inner.setdefault("model_type", f"{config['model_type']}_vision_model")
    return {**family.assumed, **{name: value for name, value in inner.items() if value is not None}}


def fields(config: Config, kind: str) -> dict[str, Any]:
    """Fields of ``EncoderSpec`` that a configuration (of the tower) says; ``input_shape`` only where it is fixed."""
    told = {ours: config[name] for ours, names in _NAMES.items() for name in reversed(names) if name in config}
    width, hidden = told.get("width"), told.pop("hidden", None)
    if width and hidden:
        ratio = hidden / width
        told["mlp_ratio"] = ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)
    elif "mlp_ratio" in config:
        told["mlp_ratio"] = float(config["mlp_ratio"])
    if config.get("model_type") == "albert":
        told["depth"] = int(config.get("num_hidden_groups", 1))
    shape = _shape(config, kind)
    return {**told, **_of_kind(config, kind), **({"input_shape": shape} if shape else {})}


def _of_kind(config: Config, kind: str) -> dict[str, Any]:
    model_type = config.get("model_type")
    if kind == "text":
        arch = OWN_BLOCKS.get(str(model_type), ("", ""))[1]
        size = {"vocabulary": config["vocab_size"]} if "vocab_size" in config else {}
        return {**size, **({"arch": arch} if arch else {})}
    if kind == "vision":
        return {"patch": config["patch_size"]} if isinstance(config.get("patch_size"), int) else {}
    if model_type == "audio-spectrogram-transformer":
        return {"patch": config.get("patch_size", 16), "stride": config.get("time_stride", 10)}
    return {"patch": config["patch_length"]} if "patch_length" in config else {}


def _shape(config: Config, kind: str) -> Shape:
    """Shape of one sample where the configuration fixes it; () where the data may."""
    if kind == "vision":
        size = config.get("image_size", 224)
        height, width = size if isinstance(size, list) else (size, size)
        return height, width, int(config.get("num_channels", 3))
    if kind == "audio" and "max_source_positions" in config:
        return 2 * config["max_source_positions"], config.get("num_mel_bins", 80)
    if kind == "audio" and "max_length" in config and "num_mel_bins" in config:
        return config["max_length"], config["num_mel_bins"]
    if kind == "sensor" and "context_length" in config:
        return config["context_length"], config.get("num_input_channels", 1)
    return ()


def longest(config: Config) -> int:
    """Tokens of the longest text that the table of positions has rows for; 0: there is no such table."""
    rows = int(config.get("max_position_embeddings", 0))
    behind_padding = config.get("model_type") in {"roberta", "xlm-roberta", "camembert", "mpnet"}
    return max(0, rows - int(config.get("pad_token_id", 1) or 0) - 1) if behind_padding else rows


def travelling(config: Config, pixels: object = None) -> str:
    """The configuration as JSON, as it goes into ``EncoderSpec.config``; ``pixels``: mean and deviation of 0..1."""
    kept = {name: value for name, value in config.items() if name not in _LEFT_OUT and not name.startswith("_")}
    return json.dumps({**kept, **({"pixels": pixels} if pixels else {})}, sort_keys=True)
