"""Where the product spells the name of a method, read from the syntax tree.

The core knows roles ("cluster"), never names ("lsh"): a name belongs into ``edgefl/methods`` and into recipes.
What counts:

* a name that means nothing else (``class_mean``): every string constant equal to it, docstrings apart;
* any name, ordinary words (``none``, ``mean``) too, where it is compared with, looked up in, or written into something
  that holds a slot of its role: ``"own" in recipe["weight"]``, ``slot.name == "none"``, ``{"cluster": "none"}``;
* two names of one role in one literal: ``{"all": …, "random": …}``.

Text within a longer text, such as an error's, does not count.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.tree_facts import PACKAGES

METHODS = "edgefl/methods/"
#: Role -> the names registered for it.
Roles = Mapping[str, frozenset[str]]
Env = dict[str, frozenset[str]]

#: Names that are also words for something else: modes of numpy, columns of tables, counts, masks of an evaluation.
ORDINARY = frozenset({
    "all", "completion", "heads", "ignore", "joint", "mean", "median", "mixed", "momentum", "none", "own", "plain",
    "planned", "prototype", "random", "reconstruction", "samples", "separate", "whole", "zero",
})  # fmt: skip
#: Identifiers that hold the slots of every role.
_ANY_ROLE = frozenset({"recipe", "slot", "slots"})
#: Identifiers that hold a role's slot under another name.
_ALIASES = {"encoder_sharing": "sharing", "mask": "missing", "masks": "missing", "terms": "objective"}
_READS = frozenset({"copy", "get", "items", "keys", "pop", "values"})
_WRAPS = frozenset({"frozenset", "iter", "list", "next", "set", "sorted", "str", "tuple"})
_SET_CALLS = frozenset({"difference", "intersection", "isdisjoint", "issubset", "issuperset", "union"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Spelling(NamedTuple):
    """One place that spells a method's name."""

    file: str
    line: int
    name: str


def spellings(root: Path, roles: Roles) -> list[Spelling]:
    """Every place in the product below ``root`` outside ``edgefl/methods``, in order."""
    found = []
    for path in product_files(root):
        file = path.relative_to(root).as_posix()
        if not file.startswith(METHODS):
            found += in_source(path.read_text(encoding="utf-8"), file, roles)
    return found


def product_files(root: Path) -> list[Path]:
    """The product's Python files, in order."""
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))


def in_source(source: str, file: str, roles: Roles) -> list[Spelling]:
    """The places in one module."""
    reader = _Reader(roles)
    tree = ast.parse(source)
    reader.scope(tree, {})
    for node in reader.distinct(tree):
        reader.note(node)
    return sorted({Spelling(file, line, name) for _, line, name in reader.found.values()})


class _Reader:
    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self.words: Env = {word: frozenset(roles) for word in _ANY_ROLE}
        self.words.update({role: frozenset({role}) for role in roles})
        self.words.update({word: frozenset({role}) for word, role in _ALIASES.items() if role in roles})
        self.every = frozenset(name for names in roles.values() for name in names)
        #: id of a constant -> (the constant, so that the id stays its own; line; name)
        self.found: dict[int, tuple[ast.Constant, int, str]] = {}

    def note(self, *constants: ast.Constant) -> None:
        for node in constants:
            self.found[id(node)] = (node, node.lineno, str(node.value))

    def distinct(self, tree: ast.AST) -> Iterator[ast.Constant]:
        """Constants that are the name of a method and of nothing else."""
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        names = self.every - ORDINARY
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in names and id(node) not in docstrings:
                yield node

    def scope(self, tree: ast.AST, outer: Env) -> None:
        """Read one module, class or function; ``outer``: names of enclosing scopes that hold a slot."""
        body = list(_own(tree))
        env = dict(outer)
        for _ in range(2):  # a name may hold what a later line of a loop gave it
            for node in body:
                for target, value in _bindings(node):
                    roles = self.held(value, env)
                    if roles:
                        env.update(dict.fromkeys(_first_names(target), roles))
        for node in body:
            self.read(node, env)
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                self.scope(node, env)

    def held(self, node: ast.AST | None, env: Env) -> frozenset[str]:
        """The roles whose slots ``node`` may hold."""
        if isinstance(node, ast.Name):
            return env.get(node.id) or self.words.get(node.id.lower().strip("_"), frozenset())
        if isinstance(node, ast.Attribute):
            named = node.attr == "name"
            return self.held(node.value, env) if named else self.words.get(node.attr.strip("_"), frozenset())
        if isinstance(node, ast.Subscript):
            return self.narrowed(node.value, node.slice, env)
        if isinstance(node, ast.Call):
            return self.called(node, env)
        if isinstance(node, ast.BoolOp):
            return frozenset().union(*(self.held(value, env) for value in node.values))
        if isinstance(node, ast.IfExp):
            return self.held(node.body, env) | self.held(node.orelse, env)
        if isinstance(node, ast.BinOp):
            return self.held(node.left, env) | self.held(node.right, env)
        if isinstance(node, ast.NamedExpr | ast.Starred):
            return self.held(node.value, env)
        if isinstance(node, ast.Set | ast.List | ast.Tuple):
            return frozenset().union(*(self.held(one, env) for one in node.elts))
        return frozenset()

    def called(self, node: ast.Call, env: Env) -> frozenset[str]:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _READS:
            return self.narrowed(function.value, node.args[0] if node.args else None, env)
        if isinstance(function, ast.Name) and function.id in _WRAPS and node.args:
            return self.held(node.args[0], env)
        if isinstance(function, ast.Name) and function.id == "getattr" and len(node.args) > 1:
            return self.words.get(str(_text(node.args[1])), frozenset())
        return frozenset()

    def narrowed(self, holder: ast.AST, key: ast.AST | None, env: Env) -> frozenset[str]:
        """Roles of ``holder[key]``: a role's name narrows, an option's value holds no name."""
        word = _text(key)
        if word is None:
            return self.held(holder, env)
        return frozenset({word} & self.roles.keys())

    def read(self, node: ast.AST, env: Env) -> None:
        """Note the names in one node: its comparisons, look-ups, values written and tables."""
        for left, right in _meetings(node):
            for holder, other in ((left, right), (right, left)):
                self.note(*self.named(other, self.held(holder, env)))
        for word, value in _writes(node):
            roles = self.words.get((word or "").strip("_"), frozenset())
            self.note(*self.named(value, roles if len(roles) == 1 else frozenset()))
        if isinstance(node, ast.Dict | ast.Set | ast.List | ast.Tuple):
            self.read_table(node)

    def read_table(self, node: ast.Dict | ast.Set | ast.List | ast.Tuple) -> None:
        """Two names of one role, side by side."""
        items = [key for key in node.keys if key is not None] if isinstance(node, ast.Dict) else node.elts
        for names in self.roles.values():
            among = [one for one in items if isinstance(one, ast.Constant) and one.value in names]
            if len({one.value for one in among}) > 1:
                self.note(*among)

    def named(self, node: ast.AST, roles: Iterable[str]) -> Iterator[ast.Constant]:
        """Constants within ``node``, a constant or a literal of constants, that are names of these roles."""
        names = frozenset().union(*(self.roles[role] for role in roles))
        if isinstance(node, ast.Constant):
            inside: list[ast.AST] = [node]
        elif isinstance(node, ast.Dict):
            inside = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Set | ast.List | ast.Tuple):
            inside = list(node.elts)
        elif isinstance(node, ast.MatchValue | ast.MatchOr):
            inside = list(ast.walk(node))
        else:
            inside = []
        return (one for one in inside if isinstance(one, ast.Constant) and one.value in names)


def _own(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of one scope: nested functions and classes themselves, without what is in them."""
    for child in ast.iter_child_nodes(tree):
        yield child
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            yield from _own(child)


def _bindings(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(target, value) of what ``node`` binds; of a loop, the value is what it goes through."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.target, node.iter


def _meetings(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Pairs that ``node`` compares, combines, or looks the one up in the other."""
    if isinstance(node, ast.Compare):
        yield from itertools.pairwise([node.left, *node.comparators])
    elif isinstance(node, ast.BinOp):
        yield node.left, node.right
    elif isinstance(node, ast.Subscript):
        yield node.value, node.slice
    elif isinstance(node, ast.Match):
        yield from ((node.subject, case.pattern) for case in node.cases)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READS | _SET_CALLS:
        yield from ((node.func.value, argument) for argument in node.args)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next" and node.args[1:]:
        yield node.args[0], node.args[1]


def _writes(node: ast.AST) -> Iterator[tuple[str | None, ast.AST]]:
    """(word, value): what ``node`` gives to a key, a parameter, a variable or a field of this name."""
    if isinstance(node, ast.Dict):
        yield from ((_text(key), value) for key, value in zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.keyword):
        yield node.arg, node.value
    elif isinstance(node, ast.arguments):
        positional = reversed([*node.posonlyargs, *node.args])
        yield from ((one.arg, value) for one, value in zip(positional, reversed(node.defaults), strict=False))
        by_name = zip(node.kwonlyargs, node.kw_defaults, strict=True)
        yield from ((one.arg, value) for one, value in by_name if value is not None)
    for target, value in _bindings(node):
        if isinstance(target, ast.Name | ast.Attribute):
            yield target.id if isinstance(target, ast.Name) else target.attr, value


def _first_names(target: ast.AST) -> list[str]:
    """Names of a target; of a pair the first alone, which is the method's name where the second is its options."""
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Tuple | ast.List) and target.elts:
        return _first_names(target.elts[0])
    return []


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
