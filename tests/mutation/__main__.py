"""Mutation testing: ``python -m mutation [--each N] [--seed S] [--folder F …] [--children C] [--write PAGE]``.

Of each folder's mutants, as mutmut makes them, a seeded sample is run; the same seed draws the same while the code is
the same. Each meets the tests that execute what it changes, fastest first, until one fails. Prints the score by folder,
and each survivor as a diff. ``equivalent.md`` says which survivors were read and cannot be told from the code.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mutation.mutants import FOLDERS, Mutant, draw
from mutation.session import Session

#: The tests that decide: those beside the code, not fleets, attacks and pins.
TESTS = ("tests/aggregation", "tests/methods", "tests/coordinator", "tests/agent", "tests/protocol")
ARGUMENTS = ("-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "--timeout", "0")
EQUIVALENT = Path(__file__).with_name("equivalent.md")
#: What became of one that was noticed: a test failed, it used up its time of the processor, or it ended the process.
KILLED = {"killed", "time", "died"}

Result = tuple[str, str]  # what became of a mutant; the test that did it


def main() -> int:
    """Draw, run and report; 1 when the tests could not be collected."""
    parser = argparse.ArgumentParser(prog="mutation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--each", type=int, default=60, help="mutants of a folder; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", nargs="*", default=FOLDERS, choices=FOLDERS, help="default: all")
    parser.add_argument("--children", type=int, default=2, help="processes")
    parser.add_argument("--minutes", type=float, default=0, help="begin no mutant after these; 0: no end")
    parser.add_argument("--log", type=Path, help="a line of JSON for each mutant, as it ends")
    parser.add_argument("--again", type=Path, help="of those drawn, the ones that such a log says no test noticed")
    parser.add_argument("--write", type=Path, help="the page with the results")
    options = parser.parse_args()
    begun = time.time()
    drawn = {folder: draw(folder, options.each, options.seed) for folder in options.folder}
    # folder by folder in turn, so that an early end leaves a sample of each
    turns = [(at, mutant) for chosen, _ in drawn.values() for at, mutant in enumerate(chosen)]
    order = [mutant for _, mutant in sorted(turns, key=lambda turn: turn[0])]
    if options.again:
        said = [json.loads(line) for line in options.again.read_text(encoding="utf-8").splitlines()]
        left = {each["name"] for each in said if each["status"] not in KILLED}
        order = [mutant for mutant in order if mutant.name in left]
    sys.stdout.write(f"{len(order)} mutants of {sum(of for _, of in drawn.values())}\n")
    sys.stdout.flush()
    results: dict[str, Result] = {}
    log = options.log.open("a", encoding="utf-8") if options.log else None

    def tell(mutant: Mutant, status: str, test: str) -> None:
        results[mutant.name] = (status, test)
        if log:
            said = {"name": mutant.name, "status": status, "test": test, "-": mutant.removed, "+": mutant.added}
            log.write(json.dumps({**said, "at": round(time.time() - begun)}) + "\n")
            log.flush()

    session = Session(order, options.children, begun + options.minutes * 60 if options.minutes else 0, tell)
    status = pytest.main([*ARGUMENTS, "--hypothesis-seed", "0", *TESTS], plugins=[session])
    if status not in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
        sys.stderr.write(f"pytest ended with status {status}\n")
        return 1
    known = equivalents(EQUIVALENT.read_text(encoding="utf-8"))
    lines = [*table(drawn, results, known), "", *unsure(session, results), *survivors(order, results, known)]
    sys.stdout.write("\n".join(["", *lines, ""]))
    if options.write:
        asked = f"make mutants EACH={options.each} SEED={options.seed}"
        options.write.write_text("\n".join([*heading(asked, time.time() - begun), *lines, ""]), encoding="utf-8")
    return 0


def equivalents(page: str) -> dict[tuple[str, str, str, str], str]:
    """The reason, by a mutant's change: path, function, removed and added line."""
    found = {}
    for each in re.finditer(r"^\* `(\S+):(\S+)`: (.+)\n((?:  [-+] `.*`\n?)+)", page, re.MULTILINE):
        path, function, reason, changes = each.groups()
        shown = re.findall(r"^  ([-+]) `(.*)`$", changes, re.MULTILINE)
        before = [text for sign, text in shown if sign == "-"]
        for sign, text in shown:
            if sign == "+":
                found[path, function, before[0], text] = reason
    return found


def table(
    drawn: dict[str, tuple[list[Mutant], int]],
    results: dict[str, Result],
    known: dict[tuple[str, str, str, str], str],
) -> Iterator[str]:
    """Markdown: a line a folder, and all."""
    yield "| folder | mutants | run | killed | by time | survived | no test | equivalent | score | without these |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    rows = [(folder, of, [each for each in chosen if each.name in results]) for folder, (chosen, of) in drawn.items()]
    if len(rows) > 1:
        rows.append(("all", sum(of for _, of, _ in rows), [mutant for _, _, chosen in rows for mutant in chosen]))
    for folder, of, chosen in rows:
        count = Counter(results[each.name][0] for each in chosen)
        killed, ran = sum(count[status] for status in KILLED), len(chosen)
        same = sum(each.change in known for each in chosen if results[each.name][0] not in KILLED)
        raw, read = (f"{killed / each:.1%}" if each else "-" for each in (ran, ran - same))
        rest = ran - killed - count["no test"]
        counts = [of, ran, killed, count["time"], rest, count["no test"], same]
        yield f"| {folder} | {' | '.join(map(str, counts))} | {raw} | {read} |"


def unsure(session: Session, results: dict[str, Result]) -> Iterator[str]:
    """What may not be as the table says."""
    for test in session.unsound:
        yield f"* fails without a mutant, and is not asked: `{test}`"
    for test in session.wavering:
        count = sum(each[1] == test for each in results.values())
        yield f"* fails without a mutant when run once more, so {count} were not killed for sure: `{test}`"


def survivors(
    order: list[Mutant], results: dict[str, Result], known: dict[tuple[str, str, str, str], str]
) -> Iterator[str]:
    """Each that no test noticed, with what it changes; those read before are left out."""
    for mutant in order:
        status = results.get(mutant.name, ("killed", ""))[0]
        if status not in KILLED and mutant.change not in known:
            yield f"* `{mutant.path}:{mutant.function}` ({status})"
            yield f"  - `{mutant.removed}`"
            yield f"  + `{mutant.added}`"


def heading(asked: str, seconds: float) -> list[str]:
    """The page's first lines."""
    return ["# Mutants", "", f"Made by `{asked}` in {seconds / 60:.0f} minutes.", ""]


if __name__ == "__main__":
    sys.exit(main())
