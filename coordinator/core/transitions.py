"""The form of the machine's table of transitions, (phase, event) -> rule, and its check. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from coordinator.core.events import Event, IllegalMoveError
from coordinator.core.state import Phase
from coordinator.core.steps import Steps

Rule = Callable[[Steps, Any], object]
#: In a row of the table: all phases that no other row of its event names.
REST: frozenset[Phase] = frozenset()
ALL = frozenset(Phase)


def ignore(steps: Steps, event: Event) -> None:
    """The event does nothing in this phase, on purpose."""


def illegal(why: str) -> Rule:
    """The event is impossible in this phase: a defect of the runner."""

    def rule(steps: Steps, event: Event) -> None:
        raise IllegalMoveError(event, steps.state, why)

    return rule


def table(*rows: tuple[type[Event], Collection[Phase], Rule]) -> dict[tuple[Phase, type[Event]], Rule]:
    """The rows by (phase, event). Raises ValueError for a pair of which there are two rows, or none."""
    found: dict[tuple[Phase, type[Event]], Rule] = {}
    for event, phases, rule in sorted(rows, key=lambda row: row[1] is REST):
        for phase in phases or [phase for phase in Phase if (phase, event) not in found]:
            if (phase, event) in found:
                raise ValueError(f"two rows for {event.__name__} in phase {phase.value}")
            found[phase, event] = rule
    if missing := [(phase, event) for event, _, _ in rows for phase in Phase if (phase, event) not in found]:
        raise ValueError(f"no row for {missing[0][1].__name__} in phase {missing[0][0].value}")
    return found
