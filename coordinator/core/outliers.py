"""Updates whose change is out of line with the others' of their round: left out when it closes. Pure.

Device k may move a part by  b * median_j(d_j),  d_j = ||theta_j - theta|| of the other devices j that trained the
part, b = ``RoundPolicy.largest_change``; or, if that is more, by the part's own length ||theta||: where some devices
send back what they were offered, their median is 0, and so short a change does not ruin a mean. Where no other device
trained the part, the bound is b times the part's own length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from coordinator.core.state import Assignment, Change, Changes, State
from edgefl.records import Refusal

#: The length of a part that has none of its own: zeros, or a table of prototypes.
LEAST = 1.0


def out_of_line(changes: Mapping[str, Changes], most: float) -> dict[str, Refusal]:
    """The updates (by any name) that are to be left out, and why. ``most``: b above; 0: none are."""
    found: dict[str, Refusal] = {}
    norms: dict[str, list[float]] = {}
    for own in changes.values() if most > 0 else ():
        for part, change in own.items():
            norms.setdefault(part, []).append(change.norm)
    for ordered in norms.values():
        ordered.sort()
    for name, own in changes.items() if most > 0 else ():
        for part, change in own.items():
            others = _median_without(norms[part], change.norm)
            allowed = _allowed(change, others, most)
            if change.norm > allowed and name not in found:
                text = f"part {part}: its change has the norm {change.norm:.3g}, {_measure(change, others, most)}"
                found[name] = Refusal("change", change.norm, allowed, detail=text)
    return found


def _median_without(ordered: list[float], value: float) -> float | None:
    """The median of sorted values without one of them; None: there are no others."""
    count, place = len(ordered) - 1, bisect_left(ordered, value)
    if not count:
        return None
    low, high = (ordered[k if k < place else k + 1] for k in ((count - 1) // 2, count // 2))
    return (low + high) / 2


def outliers(state: State) -> list[tuple[str, Assignment, Refusal]]:
    """(device, its part, why) of what is about to be counted and is to be left out."""
    opened = state.open
    due = {("", name): one for name, one in (opened.assignments if opened is not None else {}).items()}
    due |= {(key, one.update.device): one for key, one in state.buffered.items() if one.update is not None}
    here = {f"{key} {name}": (name, one) for (key, name), one in sorted(due.items()) if one.status == "done"}
    found = out_of_line({key: one.changes for key, (_, one) in here.items()}, state.policy.largest_change)
    return [(*here[key], refusal) for key, refusal in found.items()]


def _allowed(change: Change, others: float | None, most: float) -> float:
    if others is None:
        return most * max(change.base, LEAST)
    return max(most * others, change.base, LEAST)


def _measure(change: Change, others: float | None, most: float) -> str:
    if others is None:
        return f"the part itself {change.base:.3g}, and no other device trained it (round.largest_change: {most:g})"
    return f"the median of the others is {others:.3g} (round.largest_change: {most:g})"
