"""Writes docs/configuration.md, docs/commands.md, docs/doctor.md from the code, so that none drifts: `make docs`.

``pages()`` is what the files must hold; a test compares. Every field, option, choice and default comes from the models
and the programs themselves; the text around them is in ``docs/pages``.
"""

from __future__ import annotations

from pathlib import Path

from pages.commands import commands
from pages.configuration import configuration
from pages.doctor import doctor


def pages() -> dict[str, str]:
    """File name -> text of every generated page."""
    made = {"configuration.md": configuration(), "commands.md": commands(), "doctor.md": doctor()}
    return {name: "\n".join(lines).rstrip() + "\n" for name, lines in made.items()}


def main() -> None:
    """Write the pages beside this file."""
    for name, text in pages().items():
        (Path(__file__).resolve().parent / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
