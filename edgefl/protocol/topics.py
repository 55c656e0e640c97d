"""Every topic, built and parsed here and nowhere else: ``edgefl/1/<fleet>/…``."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from edgefl.errors import ProtocolError

_ROOT = "edgefl/1"
#: Fleet, device and transfer names: one topic level, no wildcard, short enough for a client id.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

#: The coordinator's name, and its user at the broker: no device is called so.
COORDINATOR = "coordinator"

#: In place of a transfer, whose names begin with a direction.
_CALL = "call"

Channel = Literal[
    "up", "down", "presence", "probe", "up-object", "down-object", "shared-object", "enroll-up", "enroll-down"
]


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


def up(fleet: str, device: str) -> str:
    """Messages of a device."""
    return f"{_ROOT}/{fleet}/d/{device}/up"


def down(fleet: str, device: str) -> str:
    """Messages to a device."""
    return f"{_ROOT}/{fleet}/d/{device}/down"


def presence(fleet: str, device: str) -> str:
    """Retained presence of a device, and its last will."""
    return f"{_ROOT}/{fleet}/d/{device}/presence"


def probe(fleet: str, name: str) -> str:
    """Probes that a device, or the coordinator, sends to itself to find the largest message that the broker takes."""
    return f"{_ROOT}/{fleet}/d/{name}/probe"


def up_object(fleet: str, device: str, transfer: str) -> str:
    """Chunks a device sends."""
    return f"{_ROOT}/{fleet}/d/{device}/up/o/{transfer}"


def down_object(fleet: str, device: str, transfer: str) -> str:
    """Chunks for one device."""
    return f"{_ROOT}/{fleet}/d/{device}/down/o/{transfer}"


def shared_object(fleet: str, transfer: str) -> str:
    """Chunks many devices need, published once."""
    return f"{_ROOT}/{fleet}/o/{transfer}"


def call(fleet: str) -> str:
    """The coordinator asks who is there: it has just come, or the broker has forgotten it. An empty message."""
    return shared_object(fleet, _CALL)


def enroll_up(fleet: str, client: str) -> str:
    """The request of a device that has no certificate yet, by its client id."""
    return f"{_ROOT}/{fleet}/enroll/{client}/up"


def enroll_down(fleet: str, client: str) -> str:
    """The answer to it."""
    return f"{_ROOT}/{fleet}/enroll/{client}/down"


def device_subscriptions(fleet: str, device: str) -> list[str]:
    """Topics a device subscribes to: its own branch and the fleet's shared objects."""
    return [down(fleet, device), down_object(fleet, device, "+"), shared_object(fleet, "+")]


def coordinator_subscriptions(fleet: str) -> list[str]:
    """Topics the coordinator subscribes to."""
    return [up(fleet, "+"), presence(fleet, "+"), up_object(fleet, "+", "+")]


_N = NAME.pattern
_PATTERN = re.compile(
    rf"{_ROOT}/{_N}/"
    rf"(?:d/(?P<device>{_N})/(?P<rest>up|down|presence|probe|(?P<way>up|down)/o/(?P<own>{_N}))|o/(?P<shared>{_N})"
    rf"|enroll/(?P<client>{_N})/(?P<side>up|down))"
)


def parse(topic: str) -> Topic:
    """The parsed topic. Raises ProtocolError for a topic that is not one of ours."""
    match = _PATTERN.fullmatch(topic)
    if match is None:
        raise ProtocolError(f"unknown topic {topic[:200]!r}")
    if match["shared"]:
        return Topic("shared-object", "", match["shared"])
    if match["client"]:
        return Topic("enroll-up" if match["side"] == "up" else "enroll-down", match["client"], "")
    if match["own"]:
        return Topic("up-object" if match["way"] == "up" else "down-object", match["device"], match["own"])
    channel: Channel = match["rest"]  # type: ignore[assignment]
    return Topic(channel, match["device"], "")
