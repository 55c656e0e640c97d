"""Specification of a model, as values: which encoders, how many stages, which parts. No torch here.

A model is an ordered list of named parts. For modalities ``acc`` and ``gyro`` with S stages::

    acc/embed acc/stage1 … acc/stageS acc/norm head/acc  gyro/embed …  head/gyro  fusion  task

``<m>/embed`` turns raw input into tokens, ``<m>/stage<k>`` transforms tokens, ``<m>/norm`` is the encoder's final norm,
``head/<m>`` projects the pooled token to the shared width, ``fusion`` joins the projections, ``task`` classifies; where
devices have label sets of their own, ``task/<set>`` each.

With multiway encoders ``shared/stage<k>`` holds the attention of stage k and ``<m>/stage<k>`` the modality's own feed-
forward layers. On request there are ``reconstruct/<m>``, which makes a projection from those of the other modalities,
``match/<m>``, the small models that find what belongs to a projection, and ``missing``, the weights of stand-ins.
``lora/<part>`` holds the low-rank terms of a part's linear maps (arXiv 2106.09685), of the same modality as the part;
where devices have ranks of their own, the first dimensions, and ``lora/<k>/<part>`` those from dimension k on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

from edgefl.encoder_families import MAX_CONFIG_BYTES
from edgefl.label_spaces import spaces_in
from edgefl.records import MAX_COLUMNS, MAX_FALLBACK_RANKS, CellName, TableColumn
from edgefl.registry import default, method

#: What travels beside the parts of the model: prototypes both ways, once what clusters are made of, and single layers
#: ("part|tensor" -> its values) both ways in rounds that exchange nothing else.
PROTOTYPES, SIGNATURE, LAYERS = "prototypes", "signature", "layers"
#: The part that makes the stand-ins of absent modalities, where they have weights.
MISSING = "missing"
_MATCH = "match/"
_LORA = "lora/"
_TASK = "task/"

Norm = Literal["batch", "layer", "none"]


class EncoderSpec(msgspec.Struct, frozen=True):
    """One modality's encoder. ``input_shape`` is one sample's shape without the batch axis.

    sensor: [time, channels]; vision: [height, width, channels] in 0..1; text: [length] token ids, 0 = padding;
    audio: [frames, mel bands]; table: [columns, 2], a cell's value and whether it is there. ``step`` to ``crop`` say
    how files become such a sample (``edgefl.data.readers``). ``standardize`` "fleet": the model takes (x - ``mean``) /
    ``std`` of each channel or column, which the devices agree on before the first round; until then they are ().
    ``columns``: of the user's table that this is read from; (): of none, and a table's cells are numbers without names.
    ``config``: of `transformers`, whose modules then are the encoder (``edgefl.models.adapter``); "": ours are.
    """

    kind: str = "sensor"
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
    pretrained: str = ""  # a transformers checkpoint (name or folder), or our own file; "": random weights
    pool: Literal["token", "mean"] = "token"  # what stands for a sample: the class token(s), or the mean of all tokens
    # Text: whose blocks, "bert" with token types as well; "bag" of n-grams. Audio: "bands", spans of all mel bands.
    # Vision: "conv", convolutions and a linear map in place of patches.
    arch: Literal["distilbert", "bert", "bag", "bands", "conv"] = "distilbert"
    step: int = 0  # sensor only: time steps from one window of a recording to the next; 0: a recording is one sample
    rate: float = 0.0  # sensor only: Hz to which recordings are resampled; 0: they stay as they are
    source_rate: float = 0.0  # sensor only: Hz of recordings that say no time; 0: not known
    crop: Literal["stretch", "center"] = "stretch"  # vision only: pictures of other proportions
    standardize: Literal["none", "fleet"] = "none"  # sensor, table, and audio by bands
    mean: tuple[float, ...] = ()  # of each channel, or column
    std: tuple[float, ...] = ()
    columns: Annotated[tuple[TableColumn, ...], msgspec.Meta(max_length=MAX_COLUMNS)] = ()  # table only
    config: Annotated[str, msgspec.Meta(max_length=MAX_CONFIG_BYTES)] = ""  # of the library's own modules, as JSON


class HeadSpec(msgspec.Struct, frozen=True):
    """Projection head: twice (Linear → dropout → norm → ReLU), then Linear to ``out`` → plain norm.

    ``norm`` "batch": the last one has no affine parameters, no Linear has a bias (arXiv 2407.15426); "layer": layer
    norm in place of each batch norm; "none": no norm at all, each Linear with a bias (arXiv 2502.04400). ``kind``
    "none": no head, the pooled token itself goes into the fusion (arXiv 2312.13508); then every encoder is ``out``
    wide.
    """

    width: int = 4096
    out: int = 256
    dropout: float = 0.1
    kind: Literal["mlp", "none"] = "mlp"
    norm: Norm = "batch"


class JointSpec(msgspec.Struct, frozen=True):
    """Joint fusion (FedMVP): tokens are ``width`` wide for the cross-attention, 2 x ``width`` afterwards.

    ``shared``: one projection makes the joint embedding and the modalities' own; False, in runs made before there was
    one: a head for each modality, and modalities x ``width`` after the cross-attention.
    """

    width: int = 256
    heads: int = 4
    layers: int = 3  # of self-attention, after the cross-attention
    shared: bool = False


class LoraSpec(msgspec.Struct, frozen=True):
    """Low-rank adaptation (LoRA, arXiv 2106.09685): W x + b + (alpha / rank) B A x with W frozen.

    ``parts``: the adapted ones; ``maps``: patterns of the linear maps inside them, all by default. ``fallback_ranks``,
    ascending: of devices whose budgets are short of ``rank``; A's rows and B's columns are cut there into slices, each
    a part of its own (FediLoRA, arXiv 2509.06984).
    """

    rank: int = 8
    alpha: float = 16.0
    parts: tuple[str, ...] = ()
    maps: tuple[str, ...] = ("*",)
    fallback_ranks: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_FALLBACK_RANKS)] | msgspec.UnsetType = (
        msgspec.UNSET
    )


class DeclaredSpec(msgspec.Struct, frozen=True):
    """A model that only the devices' own training code builds: its parts in order, and the file of first weights.

    ``initial`` (``edgefl.models.declared``) is at the coordinator alone.
    """

    parts: tuple[str, ...] = ()
    initial: str = ""


class ModelSpec(msgspec.Struct, frozen=True):
    """The whole model. ``classes`` = 0: no fusion and no task part (unlabelled training).

    ``encoder_sharing``: "multiway" shares the attention among the modalities. ``fusion``: "concat" is an MLP on the
    concatenated projections (``bounded``: which ends in tanh(layer norm / 2)), "mean" their mean, "joint" attends
    between the tokens; ``fusion_options``: those that it is built with and that are no fields. ``stand_in``: the
    method of the part ``missing`` and the options that it is built with. ``matching``: small models after training, r_m
    to a class ("classifier") or to the other modalities' projections ("prior"). ``declared``: in place of encoders and
    all that follows them.
    """

    encoders: dict[str, EncoderSpec] = {}
    stages: int = 6
    head: HeadSpec = HeadSpec()
    fusion_width: int = 256
    classes: int = 0
    label_names: tuple[str, ...] = ()
    label_column: CellName = ""  # of the user's table
    encoder_sharing: str = "separate"
    fusion: str = "concat"
    fusion_options: dict[str, float | str] = {}
    stand_in: dict[str, dict[str, float | str]] | msgspec.UnsetType = msgspec.UNSET
    joint: JointSpec = JointSpec()
    bounded: bool = False
    reconstruction: bool = False
    matching: Literal["none", "classifier", "prior"] = "none"
    lora: LoraSpec | msgspec.UnsetType = msgspec.UNSET
    declared: DeclaredSpec | msgspec.UnsetType = msgspec.UNSET


#: First words of parts whose second word is a modality: everything after the encoders that is one modality's own.
_AFTER_ENCODERS = ("head", "reconstruct", "match")


def encoder_parts(spec: ModelSpec, modality: str, *, through: int | None = None) -> list[str]:
    """Parts of one encoder and its head, in order, with stages 1..``through`` (default: all)."""
    last = spec.stages if through is None else through
    stages = [f"{modality}/stage{k}" for k in range(1, last + 1)]
    return [f"{modality}/embed", *stages, f"{modality}/norm", f"head/{modality}"]


def shared_parts(spec: ModelSpec, *, through: int | None = None) -> list[str]:
    """Parts that belong to no single modality, with stages 1..``through`` (default: all)."""
    last = spec.stages if through is None else through
    stages = range(1, last + 1) if shares_attention(spec) else ()
    joined = ["fusion"] if method("fusion", spec.fusion).weights else []  # a mean has no weights
    joined += [MISSING] if spec.stand_in else []
    return [*(f"shared/stage{k}" for k in stages), *((*joined, *task_parts(spec)) if spec.classes else ())]


def task_parts(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Classifiers: part -> places of the classes it answers. One, or one for each label set (``label_spaces``)."""
    spaces = spaces_in(spec.label_names)
    return {_TASK + space: places for space, places in spaces.items()} or {"task": tuple(range(spec.classes))}


def is_task(part: str) -> bool:
    """Whether a part is a classifier: ``task``, or ``task/<set>`` of a label set."""
    return part == "task" or part.startswith(_TASK)


def space_of_part(part: str) -> str:
    """The label set of a classifier; "" for every other part."""
    return part.removeprefix(_TASK) if part.startswith(_TASK) else ""


def answered(spec: ModelSpec, parts: Sequence[str]) -> tuple[int, ...]:
    """Places of the classes that the classifiers among ``parts`` answer, ascending."""
    return tuple(sorted(place for part, places in task_parts(spec).items() if part in parts for place in places))


def reconstruct_parts(spec: ModelSpec) -> list[str]:
    """``reconstruct/<m>`` of every modality, where the model has them."""
    return [f"reconstruct/{m}" for m in spec.encoders] if spec.reconstruction else []


def match_parts(spec: ModelSpec) -> list[str]:
    """``match/<m>`` of every modality, where the model has them. No schedule trains them."""
    return [] if spec.matching == "none" else [_MATCH + m for m in spec.encoders]


def is_matcher(part: str) -> bool:
    """Whether a part is ``match/<m>``."""
    return part.startswith(_MATCH)


def lora_part(part: str, start: int = 0) -> str:
    """Part name of low-rank terms, or their slice from dimension ``start`` on."""
    return f"{_LORA}{start}/{part}" if start else _LORA + part


def is_lora(part: str) -> bool:
    """True for a part of low-rank terms."""
    return part.startswith(_LORA)


def adapted_part(part: str) -> str:
    """Name of the part with the adapted weights; others have their own."""
    return _start_and_adapted(part)[1]


def rank_start(part: str) -> int:
    """First rank dimension of a slice of low-rank terms; 0 for every other part."""
    return _start_and_adapted(part)[0]


def _start_and_adapted(part: str) -> tuple[int, str]:
    if not is_lora(part):
        return 0, part
    rest = part.removeprefix(_LORA)
    start, _, more = rest.partition("/")
    return (int(start), more) if start.isdecimal() else (0, rest)  # a modality begins with a letter


def rank_slices(lora: LoraSpec) -> dict[int, int]:
    """First rank dimension -> end of each slice, ascending."""
    ends = (*(lora.fallback_ranks or ()), lora.rank)
    return dict(zip((0, *ends), ends, strict=False))


def slices_of(lora: LoraSpec, part: str) -> list[str]:
    """Parts of the low-rank terms of ``part``, in order; [] without any."""
    return [lora_part(part, start) for start in rank_slices(lora)] if part in lora.parts else []


def with_lora(spec: ModelSpec, part: str) -> list[str]:
    """A part, and the parts of its low-rank terms where the model has some."""
    return [part] if spec.lora is msgspec.UNSET else [part, *slices_of(spec.lora, part)]


def lora_parts(spec: ModelSpec, parts: Sequence[str]) -> list[str]:
    """Parts of the low-rank terms of ``parts``."""
    return [adapter for part in parts for adapter in with_lora(spec, part)[1:]]


def adaptable_parts(spec: ModelSpec) -> list[str]:
    """Parts open to low-rank adaptation: encoder stages, and heads of several layers."""
    parts = [part for m in spec.encoders for part in encoder_parts(spec, m)] + shared_parts(spec)
    heads = spec.head.kind != "none" and not shares_projection(spec)
    return [
        p for p in parts if (p.rpartition("/")[2].startswith("stage") if is_encoder(p) else heads and modality_of(p))
    ]


@lru_cache(maxsize=4096)  # asked for each part of each update
def is_scheduled(part: str) -> bool:
    """Whether a schedule can train a part: not ``match/<m>``, nor what travels beside the model."""
    return part not in {PROTOTYPES, SIGNATURE, LAYERS} and not is_matcher(part)


def unscaled(spec: ModelSpec) -> list[str]:
    """The modalities that are to be standardised and whose constants are not fixed yet."""
    return [m for m, encoder in spec.encoders.items() if encoder.standardize == "fleet" and not encoder.mean]


def shares_attention(spec: ModelSpec) -> bool:
    """Whether the encoders of a model share the attention of their blocks."""
    return spec.encoder_sharing != default("sharing")


def fuses_tokens(spec: ModelSpec) -> bool:
    """Whether a model's fusion attends over the modalities' tokens."""
    return bool(method("fusion", spec.fusion).tokens)


def part_names(spec: ModelSpec, *, through: int | None = None) -> list[str]:
    """Every part of the model with stages 1..``through`` (default: all), in order; ``match/<m>`` with the last only."""
    if spec.declared is not msgspec.UNSET:
        return list(spec.declared.parts)
    names = [part for m in spec.encoders for part in encoder_parts(spec, m, through=through)]
    names += [*reconstruct_parts(spec), *shared_parts(spec, through=through)]
    names += lora_parts(spec, names)
    return names + (match_parts(spec) if through is None or through >= spec.stages else [])


@lru_cache(maxsize=4096)
def modality_of(part: str) -> str | None:
    """The modality a part belongs to; None for ``shared/stage<k>``, ``fusion``, classifiers and ``prototypes``."""
    owner, _, rest = adapted_part(part).partition("/")
    if not rest or owner in {"shared", "task"}:
        return None
    return rest if owner in _AFTER_ENCODERS else owner


def is_encoder(part: str) -> bool:
    """Whether a part belongs to an encoder, shared attention included: all but heads, fusion and what follows."""
    owner, _, rest = adapted_part(part).partition("/")
    return bool(rest) and owner not in _AFTER_ENCODERS and owner != "task"


def fused_width(spec: ModelSpec) -> int:
    """Width of f, which ``task`` classifies."""
    return spec.fusion_width if method("fusion", spec.fusion).wide else spec.head.out


def shares_projection(spec: ModelSpec) -> bool:
    """Whether the joint embedding and the modalities' own come from one projection, which is in the part ``fusion``."""
    return fuses_tokens(spec) and spec.joint.shared and spec.classes > 0


def shared_width(spec: ModelSpec) -> int:
    """Input width of the shared projection: the widest encoder's, so that outputs of that width go in as they are."""
    return max(encoder.width for encoder in spec.encoders.values())


def encodes_together(spec: ModelSpec) -> bool:
    """Whether what a modality becomes, or what the fusion reads, depends on what else a row is given."""
    return shares_attention(spec) or fuses_tokens(spec)
