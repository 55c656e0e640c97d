"""Recipe files, and the slots of a run file, as frozen values: which choice fills each role."""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic import Field

from edgefl.config.fields import Name
from edgefl.config.slots import conflicts, parse_slot
from edgefl.config.yaml_files import Values
from edgefl.errors import Problem
from edgefl.registry import ROLES, default

Slot = dict[str, dict[str, float | str]]


def _parse(value: Any, info: pydantic.ValidationInfo) -> Any:
    return parse_slot(str(info.field_name), value)


def _parse_given(value: Any, info: pydantic.ValidationInfo) -> Any:
    return None if value is None else _parse(value, info)  # a run file as resolved names every slot


def _slot(role: str) -> Any:
    """A recipe's slot, filled with the role's default."""
    return Field(parse_slot(role, default(role)), description=ROLES[role].decides)


def _given(role: str) -> Any:
    """A run file's slot, which may be left out."""
    return Field(None, description=ROLES[role].decides)


class RecipeConfig(Values):
    """A method: a name, where it comes from, and what fills each slot."""

    name: Name = Field(description="the recipe's name")
    source: str = Field("", description="paper or page that describes the method")
    summary: str = Field("", description="one sentence: what it does")
    schedule: Slot = _slot("schedule")
    sharing: Slot = _slot("sharing")
    fusion: Slot = _slot("fusion")
    cluster: Slot = _slot("cluster")
    select: Slot = _slot("select")
    missing: Slot = _slot("missing")
    prototypes: Slot = _slot("prototypes")
    objective: Slot = _slot("objective")
    repair: Slot = _slot("repair")
    weight: Slot = _slot("weight")
    combine: Slot = _slot("combine")
    optimise: Slot = _slot("optimise")

    _slots = pydantic.field_validator(*ROLES, mode="before")(_parse)

    def conflicts(self) -> list[Problem]:
        """Slots that need, or exclude, one another."""
        return conflicts({role: getattr(self, role) for role in ROLES})


class SlotsConfig(Values):
    """Slots that differ from the recipe's; each as in a recipe file."""

    schedule: Slot | None = _given("schedule")
    sharing: Slot | None = _given("sharing")
    fusion: Slot | None = _given("fusion")
    cluster: Slot | None = _given("cluster")
    select: Slot | None = _given("select")
    missing: Slot | None = _given("missing")
    prototypes: Slot | None = _given("prototypes")
    objective: Slot | None = _given("objective")
    repair: Slot | None = _given("repair")
    weight: Slot | None = _given("weight")
    combine: Slot | None = _given("combine")
    optimise: Slot | None = _given("optimise")

    _slots = pydantic.field_validator(*ROLES, mode="before")(_parse_given)
