"""The glossary's words, and docstrings in plain ones."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.method_names import product_files

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("glossary*.md"))
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)
ROWS = re.findall(
    r"^\| (?P<word>[^|]+) \|[^|]+\|[^|]*\| `(?P<file>[\w/]+\.py)` `(?P<symbol>\w+)` \|$", TEXT, re.MULTILINE
)
#: Words that docstrings go without: riddles, and what is no English here. Name -> pattern.
BANNED = {
    "anew": r"(?i)\banew\b",
    "can-not": r"(?i)\bcan not\b",
    "nobody": r"(?i)\b(nobody|somebody)\b",
    "told": r"(?i)\btold\b",
    "what-is": r"\A(What|Who|Whoever) (is|are|was|were|a|an|the)\b",
}


def test_the_glossary_has_its_words_once() -> None:
    words = [word for word, _, _ in ROWS]
    assert len(PAGES) == 2
    assert len(words) >= 40
    assert len(set(words)) == len(words)
    table = [line for line in TEXT.splitlines() if line[:2] == "| "]
    assert len(table) - len(ROWS) == sum(line.startswith("| word ") for line in table), "a row that is not understood"


@pytest.mark.parametrize(("word", "file", "symbol"), ROWS)
def test_each_word_is_where_the_glossary_says(word: str, file: str, symbol: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert symbol in defined, f"{file} has no {symbol}, where docs/glossary*.md has '{word}'"


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("What is leaving.", {"what-is"}),
        ("Whoever is told; it can not be done anew.", {"anew", "can-not", "told"}),
        ("A straggler's update.\n\nWhat is late counts later.", set()),
        ("Nobody asks.", {"nobody"}),
    ],
)
def test_banned_words_are_found(text: str, keys: set[str]) -> None:
    assert {key for key, pattern in BANNED.items() if re.search(pattern, text)} >= keys
    assert keys or not any(re.search(pattern, text) for pattern in BANNED.values())


def test_docstrings_are_plain() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in product_files(ROOT):
        for text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            keys = [key for key, pattern in BANNED.items() if re.search(pattern, text)]
            found[path.relative_to(ROOT).as_posix()] += keys
    breaches = {file: keys for file, keys in found.items() if keys}
    assert not breaches, "say in the field's words what it is (docs/glossary.md)"
