"""Measures of the code's structure, each by a count that anyone can repeat, beside those of an older commit.

python -m benchmarks.structure [--against COMMIT] [--no-walk] [--write docs/results]
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from benchmarks.common.method_names import METHODS, ORDINARY, in_source, product_files
from benchmarks.common.trees import ROOT, work_tree
from benchmarks.common.walk import walked

MANY_PARAMETERS = 6
#: Where the roles' kinds are declared.
_REGISTRY = ("edgefl/registry.py", "edgefl/roles.py")
#: Paper -> nouns of its own: what stands for nothing else in the code.
_NOUNS = {
    "PmcmFL": re.compile("matcher|is_closing|closing_round|matching_networks"),
    "AproMFL": re.compile("private_head|teacher|pseudo_label|local_pairs"),
    "FedMVP": re.compile("similarity|completed_(data|counts)|[Jj]oint_?[Ff]usion|JointSpec|shares_projection"),
    "MMiC": re.compile("poverty|coalition|core_members|banzhaf|sketch"),
}
#: Tokens that carry no code.
_LAYOUT = frozenset({
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
})  # fmt: skip


class Tree(NamedTuple):
    """A checked-out commit: its product files' text, the methods of each role, and who imports whom."""

    root: Path
    sources: Mapping[str, str]
    roles: Mapping[str, frozenset[str]]
    hooks: Mapping[str, int]
    imports: Mapping[str, frozenset[str]]


class Measure(NamedTuple):
    """One row. ``goal``: where it is to go; ``figure`` gives it as text."""

    name: str
    goal: str
    figure: Callable[[Tree], str]
    how: str


def read_tree(root: Path) -> Tree:
    """What is measured of the tree at ``root``."""
    sources = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in product_files(root)}
    command = [sys.executable, str(ROOT / "benchmarks" / "common" / "tree_facts.py")]
    asked = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=True, stdout=subprocess.PIPE
    )
    facts = json.loads(asked.stdout)
    roles = {role: frozenset(names) for role, names in facts["roles"].items()}
    return Tree(
        root, sources, roles, facts["hooks"], {module: frozenset(others) for module, others in facts["imports"].items()}
    )


def lines(tree: Tree) -> int:
    """All lines of the product's Python files."""
    return sum(len(source.splitlines()) for source in tree.sources.values())


def code_lines(tree: Tree) -> int:
    """Lines that hold code: no blank line, comment or docstring."""
    return sum(len(_code_lines(source)) for source in tree.sources.values())


def _code_lines(source: str) -> set[int]:
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return held


def functions(tree: Tree) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method."""
    for source in tree.sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many, without ``self`` and ``cls``, ``*`` and ``**``."""
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def untyped(tree: Tree) -> int:
    """How often the word ``Any`` stands in code, imports included."""
    tokens = (tokenize.generate_tokens(io.StringIO(source).readline) for source in tree.sources.values())
    return sum(token.type == tokenize.NAME and token.string == "Any" for each in tokens for token in each)


def cycles(tree: Tree) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reached = {module: _reached(module, tree.imports) for module in tree.imports}
    groups = {tuple(sorted(other for other in reached[one] if one in reached[other])) for one in reached}
    return sorted(list(group) for group in groups if group)


def _reached(module: str, imports: Mapping[str, frozenset[str]]) -> frozenset[str]:
    found: set[str] = set()
    waiting = list(imports[module])
    while waiting:
        other = waiting.pop()
        if other not in found:
            found.add(other)
            waiting += imports[other]
    return frozenset(found)


def unordered(tree: Tree) -> list[str]:
    """Modules that stand in no layer of any contract, nor in a folder that does."""
    layers = set(_layers(tree.root))
    return [module for module in sorted(tree.imports) if "." in module and not layers & set(_with_parents(module))]


def unordered_in_folder(tree: Tree) -> list[str]:
    """Modules that no contract orders among their siblings."""
    return [module for module in sorted(tree.imports) if "." in module and module not in set(_layers(tree.root))]


def _layers(root: Path) -> Iterator[str]:
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    for contract in settings["contracts"]:
        if contract["type"] == "layers":
            for container in contract.get("containers", [""]):
                for layer in contract["layers"]:
                    names = layer.replace(":", "|").replace("(", "").replace(")", "").split("|")
                    yield from (".".join(filter(None, (container, name.strip()))) for name in names)


def _with_parents(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]


def shared_names(tree: Tree) -> Counter[str]:
    """File name -> files, of the names that more than one file has; packages' own files apart."""
    names = Counter(Path(file).name for file in tree.sources)
    return Counter({name: count for name, count in names.items() if count > 1 and name != "__init__.py"})


def names_outside(tree: Tree) -> list[str]:
    """The files outside ``edgefl/methods``, one entry for each place that spells a method's name."""
    places = (in_source(source, file, tree.roles) for file, source in tree.sources.items() if METHODS not in file)
    return [place.file for found in places for place in found]


def files_of_methods(tree: Tree) -> dict[str, int]:
    """Method -> product files that spell its name, of the names that mean nothing else."""
    files: Counter[str] = Counter()
    for file, source in tree.sources.items():
        files.update({place.name for place in in_source(source, file, tree.roles)})
    return {name: max(1, files[name]) for name in sorted(frozenset().union(*tree.roles.values()) - ORDINARY)}


def single_hooks(tree: Tree) -> list[str]:
    """Hooks and traits of the roles that one method sets, or none."""
    return sorted(name for name, users in tree.hooks.items() if users < 2)


def concepts(tree: Tree) -> dict[str, list[str]]:
    """Paper -> the files outside ``edgefl/methods`` whose code, comments and texts left out, has a noun of it."""
    core = {file: _code(source) for file, source in tree.sources.items() if METHODS not in file}
    return {paper: sorted(f for f, code in core.items() if nouns.search(code)) for paper, nouns in _NOUNS.items()}


def _code(source: str) -> str:
    left_out = (tokenize.COMMENT, tokenize.STRING)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return " ".join(token.string for token in tokens if token.type not in left_out)


def untyped_hooks(tree: Tree) -> int:
    """Functions of methods whose parameters are not typed where they are declared."""
    declared = re.compile(r"^    \w+: Callable\[\.\.\.", re.MULTILINE)
    return sum(len(declared.findall(source)) for file, source in tree.sources.items() if file in _REGISTRY)


def option_values(tree: Tree) -> list[str]:
    """The files outside ``edgefl/methods``, one entry for each comparison with the value of a method's option."""
    return [file for file, source in tree.sources.items() if METHODS not in file for _ in compared_options(source)]


def compared_options(source: str) -> list[int]:
    """Lines that compare ``….options["name"]`` or ``….options.get("name")``, or a name that holds one, with text."""
    found = []
    for scope in ast.walk(ast.parse(source)):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        held = {
            target.id
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign) and _reads_option(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(scope):
            if not isinstance(node, ast.Compare) or not any(map(_holds_text, node.comparators)):
                continue
            if _reads_option(node.left) or (isinstance(node.left, ast.Name) and node.left.id in held):
                found.append(node.lineno)
    return sorted(set(found))


def _reads_option(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        return _is_options(node.func.value) and bool(node.args) and isinstance(node.args[0], ast.Constant)
    return isinstance(node, ast.Subscript) and _is_options(node.value) and isinstance(node.slice, ast.Constant)


def _is_options(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "options") or (
        isinstance(node, ast.Name) and node.id == "options"
    )


def _holds_text(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in ast.walk(node))


def _spread(counts: Mapping[str, int]) -> str:
    most = max(counts, key=lambda name: counts[name])
    return f"{statistics.median(counts.values()):g} (most: {most}, {counts[most]})"


def _in_files(files: Iterable[str]) -> str:
    found = list(files)
    return f"{len(found)} in {len(set(found))} files" if found else "0"


def _modules(tree: Tree) -> list[int]:
    return [len(source.splitlines()) for file, source in tree.sources.items() if not file.endswith("__init__.py")]


def _walk(tree: Tree) -> str:
    files = [file for file in walked(tree.root) if file in tree.sources]  # not those of an environment inside the tree
    return f"{len(files)} ({sum(len(tree.sources[file].splitlines()) for file in files):,} lines)"


WALK = Measure(
    "files on a layer's walk", "60",
    _walk,
    "files with a function that runs while one device trains two stages, a round each, over MQTT: coordinator, its "
    "worker, agent and trainer, traced from start to end; what runs while a module is imported does not count. The "
    "goal is of a count by hand that left start, end and measuring out, and was 117 at 8515bcb",
)  # fmt: skip
MEASURES = (
    Measure("product lines", "30,000", lambda tree: f"{lines(tree):,}", "all lines of the packages' Python files"),
    Measure(
        "code lines", "20,500", lambda tree: f"{code_lines(tree):,}", "of these without blanks, comments and docstrings"
    ),
    Measure("files", "205", lambda tree: str(len(_modules(tree))), "without `__init__.py`"),
    Measure("median module, lines", "130", lambda tree: f"{statistics.median(_modules(tree)):g}", "of these files"),
    Measure(
        "functions with more than six parameters", "< 12",
        lambda tree: str(sum(parameters(function) > MANY_PARAMETERS for function in functions(tree))),
        "without `self` and `cls`, `*` and `**`",
    ),
    Measure("`Any`", "< 150", lambda tree: str(untyped(tree)), "the word in code, imports included"),
    Measure(
        "import cycles", "0", lambda tree: str(len(cycles(tree))),
        "groups of modules that import each other, in functions and for type checks too (grimp)",
    ),
    Measure(
        "modules in no layer", "0", lambda tree: str(len(unordered(tree))),
        "of no layers contract, nor below a folder that is a layer",
    ),
    Measure(
        "modules without an order in their folder", "0", lambda tree: str(len(unordered_in_folder(tree))),
        "no layers contract names the module itself",
    ),
    Measure(
        "files that share a name", "< 15",
        lambda tree: f"{shared_names(tree).total()} ({len(shared_names(tree))} names)", "without `__init__.py`",
    ),
    Measure(
        "method names outside edgefl/methods", "0", lambda tree: _in_files(names_outside(tree)),
        "places that spell one, by the rule of `benchmarks/common/method_names.py`: comparisons, look-ups and tables, "
        "the closed dictionary of choices too",
    ),
    Measure(
        "files that spell a method's name", "1", lambda tree: _spread(files_of_methods(tree)),
        "median over the methods whose name is no ordinary word: the fewest files that adding one touches",
    ),
    Measure(
        "hooks with one user", "", lambda tree: f"{len(single_hooks(tree))} of {len(tree.hooks)}",
        "functions and traits of the roles' kinds that one method sets, shipped or of examples/edgefl_extra, or none",
    ),
    Measure(
        "core files with one paper's concept", "",
        lambda tree: ", ".join(f"{paper} {len(files)}" for paper, files in concepts(tree).items()),
        "outside `edgefl/methods`, by nouns of its own in their code (`_NOUNS`), texts and comments left out",
    ),
    Measure(
        "untyped hooks", "0", lambda tree: str(untyped_hooks(tree)),
        "functions of the roles' kinds that the registry declares as `Callable[...`, whatever they are given",
    ),
    Measure(
        "option values compared in the core", "0", lambda tree: _in_files(option_values(tree)),
        "comparisons outside edgefl/methods of what `options` holds, directly or by a local name, with text",
    ),
)  # fmt: skip


def page(columns: Mapping[str, list[str]], measures: Iterable[Measure], command: str) -> str:
    """The table, and how each figure was counted."""
    names = list(columns)
    rows = [f"| measure | {' | '.join(names)} | goal |", f"|---{'|---' * len(names)}|---|"]
    counted = []
    for place, measure in enumerate(measures):
        rows.append(f"| {measure.name} | {' | '.join(columns[name][place] for name in names)} | {measure.goal} |")
        counted.append(f"* **{measure.name}**: {measure.how}.")
    return "\n".join(
        [
            "# The code's structure", "", f"`{command}`", "",
            "Product code is `edgefl`, `coordinator` and `device_agent`; tests and benchmarks are left out.", "",
            *rows, "", "How each is counted:", "", *counted,
        ]
    )  # fmt: skip


def main() -> None:
    """Count, print, and write the page where asked to."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--against", action="append", default=[], metavar="COMMIT", help="count an older commit too")
    options.add_argument("--no-walk", action="store_true", help="leave out the traced run (a minute a tree)")
    options.add_argument("--write", type=Path, metavar="FOLDER", help="write FOLDER/structure.md")
    asked = options.parse_args()
    measures = MEASURES if asked.no_walk else (*MEASURES, WALK)
    columns = {}
    for commit in asked.against:
        with work_tree(commit) as place:
            tree = read_tree(place)
            columns[commit] = [measure.figure(tree) for measure in measures]
    tree = read_tree(ROOT)
    columns["now"] = [measure.figure(tree) for measure in measures]
    text = page(
        columns, measures, " ".join(["python -m benchmarks.structure", *(f"--against {c}" for c in asked.against)])
    )
    print(text)
    if asked.write:
        (asked.write / "structure.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
