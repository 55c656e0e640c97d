"""What a model is, as values: which encoders, how many stages, which parts. No torch here.

A model is an ordered list of named parts. For modalities ``acc`` and ``gyro`` with S stages::

    acc/embed acc/stage1 … acc/stageS acc/norm head/acc  gyro/embed …  head/gyro  fusion  task

``<m>/embed`` turns raw input into tokens, ``<m>/stage<k>`` transforms tokens, ``<m>/norm`` is the encoder's final norm,
``head/<m>`` projects the pooled token to the shared width, ``fusion`` joins the projections, ``task`` classifies.
"""

from __future__ import annotations

from typing import Literal

import msgspec

EncoderKind = Literal["sensor", "vision", "text", "audio"]


class EncoderSpec(msgspec.Struct, frozen=True):
    """One modality's encoder. ``input_shape`` is one sample's shape without the batch axis.

    sensor: [time, channels]; vision: [height, width, channels] in 0..1; text: [length] token ids, 0 = padding;
    audio: [frames, mel bands].
    """

    kind: EncoderKind = "sensor"
    input_shape: tuple[int, ...] = ()
    width: int = 64
    depth: int = 6  # transformer blocks; a multiple of the number of stages
    heads: int = 4
    mlp_ratio: float = 4.0
    patch: int = 8  # samples (sensor), pixels (vision) or spectrogram bins (audio) per patch side
    dropout: float = 0.0
    stride: int = 0  # audio only: bins between the starts of neighbouring patches; 0: as wide as a patch (no overlap)
    vocabulary: int = 0  # text only
    positions: int = 0  # text only: rows of the position table; 0: as many as the text is long
    pretrained: str = ""  # name or local folder of a transformers checkpoint; "": random weights


class HeadSpec(msgspec.Struct, frozen=True):
    """Projection head: twice (Linear → dropout → batch norm → ReLU), then Linear to ``out`` → plain batch norm.

    The last batch norm has no affine parameters, no Linear has a bias (arXiv 2407.15426). ``kind`` "none": no head, the
    pooled token itself goes into the fusion (arXiv 2312.13508); then every encoder is ``out`` wide.
    """

    width: int = 4096
    out: int = 256
    dropout: float = 0.1
    kind: Literal["mlp", "none"] = "mlp"


class ModelSpec(msgspec.Struct, frozen=True):
    """The whole model. ``classes`` = 0: no fusion and no task part (unlabelled training)."""

    encoders: dict[str, EncoderSpec] = {}
    stages: int = 6
    head: HeadSpec = HeadSpec()
    fusion_width: int = 256
    classes: int = 0
    label_names: tuple[str, ...] = ()


def encoder_parts(spec: ModelSpec, modality: str, *, through: int | None = None) -> list[str]:
    """Parts of one encoder and its head, in order, with stages 1..``through`` (default: all)."""
    last = spec.stages if through is None else through
    stages = [f"{modality}/stage{k}" for k in range(1, last + 1)]
    return [f"{modality}/embed", *stages, f"{modality}/norm", f"head/{modality}"]


def shared_parts(spec: ModelSpec) -> list[str]:
    """Parts that belong to no single modality."""
    return ["fusion", "task"] if spec.classes else []


def part_names(spec: ModelSpec, *, through: int | None = None) -> list[str]:
    """Every part of the model with stages 1..``through`` (default: all), in order."""
    names = [part for m in spec.encoders for part in encoder_parts(spec, m, through=through)]
    return names + shared_parts(spec)


def modality_of(part: str) -> str | None:
    """The modality a part belongs to; None for ``fusion``, ``task`` and ``prototypes``."""
    owner, _, rest = part.partition("/")
    if not rest:
        return None
    return rest if owner == "head" else owner
