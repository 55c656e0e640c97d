"""What must be asked of a tree's own code: the methods registered for each role, and which module imports which.

PYTHONPATH=TREE python benchmarks/common/tree_facts.py     # both, as JSON
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from typing import Any

import grimp

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
    """ "role.hook" -> methods that set it, of what each role's kind adds to a method; none before the registry."""
    if importlib.util.find_spec("edgefl.registry") is None:
        return {}
    registry = importlib.import_module("edgefl.registry")
    shared = {one.name for one in dataclasses.fields(registry.Method)}
    return {
        f"{role}.{one.name}": sum(getattr(each, one.name) != one.default for each in registry.methods(role).values())
        for role, (_, kind, *_) in _roles().items()
        for one in dataclasses.fields(kind)
        if one.name not in shared
    }


def imports() -> dict[str, frozenset[str]]:
    """Module -> product modules that it imports anywhere, in functions and for type checks too."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {module: frozenset(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


if __name__ == "__main__":
    roles = {role: sorted(names) for role, names in registered().items()}
    found = {module: sorted(others) for module, others in imports().items()}
    print(json.dumps({"roles": roles, "hooks": hooks(), "imports": found}))
