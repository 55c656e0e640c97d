"""What must be asked of a tree's own code: the methods registered for each role, and which module imports which.

PYTHONPATH=TREE python benchmarks/common/tree_facts.py     # both, as JSON
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import grimp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Beside the tree that is asked, the folder this runs in.
OUTSIDE = Path("examples/edgefl_extra")
PACKAGES = ("edgefl", "coordinator", "device_agent")


def registered() -> dict[str, frozenset[str]]:
    """Role -> names: of the registry, or of the closed dictionary that trees before it have."""
    if importlib.util.find_spec("edgefl.registry") is not None:
        registry = importlib.import_module("edgefl.registry")
        return {role: frozenset(registry.methods(role)) for role in _roles()}
    slots = importlib.import_module("edgefl.config.choices").SLOTS
    return {role: frozenset(choices) for role, (_, choices) in slots.items()}


def _roles() -> dict[str, Any]:
    """The roles' table, which earlier trees have in the registry."""
    of = "edgefl.roles" if importlib.util.find_spec("edgefl.roles") is not None else "edgefl.registry"
    found: dict[str, Any] = importlib.import_module(of).ROLES
    return found


def hooks() -> dict[str, int]:
    """ "role.hook" -> methods that set it, of what each role's kind adds to a method; none before the registry.

    Those of the tree's outside package count: a hook that one paper inside and one outside share is proven by two.
    """
    if importlib.util.find_spec("edgefl.registry") is None:
        return {}
    registry = importlib.import_module("edgefl.registry")
    registry.methods("select")  # the product's own come first
    _register_outside()
    shared = {one.name for one in dataclasses.fields(registry.Method)}
    return {
        f"{role}.{one.name}": sum(getattr(each, one.name) != one.default for each in registry.methods(role).values())
        for role, (_, kind, *_) in _roles().items()
        for one in dataclasses.fields(kind)
        if one.name not in shared
    }


def _register_outside() -> None:
    project = OUTSIDE / "pyproject.toml"
    if project.exists():
        points = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]["edgefl.methods"]
        sys.path.insert(0, str(OUTSIDE))
        for module in points.values():
            importlib.import_module(module)


def imports() -> dict[str, frozenset[str]]:
    """Module -> product modules that it imports anywhere, in functions and for type checks too."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {module: frozenset(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


if __name__ == "__main__":
    roles = {role: sorted(names) for role, names in registered().items()}
    found = {module: sorted(others) for module, others in imports().items()}
    print(json.dumps({"roles": roles, "hooks": hooks(), "imports": found}))
