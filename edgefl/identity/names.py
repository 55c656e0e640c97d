"""Shown names of devices: what a device enrolled as stays its name at the broker (docs/decisions/0092)."""

from __future__ import annotations

from msgspec.structs import replace

from edgefl.errors import IdentityError
from edgefl.identity.fleet import Fleet, enrolled_id, names_of
from edgefl.identity.issued_tokens import awaited
from edgefl.protocol.topics import COORDINATOR, check_name


def rename(fleet: Fleet, old: str, new: str) -> None:
    """Show a device by another name from the next run on. Raises IdentityError for a name in use."""
    check_name("device", new)
    with fleet.changing() as devices:
        own = enrolled_id(devices, old)
        if new in names_of(devices, but=own) or new == COORDINATOR or new in awaited(fleet).keys() - {own}:
            raise IdentityError(f"{new!r} is another's name", remedy="Choose a name that no device has or had.")
        groups, before = fleet.groups(), devices[own].shown or own
        if new == before:
            raise IdentityError(f"{new!r} is its name already", remedy="There is nothing to do.")
        if holding := [group for group, named in groups.items() if new in named]:
            text = f"{new!r} is in group {holding[0]!r}, which the device would join by that name"
            raise IdentityError(text, remedy=f"Take it out first: edgefl-coordinator group remove {holding[0]} {new}")
        formerly = tuple(dict.fromkeys((*devices[own].formerly, before)))
        devices[own] = replace(devices[own], shown="" if new == own else new, formerly=formerly)
        if any(before in named for named in groups.values()):
            fleet.write_groups({g: tuple(new if n == before else n for n in named) for g, named in groups.items()})
