"""Hooks of `make site`: pages from outside docs/, folders in the navigation, and links that leave docs/, which become
the paths they point at in the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
#: Pages of the site, and the files outside docs/ that they are made of.
OUTSIDE = {"index.md": ROOT / "README.md", "example_package.md": ROOT / "examples/edgefl_extra/README.md"}
PAGES = {source: page for page, source in OUTSIDE.items()}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^):#\s]+)(#[^)\s]*)?\)")


def pages_of(entry: Any) -> list[Any]:
    """A navigation entry, or the pages of the folder under docs/ that it names by a slash at its end, README first."""
    if not (isinstance(entry, str) and entry.endswith("/")):
        return [expanded(entry)]
    names = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / entry).glob("*.md"))
    return sorted(names, key=lambda name: name != f"{entry}README.md")


def expanded(entry: Any) -> Any:
    """A part of the navigation with the pages of its folders."""
    if isinstance(entry, list):
        return [page for one in entry for page in pages_of(one)]
    if isinstance(entry, dict):
        return {title: expanded(inner) for title, inner in entry.items()}
    return entry


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = expanded(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=source.read_text(encoding="utf-8")))
    return files


def relinked(text: str, source: Path) -> str:
    """The Markdown of the file ``source`` for its page. A link to nothing stays, and fails the strict build."""
    page = DOCS / PAGES[source] if source in PAGES else source

    def link(found: re.Match[str]) -> str:
        picture, words, path, anchor = found.groups(default="")
        target = (source.parent / path).resolve()
        if target in PAGES:
            target = DOCS / PAGES[target]
        if target.is_relative_to(DOCS):
            return f"{picture}[{words}]({Path(os.path.relpath(target, page.parent)).as_posix()}{anchor})"
        if picture or not (target.exists() and target.is_relative_to(ROOT)):
            return found[0]
        place = target.relative_to(ROOT).as_posix()
        return f"`{place}`" if words in {place, place.removesuffix("/README.md")} else f"{words} (`{place}`)"

    return LINK.sub(link, text)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    name = page.file.src_uri
    return relinked(markdown, OUTSIDE.get(name, DOCS / name))
