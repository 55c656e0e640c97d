"""Timeline of every device's activities in a run, from events and its own measured seconds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from edgefl.run_records import AssignmentRow, EventRow, RunReport

#: Activities of a device, in the order in which a legend names them.
FETCHES, TRAINS, SENDS, FAILS = "fetches, prepares", "trains", "sends", "no update"
WAITS, REFUSED, LEFT_OUT, AWAY, NOT_YET = "waits", "refused", "left out", "away", "not joined yet"
ACTIVITIES = (TRAINS, FETCHES, SENDS, FAILS, WAITS, REFUSED, LEFT_OUT, AWAY, NOT_YET)
#: Of several at one moment, the one further to the front is shown.
_OVER = (LEFT_OUT, AWAY, NOT_YET, FETCHES, TRAINS, SENDS, FAILS, REFUSED, WAITS)

#: Reason of a device that its coordinator has given up: how long it was silent.
_SILENT = re.compile(r"silent for ([0-9.]+) s$")


class Span(NamedTuple):
    """One activity of a device, from ``start`` to ``end``, seconds since the run started; stage and round 0: none."""

    device: str
    activity: str
    start: float
    end: float
    stage: int = 0
    round: int = 0


class Length(NamedTuple):
    """Begin of a run, seconds since the epoch, and its recorded length in seconds."""

    began: float
    seconds: float


def length(report: RunReport) -> Length:
    """The time the timeline covers."""
    times = [event.at for event in report.events]
    times += [at for row in report.rounds for at in (row.started_at, row.ended_at) if at]
    began = min(times, default=report.started_at)
    return Length(began, max([*times, began]) - began)


def spans(report: RunReport) -> list[Span]:
    """Every device's activities in order of time, without gaps; none of a run without rounds."""
    if not report.rounds:
        return []
    run = length(report)
    found: dict[str, list[Span]] = {device.device: [] for device in report.devices}
    for span in (*_away(report, run), *_worked(report, run), *_refused(report, run), *_left_out(report, run)):
        found.setdefault(span.device, []).append(span)
    return [span for device, held in found.items() for span in _filled(device, held, run.seconds)]


def _filled(device: str, held: Sequence[Span], seconds: float) -> Iterator[Span]:
    """A device's spans made free of overlaps; gaps become waiting."""
    edges: dict[float, list[tuple[bool, Span]]] = defaultdict(list)
    for span in (*held, Span(device, WAITS, 0.0, seconds)):
        start, end = (min(max(at, 0.0), seconds) for at in (span.start, span.end))
        if start < end:
            edges[start].append((True, span))
            edges[end].append((False, span))
    here: list[Span] = []
    before: Span | None = None
    for start, end in pairwise(sorted(edges)):
        for begins, span in edges[start]:
            here.append(span) if begins else here.remove(span)
        top = min(here, key=lambda span: _OVER.index(span.activity))._replace(start=start, end=end)
        if before is not None and before[:2] + before[4:] == top[:2] + top[4:]:
            before = before._replace(end=end)
            continue
        if before is not None:
            yield before
        before = top
    if before is not None:
        yield before


def _away(report: RunReport, run: Length) -> Iterator[Span]:
    """Spans of absence: before a device's first join, and from each leaving to its return."""
    left = {device.device: run.began for device in report.devices}
    known: set[str] = set()
    for event in report.events:
        if event.kind == "device_joined" and event.device in left:
            absence = AWAY if event.device in known else NOT_YET
            yield Span(event.device, absence, left.pop(event.device) - run.began, event.at - run.began)
            known.add(event.device)
        elif event.kind == "device_left":
            left.setdefault(event.device, event.at - _silence(event))
    if any(event.kind == "device_joined" for event in report.events):
        for device, at in left.items():
            yield Span(device, AWAY if device in known else NOT_YET, at - run.began, run.seconds)


def _silence(event: EventRow) -> float:
    """Seconds from the last sign of life to the event of a device's leaving; 0 where its last will came."""
    match = _SILENT.match(str(event.data.get("reason", "")))
    return float(match[1]) if match else 0.0


def _worked(report: RunReport, run: Length) -> Iterator[Span]:
    """Spans of devices' rounds: download and training by their own seconds, then upload."""
    offered: dict[tuple[int, int], list[float]] = defaultdict(list)
    ended: dict[tuple[int, int], float] = {}
    answered: dict[tuple[int, int, str], EventRow] = {}
    for event in report.events:
        if event.kind == "round_started":
            offered[event.stage, event.round].append(event.at)
        elif event.kind == "round_closed":
            ended[event.stage, event.round] = event.at
        elif event.kind in {"update", "declined", "rejected"}:
            answered[event.stage, event.round, event.device] = event
    for row in report.rounds:
        offered.setdefault((row.stage, row.round), [row.started_at])
        ended.setdefault((row.stage, row.round), row.ended_at or run.began + run.seconds)
    for one in report.assignments:
        key = (one.stage, one.round)
        times = offered.get(key, [])
        if 0 < one.attempt <= len(times) and one.status not in {"refused", "quarantined"}:
            answer = answered.get((*key, one.device))
            arrived = ended.get(key, run.began + run.seconds) if answer is None else answer.at
            yield from _round(one, times[one.attempt - 1] - run.began, arrived - run.began)


def _round(row: AssignmentRow, start: float, arrived: float) -> Iterator[Span]:
    """Spans of one assignment. ``start``: of the offer; ``arrived``: answer received, or end of the round."""
    wall, compute = (row.measured[name].value if name in row.measured else None for name in ("wall_s", "compute_s"))
    if row.status != "done" or wall is None:
        activity = TRAINS if row.status == "done" else FAILS
        yield Span(row.device, activity, start, arrived, row.stage, row.round)
        return
    announced = min(start + wall, arrived)
    begun = max(start, announced - (compute or 0.0))
    for activity, first, last in ((FETCHES, start, begun), (TRAINS, begun, announced), (SENDS, announced, arrived)):
        yield Span(row.device, activity, first, last, row.stage, row.round)


def _refused(report: RunReport, run: Length) -> Iterator[Span]:
    """Spans of stages in which a device was refused by the planner."""
    began: dict[int, float] = {}
    for row in report.rounds:
        began.setdefault(row.stage, row.started_at - run.began)
    ends = dict(zip(began, [*list(began.values())[1:], run.seconds], strict=True))
    for device, stage in dict.fromkeys((r.device, r.stage) for r in report.assignments if r.status == "refused"):
        if stage in began:
            yield Span(device, REFUSED, began[stage], ends[stage], stage)


def _left_out(report: RunReport, run: Length) -> Iterator[Span]:
    """Spans of devices left out by the operator."""
    since: dict[str, float] = {}
    for event in report.events:
        if event.kind == "left_out":
            since.setdefault(event.device, event.at)
        elif event.kind == "taken_in" and event.device in since:
            yield Span(event.device, LEFT_OUT, since.pop(event.device) - run.began, event.at - run.began)
    for device, at in since.items():
        yield Span(device, LEFT_OUT, at - run.began, run.seconds)


class Pause(NamedTuple):
    """A pause, in seconds since the run started, and its operator (``by``)."""

    start: float
    end: float
    by: str


def pauses(report: RunReport) -> list[Pause]:
    """The operator's pauses, each from the last round's end until the run resumed or ended."""
    run = length(report)
    found: list[Pause] = []
    since: EventRow | None = None
    for event in report.events:
        if event.kind == "paused":
            since = since or event
        elif since is not None and event.kind in {"resumed", "run_finished", "run_stopped", "run_failed"}:
            found.append(Pause(since.at - run.began, event.at - run.began, str(since.data.get("by", ""))))
            since = None
    if since is not None:
        found.append(Pause(since.at - run.began, run.seconds, str(since.data.get("by", ""))))
    return found


def busy(found: Sequence[Span], seconds: float, parts: int = 120) -> list[Mapping[str, float | str]]:
    """Mean number of devices by activity in ``parts`` equal parts of the run, as chart rows."""
    width = seconds / parts or 1.0
    rows: list[Mapping[str, float | str]] = []
    for activity in ACTIVITIES:
        here = [0.0] * parts
        for span in (span for span in found if span.activity == activity):
            for part in range(int(span.start / width), min(parts, int(span.end / width) + 1)):
                inside = min(span.end, (part + 1) * width) - max(span.start, part * width)
                here[part] += max(0.0, inside) / width
        rows += [{"start": n * width, "activity": activity, "devices": count} for n, count in enumerate(here)]
    return rows
