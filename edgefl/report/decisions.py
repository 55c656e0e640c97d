"""The table of refusals: who did not train as first planned, why with both numbers, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgefl.records import GPU, Refusal
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, count, words
from edgefl.run_records import RunReport

#: Machine-readable reason -> words.
REASONS: dict[str, str] = {
    "step_memory": "step memory over budget",
    "memory": "process memory over budget",
    "flops": "FLOPs over budget",
    "payload": "bytes over budget",
    "disk": "disk space over budget",
    "data": "too little data for one batch",
    "labels": "unlabelled data",
    "busy": "busy with another round",
    "ceiling": "memory ceiling hit while training",
    "error": "training failed",
    "model": "model does not fit the data",
    "update": "update could not be used",
    "lost": "lost contact",
    "late": "update came after the deadline",
    "parts": "update of other parts than asked for",
    "samples": "more samples claimed than it has",
    "size": "object of an impossible size",
    "not_finite": "update holds NaN or infinity",
    "range": "values beyond what f32 can calculate with",
    "change": "change out of line with the other devices'",
    "few": "prototype of too few samples",
    "shape": "tensor of another shape",
    "names": "other tensors than the part's",
    "dtype": "tensor of another kind of number",
    "malformed": "update is no safetensors part",
    "hash": "bytes that are not what they are named by",
    "quarantine": "in quarantine",
}


_Key = tuple[str, int, str, Refusal]  # device, stage, who decided, why


def refusals(report: RunReport) -> Grid:
    """Who did not train, or not as first planned, and why, with both numbers where there are any."""
    columns = (
        Column("device", key=True, text=True),
        Column("stage", key=True),
        Column("rounds"),
        Column("decided by", text=True),
        Column("why", text=True),
        Column("needed"),
        Column("allowed"),
        Column("then", text=True),
    )
    order = {device.device: index for index, device in enumerate(report.devices)}
    lines = [
        (
            words(device),
            count(stage),
            words(units.spans(sorted(numbers))),
            words(who),
            _why(refusal),
            words(_number(refusal.needed, refusal.unit)),
            words(_number(refusal.allowed, refusal.unit)),
            _then(report, device, stage),
        )
        for (device, stage, who, refusal), numbers in sorted(
            _collected(report).items(),
            key=lambda item: (order.get(item[0][0], len(order)), item[0][1], min(item[1] or {0})),
        )
    ]
    note = (
        "Decided by the plan: the predicted cost exceeds the device's budget, so it was not asked. Decided by the "
        "device: it was asked, and found out by its own measurement or its data. Decided by the coordinator: its "
        "update could not be used, or after several of these it was not asked."
    )
    notes = (note, *(f"Warned of {text}." for text in _warned(report)))
    return Grid("Refusals and decisions", columns, tuple(lines), notes, _none_refused(report))


def _warned(report: RunReport) -> list[str]:
    """Warnings about devices that operators got once: of a weight, of claims, of figures."""
    told = (e.data.get("text") for e in report.events if e.kind == "warning" and e.data.get("about"))
    return [str(text) for text in dict.fromkeys(told)]


def _none_refused(report: RunReport) -> str:
    """The text in place of an empty table: that every device took part only where every one did."""
    rounds = {(row.stage, row.round) for row in report.rounds}
    if not rounds:
        return "No round has started yet."
    done = {(row.device, row.stage, row.round) for row in report.assignments if row.status == "done"}
    missed = [row.device for row in report.devices if any((row.device, *key) not in done for key in rounds)]
    if report.devices and not missed:
        return "Every device took part in every round."
    return "No device was refused, declined or dropped."


def _why(refusal: Refusal) -> Cell:
    """The reason with the device's own words: behind it where there are no numbers, else in a footnote."""
    if refusal.needed is None and refusal.detail:
        return Cell(f"{reason(refusal)}: {refusal.detail}")
    return Cell(reason(refusal), why=refusal.detail)


def _collected(report: RunReport) -> dict[_Key, set[int]]:
    """Every refusal with the rounds it was met in. A device that declined, was planned again and then trained leaves
    its refusal in the events only."""
    found: dict[_Key, set[int]] = {}
    for row in report.assignments:
        if row.refusal is not None or row.status in ("lost", "late"):
            refusal = row.refusal or Refusal(reason=row.status)
            who = {"refused": "plan", "declined": "device"}.get(row.status, "coordinator")
            found.setdefault((row.device, row.stage, who, refusal), set()).add(row.round)
    for event in report.events:
        if event.kind == "declined":
            found.setdefault((event.device, event.stage, "device", refusal_of(event.data)), set()).add(event.round)
        if event.kind == "rejected":  # also those of attempts that were tried again
            found.setdefault((event.device, event.stage, "coordinator", refusal_of(event.data)), set()).add(event.round)
    told = {(device, stage) for device, stage, who, _ in found if who == "plan"}
    for device, stage, refusal in planned_refusals(report):
        if (device, stage) not in told:
            found.setdefault((device, stage, "plan", refusal), set())
    return found


def refusal_of(data: Mapping[str, Any]) -> Refusal:
    """The refusal that an event tells of."""
    return Refusal(
        reason=str(data.get("reason") or ""),
        needed=data.get("needed"),
        allowed=data.get("allowed"),
        unit=str(data.get("unit") or ""),
        detail=str(data.get("detail") or ""),
        where=str(data.get("where") or ""),
    )


def how_words(data: Mapping[str, Any]) -> str:
    """What was done so that training fits, of the event's data: "" when nothing had to be."""
    words = [f"micro-batch {data['micro_batch']}"] if data.get("micro_batch") else []
    words += ["blocks computed anew"] if data.get("checkpoint") else []
    words += [str(data["lean"])] if data.get("lean") else []
    return ", ".join(words)


def reason(refusal: Refusal) -> str:
    """The refusal's reason in words."""
    if refusal.reason == "memory" and refusal.where == GPU:
        return "GPU memory over budget"
    if refusal.reason == "data" and refusal.needed is None:
        return "data does not fit the model"  # its detail says how; without numbers it is not the amount
    return REASONS.get(refusal.reason, refusal.reason.replace("_", " ") or "no reason given")


def planned_refusals(report: RunReport) -> list[tuple[str, int, Refusal]]:
    """(device, stage, why) of every placement that a stage's plan refused, from the run's events."""
    return [
        (str(placement.get("device", "")), event.stage, refusal_of(placement))
        for event in report.events
        if event.kind == "stage_planned"
        for placement in event.data.get("placements", [])
        if not placement.get("ok", True)
    ]


def _number(value: float | None, unit: str) -> str:
    """Empty when the reason has no number, such as lost contact."""
    return "" if value is None else units.quantity(value, unit)


def _then(report: RunReport, device: str, stage: int) -> Cell:
    """What came of it: a new plan, training after all, or nothing more in this stage."""
    again: list[dict[str, Any]] = [
        event.data
        for event in report.events
        if event.kind == "replanned" and (event.device, event.stage) == (device, stage)
    ]
    barred = [(e.stage, e.round) for e in report.events if (e.device, e.kind) == (device, "quarantined")]
    back = [(e.stage, e.round) for e in report.events if (e.device, e.kind) == (device, "readmitted")]
    if barred and min(barred)[0] <= stage:
        return Cell("quarantined, asked again later" if back else "quarantined", tone="warn")
    trained = any(row.status == "done" for row in report.assignments if (row.device, row.stage) == (device, stage))
    if again and trained:
        return Cell(f"planned again, trained with {how_words(again[-1]) or 'the whole batch at once'}", tone="good")
    if again:
        return Cell("planned again, did not train", tone="warn")
    return Cell("trained other rounds" if trained else "left out of this stage", tone="" if trained else "warn")
