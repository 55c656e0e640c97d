"""Tables of refusals, with the number needed and the number allowed, and of rounds a device was not offered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import msgspec

from edgefl.records import Refusal
from edgefl.registry import default
from edgefl.report import resources, shortfall, units
from edgefl.report.events import fitting
from edgefl.report.folding import fold, listed
from edgefl.report.grid import Cell, Column, Grid, table
from edgefl.report.refusals import REASONS, REPLACED, REVOKED, reason, refusal_of, refusal_text
from edgefl.run_records import EventRow, RunReport

#: Reason that the coordinator records for a device whose last will came.
OFFLINE = "offline"
NOT_JOINED = "not connected yet"
#: Beginning of the reason of a device whose heartbeats stopped.
SILENT = "silent for "
#: Up to so many devices with one reason each have a sentence of their own.
_APART = 3
#: Events that an operator causes -> their words.
_REQUESTS = {
    "pausing": "pause when the open round is over",
    "paused": "paused",
    "resumed": "resumed",
    "left_out": "device left out",
    "taken_in": "device taken in again",
    "run_stopped": "stopped",
}
BEHIND = "at work on an earlier round"
NOT_CHOSEN = "not chosen"
#: Stands for the devices that are not named.
_OTHERS = ""
NEXT_PERIOD = "waits for the next period"

_NOTE = (
    "Decided by the plan: the predicted cost exceeds the device's budget, or its data or methods do not suit the "
    "stage, so it was asked for less, or not at all. Decided by the device: it was asked, and found out by its own "
    "measurement or its data. Decided by the coordinator: its update could not be used or came too late, or after "
    "several of these it was not asked."
)
#: Who decided -> the word of a sentence.
_BY = {"plan": "refused by the plan", "device": "declined"}
#: Reasons whose word says all: no limit follows.
_PLAIN = {why: REASONS[why] for why in ("lost", "left_out")}
#: Reasons that the fleet decides, of a run's absences; in words.
_BY_FLEET = {REVOKED: REVOKED, REPLACED: REASONS[REPLACED]}
_Round = tuple[int, int]  # stage, round


class _Decision(NamedTuple):
    device: str
    stage: int
    decided_by: str  # plan, device, coordinator or operator
    refusal: Refusal
    instead: str = ""  # what was trained in place of the whole stage; "": nothing was


class _Absence(NamedTuple):
    device: str
    why: str
    rounds: list[_Round]


def refusals(report: RunReport) -> Grid:
    """Table of refusals, each once: device, stage, rounds, decided by, reason, both numbers, outcome."""
    found = collected(report)
    order = {device.device: index for index, device in enumerate(report.devices)}

    def why(row: _Decision) -> Cell:
        """Cell with the reason and the device's own words, as text without numbers, else as footnote."""
        if row.refusal.needed is None and row.refusal.detail:
            return Cell(f"{reason(row.refusal)}: {row.refusal.detail}")
        return Cell(reason(row.refusal), why=row.refusal.detail)

    def number(value: float | None, unit: str) -> str:
        return "" if value is None else units.quantity(value, unit)  # lost contact, such as, has none

    columns: list[Column[_Decision]] = [
        Column("device", lambda row: row.device, key=True, text=True),
        Column("stage", lambda row: row.stage, key=True),
        Column("rounds", lambda row: units.spans(found[row])),
        Column("decided by", lambda row: row.decided_by, text=True),
        Column("why", why, text=True),
        Column("needed", lambda row: number(row.refusal.needed, row.refusal.unit)),
        Column("allowed", lambda row: number(row.refusal.allowed, row.refusal.unit)),
        Column("then", lambda row: row.instead or _then(report, row), text=True),
    ]
    rows = sorted(found, key=lambda row: (order.get(row.device, len(order)), row.stage, min(found[row] or {0})))
    warned = (e.data.get("text") for e in report.events if e.kind == "warning" and e.data.get("about"))
    notes = (_NOTE, *(f"Warned of {text}." for text in dict.fromkeys(map(str, warned))))
    return fold(table("Refusals and decisions", columns, rows, notes, _none_refused(report)), "device")


def sentences(report: RunReport) -> list[str]:
    """Faults of devices as sentences: refusals with both numbers, lost or unusable updates, rounds not offered.

    A sentence a device; of more than ``_APART`` devices with one reason, one sentence with the worst.
    """
    decided: dict[tuple[str, str], dict[str, list[_Decision]]] = {}
    for row in (row for row in collected(report) if not row.instead and row.refusal.reason not in _BY_FLEET):
        decided.setdefault((row.decided_by, row.refusal.reason), {}).setdefault(row.device, []).append(row)
    found = []
    for (by, why), devices in decided.items():
        verb = _PLAIN.get(why) or _BY.get(by, "without a usable update")
        alike = [list(devices)] if len(devices) > _APART else [[name] for name in devices]
        for names in alike:
            rows = [row for name in names for row in devices[name]]
            stages = {row.stage for row in rows}
            last = {name: max(devices[name], key=lambda row: row.stage) for name in names}
            after = dict.fromkeys(_then(report, row).text for row in last.values())
            then = ", or ".join(after)
            then = then.replace("this stage", "these stages") if len(stages) > 1 else then
            worst = max(rows, key=lambda row: row.refusal.needed or 0.0)
            most = f"the most by {worst.device}, " if len(names) > 1 and worst.refusal.needed else ""
            where = f"stage{'s' * (len(stages) > 1)} {units.spans(stages)}"
            limit = "" if why in _PLAIN else f", {most}{_limit(rows, worst)}"
            found.append(f"{_who(names)}: {verb} in {where}{limit}; {then}.")
    return [*_shut_out(report), *found, *shortfall.sentences(report), *_not_there(report)]


def _shut_out(report: RunReport) -> Iterator[str]:
    """A sentence on each device that was revoked or replaced: the time, and the number of rounds missed."""
    at = {(event.device, why): event.at for event in report.events if (why := _by_fleet(event))}
    missed = {(device, why): set(rounds) for device, whys in absences(report).items() for why, rounds in whys.items()}
    for row in report.assignments:
        if row.refusal is not None:
            missed.setdefault((row.device, row.refusal.reason), set()).add((row.stage, row.round))
    in_stage = Counter(row.stage for row in report.rounds)
    for (device, why), when in at.items():
        rounds = missed.get((device, why), set())
        count = f"{len(rounds)} round{'s' * (len(rounds) > 1)} of {len(report.rounds)}"
        where = f", {count} (stages {_stages(rounds, in_stage)})" if rounds else ""
        yield f"{device}: {_BY_FLEET[why]} at {units.moment(when)}{where}."


def _by_fleet(event: EventRow) -> str:
    """The fleet's decision that a device left by; "" for other events."""
    why = str(event.data.get("reason") or "") if event.kind == "device_left" else ""
    return why if why in _BY_FLEET else ""


def _limit(rows: Sequence[_Decision], worst: _Decision) -> str:
    """The reason with both numbers; of one device with several stages the range of needs."""
    text = refusal_text(msgspec.structs.asdict(worst.refusal))
    needs = [row.refusal.needed for row in rows if row.refusal.needed is not None]
    least, most = (units.quantity(value, worst.refusal.unit) for value in (min(needs or [0]), max(needs or [0])))
    if len({row.device for row in rows}) > 1 or least == most:
        return text
    return text.replace(f"needs {most}", f"needs {least.partition(' ')[0]} to {most}")


def _who(names: Sequence[str]) -> str:
    """The device's name, or the number of devices with the first names."""
    return names[0] if len(names) == 1 else f"{len(names)} devices ({listed(names)})"


def _not_there(report: RunReport) -> Iterator[str]:
    """Sentences on devices offline at the begin of rounds; one sentence for many."""
    in_stage = Counter(row.stage for row in report.rounds)
    missed = absences(report)
    silent = dict.fromkeys(why for whys in missed.values() for why in whys if why.startswith(SILENT))
    for why in (*silent, OFFLINE, NOT_JOINED):
        away = {device: keys for device, whys in missed.items() if (keys := whys.get(why))}
        words = f"lost contact ({why})" if why in silent else why
        for names in [list(away)] if len(away) > _APART else [[name] for name in away]:
            most = max((away[name] for name in names), key=len)
            up_to = f"up to {len(most)}" if len(names) > 1 else str(len(most))
            where = f" (stages {_stages(most, in_stage)})" if len(names) == 1 else ""
            yield f"{_who(names)}: {words}, not offered in {up_to} of {len(report.rounds)} rounds{where}."


def requests(report: RunReport) -> Grid:
    """Table of the operator's requests during the run: time, request, device, origin."""
    asked = [event for event in report.events if event.kind in _REQUESTS]
    began = min((event.at for event in report.events), default=report.started_at)
    columns: list[Column[EventRow]] = [
        Column("after", lambda row: units.seconds(row.at - began), key=True, tip="since the run's first event"),
        Column("stage", lambda row: row.stage or None),
        Column("round", lambda row: row.round or None),
        Column("what", lambda row: _REQUESTS[row.kind], text=True),
        Column("device", lambda row: row.device, text=True),
        Column("by", lambda row: str(row.data.get("by", "")), text=True),
    ]
    return table("What the operator asked of the run", columns, asked)


def _none_refused(report: RunReport) -> str:
    """Text in place of an empty table of refusals, by attendance."""
    rounds = {(row.stage, row.round) for row in report.rounds}
    if not rounds:
        return "No round has started yet."
    done = {(row.device, row.stage, row.round) for row in report.assignments if row.status == "done"}
    missed = [row.device for row in report.devices if any((row.device, *key) not in done for key in rounds)]
    if report.devices and not missed:
        return "Every device took part in every round."
    return "No device was refused, declined or dropped."


def collected(report: RunReport) -> dict[_Decision, set[int]]:
    """Refusal -> its rounds, also of replanned devices and repeated attempts, whose refusals
    are in the events only."""
    found: dict[_Decision, set[int]] = {}
    for row in report.assignments:
        if row.status != "replanning" and (row.refusal is not None or row.status in ("lost", "late")):
            decided_by = {"refused": "plan", "declined": "device", "left_out": "operator"}.get(
                row.status, "coordinator"
            )
            decision = _Decision(row.device, row.stage, decided_by, row.refusal or Refusal(reason=row.status))
            found.setdefault(decision, set()).add(row.round)
    for event in report.events:
        if decided_by := {"declined": "device", "rejected": "coordinator"}.get(event.kind, ""):
            decision = _Decision(event.device, event.stage, decided_by, refusal_of(event.data))
            found.setdefault(decision, set()).add(event.round)
    planned = {(row.device, row.stage) for row in found if row.decided_by == "plan"}
    for event in report.events:
        for placement in event.data.get("placements", []) if event.kind == "stage_planned" else []:
            device = str(placement.get("device", ""))
            if not placement.get("ok", True) and (device, event.stage) not in planned:
                found.setdefault(_Decision(device, event.stage, "plan", refusal_of(placement)), set())
    for one in shortfall.shortfalls(report):
        found[_Decision(one.device, one.stage, "plan", one.limit, f"trained {one.text}")] = set(one.rounds)
    return found


def _then(report: RunReport, row: _Decision) -> Cell:
    """Cell with the outcome of a refusal: new plan, training after all, or nothing more in this stage."""
    device, stage = row.device, row.stage
    events = [event for event in report.events if event.device == device]
    again = [event.data for event in events if event.kind == "replanned" and event.stage == stage]
    if any(event.kind == "quarantined" and event.stage <= stage for event in events):
        back = any(event.kind == "readmitted" for event in events)
        return Cell("quarantined, asked again later" if back else "quarantined", tone="warn")
    trained = any(row.status == "done" for row in report.assignments if (row.device, row.stage) == (device, stage))
    if again and trained:
        return Cell(f"planned again, trained with {fitting(again[-1]) or 'the whole batch at once'}", tone="good")
    if again:
        return Cell("planned again, did not train", tone="warn")
    if row.refusal.reason in _BY_FLEET:
        return Cell("out of the fleet", tone="warn")
    if trained:
        return Cell("trained other rounds")
    without = {"operator": "left out of this stage", "plan": "not asked in this stage"}
    return Cell(without.get(row.decided_by, "no update in this stage"), tone="warn")


def not_offered(report: RunReport) -> Grid:
    """Table by device and reason: number of rounds not offered, and which, by stage.

    Many devices not chosen share a row: they differ by the draw alone.
    """
    in_stage = Counter(row.stage for row in report.rounds)
    not_asked = "Rounds of the run that this device was not asked to train in."
    others = "In brackets: rounds of the stage, where it was offered others."
    columns: list[Column[_Absence]] = [
        Column("device", lambda row: row.device, key=True, text=True),
        Column(
            "why",
            lambda row: Cell(row.why, tone="warn" if row.why in {OFFLINE, NOT_JOINED, *_BY_FLEET} else ""),
            key=True,
            text=True,
        ),
        Column("not offered", lambda row: f"{len(row.rounds)} / {len(report.rounds)}", "rounds", tip=not_asked),
        Column("stages", lambda row: _stages(row.rounds, in_stage), text=True, tip=others),
    ]
    rows = [_Absence(device, why, keys) for device, whys in absences(report).items() for why, keys in whys.items()]
    spared = [row for row in rows if row.why.startswith(NOT_CHOSEN)]
    if len(spared) > _APART:
        rows = [row for row in rows if not row.why.startswith(NOT_CHOSEN)]
    grid = table("Rounds that a device was not offered", columns, rows, empty="Every device was asked in every round.")
    if len(spared) > _APART:
        grid = replace(grid, rows=(*grid.rows, *_not_chosen(spared, len(report.rounds))))
    return grid


def _not_chosen(rows: Sequence[_Absence], of: int) -> Iterator[tuple[Cell, ...]]:
    """One row per reason for these absences."""
    for why in dict.fromkeys(row.why for row in rows):
        alike = [row for row in rows if row.why == why]
        counts = sorted({len(row.rounds) for row in alike})
        up_to = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        yield Cell(f"{len(alike)} devices"), Cell(why), Cell(f"{up_to} / {of}"), Cell()


def absences(report: RunReport) -> dict[str, dict[str, list[_Round]]]:
    """Device -> reason -> the rounds it was not offered; devices that were asked in every round are left out."""
    asked = {(row.device, row.stage, row.round) for row in report.assignments}
    asked |= {(device, row.stage, row.round) for row in report.rounds for device in row.participants}
    begun = _at_the_start(report)
    recipe = report.config.get("recipe")
    choice = next(iter(recipe.get("select") or ()), "") if isinstance(recipe, dict) else ""
    not_chosen = f"{NOT_CHOSEN} (select: {choice})" if choice not in {"", default("select")} else NOT_CHOSEN
    found: dict[str, dict[str, list[_Round]]] = {}
    for device in resources.by_device(report):
        for row in report.rounds:
            key = (row.stage, row.round)
            if (device, *key) in asked:
                continue
            why = "not on record"
            if key in begun:
                why = begun[key].get(device, begun[key].get(_OTHERS, NOT_JOINED)) or not_chosen
            found.setdefault(device, {}).setdefault(why, []).append(key)
    return found


def _at_the_start(report: RunReport) -> dict[_Round, dict[str, str]]:
    """Round -> device -> reason for absence at the begin of its last attempt; "": available.

    Devices of a crowd are available until they leave, also those that have not joined yet (``_OTHERS``).
    """
    away: dict[str, str] = {}
    left: set[str] = set()
    left_out: dict[str, str] = {}
    found: dict[_Round, dict[str, str]] = {}
    for event in report.events:
        if event.kind == "run_started":  # also after the coordinator's restart: connected devices join again
            away = {device: REVOKED if why == REVOKED else OFFLINE for device, why in away.items()}
        elif event.kind == "device_joined":
            away[event.device] = ""
            left.discard(event.device)
        elif event.kind == "device_left":
            left.add(event.device)
            away[event.device] = str(event.data.get("reason") or OFFLINE)
        elif event.kind in {"left_out", "taken_in"}:
            left_out.pop(event.device, None)
            left_out |= (
                {event.device: f"left out by the operator ({event.data.get('by', '')})"}
                if event.kind == "left_out"
                else {}
            )
        elif event.kind == "round_started":
            busy = dict.fromkeys(event.data.get("behind", ()), BEHIND)
            busy |= dict.fromkeys(event.data.get("next_period", ()), NEXT_PERIOD)
            there = away
            if "crowd" in event.data:
                there = {device: why for device, why in away.items() if device in left} | {_OTHERS: ""}
            found[event.stage, event.round] = there | busy | left_out
    return found


def _stages(keys: Iterable[_Round], in_stage: Mapping[int, int]) -> str:
    """ "1 (round 2), 2–6": stages, with rounds where only some are in ``keys``; ``in_stage``: rounds of each."""
    rounds = {stage: [number for _, number in of] for stage, of in groupby(sorted(keys), key=lambda key: key[0])}
    texts = []
    for whole, stages in groupby(rounds, key=lambda stage: len(rounds[stage]) == in_stage[stage]):
        if whole:
            texts.append(units.spans(list(stages)))
        else:
            texts += [f"{one} (round{'s' * (len(rounds[one]) > 1)} {units.spans(rounds[one])})" for one in stages]
    return ", ".join(texts)
