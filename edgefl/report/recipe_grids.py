"""The shipped recipes as tables: what there is and where it comes from, and one of them slot by slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgefl.registry import ROLES, default, method
from edgefl.report.grid import Column, Grid, words

#: What a recipe says of itself.
Recipe = Mapping[str, Any]


def recipe_list(recipes: Sequence[Recipe]) -> Grid:
    """Every recipe with its summary and source."""
    columns = (Column("recipe", key=True, text=True), Column("what it does", text=True), Column("source", text=True))
    rows = tuple((words(one["name"]), words(one["summary"]), words(one["source"])) for one in recipes)
    return Grid("Recipes", columns, rows, ("edgefl recipes show NAME explains a recipe slot by slot.",))


def recipe_slots(recipe: Recipe) -> Grid:
    """One recipe: what each slot decides, what fills it, what that does, its options. Slots at rest are dimmed."""
    columns = (
        Column("slot", key=True, text=True),
        Column("decides", text=True),
        Column("filled with", text=True),
        Column("which means", text=True),
        Column("options", text=True),
    )
    rows = []
    for role, (decides, *_) in ROLES.items():
        for i, (name, options) in enumerate(recipe[role].items()):
            resting = name == default(role) and not options
            rows.append(
                (
                    words("" if i else role),
                    words("" if i else decides),
                    words(name, tone="dim" if resting else ""),
                    words(method(role, name).summary, tone="dim" if resting else ""),
                    words(", ".join(f"{option} {_plain(value)}" for option, value in options.items())),
                )
            )
    return Grid(f"{recipe['name']}: {recipe['summary']}", columns, tuple(rows), (f"Source: {recipe['source']}.",))


def _plain(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else value or "—"
