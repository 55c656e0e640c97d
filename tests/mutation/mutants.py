"""Mutants of a file: what mutmut makes, without the changes that only reword a text, each with the lines it changes."""

from __future__ import annotations
import __future__

import ast
import dataclasses
import gc
import hashlib
import importlib
import json
import random
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

#: What is mutated, what matters most first.
FOLDERS = ("edgefl/methods", "edgefl/aggregation", "coordinator/core", "device_agent/core", "edgefl/transfer")
#: What was made of a file, by the hash of its text: libcst takes minutes for all of them.
CACHE = Path("mutants/made")
#: To be raised when other mutants are made of the same text.
MAKER = 1


class Span(Protocol):
    """Where a function stands, first and last line."""

    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A function with one change."""

    path: str
    function: str  # its qualified name
    number: int  # among those of the function, as mutmut counts
    source: str  # the changed function, still with mutmut's name
    removed: str  # the changed lines, joined and without their indentation
    added: str
    lines: list[int]  # of the file: the statements that are changed

    @property
    def name(self) -> str:
        """As it is listed: path, function, number."""
        return f"{self.path}:{self.function}#{self.number}"

    @property
    def change(self) -> tuple[str, str, str, str]:
        """What a judgement is about: it outlives a change elsewhere in the function."""
        return self.path, self.function, self.removed, self.added

    def apply(self) -> None:
        """Give the loaded function the changed code: whoever holds the function has it from now on."""
        module = importlib.import_module(self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
        owner, _, name = self.function.rpartition(".")
        tree = definition(self.source)
        tree.name, tree.decorator_list = name, []
        body: ast.stmt = tree
        if owner:  # for super() and names with two underscores
            body = ast.ClassDef(name=owner, bases=[], keywords=[], body=[tree], decorator_list=[])
            body.__dict__["type_params"] = []
        whole = ast.fix_missing_locations(ast.Module(body=[body], type_ignores=[]))
        made: dict[str, object] = {}
        flags = __future__.annotations.compiler_flag
        exec(compile(whole, self.path, "exec", flags=flags, dont_inherit=True), module.__dict__, made)  # noqa: S102 - what a mutant is
        changed = plain(vars(made[owner])[name] if owner else made[name])
        kept = plain(vars(getattr(module, owner))[name] if owner else getattr(module, name))
        for function, code in inner_functions(kept.__code__, changed.__code__):
            function.__code__ = code
        kept.__code__, kept.__defaults__ = changed.__code__, changed.__defaults__
        kept.__kwdefaults__ = changed.__kwdefaults__


def inner_functions(
    before: types.CodeType, after: types.CodeType
) -> Iterator[tuple[types.FunctionType, types.CodeType]]:
    """The functions that one of this code has made already, when its module was loaded, with their changed code."""
    pairs = zip(
        *([one for one in code.co_consts if isinstance(one, types.CodeType)] for code in (before, after)), strict=False
    )
    for old, new in pairs:
        if old.co_freevars == new.co_freevars:
            gc.unfreeze()  # what is frozen is not looked through
            for found in gc.get_referrers(old):
                if isinstance(found, types.FunctionType):
                    yield found, new


def draw(folder: str, each: int, seed: int) -> tuple[list[Mutant], int]:
    """``each`` mutants of the folder (0: all), every one as likely, in the order drawn; and how many there are."""
    found = sorted((mutant for path in sorted(Path(folder).rglob("*.py")) for mutant in cached(path)), key=_key)
    return random.Random(f"{seed} {folder}").sample(found, min(each or len(found), len(found))), len(found)


def _key(mutant: Mutant) -> tuple[str, str, int]:
    return mutant.path, mutant.function, mutant.number


def cached(path: Path) -> list[Mutant]:
    """The mutants of a file, made once for each text of it."""
    text = path.read_text(encoding="utf-8")
    kept = CACHE / hashlib.sha256(f"{MAKER} {path}\n{text}".encode()).hexdigest()[:32]
    if not kept.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps([dataclasses.asdict(each) for each in mutants(path, text)]), encoding="utf-8")
    return [Mutant(**each) for each in json.loads(kept.read_text(encoding="utf-8"))]


def mutants(path: Path, text: str) -> Iterator[Mutant]:
    """Those that change more than the wording of a text."""
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import orig_function_and_class_names_from_key

    made = mutate_file_contents(str(path), text)
    lines = made.code.splitlines()
    spans = made.line_span_by_function_name
    statements = dict(functions(ast.parse(text)))
    for name in made.mutant_names:
        own, owner = orig_function_and_class_names_from_key(name)
        function = f"{owner}.{own}" if owner else own
        kept = f"{name.partition('__mutmut_')[0]}__mutmut_orig"
        before, after = text_of(lines, spans[kept]), text_of(lines, spans[name])
        if shape(before) == shape(after):
            continue
        node = statements[function]
        after = [line.replace(name, kept) for line in after]
        first, last, last_after = changed(before, after)
        touched = statement_lines(node, first, last)
        yield Mutant(
            path=str(path),
            function=function,
            number=int(name.rpartition("_")[2]),
            source="\n".join(after),
            removed=joined(before[first:last]),
            added=joined(after[first:last_after]),
            lines=sorted(touched),
        )


def text_of(lines: list[str], span: Span) -> list[str]:
    """The lines of a function, from its first decorator or its name on."""
    found = lines[span.start - 1 : span.end]
    while not found[0].strip() or found[0].lstrip().startswith("#"):
        found = found[1:]
    return found


def joined(lines: list[str]) -> str:
    """Lines as one."""
    return " ".join(line.strip() for line in lines)


def changed(before: list[str], after: list[str]) -> tuple[int, int, int]:
    """The lines that differ: from the first, to the last in either."""
    first = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
    same = 0
    while same < min(len(before), len(after)) - first and before[-1 - same] == after[-1 - same]:
        same += 1
    return first, len(before) - same, len(after) - same


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(qualified name, definition) of functions and methods."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{member.name}", member


def statement_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, first: int, last: int) -> set[int]:
    """Lines of the file of the innermost statements that hold lines first to last (excluded) of the function's text."""
    start = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    wanted = set(range(start + first, start + max(last, first + 1)))
    found: set[int] = set()
    for node in ast.walk(function):
        if node is function or not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        own = set(range(node.lineno, max(end, node.lineno) + 1))
        if isinstance(node, ast.Match):
            own = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if own & wanted:
            found |= own
    if found:
        return found
    # in its signature: whoever calls it
    return set(range(function.body[0].lineno, (function.end_lineno or function.lineno) + 1))


def definition(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """A function's text, parsed."""
    (function,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    return function


def shape(lines: list[str]) -> str:
    """A function without its name, the wording of texts with a blank in them, and what has no effect when it runs."""
    function = definition("\n".join(lines))
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if " " in node.value:
                node.value = " "
            elif node.value == "UTF-8":
                node.value = "utf-8"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast" and node.args:
            node.args[0] = ast.Constant(None)  # a type, for the checker alone
    function.name, function.decorator_list = "", []
    return ast.dump(function)


def plain(found: object) -> types.FunctionType:
    """The function below what wraps it."""
    found = getattr(found, "__func__", found)
    assert isinstance(found, types.FunctionType), found
    return found
