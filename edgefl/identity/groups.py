"""Groups of a fleet's devices, as its operator keeps them: what a device says of itself counts for nothing here."""

from __future__ import annotations

from collections.abc import Sequence

from edgefl.errors import IdentityError, some_of
from edgefl.identity.fleet import Fleet, Groups
from edgefl.identity.issued_tokens import awaited
from edgefl.protocol.topics import check_name


def add_to_group(fleet: Fleet, group: str, named: Sequence[str]) -> Groups:
    """Put devices into a group, a new one if need be; all groups. Raises IdentityError for an unknown device."""
    check_name("group", group)
    with fleet.changing() as devices:
        known = {*fleet.shown(devices).values(), *awaited(fleet)}
        if unknown := sorted(set(named) - known):
            text = f"no device {', '.join(map(repr, unknown))} is enrolled or has a token"
            raise IdentityError(text, remedy=f"There are: {some_of(sorted(known))}.")
        groups = fleet.groups()
        fleet.write_groups({**groups, group: (*groups.get(group, ()), *named)})
        return fleet.groups()


def remove_from_group(fleet: Fleet, group: str, named: Sequence[str] = ()) -> Groups:
    """Take devices out of a group, all if none is named; all groups. Raises IdentityError for one not in it."""
    with fleet.changing():
        groups = fleet.groups()
        if group not in groups:
            text = f"there is no group {group!r}"
            raise IdentityError(text, remedy=f"Groups there are: {', '.join(groups) or 'none'}.")
        if unknown := sorted(set(named) - set(groups[group])):
            text = f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not in group {group!r}"
            raise IdentityError(text, remedy=f"In it are: {some_of(groups[group])}.")
        left = tuple(name for name in groups[group] if name not in named) if named else ()
        fleet.write_groups({**groups, group: left})
        return fleet.groups()
