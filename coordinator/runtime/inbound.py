"""Decoding of devices' messages: from the bytes of a topic to an event, with limits on what devices send. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from typing import TypeVar

import msgspec

from coordinator.core.moves import Accepted, Announced, Declined, FromDevice, HeartbeatSeen, Joined, Progressed
from coordinator.runtime.device_texts import cleaned
from coordinator.runtime.liveness import Liveness
from edgefl.errors import ProtocolError
from edgefl.protocol import messages, topics
from edgefl.protocol.messages import Need, Renew, UnknownMessageError

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
