"""``edgefl recipes``: the methods there are, and what each is made of."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from edgefl.cli.options import Format, print_json


def command(
    action: Annotated[Literal["list", "show"], typer.Argument(help="List the recipes, or show one.")] = "list",
    name: Annotated[str, typer.Argument(help="show: a shipped recipe's name, or a recipe file.")] = "",
    format: Format = "terminal",  # noqa: A002 - the option's own name
) -> None:
    """List the recipes with their sources, or explain one slot by slot.

    Example: edgefl recipes show pmcmfl
    """
    from edgefl.config.profiles import load_recipe, shipped
    from edgefl.report import inventory

    if action == "show" and not name:
        raise typer.BadParameter(f"which one? {', '.join(sorted(shipped('recipes')))}", param_hint="NAME")
    recipes = [load_recipe(one).model_dump() for one in ([name] if name else sorted(shipped("recipes")))]
    if format == "json":
        print_json(recipes[0] if name else recipes)
        return
    from rich.console import Console

    from edgefl.report.terminal import print_grid

    print_grid(inventory.slots(recipes[0]) if name else inventory.recipes(recipes), Console())
