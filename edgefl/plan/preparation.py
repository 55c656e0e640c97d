"""Preparation of raw data for encoders: a run file's fields as encoder specifications."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import msgspec

from edgefl.config.encoder import EncoderConfig
from edgefl.config.settings import RunConfig
from edgefl.data.log_mel import frames_of
from edgefl.encoder_kinds import encoder_kind
from edgefl.errors import ConfigError
from edgefl.models.check import encoder_of_size
from edgefl.models.spec import EncoderSpec
from edgefl.plan.checkpoint_fields import checkpoint_problems, told
from edgefl.plan.job import Preparation, RunPlan
from edgefl.records import TableColumn
from edgefl.registry import MIN_COUNT, choose

#: Field -> the kind it is of, and of what that has.
_ONLY = {
    **dict.fromkeys(("image_size", "crop"), ("vision", "pictures")),
    **dict.fromkeys(("window", "step", "rate", "source_rate"), ("sensor", "recordings of a sensor")),
    **dict.fromkeys(("bands", "seconds"), ("audio", "sounds")),
    "length": ("text", "texts"),
}
#: Fields that only the shape of a sample tells of.
_SHAPE = {"image_size", "window", "bands", "seconds", "length"}
#: Seconds by which windows of two sensors may drift apart from one to the next, as a share of the step.
DRIFT = 1e-3


def encoder_spec(config: EncoderConfig, shape: tuple[int, ...] = ()) -> EncoderSpec:
    """Specification of a run file's encoder for samples of ``shape``; (): as requested, an axis of 0 by the data."""
    given = config.model_dump(exclude={"kind", "size", *_SHAPE})
    changes = {**told(config).fields, **{key: value for key, value in given.items() if value is not None}}
    changes["columns"] = tuple(_column(name, said) for name, said in config.columns.items())
    if config.kind == "sensor" and config.window is not None:
        changes["step"] = config.step or config.window
    fixed = changes.pop("input_shape", ())
    spec = encoder_of_size(config.kind, config.size, tuple(shape) or fixed, **changes)
    return spec if shape else msgspec.structs.replace(spec, input_shape=_asked(config, spec.input_shape))


def encoders_of(config: RunConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, EncoderSpec]:
    """Specifications of the run file's encoders with a known modality and size, for these shapes."""
    return {
        m: encoder_spec(encoder, shapes[m])
        for m, encoder in config.model.encoders.items()
        if m in shapes and encoder.size in encoder_kind(encoder.kind).sizes
    }


def _asked(config: EncoderConfig, own: tuple[int, ...]) -> tuple[int, ...]:
    """Sample shape requested by the run file; ``own``: default of the encoder's named size, () for none.

    An axis of 0 is set by the data; () requests nothing.
    """
    size = config.image_size
    if config.kind == "vision" and size is not None:
        height, width = size if isinstance(size, list) else (size, size)
        return height, width, 0
    if config.kind == "sensor" and config.window is not None:
        return config.window, 0
    if config.kind == "audio" and (config.bands is not None or config.seconds is not None):
        frames, bands = own or (0, 0)
        return (frames if config.seconds is None else frames_of(config.seconds)), config.bands or bands
    if config.kind == "text" and config.length is not None:
        return (config.length,)
    if config.kind == "table" and config.columns:
        return len(config.columns), 2
    return own


def _column(name: str, told: str | list[str]) -> TableColumn:
    """Parse a column: "kind" or "kind in unit" as text, a category's values as a list."""
    if isinstance(told, list):
        return TableColumn(name, "category", tuple(told))
    kind, _, rest = told.partition(" ")
    return msgspec.convert({"name": name, "kind": kind, "unit": rest.removeprefix("in ")}, TableColumn)


def column_field(column: TableColumn) -> str | list[str]:
    """A column in the run file's notation."""
    if column.kind == "category":
        return list(column.values)
    joint = " in " if column.kind == "number" else " "
    return f"{column.kind}{joint}{column.unit}" if column.unit else column.kind


def read_as(config: RunConfig, *, folder: bool) -> dict[str, EncoderSpec]:
    """Encoder specification for reading each modality: kind, vocabulary, tokenizer, requested shape.

    For reading before the model is known, whose remaining shapes come from the data. ``folder``: the data are files,
    which are brought to the shape of an encoder's named size too; arrays are as they are. An axis of 0 is as found.
    """
    if problems := checkpoint_problems(config):
        raise ConfigError(config.name, problems)
    found: dict[str, EncoderSpec] = {}
    for modality, encoder in config.model.encoders.items():
        if encoder.size not in encoder_kind(encoder.kind).sizes:
            continue  # model_spec says so
        shape = encoder_spec(encoder).input_shape if folder else _asked(encoder, ())
        found[modality] = msgspec.structs.replace(encoder_spec(encoder), input_shape=shape)
    return found


def preparation_of(plan: RunPlan) -> Preparation:
    """Reading of data sent to devices before their hello; without an id if defaults apply."""
    encoders, asked = plan.model.encoders, choose("cluster", plan.server).method.signature
    signature = asked.name if asked and asked.joining else ""
    if not signature and not any(encoder.step or encoder.standardize == "fleet" for encoder in encoders.values()):
        return Preparation()
    plain = {m: msgspec.structs.replace(encoder, mean=(), std=()) for m, encoder in encoders.items()}
    options = next(iter(plan.server.get("prototypes", {}).values()), {})
    least = int(options.get("min_count", MIN_COUNT.default))
    told = (signature, plan.seed, plan.model.classes) if signature else ("", 0, 0)
    text = msgspec.json.encode((plain, least, *(told if signature else ())), order="sorted")
    return Preparation(hashlib.sha256(text).hexdigest()[:16], plain, least, *told)


def out_of_place(config: EncoderConfig) -> Iterator[tuple[str, str]]:
    """(field, fault) of encoder fields of another kind, or without effect."""
    for field, (kind, what) in _ONLY.items():
        if getattr(config, field) not in (None, {}) and config.kind != kind:
            yield field, f"is for {what}, and the kind is {config.kind}"
    if config.step is not None and config.window is None:
        yield "step", "is from one window to the next; set window too"
    if config.source_rate is not None and config.rate is None:
        yield "source_rate", "is for recordings that are resampled; set rate too"
    if (
        config.crop is not None
        and config.image_size is None
        and not encoder_kind(config.kind).sizes.get(config.size, {}).get("input_shape")
    ):
        yield "crop", "is for pictures that are brought to a size; set image_size too"


def out_of_step(encoders: Mapping[str, EncoderSpec]) -> Iterator[tuple[str, str]]:
    """(field, fault) of sensor windows with different durations in seconds."""
    periods = {m: one.step / one.rate for m, one in encoders.items() if one.step and one.rate}
    for m, period in periods.items():
        first, wanted = next(iter(periods.items()))
        if abs(period - wanted) > DRIFT * wanted:
            yield f"{m}.step", f"is {period:g} s, that of {first} {wanted:g} s: their windows would drift apart"
