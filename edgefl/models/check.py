"""Is a model specification sound? Every fault at once, with the way out. No torch: planning may ask, too."""

from __future__ import annotations

from collections.abc import Iterator

from edgefl.errors import ModelError, Problem
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.records import MODALITY_RULE, is_modality

#: What one sample's axes are called, by kind; also the closed list of kinds.
AXES = {
    "sensor": ("time", "channels"),
    "vision": ("height", "width", "channels"),
    "text": ("length",),
    "audio": ("frames", "mel bands"),
}


def spec_problems(spec: ModelSpec) -> list[Problem]:
    """Every fault of the specification; the paths are fields of ``ModelSpec``. Empty: sound."""
    found: list[Problem] = []
    if not spec.encoders:
        found.append(Problem("encoders", "no modality; name at least one encoder"))
    if spec.stages < 1:
        found.append(Problem("stages", f"is {spec.stages}; use 1 or more"))
    for path, value in (("head.width", spec.head.width), ("head.out", spec.head.out)):
        if value < 1:
            found.append(Problem(path, f"is {value}; use 1 or more"))
    if not 0 <= spec.head.dropout < 1:
        found.append(Problem("head.dropout", f"is {spec.head.dropout}; use 0 or more, below 1"))
    if spec.classes < 0:
        found.append(Problem("classes", f"is {spec.classes}; use 0 (no labels) or the number of classes"))
    if spec.classes and spec.fusion_width < 1:
        found.append(Problem("fusion_width", f"is {spec.fusion_width}; use 1 or more"))
    if spec.label_names and len(spec.label_names) != spec.classes:
        found.append(Problem("label_names", f"{len(spec.label_names)} names for {spec.classes} classes"))
    for modality, encoder in spec.encoders.items():
        path = f"encoders.{modality}"
        if not is_modality(modality):
            found.append(Problem(path, f"can not be a modality's name; use {MODALITY_RULE}"))
        if spec.head.kind == "none" and encoder.width != spec.head.out:
            message = (
                f"is {encoder.width}; without a head every encoder is as wide as the fusion takes, {spec.head.out}"
            )
            found.append(Problem(f"{path}.width", message))
        found += [Problem(f"{path}.{field}", message) for field, message in _encoder_faults(encoder, spec.stages)]
    return found


def check_spec(spec: ModelSpec) -> None:
    """Raise ModelError with every fault of the specification, if there is any."""
    found = spec_problems(spec)
    if found:
        lines = "\n".join(f"  {problem}" for problem in found)
        raise ModelError(f"the model specification has {len(found)} fault{'s' if len(found) > 1 else ''}\n{lines}")


def _encoder_faults(encoder: EncoderSpec, stages: int) -> Iterator[tuple[str, str]]:
    if encoder.kind not in AXES:
        yield "kind", f"'{encoder.kind}' is unknown; choose {', '.join(AXES)}"
        return
    if encoder.heads < 1 or encoder.width < 1 or encoder.width % encoder.heads:
        yield "width", f"{encoder.width} is no multiple of the {encoder.heads} attention heads; change one of them"
    if encoder.depth < 1 or (stages > 0 and encoder.depth % stages):
        below = encoder.depth // stages * stages if stages else 0
        advice = f"set depth to {f'{below} or ' if below else ''}{below + stages}, or stages to a divisor of the depth"
        yield "depth", f"{encoder.depth} blocks do not split evenly into {stages} stages; {advice}"
    if int(encoder.width * encoder.mlp_ratio) < 1:
        yield "mlp_ratio", f"{encoder.mlp_ratio} leaves no hidden unit at width {encoder.width}; use 4"
    if not 0 <= encoder.dropout < 1:
        yield "dropout", f"is {encoder.dropout}; use 0 or more, below 1"
    axes = AXES[encoder.kind]
    if len(encoder.input_shape) != len(axes) or any(size < 1 for size in encoder.input_shape):
        yield (
            "input_shape",
            f"{list(encoder.input_shape)} is no sample's shape; {encoder.kind} needs [{', '.join(axes)}]",
        )
        return
    yield from _text_faults(encoder) if encoder.kind == "text" else _patch_faults(encoder)


def _text_faults(encoder: EncoderSpec) -> Iterator[tuple[str, str]]:
    if encoder.vocabulary < 2:
        yield "vocabulary", f"is {encoder.vocabulary}; use the number of token ids, padding (0) included"
    if encoder.positions and encoder.positions < encoder.input_shape[0]:
        yield "positions", f"{encoder.positions} rows for texts of {encoder.input_shape[0]} tokens; use 0 or more rows"


def _patch_faults(encoder: EncoderSpec) -> Iterator[tuple[str, str]]:
    if encoder.patch < 1:
        yield "patch", f"is {encoder.patch}; use 1 or more"
        return
    shape = list(encoder.input_shape)
    if encoder.kind == "vision" and (shape[0] % encoder.patch or shape[1] % encoder.patch):
        yield "patch", f"{encoder.patch} does not divide an image of {shape[0]} x {shape[1]}; choose a common divisor"
    if encoder.kind == "audio" and min(shape) < encoder.patch:
        yield (
            "patch",
            f"{encoder.patch} is larger than a spectrogram of {shape[0]} x {shape[1]}; choose a smaller patch",
        )
    if encoder.stride < 0:
        yield "stride", f"is {encoder.stride}; use 0 (no overlap) or more"
