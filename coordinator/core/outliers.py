"""Comparison of devices' changes: clipping and rejection of outliers. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from coordinator.core.state import BUFFERS_OF, Assignment, Changes, State
from edgefl.aggregation.mean import OF
from edgefl.models.spec import PROTOTYPES, is_scheduled
from edgefl.plan.job import RoundPolicy
from edgefl.records import Refusal

K = TypeVar("K")

#: The length of a part that has none of its own, as one of zeros.
LEAST_LENGTH = 1.0


def _due(state: State) -> list[tuple[str, Assignment]]:
    """(device, assignment) of updates in the next aggregation, ordered as ``round_rules.aggregated_updates``."""
    due = [(name, one) for name, one in sorted(state.assignments.items()) if one.status == "done"]
    return due + [(one.update.device, one) for _, one in sorted(state.buffered.items()) if one.update is not None]


def _changes(state: State) -> dict[int, Changes]:
    """Index in ``_due`` -> the update's changes."""
    return {index: one.changes for index, (_, one) in enumerate(_due(state))}


def outliers(state: State) -> list[tuple[str, Assignment, Refusal]]:
    """(device, assignment, reason) of the outliers in the next aggregation."""
    due, changes = _due(state), _changes(state)
    samples = {index: state.devices[device].claim.samples.get("", 0) for index, (device, _) in enumerate(due)}
    found = out_of_line(changes, state.policy.largest_change, samples)
    return [(*due[index], refusal) for index, refusal in found.items()]


def clipped(state: State) -> tuple[dict[str, float], ...]:
    """Clip factors of each update in the next aggregation; {}: unclipped."""
    changes = _changes(state)
    found = clips(changes, state.policy)
    return tuple(found.get(index, {}) for index in changes) if found else ()


class Others(NamedTuple):
    """Number of other devices with a change of the part, and the median change (0 without any)."""

    number: int
    median: float

    @property
    def comparable(self) -> bool:
        """True if the part has three or more updates and a median above 0."""
        return self.number + 1 >= OF and self.median > 0


def _others(changes: Mapping[K, Changes]) -> dict[K, dict[str, Others]]:
    """The others of each update, by part."""
    norms: dict[str, list[float]] = {}
    for own in changes.values():
        for part, change in own.items():
            norms.setdefault(part, []).append(change.norm)
    # The median without a value is one of two: where it is above the middle, the middle itself.
    found: dict[str, tuple[float, Others, Others]] = {}
    for part, ordered in norms.items():
        ordered.sort()
        count, middle = len(ordered) - 1, ordered[(len(ordered) - 1) // 2]
        lower, upper = (Others(count, _median_without(ordered, value)) for value in (math.inf, -math.inf))
        found[part] = middle, lower, upper
    return {
        name: {
            part: lower if middle < change.norm else upper
            for part, change in own.items()
            for middle, lower, upper in [found[part]]
        }
        for name, own in changes.items()
    }


def _distance(own: Changes, others: Mapping[str, Others]) -> float:
    """r_k = sqrt(sum_p d_kp^2 / sum_p m_kp^2)  over the comparable parts p of update k; 0 without one.

    d_kp = ||theta_kp - theta_p||, m_kp the median of d_jp over the other devices j; buffers and prototypes left out.
    """
    parts = [p for p in own if is_scheduled(p) and not p.startswith(BUFFERS_OF) and others[p].comparable]
    medians = math.fsum(others[part].median ** 2 for part in parts)
    return math.sqrt(math.fsum(own[part].norm ** 2 for part in parts) / medians) if parts else 0.0


def longest(state: State) -> str:
    """Device of the longest change in the next aggregation; "" unless there are two."""
    changes = _changes(state)
    others = _others(changes)
    factors = clips(changes, state.policy, others)
    names = enumerate(name for name, _ in _due(state))
    moved = [(_moved(changes[i], others[i], factors.get(i, {})), name) for i, name in names]
    return max(moved)[1] if len(moved) > 1 else ""


def _moved(own: Changes, others: Mapping[str, Others], factors: Mapping[str, float]) -> float:
    """An update's largest clipped change of a part, relative to the others' median or the part's norm."""
    ratios = [0.0]
    for part, change in own.items():
        if is_scheduled(part) and not part.startswith(BUFFERS_OF):
            usual = others[part].median if others[part].comparable else max(change.base, LEAST_LENGTH)
            ratios.append(factors.get(part, 1.0) * change.norm / usual)
    return max(ratios)


def clips(
    changes: Mapping[K, Changes], policy: RoundPolicy, everyone: Mapping[K, Mapping[str, Others]] | None = None
) -> dict[K, dict[str, float]]:
    """Clip factors below 1 of changes, for each part and its buffers.

    min(1, c / r_k, b m_kp / d_kp),  c = ``clip_change``, b = ``largest_change`` (0: no bound), of comparable parts.
    ``everyone``: as ``_others`` gives them.
    """
    clip, most = policy.clip_change or math.inf, policy.largest_change or math.inf
    everyone, found = _others(changes) if everyone is None else everyone, {}
    for name, own in changes.items():
        others = everyone[name]
        whole = clip / distance if clip < math.inf and (distance := _distance(own, others)) else 1.0
        factors = {
            part: min(whole, most * others[part].median / change.norm)
            for part, change in own.items()
            if part != PROTOTYPES and change.norm and others[part].comparable
        }
        if below := {part: factor for part, factor in factors.items() if factor < 1}:
            found[name] = below
    return found


def out_of_line(changes: Mapping[K, Changes], most: float, samples: Mapping[K, int] | None = None) -> dict[K, Refusal]:
    """Outliers -> reason. ``most``: b below; 0: no outliers. ``samples``: number of each device.

    b = ``RoundPolicy.largest_change``. An update is left out where its distance r_k from the others is above b, or b
    times the device's samples in parts of the others' median, where it has more: it made as many more steps. A part
    that cannot be compared may move by b times the median of the others that trained it or, if that is more, by its own
    length ||theta||: where some devices send back what they were offered, their median is 0, and so short a change does
    not ruin a mean. Where no other device trained the part, the bound is b times the part's own length.
    """
    found: dict[K, Refusal] = {}
    everyone = _others(changes) if most > 0 else {}
    held = sorted((samples or {}).values())
    for name, others in everyone.items():
        usual = _median_without(held, samples[name], low=True) if samples else 0.0
        allowed = most * max(1.0, samples[name] / usual) if samples and usual else most
        if (distance := _distance(changes[name], others)) > allowed:
            text = f"its change is {distance:.3g} times the median of the others' (round.largest_change: {most:g})"
            found[name] = Refusal("change", distance, allowed, detail=text)
            continue
        for part, change in changes[name].items():
            count, median = others[part]
            if others[part].comparable and part != PROTOTYPES:  # clipped, not left out
                continue
            if count:
                allowed = max(most * median, change.base, LEAST_LENGTH)
                measure = f"the median of the others is {median:.3g}"
            else:
                allowed = most * max(change.base, LEAST_LENGTH)
                measure = f"the part itself {change.base:.3g}, and no other device trained it"
            if change.norm > allowed and name not in found:
                text = f"part {part}: its change has the norm {change.norm:.3g}, {measure}"
                text += f" (round.largest_change: {most:g})"
                found[name] = Refusal("change", change.norm, allowed, detail=text)
    return found


def _median_without(ordered: Sequence[float], value: float, *, low: bool = False) -> float:
    """The upper (``low``: lower) median of sorted values without ``value``; 0: no others.

    The mean of two would let one device move the median that an honest one is compared with.
    """
    count, place = len(ordered) - 1, bisect_left(ordered, value)
    if not count:
        return 0.0
    k = (count - 1) // 2 if low else count // 2
    return ordered[k if k < place else k + 1]
