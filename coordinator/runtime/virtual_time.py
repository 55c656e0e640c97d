"""Virtual time of a simulated fleet with traces: who is there, how long a round takes, who leaves in it.

The time stands still while anything is at work in this process. It moves on when each device that was sent an offer
has answered: to the next moment at which an update arrives, a device comes or leaves, or a wait of the machine ends. A
device whose update would not arrive in time, by its profile, its link and its trace, is not sent the offer at all: what
it would have spent until then goes on record. Nothing depends on which of the real answers comes first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from coordinator.core import moves as m
from coordinator.core.assignments import assignment_of, expected
from coordinator.core.state import Phase, State
from edgefl.records import Attempt, Figure, Figures
from edgefl.run_records import EventRow
from edgefl.sequences import place_of
from edgefl.traces import Traces

replace = msgspec.structs.replace

#: Phases that wait for devices or for time.
_WAITING = frozenset({Phase.JOINING, Phase.WAITING, Phase.RETRYING})
#: Data of events in virtual time: its seconds.
SIMULATED = "simulated_s"
AWAY = "away, by its trace"
SOURCE = "speed of the device's profile, and its trace"
_HERE = Figure(reason="a simulated device has not taken this machine's time")
#: Kinds of moments, in the order in which those of one millisecond come.
_ARRIVES, _EDGE = 0, 1


class _Due(NamedTuple):
    """When an attempt's update arrives."""

    at_ms: int
    attempt: Attempt


class VirtualTime:
    """Virtual time of a run. ``crowd``: whether its fleet is one; ``now_ms``: milliseconds since the run began."""

    def __init__(self, traces: Traces, *, crowd: bool) -> None:
        self.traces, self.now_ms = traces, 0
        self.held: dict[str, m.Joined] = {}  # hellos of devices that are away
        self._crowd = crowd
        self._there = np.ones(len(traces.names), bool)  # as the machine knows of a crowd's
        self._moments: list[tuple[int, int, str]] = []  # a heap of (time, kind, device)
        self._followed: set[str] = set()  # devices whose next edge is among them
        self._due: dict[str, _Due] = {}
        self._announced: dict[str, m.Announced] = {}
        self._took: dict[str, tuple[Attempt, float]] = {}  # device -> seconds of its newest attempt
        self._unsent: dict[str, Attempt] = {}
        self._returned: set[str] = set()  # devices that are back, and need no welcome
        self._dead: set[str] = set()  # devices that have ended by themselves
        self._spent: list[m.Spending] = []

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self.now_ms / 1000

    def go_on(self, events: Iterable[EventRow]) -> None:
        """Go on from the time of an earlier process' last event."""
        self.now_ms = max((round(1000 * one.data[SIMULATED]) for one in events if SIMULATED in one.data), default=0)

    def take_spent(self) -> list[m.Spending]:
        """Costs of rounds that devices do not end, since the last call."""
        found, self._spent = self._spent, []
        return found

    def received(self, event: m.Event, state: State) -> m.Event | None:
        """The machine's event of a device's message; None for one that waits for its time, or repeats."""
        if isinstance(event, m.Joined):
            return self._joined(event, state)
        if isinstance(event, m.DeviceOffline):  # it has ended
            self._dead.add(event.device)
            self._due.pop(event.device, None)
        elif isinstance(event, m.Declined):
            self._due.pop(event.device, None)
        elif isinstance(event, m.Announced):
            event, due = self._timed(event), self._due.get(event.device)
            if due is not None and due.attempt == event.attempt:
                self._announced[event.device] = event
                return None
        return event

    def send(self, one: m.Instruction, state: State) -> m.Instruction | None:
        """The instruction to carry out; None for one to a device that would not answer in time."""
        if isinstance(one, m.SendWelcome) and one.device in self._returned:
            self._returned.discard(one.device)
            return None
        if isinstance(one, m.SendAbort) and self._unsent.get(one.device) == one.attempt:
            return None
        return self._offered(one, state) if isinstance(one, m.SendOffer) else one

    def next(self, state: State) -> list[m.Event]:
        """The next events, at their time; none while something is at work."""
        if state.phase in {*_WAITING, Phase.AGGREGATING} and (seen := self.seen()):
            return seen
        if not self._rests(state):
            return []
        while self._moments and not self._holds(state, self._moments[0]):
            heapq.heappop(self._moments)
        first = self._moments[0][0] if self._moments else math.inf
        waits = [round(at * 1000) for at in _waits(state) if not math.isinf(at)]
        if self._crowd and state.phase is Phase.WAITING:
            waits.append(self.traces.next_edges(self.now_ms).min())
        ends = min((at for at in waits if at > self.now_ms), default=math.inf)
        if math.isinf(soonest := min(first, ends)):
            return []
        self.now_ms = max(self.now_ms, int(soonest))
        before = self.seen() if state.phase in _WAITING else []
        if first > ends:
            return [*before, m.Tick(self.now)]
        _, kind, name = heapq.heappop(self._moments)
        if kind == _EDGE:
            return [*before, *self._edge(name, state)]
        del self._due[name]
        return [self._announced.pop(name)]

    def _rests(self, state: State) -> bool:
        """True if nothing is at work: time may move on."""
        if state.phase not in {*_WAITING, Phase.ROUND}:
            return False
        if any(name not in self._announced for name, due in self._due.items() if _is_open(state, name, due.attempt)):
            return False
        if state.phase in _WAITING:
            return not any(device.ticket for device in state.devices.values() if device.online)
        for name, part in (*state.assignments.items(), *state.stragglers.items()):
            if part.status in {"updated", "replanning"}:
                return False
            comes = name not in self._followed and name not in self._dead and self._is_there(name)
            if part.status in {"offered", "accepted"} and comes:  # in a run that goes on
                return False
        return True

    def _holds(self, state: State, moment: tuple[int, int, str]) -> bool:
        """True unless an arrival is of an offer that has been replaced, or is over."""
        at_ms, kind, name = moment
        due = self._due.get(name)
        if kind == _EDGE:
            return name not in self._dead
        if due is None or due.at_ms != at_ms:
            return False
        if not _is_open(state, name, due.attempt):
            del self._due[name]
            self._announced.pop(name, None)
            return False
        return True

    def _joined(self, event: m.Joined, state: State) -> m.Joined | None:
        name, known = event.device, state.devices.get(event.device)
        if name not in self._followed:
            self._followed.add(name)
            self._follow(name)
        if name not in state.called and not self._is_there(name):
            self.held[name] = event
            return None
        again = (
            known is not None
            and known.online
            and replace(event.hello, working_on=None) == replace(known.hello, working_on=None)
        )
        return None if again else event

    def _edge(self, name: str, state: State) -> list[m.Event]:
        """A device leaves; or it comes, and introduces itself (again)."""
        self._follow(name)
        if not self._is_there(name):
            self._there[self._place(name)] = False
            return [m.DeviceOffline(self.now, name, AWAY)]
        if (hello := self.held.pop(name, None)) is not None:
            return [hello]
        if (known := state.devices.get(name)) is None:
            return []
        self._returned.add(name)
        return [m.Joined(self.now, replace(known.hello, working_on=None), known.generation)]

    def _follow(self, name: str) -> None:
        at = self.traces.next_edges(self.now_ms, [self._place(name)])[0]
        if not math.isinf(at):
            heapq.heappush(self._moments, (int(at), _EDGE, name))

    def seen(self) -> list[m.Event]:
        """Those of a crowd that have come and left since it was looked at last."""
        if not self._crowd:
            return []
        now = self.traces.there(self.now_ms)
        now[[self._place(name) for name in sorted(self._dead)]] = False
        changed, names = np.flatnonzero(now != self._there), self.traces.names
        self._there = now
        came, left = (frozenset(names[at] for at in changed[now[changed] == value].tolist()) for value in (True, False))
        return [m.Present(self.now, came, left)] if len(changed) else []

    def _place(self, name: str) -> int:
        place = place_of(self.traces.names, name)
        if place is None:
            raise ValueError(f"{name} has no trace")
        return place

    def _is_there(self, name: str) -> bool:
        return bool(self.traces.there(self.now_ms, [self._place(name)])[0])

    def _offered(self, one: m.SendOffer, state: State) -> m.SendOffer | None:
        """The offer, without a deadline of real time, if its update will arrive."""
        name, place = one.device, self._place(one.device)
        figures = expected(state, one.attempt, one.placement, name, one.period)
        speed = state.devices[name].hello.capabilities.speed
        down_rate, up_rate = self.traces.drawn(place, speed, one.attempt)
        down, up, wall = (
            figures[key].value or 0.0 if key in figures else 0.0
            for key in ("payload_down_bytes", "payload_up_bytes", "wall_s")
        )
        compute = max(0.0, wall - down / speed.down_bytes - up / speed.up_bytes)
        legs = (down / down_rate, compute, up / up_rate)
        arrives = self.now_ms + max(1, round(1000 * sum(legs)))
        leaves = self.traces.next_edges(self.now_ms, [place])[0]
        closes = math.inf
        if state.open is not None and not state.policy.keeps and not math.isinf(state.open.deadline_at):
            closes = state.open.deadline_at * 1000
        self._due.pop(name, None)
        self._announced.pop(name, None)
        self._unsent.pop(name, None)
        if arrives < min(leaves, closes):
            self._due[name] = _Due(arrives, one.attempt)
            self._took[name] = (one.attempt, sum(legs))
            heapq.heappush(self._moments, (arrives, _ARRIVES, name))
            return replace(one, deadline_s=0.0)
        self._unsent[name] = one.attempt
        until = (min(leaves, closes) - self.now_ms) / 1000
        self._spent.append(m.Spending(name, one.attempt, _until(until, legs, figures)))
        return None

    def _timed(self, event: m.Announced) -> m.Announced:
        """The update with the seconds of the simulated device in place of this machine's."""
        attempt, seconds = self._took.get(event.device, (None, 0.0))
        if attempt != event.attempt:
            return event
        own = event.update.figures | {
            "compute_s": _HERE,
            "energy_j": _HERE,
            "wall_s": Figure(seconds, "predicted", SOURCE),
        }
        return replace(event, update=replace(event.update, figures=own))


def _waits(state: State) -> list[float]:
    """Ends of the machine's waits, in its seconds."""
    if state.phase is Phase.ROUND and state.open is not None:
        return [state.open.deadline_at, state.open.grace_at or math.inf]
    return [state.until, *(state.returning.values() if state.phase is Phase.JOINING else ())]


def _is_open(state: State, name: str, attempt: Attempt) -> bool:
    part = assignment_of(state, name, attempt)
    return part is not None and part.status in {"offered", "accepted"}


def _until(seconds: float, legs: tuple[float, float, float], figures: Figures) -> Figures:
    """Costs of a device ``seconds`` after its offer; ``legs``: seconds of download, training and upload."""
    source = f"{SOURCE}: it did not end, after {seconds:.0f} s"
    since, shares = 0.0, list[float]()
    for leg in legs:
        shares.append(min(1.0, max(0.0, seconds - since) / leg) if leg else float(seconds >= since))
        since += leg
    of = dict(zip(("payload_down_bytes", "flops", "payload_up_bytes"), shares, strict=True))
    of["energy_j"] = min(1.0, seconds / sum(legs))
    spent = {
        name: Figure(share * value, "predicted", source)
        for name, share in of.items()
        if name in figures and (value := figures[name].value) is not None
    }
    return {**spent, "wall_s": Figure(seconds, "predicted", source)}
