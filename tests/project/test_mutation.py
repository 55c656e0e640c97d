"""The list of equivalent mutants is about the code as it is."""

from __future__ import annotations

import ast
import gc
import importlib
import mmap
from pathlib import Path

import pytest
from mutation.__main__ import EQUIVALENT, equivalents
from mutation.mutants import FOLDERS, Mutant, functions, joined, statement_lines
from mutation.session import MORE_MEMORY_BYTES, Job, run


def test_every_equivalent_mutant_changes_a_line_of_its_function() -> None:
    known = equivalents(EQUIVALENT.read_text(encoding="utf-8"))
    assert len(known) == EQUIVALENT.read_text(encoding="utf-8").count("\n  + `"), "one in another form is not read"
    for path, function, removed, added in known:
        assert path.startswith(FOLDERS)
        text = Path(path).read_text(encoding="utf-8")
        node = dict(functions(ast.parse(text)))[function]
        lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
        assert removed in joined(lines), f"{path}:{function} has changed: read the mutant again, or take it out"
        assert removed != added


def test_a_change_belongs_to_the_innermost_statements_that_hold_it() -> None:
    text = "def f(a,\n  b=1):\n  if a:\n    b = [\n      a,\n    ]\n  return b\n"
    (_, node), *_ = functions(ast.parse(text))
    assert statement_lines(node, 4, 5) == {4, 5, 6}
    assert statement_lines(node, 2, 3) == {3}
    assert statement_lines(node, 1, 2) == {3, 4, 5, 6, 7}, "a default: all that call it"


@pytest.mark.parametrize("children", [1, 2])
def test_jobs_end_however_many_run_at_a_time(children: int) -> None:
    said: list[str] = []
    run((Job(lambda n=n: f"survived {n}", 60, 60, said.append) for n in range(3)), children)
    assert sorted(said) == ["survived 0", "survived 1", "survived 2"]


def test_a_job_may_reserve_addresses_but_not_fill_memory() -> None:
    """V8 reserves gigabytes that it never writes to; the process that drew a chart ended without a result."""

    def work(access: int) -> str:
        mmap.mmap(-1, 2 * MORE_MEMORY_BYTES, flags=mmap.MAP_PRIVATE, prot=access).close()
        return "had it"

    said: list[str] = []
    run(iter([Job(lambda: work(0), 60, 60, said.append)]), 1)
    run(iter([Job(lambda: work(mmap.PROT_READ | mmap.PROT_WRITE), 60, 60, said.append)]), 1)
    assert said == ["had it", "killed OSError"]


def test_a_mutant_reaches_the_functions_that_were_made_when_its_module_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def plus(n):\n    def add(x):\n        return x + n\n    return add\n"
    (tmp_path / "made_at_load.py").write_text(f"{text}\nadd_two = plus(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("made_at_load")
    assert module.add_two(5) == 7
    gc.freeze()
    Mutant("made_at_load.py", "plus", 1, text.replace("+ n", "- n"), "", "", []).apply()
    assert (module.add_two(5), module.plus(1)(5)) == (3, 4)
