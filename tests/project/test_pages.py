"""The commands in README and docs are commands that there are, with options that they have."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
import typer.main

import coordinator.cli
import device_agent.cli
from edgefl.cli import main as edgefl

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "SECURITY.md"]
PROGRAMS = ("edgefl", "edgefl-agent", "edgefl-coordinator")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: The usage lines of the generated reference, and words in capitals that stand for something.
USAGE = re.compile(r"\[[A-Z][\w.|]*\]|\[OPTIONS\]")


def commands(text: str) -> list[list[str]]:
    """The command lines of our programs in the code blocks of a page, as words."""
    found = []
    for language, block in BLOCK.findall(text):
        if language not in {"", "sh", "bash", "console"}:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if USAGE.search(line):
                continue
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:  # a line of a program's output
                continue
            words = list(itertools.dropwhile(lambda word: "=" in word or word in {"sudo", "nohup"}, words))
            if words and Path(words[0]).name in PROGRAMS:
                stop = next(
                    (at for at, word in enumerate(words) if word in {"|", "&", "&&", ";", ">", "2>"}), len(words)
                )
                found.append([Path(words[0]).name, *words[1:stop]])
    return found


def parse(words: list[str]) -> None:
    """Parse a command line as its program would, without running it. Raises click's usage error."""
    program, *rest = words
    if program == "edgefl":
        if not rest or rest[0].startswith("--"):
            return
        rest = edgefl.with_page(edgefl.verb_first(rest))
        assert rest[0] in edgefl.VERBS, f"edgefl has no verb {rest[0]}"
        command, rest = edgefl.load(rest[0]), rest[1:]
    else:
        command = typer.main.get_command(
            {"edgefl-agent": device_agent.cli, "edgefl-coordinator": coordinator.cli}[program].app
        )
    context = None
    while True:
        context = command.make_context(program, list(rest), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        words = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
        _, command, rest = command.resolve_command(context, words)


SHOWN = [(page.relative_to(ROOT), words) for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]


def test_a_command_that_is_not_there_would_be_seen():
    assert commands("```\nedgefl plan demo --devices x  # a comment\n```\n") == [
        ["edgefl", "plan", "demo", "--devices", "x"]
    ]
    with pytest.raises(Exception, match="No such option"):
        parse(["edgefl", "plan", "demo", "--devices", "x"])
    with pytest.raises(Exception, match="No such command"):
        parse(["edgefl-agent", "dance"])
    with pytest.raises(AssertionError, match="dance"):
        parse(["edgefl", "dance"])


def test_there_are_commands_to_look_at():
    assert len(SHOWN) > 20
    assert {words[0] for _, words in SHOWN} == set(PROGRAMS)


@pytest.mark.parametrize(
    ("page", "words"), SHOWN, ids=lambda value: shlex.join(value) if isinstance(value, list) else str(value)
)
def test_a_command_of_the_pages_can_be_parsed(page: Path, words: list[str], tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parse(words)


#: Generated reference, looked up row by row; and pages that are still to be split.
LONG = {"commands.md", "configuration.md", "doctor.md"}
DOCS = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_a_page_has_at_most_1500_words(page: Path) -> None:
    words = len(page.read_text(encoding="utf-8").split())
    assert words <= 1500 or page.name in LONG, f"{words} words: split it by what a person wants to do"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_a_page_begins_with_what_its_reader_will_have(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    title = next(index for index, line in enumerate(lines) if line.startswith("# "))
    first = next(line for line in lines[title + 1 :] if line)
    assert first.startswith(("At the end ", "Look up here "))


LINK = re.compile(r"\]\(([^)\s]+)\)")
LINKING = [
    ROOT / "README.md",
    *sorted(ROOT.glob("[A-Z]*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the forge makes them."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: there is no {target.relative_to(ROOT)}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"
