"""Mutation testing: ``python -m mutation [--each N] [--seed S] [--folder F …] [--children C] [--write PAGE]``.

Of each folder's mutants, as mutmut makes them, a seeded sample is run; the same seed draws the same while the code is
the same. Mutants that only reword a text with a blank in it are not drawn. Each runs the tests that call its function,
fastest first, until one fails. Prints the score by folder and in all, and each survivor as a diff.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

#: What is mutated, what matters most first; pyproject.toml, [tool.mutmut], says which tests run.
FOLDERS = ("edgefl/methods", "edgefl/aggregation", "coordinator/core", "device_agent/core", "edgefl/transfer")
#: What mutmut calls a mutant that a test saw: a time-out is one, too.
KILLED = {"killed", "timeout", "segfault"}
#: What it calls one that it did not come to.
UNCHECKED = "not checked"
#: Of the environment that runs this.
MUTMUT = str(Path(sys.executable).with_name("mutmut"))


def main() -> int:
    """Draw, run and report; 1 when mutmut could not run."""
    parser = argparse.ArgumentParser(prog="mutation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--each", type=int, default=60, help="mutants of a folder; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", nargs="*", default=FOLDERS, choices=FOLDERS, help="default: all")
    parser.add_argument("--children", type=int, default=2, help="processes")
    parser.add_argument("--write", type=Path, help="the page with the results")
    options = parser.parse_args()
    begun = time.time()
    drawn = {folder: draw(folder, options.each, options.seed) for folder in options.folder}
    names = [name for chosen, _ in drawn.values() for name in chosen]
    sys.stdout.write(f"{len(names)} mutants of {sum(of for _, of in drawn.values())}\n")
    sys.stdout.flush()
    paths = os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [MUTMUT, "run", "--max-children", str(options.children), *names]
    if status := subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}).returncode:
        sys.stderr.write(f"mutmut ended with status {status}\n")
        return 1
    status_of = dict(statuses())
    lines = [*table(drawn, status_of), "", *survivors(names, status_of)]
    sys.stdout.write("\n".join(["", *lines, ""]))
    if options.write:
        asked = f"make mutants EACH={options.each} SEED={options.seed}"
        options.write.write_text("\n".join([*heading(asked, time.time() - begun), *lines, ""]), encoding="utf-8")
    return 0


def draw(folder: str, each: int, seed: int) -> tuple[list[str], int]:
    """``each`` mutants of the folder (0: all), and how many there are, without those that reword a text."""
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import get_mutant_name

    found: list[str] = []
    for path in sorted(Path(folder).rglob("*.py")):
        made = mutate_file_contents(str(path), path.read_text(encoding="utf-8"))
        lines = made.code.splitlines()
        bodies = {
            name: shape(lines[span.start - 1 : span.end]) for name, span in made.line_span_by_function_name.items()
        }
        found += [
            get_mutant_name(path, name)
            for name in made.mutant_names
            if bodies[name] != bodies[f"{name.partition('__mutmut_')[0]}__mutmut_orig"]
        ]
    found.sort()
    return sorted(random.Random(f"{seed} {folder}").sample(found, min(each or len(found), len(found)))), len(found)


def shape(lines: list[str]) -> str:
    """A function without its name and without the wording of texts with a blank in them."""
    (function,) = ast.parse(textwrap.dedent("\n".join(lines))).body
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            node.value = " "
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    function.name, function.decorator_list = "", []
    return ast.dump(function)


def statuses() -> Iterator[tuple[str, str]]:
    """(mutant, what became of it) of all that mutmut knows."""
    listed = subprocess.run([MUTMUT, "results", "--all", "true"], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        name, _, status = line.strip().rpartition(": ")
        if name:
            yield name, status


def table(drawn: dict[str, tuple[list[str], int]], status_of: dict[str, str]) -> Iterator[str]:
    """Markdown: a line a folder, and all."""
    yield "| folder | mutants | run | killed | survived | no test | score |"
    yield "|---|---|---|---|---|---|---|"
    rows = [
        (folder, of, [status_of[name] for name in names if status_of[name] != UNCHECKED])
        for folder, (names, of) in drawn.items()
    ]
    rows.append(("all", sum(of for _, of, _ in rows), [status for _, _, each in rows for status in each]))
    for folder, of, each in rows:
        killed, untested = sum(status in KILLED for status in each), each.count("no tests")
        score = f"{killed / len(each):.1%}" if each else "-"
        yield f"| {folder} | {of} | {len(each)} | {killed} | {len(each) - killed - untested} | {untested} | {score} |"


def survivors(names: Iterable[str], status_of: dict[str, str]) -> Iterator[str]:
    """Each by name, with what it changes."""
    for name in names:
        if status_of[name] not in {*KILLED, UNCHECKED}:
            shown = subprocess.run([MUTMUT, "show", name], capture_output=True, text=True, check=True).stdout
            changed = [line for line in shown.splitlines() if line[:1] in {"-", "+"} and line[:3] not in {"---", "+++"}]
            yield f"* `{name}` ({status_of[name]})"
            yield from (f"  `{line[0]} {line[1:].strip()}`" for line in changed)


def heading(asked: str, seconds: float) -> list[str]:
    """The page's first lines."""
    return ["# Mutants", "", f"Made by `{asked}` in {seconds / 60:.0f} minutes.", ""]


if __name__ == "__main__":
    sys.exit(main())
