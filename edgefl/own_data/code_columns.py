"""Numeric identifiers: postal codes, codes of products, ids."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Words in names of columns whose numbers are no quantities; "id" at the end of a name, as in PassengerId.
_CODES = frozenset({"code", "codes", "zip", "zipcode", "postal", "postcode", "plz", "postleitzahl", "barcode", "sku"})
_ID = "id"


def is_code(column: str, values: Sequence[str]) -> bool:
    """True for identifiers: digits alone, in a column called code, zip, id or the like."""
    words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", column).lower())
    named = bool(_CODES & set(words)) or words[1:][-1:] == [_ID]
    return named and all(value.isdecimal() for value in values)
