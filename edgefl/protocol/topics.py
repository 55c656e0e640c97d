"""Every topic, built and parsed here and nowhere else: ``edgefl/1/<fleet>/…``."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

from edgefl.errors import ProtocolError

_ROOT = "edgefl/1"
#: Fleet, device and transfer names: one topic level, no wildcard, short enough for a client id.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

#: The coordinator's name, and its user at the broker: no device is called so.
COORDINATOR = "coordinator"

Channel = Literal[
    "up", "down", "presence", "probe", "up-object", "down-object", "shared-object", "enroll-up", "enroll-down"
]
#: Channel -> what follows the fleet's name, from device, transfer or both.
_FORMS: dict[Channel, str] = {
    "up": "d/{device}/up",  # messages of a device
    "down": "d/{device}/down",  # messages to a device
    "presence": "d/{device}/presence",  # of a device, and its last will
    # Messages that a device, or the coordinator, sends to itself to find the largest that the broker takes.
    "probe": "d/{device}/probe",
    "up-object": "d/{device}/up/o/{transfer}",  # chunks a device sends
    "down-object": "d/{device}/down/o/{transfer}",  # chunks for one device
    "shared-object": "o/{transfer}",  # chunks many devices need, published once
    "enroll-up": "enroll/{device}/up",  # the request of a device that has no certificate yet, by its client id
    "enroll-down": "enroll/{device}/down",  # the answer to it
}
_FIELDS = {"device": f"(?P<device>{NAME.pattern})", "transfer": f"(?P<transfer>{NAME.pattern})"}
_PATTERNS = {
    channel: re.compile(f"{_ROOT}/{NAME.pattern}/{form.format(**_FIELDS)}") for channel, form in _FORMS.items()
}


class Topic(NamedTuple):
    """A parsed topic. ``device`` is "" for shared objects; ``transfer`` is "" for messages.

    On the enrolment channels, ``device`` is the client id of the device that has no name yet.
    """

    channel: Channel
    device: str
    transfer: str


def check_name(kind: str, name: str) -> str:
    """``name`` itself. Raises ProtocolError when it cannot be a topic level."""
    if not NAME.fullmatch(name):
        raise ProtocolError(
            f"{kind} {name!r} is not a valid name",
            remedy="Use 1 to 64 letters, digits, dots, dashes or underscores, starting with a letter or digit.",
        )
    return name


def build(channel: Channel, fleet: str, device: str = "", transfer: str = "") -> str:
    """The topic of a channel; ``device`` and ``transfer`` may be the wildcard "+"."""
    return f"{_ROOT}/{fleet}/{_FORMS[channel].format(device=device, transfer=transfer)}"


def call(fleet: str) -> str:
    """The coordinator asks who is there: it has just come, or the broker has forgotten it. An empty message."""
    return build("shared-object", fleet, transfer="call")  # no transfer: their names begin with a direction


def device_subscriptions(fleet: str, device: str) -> list[str]:
    """Topics a device always subscribes to: its own branch and the call. Shared objects: while it fetches them."""
    return [build("down", fleet, device), build("down-object", fleet, device, "+"), call(fleet)]


def coordinator_subscriptions(fleet: str) -> list[str]:
    """Topics the coordinator subscribes to."""
    return [build("up", fleet, "+"), build("presence", fleet, "+"), build("up-object", fleet, "+", "+")]


@lru_cache(maxsize=16_384)  # a device says all of a round on two or three
def parse(topic: str) -> Topic:
    """The parsed topic. Raises ProtocolError for a topic that is not one of ours."""
    for channel, pattern in _PATTERNS.items():
        if (match := pattern.fullmatch(topic)) is not None:
            found = match.groupdict("")
            return Topic(channel, found.get("device", ""), found.get("transfer", ""))
    raise ProtocolError(f"unknown topic {topic[:200]!r}")
