"""Presence of devices: state, last sign of life, release, platform, certificate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from edgefl.groups import groups_of
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, Tone, table
from edgefl.report.refusals import REVOKED
from edgefl.report.rounds import last_seen
from edgefl.run_records import DeviceRow, RunReport

#: A coordinator records its devices' last signs of life once a minute; older by another one, none came.
FRESH_S = 120.0
SortBy = Literal["device", "state", "seen", "release", "identity"]
_BARRED: dict[str, Tone] = dict.fromkeys(("quarantined", "left out"), "warn")
_TONES: dict[str, Tone] = {"online": "good", "connected": "good", REVOKED: "bad", "expired": "bad", **_BARRED}


class Enrolled(NamedTuple):
    """A device as its fleet knows it. ``until``: end of its certificate; ``since``: when its machine enrolled.

    Both seconds since the epoch; ``since`` 0: not on record. ``generation``: number of the machine, from 1.
    """

    until: float
    revoked: bool
    generation: int = 1
    since: float = 0.0
    groups: tuple[str, ...] = ()


class Live(NamedTuple):
    """A device's state in a running coordinator. ``left_out``: by whom, or ""; ``seen_at`` 0: not seen yet."""

    online: bool
    left_out: str
    seen_at: float = 0.0
    seen_by: str = ""
    revoked: bool = False


class Presence(msgspec.Struct, frozen=True):
    """One device. Times: seconds since the epoch, None: never, or no certificate."""

    device: str
    state: str
    seen_at: float | None
    seen_by: str
    release: str
    platform: str
    certificate_until: float | None
    generation: int | None = None
    since: float | None = None
    groups: tuple[str, ...] = ()


#: Devices with a token that are named; more are counted.
MOST_NAMED = 8
_KEYS: dict[str, Callable[[Presence], object]] = {
    "device": lambda one: one.device,
    "state": lambda one: one.state,
    "seen": lambda one: -(one.seen_at or 0.0),
    "release": lambda one: [int(part) if part.isdigit() else 0 for part in one.release.split(".")],
    "identity": lambda one: one.certificate_until or float("inf"),
}


def presences(
    report: RunReport,
    enrolled: Mapping[str, Enrolled],
    now: float,
    by: SortBy = "device",
    live: Mapping[str, Live] = MappingProxyType({}),
) -> list[Presence]:
    """Every device of the run and of the fleet, sorted by ``by``: latest sign of life or soonest expiry first.

    ``live``: devices by the running coordinator; without it, by the ledger.
    """
    known = {device.device: device for device in report.devices}
    names = sorted({*known, *enrolled})
    found = [_presence(report, name, known.get(name), enrolled.get(name), live.get(name), now) for name in names]
    return sorted(found, key=_KEYS[by])  # type: ignore[arg-type]  # of one kind each


def _presence(
    report: RunReport, name: str, row: DeviceRow | None, own: Enrolled | None, live: Live | None, now: float
) -> Presence:
    sighting = next((one for one in report.sightings if one.device == name), None)
    at, source = (sighting.at, sighting.source) if sighting else (last_seen(report, name), "ledger")
    if live is not None and live.seen_at:  # the ledger's record of it is written a moment later
        at, source = live.seen_at, live.seen_by
    if row is None:
        state = "never seen"
    elif _quarantined(report, name):
        state = "quarantined"
    elif report.status != "running":
        state = "run is over"  # nobody listens: whether it is there is not known
    elif live is not None:
        there = "online" if live.online else "offline"
        state = REVOKED if live.revoked else "left out" if live.left_out else there
    else:
        state = "online" if sighting and sighting.online and now - sighting.at <= FRESH_S else "offline"
    if own is not None and (own.revoked or own.until <= now):
        state = REVOKED if own.revoked else "expired"
    has = row.capabilities if row is not None else None
    platform = " ".join(filter(None, (has.machine, has.gpu))) if has is not None else ""
    release = row.agent_version if row is not None else ""
    until, generation, since = (None, None, None) if own is None else (own.until, own.generation, own.since or None)
    groups = groups_of(name, report.groups)  # as the run has them
    return Presence(name, state, at, source if at else "", release, platform, until, generation, since, groups)


def between_runs(
    enrolled: Mapping[str, Enrolled], answers: Mapping[str, tuple[str, str]] | None, now: float, by: SortBy = "device"
) -> list[Presence]:
    """Every device of a fleet without a run, sorted by ``by``.

    ``answers``: release and platform of each that is connected; None: the broker could not be asked.
    """
    found = []
    for name, own in sorted(enrolled.items()):
        answer = (answers or {}).get(name)
        state = "connected" if answer else "unknown" if answers is None else "away"
        if own.revoked or own.until <= now:
            state = REVOKED if own.revoked else "expired"
        (release, platform), at, source = answer or ("", ""), now if answer else None, "call" if answer else ""
        since = own.since or None
        found.append(Presence(name, state, at, source, release, platform, own.until, own.generation, since, own.groups))
    return sorted(found, key=_KEYS[by])  # type: ignore[arg-type]  # of one kind each


def _quarantined(report: RunReport, name: str) -> bool:
    kinds = [event.kind for event in report.events if event.device == name]
    last = [kind for kind in kinds if kind in {"quarantined", "readmitted"}]
    return bool(last) and last[-1] == "quarantined"


def _groups(found: list[Presence]) -> list[Column[Presence]]:
    """Column of groups, where a device is in one."""
    grouped = any(row.groups for row in found)
    return [Column("groups", lambda row: ", ".join(row.groups), text=True)] if grouped else []


def presence_grid(found: list[Presence], now: float) -> Grid:
    """One row per device, within 80 columns."""

    def seen(row: Presence) -> Cell:
        return Cell(units.ago(now - row.seen_at), tip=units.moment(row.seen_at)) if row.seen_at else Cell("never")

    def until(row: Presence) -> str:
        return units.moment(row.certificate_until)[:10]

    columns: list[Column[Presence]] = [
        Column("device", lambda row: row.device, key=True, text=True),
        Column("state", lambda row: Cell(row.state, tone=_TONES.get(row.state, "")), text=True, whole=True),
        Column("last seen", seen, text=True, whole=True),
        Column("by", lambda row: row.seen_by, text=True),
        Column("release", lambda row: row.release or units.NOTHING, text=True),
        Column("platform", lambda row: row.platform or units.NOTHING, text=True),
        Column("identity until", until, text=True),
        *_groups(found),
    ]
    later = [row for row in found if (row.generation or 1) > 1]
    notes = [f"{row.device}: machine {row.generation}, since {units.moment(row.since)}." for row in later]
    return table("Who is there", columns, found, notes, "No device has joined yet.")


def tokens_out(tokens: Mapping[str, float]) -> str:
    """ "2 tokens are out, until 2026-12-01 10:00: cam-01, cam-02." of name -> expiry; "" without any."""
    if not tokens:
        return ""
    ends = dict.fromkeys(units.moment(at)[:16] for at in sorted(tokens.values()))
    until = f"the last until {list(ends)[-1]}" if len(ends) > 1 else f"until {next(iter(ends))}"
    many = f"{len(tokens)} tokens are" if len(tokens) > 1 else "1 token is"
    named = f": {', '.join(sorted(tokens))}" if len(tokens) <= MOST_NAMED else "; --format json names the devices"
    return f"{many} out, {until}{named}."


def fleet_grid(found: list[Presence], fleet: str, tokens: Mapping[str, float] = MappingProxyType({})) -> Grid:
    """One row per device of a fleet without a run, within 80 columns. ``tokens``: name -> expiry of unused ones."""

    def day(at: float | None) -> str:
        return units.moment(at)[:10]

    columns: list[Column[Presence]] = [
        Column("device", lambda row: row.device, key=True, text=True),
        Column("now", lambda row: Cell(row.state, tone=_TONES.get(row.state, "")), text=True, whole=True),
        Column("release", lambda row: row.release or units.NOTHING, text=True),
        Column("machine", lambda row: str(row.generation or units.NOTHING)),
        Column("since", lambda row: day(row.since), text=True, whole=True),
        Column("identity until", lambda row: day(row.certificate_until), text=True, whole=True),
        *_groups(found),
    ]
    out = tokens_out(tokens)
    empty = f"No device is enrolled{' yet' if out else ': edgefl-coordinator enroll --name cam-01'}"
    return table(f"Devices of fleet {fleet}", columns, found, [out] if out else [], f"{empty}. {out}".rstrip())
