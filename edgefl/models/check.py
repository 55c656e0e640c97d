"""Checks of a model's specification that need the kinds of encoder: sizes, tokens, all faults at once. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from edgefl.encoder_kinds import encoder_kind, kind_of, kinds_not_installed, preparation_faults
from edgefl.errors import ModelError, Problem
from edgefl.models.spec import EncoderSpec, ModelSpec, adaptable_parts, fuses_tokens, shares_attention
from edgefl.records import MAX_RANK, MODALITY_RULE, is_modality
from edgefl.registry import method, methods
from edgefl.storage.checkpoint_paths import is_own

#: The closed choices of the model's own fields, and of an encoder's.
CHOICES = {
    "matching": ("none", "classifier", "prior"),
    "arch": ("distilbert", "bert", "bag", "bands", "conv"),
    "pool": ("token", "mean"),
    "head.norm": ("batch", "layer", "none"),
}


def encoder_of_size(kind: str, size: str, input_shape: tuple[int, ...] = (), **changes: object) -> EncoderSpec:
    """The encoder of a named size, with ``input_shape`` (empty: the size's own) and any field changed.

    Raises ModelError for an unknown kind or size or field, naming the choices.
    """
    sizes = encoder_kind(kind).sizes
    if size not in sizes:
        raise ModelError(f"unknown encoder size '{size}'", remedy=f"Choose one of: {', '.join(sizes)}.")
    fields = {"kind": kind, **sizes[size], **changes}
    if input_shape:
        fields["input_shape"] = tuple(input_shape)
    if unknown := sorted(set(fields) - set(EncoderSpec.__struct_fields__)):
        known = ", ".join(EncoderSpec.__struct_fields__)
        raise ModelError(f"an encoder has no field {', '.join(unknown)}", remedy=f"Choose among: {known}.")
    return msgspec.convert(fields, EncoderSpec)


def token_count(encoder: EncoderSpec) -> int:
    """Tokens of one sample, class tokens included."""
    return kind_of(encoder).tokens(encoder)


def state_shape(model: ModelSpec, modality: str, depth: int) -> tuple[int, int]:
    """(tokens, width) of one sample after ``depth`` stages."""
    encoder = model.encoders[modality]
    states = kind_of(encoder).states
    if states is None:
        return token_count(encoder), encoder.width
    return states(encoder)[depth * (encoder.depth // model.stages)]


def spec_problems(spec: ModelSpec) -> list[Problem]:
    """Every fault of the specification; the paths are fields of ``ModelSpec``. Empty: sound."""
    chosen = [("encoder_sharing", "sharing", spec.encoder_sharing), ("fusion", "fusion", spec.fusion)]
    chosen += [("stand_in", "missing", name) for name in spec.stand_in or ()]
    unknown = [
        Problem(field, f"'{name}' is unknown; choose {', '.join(methods(role))}")
        for field, role, name in chosen
        if name not in methods(role)
    ]
    return unknown or _problems(spec)


def _problems(spec: ModelSpec) -> list[Problem]:
    head = spec.head
    wide = bool(spec.classes) and method("fusion", spec.fusion).wide
    faults = [
        (not spec.encoders, "encoders", "no modality; name at least one encoder"),
        (spec.stages < 1, "stages", f"is {spec.stages}; use 1 or more"),
        (head.width < 1, "head.width", f"is {head.width}; use 1 or more"),
        (head.out < 1, "head.out", f"is {head.out}; use 1 or more"),
        (not 0 <= head.dropout < 1, "head.dropout", f"is {head.dropout}; use 0 or more, below 1"),
        (spec.classes < 0, "classes", f"is {spec.classes}; use 0 (no labels) or the number of classes"),
        (wide and spec.fusion_width < 1, "fusion_width", f"is {spec.fusion_width}; use 1 or more"),
        (
            bool(spec.label_names) and len(spec.label_names) != spec.classes,
            "label_names",
            f"{len(spec.label_names)} names for {spec.classes} classes",
        ),
    ]
    found = [Problem(path, message) for wrong, path, message in faults if wrong]
    for modality, encoder in spec.encoders.items():
        path = f"encoders.{modality}"
        if not is_modality(modality):
            found.append(Problem(path, f"cannot be a modality's name; use {MODALITY_RULE}"))
        if head.kind == "none" and encoder.width != head.out:
            message = f"is {encoder.width}; without a head every encoder is as wide as the fusion takes, {head.out}"
            found.append(Problem(f"{path}.width", message))
        found += [Problem(f"{path}.{field}", message) for field, message in _encoder_faults(encoder, spec.stages)]
    more = (*_choice_faults(spec), *_multiway_faults(spec), *_lora_faults(spec))
    return found + [Problem(path, message) for path, message in more]


def check_spec(spec: ModelSpec) -> None:
    """Raise ModelError with every fault of the specification, if there is any."""
    found = spec_problems(spec)
    if found:
        lines = "\n".join(f"  {problem}" for problem in found)
        raise ModelError(f"the model specification has {len(found)} fault{'s' if len(found) > 1 else ''}\n{lines}")


def _choice_faults(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    for path, value in (("matching", spec.matching), ("head.norm", spec.head.norm)):
        if value not in CHOICES[path]:
            yield path, f"'{value}' is unknown; choose {', '.join(CHOICES[path])}"
    joint = spec.joint
    if fuses_tokens(spec) and (joint.heads < 1 or joint.width < 1 or joint.width % joint.heads):
        yield "joint.width", f"{joint.width} is no multiple of the {joint.heads} attention heads; change one of them"
    if fuses_tokens(spec) and joint.layers < 1:
        yield "joint.layers", f"is {joint.layers}; use 1 or more"
    if spec.reconstruction and len(spec.encoders) < 2:
        yield "reconstruction", "makes one modality from others; it needs two or more"
    if spec.matching == "classifier" and spec.classes < 1:
        yield "matching", "'classifier' names classes, and the model has none; choose prior or none"
    if spec.matching == "prior" and len(spec.encoders) < 2:
        yield "matching", "'prior' leads from one modality to another; it needs two or more"


def _lora_faults(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    if spec.lora is msgspec.UNSET:
        return
    if not 1 <= spec.lora.rank <= MAX_RANK:
        yield "lora.rank", f"is {spec.lora.rank}; use 1 to {MAX_RANK}"
    ranks = (0, *(spec.lora.fallback_ranks or ()), spec.lora.rank)
    if any(low >= high for low, high in itertools.pairwise(ranks[:-1])) or ranks[-2] >= max(1, ranks[-1]):
        yield "lora.fallback_ranks", f"are {list(ranks[1:-1])}; they ascend from 1, below the rank {spec.lora.rank}"
    if unknown := sorted(set(spec.lora.parts) - set(adaptable_parts(spec))):
        yield "lora.parts", f"{unknown[0]!r} cannot be adapted; choose among {', '.join(adaptable_parts(spec))}"


def _multiway_faults(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Shared attention has one width, one number of heads and layers, one dropout: those of the first encoder."""
    together = "encoder_sharing" if shares_attention(spec) else "fusion" if fuses_tokens(spec) else ""
    for modality, encoder in spec.encoders.items() if together else ():
        if not kinds_not_installed([encoder.kind]) and kind_of(encoder).states:
            yield together, f"needs tokens of one width at each stage, and {modality} is a module of its own"
    if not shares_attention(spec):
        return
    first = next(iter(spec.encoders), "")
    for modality, encoder in spec.encoders.items():
        for field in ("width", "heads", "depth", "dropout"):
            value, wanted = getattr(encoder, field), getattr(spec.encoders[first], field)
            if value != wanted:
                yield (
                    f"encoders.{modality}.{field}",
                    f"is {value}, that of {first} {wanted}; multiway encoders share attention, so make them equal",
                )
        if encoder.pretrained and not is_own(encoder.pretrained):
            message = "no public checkpoint has multiway blocks; name an own file (.safetensors), or leave it empty"
            yield f"encoders.{modality}.pretrained", message
        elif encoder.pretrained != spec.encoders[first].pretrained:
            message = f"is not that of {first}; the shared attention has one file, so name it for all or for none"
            yield f"encoders.{modality}.pretrained", message


def _encoder_faults(encoder: EncoderSpec, stages: int) -> Iterator[tuple[str, str]]:
    if unknown := kinds_not_installed([encoder.kind]):
        yield "kind", unknown
        return
    kind = kind_of(encoder)
    if encoder.heads < 1 or encoder.width < 1 or encoder.width % encoder.heads:
        yield "width", f"{encoder.width} is no multiple of the {encoder.heads} attention heads; change one of them"
    if encoder.depth < 1 or (stages > 0 and encoder.depth % stages):
        below = encoder.depth // stages * stages if stages else 0
        advice = (
            f"name {stages} stages of it in edgefl.encoder, or set model.stages to a divisor"
            if kind.states
            else f"set depth to {f'{below} or ' if below else ''}{below + stages}, or stages to a divisor of the depth"
        )
        yield "depth", f"{encoder.depth} blocks do not split evenly into {stages} stages; {advice}"
    if int(encoder.width * encoder.mlp_ratio) < 1:
        yield "mlp_ratio", f"{encoder.mlp_ratio} leaves no hidden unit at width {encoder.width}; use 4"
    if not 0 <= encoder.dropout < 1:
        yield "dropout", f"is {encoder.dropout}; use 0 or more, below 1"
    for field, value in (("pool", encoder.pool), ("arch", encoder.arch)):
        if value not in CHOICES[field]:
            yield field, f"'{value}' is unknown; choose {', '.join(CHOICES[field])}"
    if len(encoder.input_shape) != len(kind.axes) or any(size < 1 for size in encoder.input_shape):
        yield (
            "input_shape",
            f"{list(encoder.input_shape)} is no sample's shape; {encoder.kind} needs [{', '.join(kind.axes)}]",
        )
        return
    yield from preparation_faults(encoder)
    yield from kind.faults(encoder)
