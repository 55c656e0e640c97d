"""Encoders of named sizes, from `tiny` (tests, first tries) to those of the papers, and their tokens. No torch here."""

from __future__ import annotations

from typing import Any

import msgspec

from edgefl.encoder_kinds import encoder_kind
from edgefl.errors import ModelError
from edgefl.models.spec import EncoderSpec


def encoder_of_size(kind: str, size: str, input_shape: tuple[int, ...] = (), **changes: Any) -> EncoderSpec:
    """The encoder of a named size, with ``input_shape`` (empty: the size's own) and any field changed.

    Raises ModelError for an unknown kind or size or field, naming the choices.
    """
    sizes = encoder_kind(kind).sizes
    if size not in sizes:
        raise ModelError(f"unknown encoder size '{size}'", remedy=f"Choose one of: {', '.join(sizes)}.")
    fields: dict[str, Any] = {"kind": kind, **sizes[size], **changes}
    if input_shape:
        fields["input_shape"] = tuple(input_shape)
    unknown = sorted(set(fields) - set(EncoderSpec.__struct_fields__))
    if unknown:
        choices_ = ", ".join(EncoderSpec.__struct_fields__)
        raise ModelError(f"an encoder has no field {', '.join(unknown)}", remedy=f"Choose among: {choices_}.")
    return msgspec.convert(fields, EncoderSpec)


def token_count(encoder: EncoderSpec) -> int:
    """Tokens of one sample, class tokens included."""
    return encoder_kind(encoder.kind).tokens(encoder)
