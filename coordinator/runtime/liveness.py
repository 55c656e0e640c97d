"""Liveness: which devices have been silent for too long, and which have not introduced themselves. No I/O."""

from __future__ import annotations

import math

from coordinator.core.moves import DeviceOffline, HeartbeatSeen
from edgefl.protocol.messages import Hello, Presence

#: A device that has not answered so often is gone, whatever the broker retains; its next heartbeat is answered anyway.
MAX_INTRODUCTIONS = 10


class Liveness:
    """``silence_s``: a device not heard of for longer is offline. ``introduce_s``: between requests for a hello."""

    def __init__(self, silence_s: float, introduce_s: float) -> None:
        self._silence_s = silence_s
        self._introduce_s = introduce_s
        self._strangers: dict[str, tuple[float, int]] = {}  # when, and how many times, it was asked for its hello
        self._sessions: dict[str, str] = {}
        self._heard: dict[str, float] = {}
        self._hellos: dict[str, tuple[float, Hello]] = {}

    def heard(self, device: str, now: float) -> None:
        """A device shows life."""
        self._heard[device] = now

    def reset(self, now: float) -> None:
        """The coordinator itself was offline: silence before now counts for no device."""
        self._heard = dict.fromkeys(self._heard, now)

    def silent(self, now: float) -> list[DeviceOffline]:
        """Devices not heard of for too long, once each."""
        late = [name for name, at in self._heard.items() if now - at > self._silence_s]
        for name in late:
            del self._heard[name]
        return [DeviceOffline(now, name, f"silent for {self._silence_s:g} s") for name in late]

    def strangers(self, now: float) -> list[HeartbeatSeen]:
        """Devices that are online and still have not introduced themselves, each time it is due to ask them."""
        due = [name for name, (at, _) in self._strangers.items() if now - at >= self._introduce_s]
        for name in due:
            times = self._strangers[name][1] + 1
            self._strangers[name] = (now, times)
            if times >= MAX_INTRODUCTIONS:
                del self._strangers[name]
        return [HeartbeatSeen(now, name, reports_work=False) for name in due]

    def presence(self, message: Presence, now: float) -> DeviceOffline | None:
        """A device is online, or its last will says that it is not; an earlier session's last will is ignored."""
        device = message.device
        if message.online:
            if device not in self._sessions:  # its hello follows, unless it was sent before this process listened
                self._strangers[device] = (now, 0)
            return None
        self._strangers.pop(device, None)
        self._hellos.pop(device, None)
        known = self._sessions.get(device) == message.session
        return DeviceOffline(now, device, "offline") if known and self._heard.pop(device, None) is not None else None

    def is_repeated(self, hello: Hello, now: float) -> bool:
        """Note a hello. True for the same one within a moment: the device was called just when it came by itself."""
        device = hello.device
        self._sessions[device] = hello.session
        self._strangers.pop(device, None)
        at, before = self._hellos.get(device, (-math.inf, None))
        if before == hello and now - at < self._introduce_s:
            return True
        self._hellos[device] = (now, hello)
        return False
