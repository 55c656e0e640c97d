"""Control of a run by its operator: pause, resume, stop, devices left out and taken in; for terminals and pages alike.

Each request is answered once the ledger has it. What a request cannot do now raises ControlError.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from coordinator.core.moves import LeaveOutAsked, PauseAsked, Request, ResumeAsked, StopAsked, TakeInAsked
from coordinator.core.state import ENDED, Phase, State
from coordinator.runtime.device_logs import DeviceLogs
from edgefl.errors import ControlError, some_of
from edgefl.protocol.messages import LogLines


class DeviceStatus(msgspec.Struct, frozen=True):
    """A device as the coordinator has it. ``part``: its status in the open attempt, "" where it has none.

    ``seen_at``, ``seen_by``: its last sign of life, seconds since the epoch and kind; 0, "": none in this process.
    """

    online: bool = False
    part: str = ""
    left_out_by: str = ""
    revoked: bool = False
    seen_at: float = 0.0
    seen_by: str = ""


class RunStatus(msgspec.Struct, frozen=True):
    """Status of a run. ``paused_by``: who asked for a pause; it has begun once ``phase`` is "paused"."""

    run: str = ""
    phase: str = ""
    stage: int = 0
    round: int = 0
    attempt: int = 0
    paused_by: str = ""
    devices: dict[str, DeviceStatus] = {}


class Control:
    """Operator's requests to one run. ``perform`` passes one to the machine; returns the committed state.

    ``signs``: device -> its last sign of life by ``clock``, and its kind. ``by``: who asks, as the ledger has it:
    "terminal", "web". All calls come from the event loop's thread.
    """

    def __init__(
        self,
        perform: Callable[[Request], Awaitable[State]],
        state: Callable[[], State],
        clock: Callable[[], float],
        logs: DeviceLogs,
        signs: Mapping[str, tuple[float, str, bool]],
    ) -> None:
        self._logs = logs
        self._perform = perform
        self._state = state
        self._clock = clock
        self._signs = signs

    def status(self) -> RunStatus:
        """Status of the run and its devices."""
        return self._status_of(self._state())

    def _status_of(self, state: State) -> RunStatus:
        parts = {**state.stragglers, **state.assignments}
        ahead = time.time() - self._clock()
        devices = {}
        for name, device in sorted(state.devices.items()):
            part = parts[name].status if name in parts else ""
            at, by, _ = self._signs.get(name, (-ahead, "", False))
            devices[name] = DeviceStatus(device.online, part, device.left_out, device.revoked, ahead + at, by)
        where = (state.stage, state.number, state.attempt)
        return RunStatus(state.plan.run, state.phase.value, *where, state.paused, devices)

    async def pause(self, by: str) -> RunStatus:
        """Open no further round; an open one is finished first."""
        if before := self._running().paused:
            goes_on = f"`edgefl runs resume {self._state().plan.run}` goes on."
            raise ControlError(f"the run is paused already ({before})", remedy=goes_on)
        return await self._ask(PauseAsked(self._clock(), by))

    async def resume(self, by: str) -> RunStatus:
        """End the pause, or call off one that has not begun."""
        if not self._running().paused:
            raise ControlError("the run is not paused", remedy="There is nothing to do.")
        return await self._ask(ResumeAsked(self._clock(), by))

    async def stop(self, by: str) -> RunStatus:
        """End the run where it stands; --resume goes on with it."""
        self._running()
        return await self._ask(StopAsked(self._clock(), by))

    async def leave_out(self, device: str, by: str) -> RunStatus:
        """Ask a device for nothing more in this run; the open round does without it."""
        if self._is_left_out(device):
            takes_in = f"`edgefl devices restore {self._state().plan.run} {device}` takes it in."
            raise ControlError(f"{device} is left out already", remedy=takes_in)
        return await self._ask(LeaveOutAsked(self._clock(), by, device))

    async def take_in(self, device: str, by: str) -> RunStatus:
        """Take a left-out device into the run again."""
        if not self._is_left_out(device):
            raise ControlError(f"{device} is not left out", remedy="There is nothing to do.")
        return await self._ask(TakeInAsked(self._clock(), by, device))

    async def device_log(self, device: str, lines: int, after: int = 0) -> LogLines:
        """Last log lines of a device's agent, beyond number ``after``; the device may refuse."""
        self._is_left_out(device)  # it is known
        if not self._state().devices[device].online:
            raise ControlError(f"{device} is offline", remedy="Its log is on the device itself.")
        return await self._logs.ask(device, lines, after)

    async def _ask(self, request: Request) -> RunStatus:
        return self._status_of(await self._perform(request))

    def _running(self) -> State:
        state = self._state()
        if state.phase is Phase.STARTING:
            raise ControlError("the run has not begun yet", remedy="Try again in a moment.")
        if state.phase in ENDED:
            raise ControlError(
                f"the run has ended ({state.phase.value})", remedy="--resume goes on with a stopped run."
            )
        return state

    def _is_left_out(self, device: str) -> bool:
        devices = self._running().devices
        if device in devices and devices[device].revoked:
            lets_in = f"`edgefl-coordinator enroll --name {device} --replace` lets it in again."
            raise ControlError(f"{device} was revoked", remedy=lets_in)
        if device in devices:
            return bool(devices[device].left_out)
        near = difflib.get_close_matches(device[:64], devices, n=1)
        meant = f"Did you mean {near[0]}? " if near else ""
        known = some_of(sorted(devices)) if devices else "none yet"
        raise ControlError(f"the run knows no device {device[:64]!r}", remedy=f"{meant}Devices it knows: {known}.")
