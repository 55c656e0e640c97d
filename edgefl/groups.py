"""Groups of devices: ``group:NAME`` where a device's name may stand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

PREFIX = "group:"
#: Group -> names of its devices.
Groups = Mapping[str, Collection[str]]


def group_of(named: str) -> str:
    """The group that ``named`` stands for; "" for a device's name."""
    return named.removeprefix(PREFIX) if named.startswith(PREFIX) else ""


def members(named: Iterable[str], groups: Groups) -> frozenset[str]:
    """Devices that are named, alone or by a group. A group that is not known has none."""
    found = set[str]()
    for one in named:
        found |= set(groups.get(group_of(one), ())) if group_of(one) else {one}
    return frozenset(found)


def groups_of(device: str, groups: Groups) -> tuple[str, ...]:
    """Groups that a device is in, by name."""
    return tuple(sorted(group for group, devices in groups.items() if device in devices))


def unknown_groups(named: Iterable[str], groups: Groups) -> list[str]:
    """Groups that are named and not known."""
    return sorted({group_of(one) for one in named} - {"", *groups})
