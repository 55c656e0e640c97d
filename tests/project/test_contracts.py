"""The import contracts leave no module out: each is ordered among its siblings, in its own folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import structure

ROOT = Path(__file__).resolve().parents[2]
#: Files that the registry or the migrations' runner finds by itself, so that no order is among them.
FOUND_BY_ITSELF = ("edgefl.methods.", "coordinator.ledger.migrations.")


@pytest.fixture(scope="module")
def tree() -> structure.Tree:
    return structure.read_tree(ROOT)


def test_every_module_is_in_a_layer(tree: structure.Tree) -> None:
    assert structure.unordered(tree) == []


def test_every_folder_orders_its_modules(tree: structure.Tree) -> None:
    left = [name for name in structure.unordered_in_folder(tree) if not name.startswith(FOUND_BY_ITSELF)]
    assert left == [], "give their folder a contract of its own in pyproject.toml"


def test_no_modules_import_each_other(tree: structure.Tree) -> None:
    assert structure.cycles(tree) == []
