"""Recipe files, and the slots of a run file, as frozen values: which choice fills each role."""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic import Field

from edgefl.config.conflicts import conflicts
from edgefl.config.fields import Name
from edgefl.config.slots import SLOTS, parse_slot
from edgefl.config.yaml_files import Values
from edgefl.errors import Problem

Slot = dict[str, dict[str, float | str]]


def _parse(value: Any, info: pydantic.ValidationInfo) -> Any:
    return parse_slot(str(info.field_name), value)


def _parse_given(value: Any, info: pydantic.ValidationInfo) -> Any:
    return None if value is None else _parse(value, info)  # a run file as resolved names every slot


def _slot(role: str, choice: str) -> Any:
    """A recipe's slot, filled with ``choice`` and its options' defaults."""
    return Field(parse_slot(role, choice), description=SLOTS[role][0])


class RecipeConfig(Values):
    """A method: a name, where it comes from, and what fills each slot."""

    name: Name = Field(description="the recipe's name")
    source: str = Field("", description="paper or page that describes the method")
    summary: str = Field("", description="one sentence: what it does")
    schedule: Slot = _slot("schedule", "end_to_end")
    sharing: Slot = _slot("sharing", "separate")
    fusion: Slot = _slot("fusion", "concat")
    cluster: Slot = _slot("cluster", "none")
    select: Slot = _slot("select", "all")
    missing: Slot = _slot("missing", "zero")
    prototypes: Slot = _slot("prototypes", "none")
    objective: Slot = _slot("objective", "cross_entropy")
    repair: Slot = _slot("repair", "none")
    weight: Slot = _slot("weight", "samples")
    combine: Slot = _slot("combine", "mean")
    optimise: Slot = _slot("optimise", "plain")

    _slots = pydantic.field_validator(*SLOTS, mode="before")(_parse)

    def conflicts(self) -> list[Problem]:
        """Slots that need, or exclude, one another."""
        return conflicts({role: getattr(self, role) for role in SLOTS})


class SlotsConfig(Values):
    """Slots that differ from the recipe's; each as in a recipe file."""

    schedule: Slot | None = Field(None, description=SLOTS["schedule"][0])
    sharing: Slot | None = Field(None, description=SLOTS["sharing"][0])
    fusion: Slot | None = Field(None, description=SLOTS["fusion"][0])
    cluster: Slot | None = Field(None, description=SLOTS["cluster"][0])
    select: Slot | None = Field(None, description=SLOTS["select"][0])
    missing: Slot | None = Field(None, description=SLOTS["missing"][0])
    prototypes: Slot | None = Field(None, description=SLOTS["prototypes"][0])
    objective: Slot | None = Field(None, description=SLOTS["objective"][0])
    repair: Slot | None = Field(None, description=SLOTS["repair"][0])
    weight: Slot | None = Field(None, description=SLOTS["weight"][0])
    combine: Slot | None = Field(None, description=SLOTS["combine"][0])
    optimise: Slot | None = Field(None, description=SLOTS["optimise"][0])

    _slots = pydantic.field_validator(*SLOTS, mode="before")(_parse_given)
