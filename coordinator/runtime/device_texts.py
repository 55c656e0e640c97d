"""Texts of devices, sanitised for terminals, logs and tables: no control characters, and a bounded length."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)

#: Characters of names, identifiers and other words; part names have at most 50.
NAME = 64
#: Characters of sentences.
SENTENCE = 500
_SENTENCES = frozenset({"detail", "source", "reason"})
#: C0, DEL and C1, which terminals obey; marks that turn, hide or break what is shown; halves of no character.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def plain(text: str, most: int = NAME) -> str:
    """The first ``most`` characters, unsafe ones replaced by U+FFFD."""
    return _UNSAFE.sub("\ufffd", text[:most])


def cleaned(message: S) -> S:
    """The message with every text in it plain; a refusal's and a figure's sentences may be longer than names."""
    values = {name: _plain(getattr(message, name), name) for name in message.__struct_fields__}
    return msgspec.structs.replace(message, **values)


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return plain(value, SENTENCE if name in _SENTENCES else NAME)
    if isinstance(value, msgspec.Struct):
        return cleaned(value)
    if isinstance(value, dict):
        return {_plain(key, ""): _plain(one, name) for key, one in value.items()}
    if isinstance(value, tuple) and value and not isinstance(value[0], int | float):
        return tuple(_plain(one, name) for one in value)
    return value
