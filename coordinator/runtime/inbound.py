"""From the bytes of a topic to what happened, and who has been heard of when. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from typing import TypeVar

import msgspec

from coordinator.core.events import (
    Accepted,
    Announced,
    Declined,
    DeviceOffline,
    FromDevice,
    HeartbeatSeen,
    Joined,
    Progressed,
)
from coordinator.runtime.device_texts import cleaned
from edgefl.errors import ProtocolError
from edgefl.protocol import messages, topics
from edgefl.protocol.messages import Need, Renew, UnknownMessageError

V = TypeVar("V")

#: Figures and metrics of one message; the ledger keeps 11 figures, training has a handful of metrics.
MAX_ENTRIES = 64
#: A device that has not answered so often is gone, whatever the broker retains; its next heartbeat is answered anyway.
MAX_INTRODUCTIONS = 10


class Inbox:
    """Decodes messages, counts what can not be used by reason, and knows since when a device has been silent."""

    def __init__(self, silence_s: float, introduce_s: float) -> None:
        self.dropped: Counter[str] = Counter()
        self._silence_s = silence_s
        self._introduce_s = introduce_s
        self._strangers: dict[str, tuple[float, int]] = {}  # when, and how many times, it was asked who it is
        self._sessions: dict[str, str] = {}
        self._heard: dict[str, float] = {}
        self._hellos: dict[str, tuple[float, messages.Hello]] = {}

    def read(self, topic: topics.Topic, payload: bytes, now: float) -> FromDevice | Need | Renew | None:
        """What a message on an ``up`` or ``presence`` topic says; None when it says nothing of use."""
        try:
            message = messages.decode_up(payload)
        except UnknownMessageError:
            self.dropped["unknown kind"] += 1
            return None
        except ProtocolError:
            self.dropped["malformed"] += 1
            return None
        if message.device != topic.device or not topics.NAME.fullmatch(topic.device):
            self.dropped["forged"] += 1
            return None
        if isinstance(message, messages.Presence) != (topic.channel == "presence"):
            self.dropped["wrong topic"] += 1
            return None
        return self._event(message if isinstance(message, Need | Renew) else cleaned(message), now)

    def heard(self, device: str, now: float) -> None:
        """A device shows life."""
        self._heard[device] = now

    def reset(self, now: float) -> None:
        """The coordinator itself was away: nobody's silence counts."""
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

    def _event(self, message: messages.UpMessage, now: float) -> FromDevice | Need | Renew | None:
        device = message.device
        if isinstance(message, messages.Presence):
            if message.online:
                if device not in self._sessions:  # its hello follows, unless it was sent before anyone listened
                    self._strangers[device] = (now, 0)
                return None
            self._strangers.pop(device, None)
            self._hellos.pop(device, None)
            known = self._sessions.get(device) == message.session  # an earlier session's last will says nothing
            return (
                DeviceOffline(now, device, "offline") if known and self._heard.pop(device, None) is not None else None
            )
        self.heard(device, now)
        if isinstance(message, messages.Hello):
            self._sessions[device] = message.session
            self._strangers.pop(device, None)
            at, before = self._hellos.get(device, (-math.inf, None))
            if before == message and now - at < self._introduce_s:
                return None  # it was called just when it came by itself
            self._hellos[device] = (now, message)
            return Joined(now, _sparing(message))
        if isinstance(message, messages.Heartbeat):
            return HeartbeatSeen(now, device, message.working_on)
        if isinstance(message, messages.Accept):
            return Accepted(now, device, message.attempt)
        if isinstance(message, messages.Decline):
            return Declined(now, device, message.attempt, message.refusal, limited(message.figures))
        if isinstance(message, messages.Progress):
            loss = message.loss if math.isfinite(message.loss) else None
            data = {"epoch": message.epoch, "step": message.step, "steps": message.steps, "loss": loss}
            return Progressed(now, device, message.attempt, data)
        if isinstance(message, messages.Update):
            return Announced(now, _sane(message))
        return message


def _sparing(hello: messages.Hello) -> messages.Hello:
    """Without more modalities than anyone has."""
    return msgspec.structs.replace(hello, modalities=limited(hello.modalities), samples=limited(hello.samples))


def _sane(update: messages.Update) -> messages.Update:
    """Without metrics that are no numbers, and without more entries than anyone needs."""
    metrics = {name: value for name, value in update.metrics.items() if math.isfinite(value)}
    return msgspec.structs.replace(update, metrics=limited(metrics), figures=limited(update.figures))


def limited(entries: dict[str, V]) -> dict[str, V]:
    """The first ``MAX_ENTRIES`` entries."""
    return dict(list(entries.items())[:MAX_ENTRIES])
