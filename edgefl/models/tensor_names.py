"""Names of tensors that are the same for every version of `transformers`."""

from __future__ import annotations

import functools
import re

#: Names inside ViT's and AST's blocks before `transformers` 5 -> those since. Order matters: the first match counts.
_RENAMED = (
    (re.compile(r"\battention\.attention\.query\."), "attention.q_proj."),
    (re.compile(r"\battention\.attention\.key\."), "attention.k_proj."),
    (re.compile(r"\battention\.attention\.value\."), "attention.v_proj."),
    (re.compile(r"\battention\.output\.dense\."), "attention.o_proj."),
    (re.compile(r"\bintermediate\.dense\."), "mlp.fc1."),
    (re.compile(r"\boutput\.dense\."), "mlp.fc2."),
)


@functools.lru_cache(4096)  # a model has a few hundred, asked for in every round
def stable_name(name: str) -> str:
    """A tensor's name, the same for every version of the library."""
    for pattern, replacement in _RENAMED:
        renamed, count = pattern.subn(replacement, name)
        if count:
            return renamed
    return name
