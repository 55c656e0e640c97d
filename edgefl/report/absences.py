"""The rounds that a device was not offered, and why: it was not connected, not chosen, or still at work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgefl.report import totals, units
from edgefl.report.grid import Cell, Column, Grid, words
from edgefl.run_records import EventRow, RunReport

#: Reason that the coordinator records for a device whose last will came, or whose heartbeats stopped.
OFFLINE = "offline"
NOT_JOINED = "not connected yet"
BEHIND = "at work on an earlier round"

_Key = tuple[int, int]  # stage, round


def table(report: RunReport) -> Grid:
    """One row per device and reason: how many rounds, and which of each stage."""
    columns = (
        Column("device", key=True, text=True),
        Column("why", key=True, text=True),
        Column("not offered", "rounds", tip="Rounds of the run that this device was not asked to train in."),
        Column("stages", text=True, tip="In brackets: rounds of the stage, where it was offered others."),
    )
    held: dict[int, int] = {}
    for row in report.rounds:
        held[row.stage] = held.get(row.stage, 0) + 1
    lines = [
        (
            words(device),
            words(why, tone="warn" if why in {OFFLINE, NOT_JOINED} else ""),
            Cell(f"{len(keys)} / {len(report.rounds)}"),
            words(_stages(keys, held)),
        )
        for device, reasons in absences(report).items()
        for why, keys in reasons.items()
    ]
    return Grid(
        "Rounds that a device was not offered", columns, tuple(lines), empty="Every device was asked in every round."
    )


def absences(report: RunReport) -> dict[str, dict[str, list[_Key]]]:
    """Device -> why -> the rounds it was not offered; devices that were asked in every round are left out."""
    asked = {(row.device, row.stage, row.round) for row in report.assignments}
    asked |= {(device, row.stage, row.round) for row in report.rounds for device in row.participants}
    begun = _at_the_start(report.events)
    recipe = report.config.get("recipe")
    choice = next(iter(recipe.get("select") or ()), "") if isinstance(recipe, dict) else ""
    found: dict[str, dict[str, list[_Key]]] = {}
    for device in totals.by_device(report):
        for row in report.rounds:
            if (device, row.stage, row.round) not in asked:
                why = _why(device, begun.get((row.stage, row.round)), choice)
                found.setdefault(device, {}).setdefault(why, []).append((row.stage, row.round))
    return found


def _at_the_start(events: Iterable[EventRow]) -> dict[_Key, tuple[Mapping[str, str], frozenset[str]]]:
    """For each round's last attempt: why each device was away when it began ("": it was there), and those behind."""
    away: dict[str, str] = {}
    found: dict[_Key, tuple[Mapping[str, str], frozenset[str]]] = {}
    for event in events:
        if event.kind == "run_started":  # also after the coordinator's restart: who is there says so again
            away = dict.fromkeys(away, OFFLINE)
        elif event.kind == "device_joined":
            away[event.device] = ""
        elif event.kind == "device_left":
            away[event.device] = str(event.data.get("reason") or OFFLINE)
        elif event.kind == "round_started":
            found[event.stage, event.round] = (dict(away), frozenset(event.data.get("behind", ())))
    return found


def _why(device: str, begun: tuple[Mapping[str, str], frozenset[str]] | None, choice: str) -> str:
    if begun is None:
        return "not on record"
    away, behind = begun
    if device in behind:
        return BEHIND
    if why := away.get(device, NOT_JOINED):
        return why
    return f"not chosen (select: {choice})" if choice not in {"", "all"} else "not chosen"


def _stages(keys: Iterable[_Key], held: Mapping[int, int]) -> str:
    """ "1 (round 2), 2–6": the rounds are named of stages in which it was offered others."""
    rounds: dict[int, list[int]] = {}
    for stage, number in keys:
        rounds.setdefault(stage, []).append(number)
    told: list[str] = []
    whole: list[int] = []
    for stage in [*sorted(rounds), 0]:  # 0: adds the whole stages that remain
        if stage and len(rounds[stage]) == held[stage]:
            whole.append(stage)
            continue
        told += [units.spans(whole)] if whole else []
        whole = []
        if stage:
            told.append(f"{stage} (round{'s' * (len(rounds[stage]) > 1)} {units.spans(rounds[stage])})")
    return ", ".join(told)
