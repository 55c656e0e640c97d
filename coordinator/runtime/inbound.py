"""Decoding of devices' messages into events, with limits on all fields; detection of silent devices."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Container, Mapping
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Literal, TypeVar, get_origin

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
    Spent,
)
from coordinator.core.timeouts import slowed
from edgefl.console import safe_text
from edgefl.errors import ProtocolError
from edgefl.protocol import messages, topics
from edgefl.protocol.messages import MOST_LOG_LINES, Hello, LogLines, Need, Presence, Renew, UnknownMessageError
from edgefl.records import Moments
from edgefl.run_records import SightingRow

V = TypeVar("V")
S = TypeVar("S", bound=msgspec.Struct)

#: When a device was heard of last by the clock that only goes forward, how, and whether it is online.
Sign = tuple[float, str, bool]

#: Figures and metrics of one message; the ledger keeps 11 figures, training has a handful of metrics.
MAX_ENTRIES = 64
#: A device that has not answered so often is gone, whatever the broker retains; its next heartbeat is answered anyway.
MAX_INTRODUCTIONS = 10
#: Channels of a sensor: multi-electrode recordings have a few hundred.
MAX_CHANNELS = 512
#: Characters of names, identifiers and other words; part names have at most 50.
NAME = 64
#: Characters of sentences.
SENTENCE = 500
_WITHOUT_TEXT = (float, int, bool, bytes, float | None, int | None)
_SENTENCES = frozenset({"detail", "source", "reason", "refusal", "lines", "layer"})
#: Keys of sentences in JSON that most messages have.
_SENTENCE_KEYS = frozenset({b"detail", b"source", b"reason"})


class Inbound:
    """Decoder of devices' messages. ``silence_s``: until offline; ``introduce_s``: between requests for a hello.

    ``names``: name that a device enrolled with -> shown name, of renamed ones.

    ``dropped``: unusable messages, counted by reason. ``signs``: for each reader (the ledger's first), the last sign of
    life of each device since the reader looked before; it empties its own.
    """

    def __init__(self, silence_s: float, introduce_s: float, names: Mapping[str, str] = MappingProxyType({})) -> None:
        self.dropped: Counter[str] = Counter()
        self._names = names
        self._silence_s = silence_s
        self._introduce_s = introduce_s
        self._strangers: dict[str, tuple[float, int]] = {}  # when, and how many times, it was asked for its hello
        self._sessions: dict[str, str] = {}
        self._heard: dict[str, float] = {}
        self._oldest = -math.inf  # none of these is earlier
        self._hellos: dict[str, tuple[float, Hello]] = {}
        self.signs: list[dict[str, Sign]] = [{}]

    def read(self, topic: topics.Topic, payload: bytes, now: float) -> FromDevice | Need | Renew | LogLines | None:
        """The decoded message on an ``up`` or ``presence`` topic; None for an unusable one."""
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
        if isinstance(message, Presence) != (topic.channel == "presence"):
            self.dropped["wrong topic"] += 1
            return None
        if topic.device in self._names:
            message = msgspec.structs.replace(message, device=self._names[topic.device])
        if isinstance(message, Presence):
            return self._presence(cleaned(message), now)
        self.heard(message.device, now, type(message).__name__.lower())
        if isinstance(message, Need | Renew):
            return message
        if isinstance(message, LogLines):
            return cleaned(msgspec.structs.replace(message, lines=message.lines[-MOST_LOG_LINES:]))
        message = cleaned(message)
        if isinstance(message, Hello) and self._is_repeated(message, now):
            return None
        return _event(message, now)

    def heard(self, device: str, now: float, by: str = "message") -> None:
        """Note a device's sign of life by a message of this kind."""
        self._heard[device] = now
        self._show(device, (now, by, True))

    def reset(self, now: float) -> None:
        """Restart every device's silence from now, after the coordinator was offline."""
        self._heard = dict.fromkeys(self._heard, now)

    def silent(
        self, now: float, excused: Callable[[str], bool] = lambda name: False, fleet_size: int = 0
    ) -> list[DeviceOffline]:
        """Devices silent for longer than ``silence_s``, once each; ``excused``: true for one that is asked for nothing.

        ``fleet_size``: the larger, the longer a device may be silent, since its heartbeats are less frequent.
        """
        most_s = self._silence_s * slowed(fleet_size)
        if now - self._oldest <= most_s:
            return []
        late = {name: at for name, at in self._heard.items() if now - at > most_s}
        gone = [name for name in late if not excused(name)]
        self._heard |= dict.fromkeys(late, now)  # the last will of an excused one counts still
        for name in gone:
            del self._heard[name]
            self._show(name, (late[name], "silence since", False))
        self._oldest = min(self._heard.values(), default=now)
        return [DeviceOffline(now, name, f"silent for {most_s:g} s") for name in gone]

    def sightings(self, ahead: float, known: Container[str]) -> list[SightingRow]:
        """Ledger rows of signs of life since the last call; ``ahead``: seconds from our clock to the epoch's."""
        found, self.signs[0] = self.signs[0], {}
        return [SightingRow(name, ahead + at, by, on) for name, (at, by, on) in sorted(found.items()) if name in known]

    def strangers(self, now: float) -> list[HeartbeatSeen]:
        """Online devices without a hello that are due to be asked for one."""
        due = [name for name, (at, _) in self._strangers.items() if now - at >= self._introduce_s]
        for name in due:
            times = self._strangers[name][1] + 1
            self._strangers[name] = (now, times)
            if times >= MAX_INTRODUCTIONS:
                del self._strangers[name]
        return [HeartbeatSeen(now, name, reports_work=False) for name in due]

    def _presence(self, message: Presence, now: float) -> DeviceOffline | None:
        """Handle a presence message or last will; an earlier session's last will is ignored."""
        device = message.device
        if message.online:
            if device not in self._sessions:  # its hello follows, unless it was sent before this process listened
                self._strangers[device] = (now, 0)
            return None
        if self._strangers.pop(device, None) is not None:  # it has ended before it has introduced itself
            return DeviceOffline(now, device, "offline")
        self._hellos.pop(device, None)
        if self._sessions.get(device) != message.session or self._heard.pop(device, None) is None:
            return None
        self._show(device, (now, "last will", False))
        return DeviceOffline(now, device, "offline")

    def _show(self, device: str, sign: Sign) -> None:
        for signs in self.signs:
            signs[device] = sign

    def _is_repeated(self, hello: Hello, now: float) -> bool:
        """Note a hello. True for the same one within a moment: the device was called just when it came by itself."""
        device = hello.device
        self._sessions[device] = hello.session
        self._strangers.pop(device, None)
        at, before = self._hellos.get(device, (-math.inf, None))
        if before == hello and now - at < self._introduce_s:
            return True
        self._hellos[device] = (now, hello)
        return False


def _event(message: messages.UpMessage, now: float) -> FromDevice | None:
    device = message.device
    if isinstance(message, Hello):
        modalities, samples = _limited(message.modalities), _limited(message.samples)
        moments = _limited({m: one for m, one in message.moments.items() if _is_finite(one)})
        signature = message.signature if len(message.signature) <= messages.MAX_SIGNATURE_BYTES else b""
        changed = {"modalities": modalities, "samples": samples, "moments": moments, "signature": signature}
        return Joined(now, msgspec.structs.replace(message, **changed))
    if isinstance(message, messages.Heartbeat):
        return HeartbeatSeen(now, device, message.working_on)
    if isinstance(message, messages.Accept):
        return Accepted(now, device, message.attempt)
    if isinstance(message, messages.Decline):
        return Declined(now, device, message.attempt, message.refusal, _limited(message.figures))
    if isinstance(message, messages.Progress):
        loss = message.loss if math.isfinite(message.loss) else None
        data = {"epoch": message.epoch, "step": message.step, "steps": message.steps, "loss": loss}
        return Progressed(now, device, message.attempt, data)
    if isinstance(message, messages.Spent):
        return Spent(now, device, message.attempt, _limited(message.figures))
    if isinstance(message, messages.Update):
        metrics = _limited({name: value for name, value in message.metrics.items() if math.isfinite(value)})
        return Announced(now, msgspec.structs.replace(message, metrics=metrics, figures=_limited(message.figures)))
    return None


def _is_finite(moments: Moments) -> bool:
    """True if all moments are finite numbers, of no more channels than a sensor may have."""
    values = (*moments.mean, *moments.variance)
    return len(values) <= 2 * MAX_CHANNELS and all(map(math.isfinite, values))


def _limited(entries: dict[str, V]) -> dict[str, V]:
    return dict(list(entries.items())[:MAX_ENTRIES])


def cleaned(message: S) -> S:
    """The message with every text in it plain: no control characters, and a bounded length; itself if it was so.

    A refusal's and a figure's sentences may be longer than names. Nearly all messages are plain, and one look at all
    their texts in JSON is several times as fast as one at each.
    """
    return message if _is_plain(msgspec.json.encode(message)) else _cleaned(message)


def _is_plain(text: bytes) -> bool:
    """True for JSON whose texts are ASCII, of no control character and none too long; false also where in doubt."""
    if not text.isascii() or b"\\" in text or b"\x7f" in text:  # JSON escapes all others
        return False
    pieces = text.split(b'"')  # each second one is a text
    if max(map(len, pieces)) <= NAME:
        return True
    return all(
        len(piece) <= SENTENCE and pieces[place - 1] == b":" and pieces[place - 2] in _SENTENCE_KEYS
        for place, piece in enumerate(pieces)
        if len(piece) > NAME
    )


def _cleaned(message: S) -> S:
    names, texts = _with_text(type(message))
    if (
        texts is not None
        and (known := texts(message))
        and sum(map(len, known)) <= SENTENCE
        and _are_plain(names, known)
    ):
        return message
    changed: dict[str, object] = {}
    for name in names:
        value = getattr(message, name)
        if value and (plain := _plain(value, name)) is not value:
            changed[name] = plain
    return msgspec.structs.replace(message, **changed) if changed else message


@cache
def _with_text(kind: type[msgspec.Struct]) -> tuple[tuple[str, ...], Callable[[object], tuple[str, ...]] | None]:
    """The fields of a record that may hold text; what reads them together, where there are several of plain text."""
    fields = [field for field in msgspec.structs.fields(kind) if field.type not in _WITHOUT_TEXT]
    names = tuple(field.name for field in fields)
    plain = all(field.type is str or get_origin(field.type) is Literal for field in fields)
    return names, operator.attrgetter(*names) if plain and len(names) > 1 else None


@lru_cache(maxsize=4096)  # devices name the same figures and sources in every round
def _are_plain(names: tuple[str, ...], texts: tuple[str, ...]) -> bool:
    return all(_plain(text, name) is text for text, name in zip(texts, names, strict=True))


def _plain(value: object, name: str) -> object:
    if isinstance(value, str):
        limit = SENTENCE if name in _SENTENCES else NAME
        plain = _known_text(value, limit) if len(value) <= SENTENCE else safe_text(value[:limit])
        return value if plain == value else plain
    if isinstance(value, msgspec.Struct):
        return _cleaned(value)
    if isinstance(value, dict):
        entries = {_plain(key, ""): _plain(one, name) for key, one in value.items()}
        same = len(entries) == len(value) and all(key in entries and entries[key] is one for key, one in value.items())
        return value if same else entries
    if isinstance(value, tuple) and value and not isinstance(value[0], int | float):
        items = tuple(_plain(one, name) for one in value)
        return value if all(map(operator.is_, items, value)) else items
    return value


@lru_cache(maxsize=4096)  # and the same parts
def _known_text(text: str, limit: int) -> str:
    return safe_text(text[:limit])
