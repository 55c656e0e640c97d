"""Which releases work together: those at most one minor release apart, by the number of the protocol that each carries.

A device tells it in its hello, the coordinator in its welcome. docs/protocol.md.
"""

from __future__ import annotations

import re

from edgefl import PROTOCOL_VERSION, __version__

#: Numbers that two programs may differ by: a fleet is upgraded one program at a time, one release at a time.
APART = 1
#: A peer's release is shown to people: a version and nothing else.
_RELEASE = re.compile(r"[0-9A-Za-z.+-]{1,32}")


def works_with(protocol: int) -> bool:
    """Whether a program of this protocol works with this one."""
    return abs(protocol - PROTOCOL_VERSION) <= APART


def shown(release: str) -> str:
    """A peer's release as it may be printed."""
    return release if _RELEASE.fullmatch(release) else "of an unknown number"


def mismatch(here: str, there: str, release: str, protocol: int) -> str:
    """Why ``there`` (a program of this release and protocol) and ``here``, this program, do not work together."""
    older, goal = (there, __version__) if protocol < PROTOCOL_VERSION else (here, shown(release))
    return (
        f"{there} is release {shown(release)} (protocol {protocol}), {here} is release {__version__} (protocol "
        f"{PROTOCOL_VERSION}); they work together when at most one minor release apart: upgrade {older} to {goal}"
    )
