"""What the pages share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

GENERATED = "<!-- Written by docs/generate.py from the code (`make docs`): change it there. -->\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table, and an empty one behind it."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |"
    yield ""


def flowing(thing: Any) -> str:
    """Its docstring in one paragraph."""
    return " ".join((inspect.getdoc(thing) or "").replace("``", "`").split())
