"""Decoding of devices' messages: from the bytes of a topic to an event, with limits on what devices send. No I/O."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any, TypeVar

import msgspec

from coordinator.core.moves import (
    Accepted,
    Announced,
    Declined,
    DeviceOffline,
    FromDevice,
    HeartbeatSeen,
    Joined,
    Progressed,
)
from edgefl.errors import ProtocolError
from edgefl.protocol import messages, topics
from edgefl.protocol.messages import Hello, Need, Presence, Renew, UnknownMessageError

V = TypeVar("V")

#: Figures and metrics of one message; the ledger keeps 11 figures, training has a handful of metrics.
MAX_ENTRIES = 64


class Inbound:
    """``dropped``: unusable messages, counted by reason."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self.dropped: Counter[str] = Counter()

    def read(self, topic: topics.Topic, payload: bytes, now: float) -> FromDevice | Need | Renew | None:
        """The event of a message on an ``up`` or ``presence`` topic; None when it says nothing of use."""
        message = decode(topic, payload)
        if isinstance(message, str):
            self.dropped[message] += 1
            return None
        if isinstance(message, messages.Presence):
            return self.liveness.presence(message, now)
        self.liveness.heard(message.device, now)
        if isinstance(message, messages.Hello) and self.liveness.is_repeated(message, now):
            return None
        return _event(message, now)


def decode(topic: topics.Topic, payload: bytes) -> messages.UpMessage | str:
    """The message with plain texts, or why it is unusable."""
    try:
        message = messages.decode_up(payload)
    except UnknownMessageError:
        return "unknown kind"
    except ProtocolError:
        return "malformed"
    if message.device != topic.device or not topics.NAME.fullmatch(topic.device):
        return "forged"
    if isinstance(message, messages.Presence) != (topic.channel == "presence"):
        return "wrong topic"
    return message if isinstance(message, Need | Renew) else cleaned(message)


def _event(message: messages.UpMessage, now: float) -> FromDevice | Need | Renew | None:
    device = message.device
    if isinstance(message, messages.Hello):
        return Joined(now, _limited_hello(message))
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
        return Announced(now, _limited_update(message))
    return message if isinstance(message, Need | Renew) else None


def _limited_hello(hello: messages.Hello) -> messages.Hello:
    return msgspec.structs.replace(hello, modalities=limited(hello.modalities), samples=limited(hello.samples))


def _limited_update(update: messages.Update) -> messages.Update:
    """Without metrics that are not finite."""
    metrics = {name: value for name, value in update.metrics.items() if math.isfinite(value)}
    return msgspec.structs.replace(update, metrics=limited(metrics), figures=limited(update.figures))


def limited(entries: dict[str, V]) -> dict[str, V]:
    """The first ``MAX_ENTRIES`` entries."""
    return dict(list(entries.items())[:MAX_ENTRIES])


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


S = TypeVar("S", bound=msgspec.Struct)

#: Characters of names, identifiers and other words; part names have at most 50.
NAME = 64
#: Characters of sentences.
SENTENCE = 500
_SENTENCES = frozenset({"detail", "source", "reason"})
#: C0, DEL and C1, which terminals obey; marks that turn, hide or break what is shown; halves of no character.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def plain(text: str, most: int = NAME) -> str:
    """The first ``most`` characters, unsafe ones replaced by U+FFFD."""
    return _UNSAFE.sub("\ufffd", text[:most])


def cleaned(message: S) -> S:
    """The message with every text in it plain; a refusal's and a figure's sentences may be longer than names."""
    values = {name: _plain(getattr(message, name), name) for name in message.__struct_fields__}
    return msgspec.structs.replace(message, **values)


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return plain(value, SENTENCE if name in _SENTENCES else NAME)
    if isinstance(value, msgspec.Struct):
        return cleaned(value)
    if isinstance(value, dict):
        return {_plain(key, ""): _plain(one, name) for key, one in value.items()}
    if isinstance(value, tuple) and value and not isinstance(value[0], int | float):
        return tuple(_plain(one, name) for one in value)
    return value
