"""A page of results whose sections are written by different benchmarks, each when it is run."""

from __future__ import annotations

import re
from pathlib import Path


def put(page: Path, title: str, text: str, *, head: str = "") -> None:
    """Replace the section ``## title`` of ``page``, or add it at the end; a new page begins with ``head``."""
    whole = page.read_text(encoding="utf-8") if page.exists() else head.rstrip() + "\n"
    section = f"## {title}\n\n{text.strip()}\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    known = pattern.search(whole) is not None
    whole = pattern.sub(lambda _: section + "\n", whole) if known else f"{whole.rstrip()}\n\n{section}"
    page.write_text(whole.rstrip() + "\n", encoding="utf-8")


#: What the page on the transport begins with.
TRANSPORT = """# Transport

What a round costs beside the training, what a crash, a bad network, a crowd and broken devices do to it. Every section
is written by the command it names; real brokers, processes and databases, on two cores.
"""


def transport(folder: Path, title: str, command: str, text: str) -> None:
    """Put a section on ``transport.md``."""
    put(folder / "transport.md", title, f"`{command}`\n\n{text}", head=TRANSPORT)
