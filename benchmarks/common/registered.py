"""The names registered for each role, of the tree that a program runs in: prints {role: [name]} as JSON.

python benchmarks/common/registered.py     # with PYTHONPATH set to the tree
"""

from __future__ import annotations

import importlib
import importlib.util
import json


def registered() -> dict[str, frozenset[str]]:
    """Role -> names: of the registry, or of the closed dictionary that trees before it have."""
    if importlib.util.find_spec("edgefl.registry") is not None:
        registry = importlib.import_module("edgefl.registry")
        return {role: frozenset(registry.methods(role)) for role in registry.ROLES}
    slots = importlib.import_module("edgefl.config.choices").SLOTS
    return {role: frozenset(choices) for role, (_, choices) in slots.items()}


if __name__ == "__main__":
    print(json.dumps({role: sorted(names) for role, names in registered().items()}))
