"""Late devices: time needed at the measured link rate, and a warning about slow links. Pure."""

from __future__ import annotations

import math

from coordinator.core.assignments import expected
from coordinator.core.known_devices import ordinal
from coordinator.core.moves import Steps
from coordinator.core.state import Assignment, Link
from edgefl.records import Refusal

#: A link is at fault where the round's bytes alone take more than this share of the deadline; else training may be.
MOST_SHARE = 0.5
#: How every part travels in a few bits, up and down.
FEWEST_BITS = "delta+int4"


def late(steps: Steps, device: str, part: Assignment) -> Refusal | None:
    """Refusal of a late device with seconds needed and allowed; None before or without a deadline.

    ``needed`` is None where its link explains no delay: training time is unknown to the coordinator. A link that is too
    slow in two rounds in a row is warned of, once in a run: one may be an accident.
    """
    opened, allowed = steps.opened, steps.state.policy.deadline_s
    if part.attempt is not None or steps.at < opened.deadline_at:
        return None
    before, now = steps.state.devices[device].late_in, ordinal(steps.state)
    steps.set_device(device, late_in=now)
    link, up = steps.state.links.get(device), _update_bytes(steps, device, part)
    slow = link is not None and link.asked + up > MOST_SHARE * allowed * link.rate
    if link is None or not (slow or part.status == "updated"):
        return Refusal("late", None, allowed, "s")
    rest = link.lacks + max(0.0, up - link.received)
    needed = _about(steps.at - opened.opened_at + rest / link.rate)
    if slow and before == now - 1 > 0:
        _warn(steps, device, link, needed)
    return Refusal("late", needed, allowed, "s")


def _update_bytes(steps: Steps, device: str, part: Assignment) -> float:
    """Bytes of the device's update: as announced, else as predicted."""
    if part.update is not None:
        return float(sum({ref.id: ref.size for ref in part.update.manifest.values()}.values()))
    figures = expected(steps.state, steps.opened.attempt, part.placement, device, part.period)
    return figures["payload_up_bytes"].value or 0.0 if "payload_up_bytes" in figures else 0.0


def _about(seconds: float) -> float:
    """Seconds rounded up to two digits: a measured rate is inexact, and equal rows of a report are joined."""
    if seconds <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return round(math.ceil(seconds / step) * step, 3)


def _warn(steps: Steps, device: str, link: Link, needed: float) -> None:
    known, plan = steps.state.devices[device], steps.state.plan
    if "link" in known.warned:
        return
    carried = f"{link.rate / 1e3:.2g} kB/s" if link.rate < 1e5 else f"{link.rate / 1e6:.2g} MB/s"
    ways = ["raise round.deadline_s"]
    if not plan.policy.keeps:
        ways.append("set round.late: keep")
    if not all(FEWEST_BITS in dict(bits).values() for bits in (plan.transfer.up, plan.transfer.down)):
        ways.append(f"set transfer.up and transfer.down: {FEWEST_BITS}")
    deadline = f"round.deadline_s is {plan.policy.deadline_s:g}"
    text = f"{device}'s link ({carried}) needs about {needed:.0f} s a round, {deadline}: {', or '.join(ways)}"
    steps.set_device(device, warned=(*known.warned, "link"))
    steps.emit("warning", device, {"text": text, "about": "link", "lasting": True})
